"""The Llama family in few PyTorch operations: Llama, Mistral, Qwen2, Qwen3.

Half of a small model's pass on a CPU is Python and small kernels. Here query, key and value come
from one product, as do gate and up; rotary angles are looked up; and what a Transformers module
passes through five layers of calls is one function per sublayer. The Transformers module stays the
oracle: the tests compare logits. Every other architecture runs through its module (`module.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from copy import copy
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from foretoken.runtime.attention import attend_grouped, grouped_mask
from foretoken.runtime.cpu import Int8Linear, PackedLinear
from foretoken.runtime.inputs import PassInputs
from foretoken.runtime.kv_slab import KVSlab
from foretoken.runtime.llama import LayerWeights, LinearWeights, LlamaWeights
from foretoken.runtime.network import Need, PassOutput

__all__ = ["LeanDecoder", "Linear"]

Linear: TypeAlias = Callable[[Tensor], Tensor]
"""[T, in] -> [T, out]."""


@dataclass(frozen=True)
class _Layer:
    """One decoder layer: the fields of `LayerWeights`, and which sublayers run.

    Args:
        index: place of its KV in the slab.
        attends, computes: whether the sublayers are there.
    """

    index: int
    attention_norm: Tensor
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    attends: bool = True
    computes: bool = True


class LeanDecoder:
    """A decoder-only model of the Llama family (see `Network`).

    Args:
        model: the Transformers module; its weights are read, not kept, except for embedding and
            norms.
        linear: the kind of linear layers.
    """

    def __init__(self, model: PreTrainedModel, linear: type[PackedLinear | Int8Linear]) -> None:
        self._least_nodes = linear.LEAST_ROWS
        weights = LlamaWeights(model)
        self._rotary = weights.rotary
        self._heads, self._key_heads = weights.heads, weights.key_heads
        self._width, self._scaling, self._epsilon = weights.width, weights.scaling, weights.epsilon
        self._embedding, self._norm = weights.embedding, weights.norm
        self._angles: tuple[Tensor, Tensor] | None = None
        self._layers = [
            _layer(index, weights.layer(index), linear) for index in range(weights.num_layers)
        ]
        self._head: Linear = linear(weights.head.weight, weights.head.bias).forward

    name = "lean"
    exact_trees = False

    @property
    def least_nodes(self) -> int:
        """See `Network.least_nodes`."""
        return self._least_nodes

    @property
    def num_layers(self) -> int:
        """Decoder layers, those left out included."""
        return len(self._layers)

    def first_layers(self, count: int) -> LeanDecoder:
        """The first layers with the final norm and head, over the same weights."""
        return self._with(self._layers[:count])

    def without(self, attention: Collection[int], mlp: Collection[int]) -> LeanDecoder:
        """The same without these sublayers."""
        return self._with(
            [
                replace(layer, attends=index not in attention, computes=index not in mlp)
                for index, layer in enumerate(self._layers)
            ]
        )

    def _with(self, layers: list[_Layer]) -> LeanDecoder:
        other = copy(self)
        other._layers = layers
        return other

    def forward(self, inputs: PassInputs, slab: KVSlab, need: Need) -> PassOutput:
        """See `Network.forward`."""
        x = F.embedding(inputs.flat(inputs.tokens), self._embedding)  # [T, E]
        cos, sin = self._angles_at(inputs.flat(inputs.positions))  # [T, 1, D]
        nodes, group = inputs.nodes, self._heads // self._key_heads
        mask = grouped_mask(inputs.mask, nodes, group)
        hidden: dict[int, Tensor] = {}
        for place, layer in enumerate(self._layers):
            if place in need.hidden:
                hidden[place] = x
            if layer.attends:
                x = x + self._attention(layer, x, (cos, sin), inputs, mask, slab)
            if layer.computes:
                x = x + self._mlp(layer, x)
        if len(self._layers) in need.hidden:
            hidden[len(self._layers)] = x
        logits = self._head(self._normalised(x, self._norm)) if need.logits else None
        return PassOutput(logits, hidden=hidden)

    def _attention(
        self,
        layer: _Layer,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        inputs: PassInputs,
        mask: Tensor,
        slab: KVSlab,
    ) -> Tensor:
        cos, sin = angles
        heads, turned = self._heads, self._heads + self._key_heads
        qkv = layer.qkv(self._normalised(x, layer.attention_norm))
        qkv = qkv.view(len(x), turned + self._key_heads, self._width)
        qk = qkv[:, :turned]
        if layer.query_norm is not None and layer.key_norm is not None:
            q = self._normalised(qk[:, :heads], layer.query_norm)
            qk = torch.cat([q, self._normalised(qk[:, heads:], layer.key_norm)], dim=1)
        first, second = qk.chunk(2, dim=-1)
        # The sign of the rotated half is in `sin`.
        qk = (torch.cat([second, first], dim=-1) * sin).addcmul_(qk, cos)
        keys, values = slab.write(qk[:, heads:], qkv[:, turned:], layer.index)
        query = inputs.padded(qk[:, :heads])  # [B, N, H, D]
        mixed = attend_grouped(query, keys, values, mask, self._scaling)
        return layer.output(inputs.flat(mixed))

    def _mlp(self, layer: _Layer, x: Tensor) -> Tensor:
        gate, up = layer.gate_up(self._normalised(x, layer.mlp_norm)).chunk(2, dim=-1)
        return layer.down(F.silu(gate) * up)

    def _normalised(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self._epsilon)

    def _angles_at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [T, 1, D] of the rotation at these positions [T]."""
        last = int(positions.max())
        if self._angles is None or last >= len(self._angles[0]):
            self._angles = self._tables(max(1024, 2 * last))
        cos, sin = self._angles
        return cos[positions, None], sin[positions, None]

    def _tables(self, size: int) -> tuple[Tensor, Tensor]:
        """[size, D] each, from the module's own frequencies and scaling."""
        cos, sin = self._rotary.angles(0, size, self._embedding.dtype)
        signs = torch.ones_like(sin)
        signs[:, : self._width // 2] = -1
        return cos, sin * signs


def _layer(index: int, weights: LayerWeights, linear: type[PackedLinear | Int8Linear]) -> _Layer:
    def of(part: LinearWeights) -> Linear:
        # Called without nn.Module's detour, which a pass would take four times a layer.
        return linear(part.weight, part.bias).forward

    return _Layer(
        index=index,
        attention_norm=weights.attention_norm,
        qkv=of(weights.qkv),
        query_norm=weights.query_norm,
        key_norm=weights.key_norm,
        output=of(weights.output),
        mlp_norm=weights.mlp_norm,
        gate_up=of(weights.gate_up),
        down=of(weights.down),
    )
