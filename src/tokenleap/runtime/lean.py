"""`LeanDecoder`: Llama, Mistral, Qwen2 and Qwen3 in few PyTorch operations.

On a CPU, half of a small model's pass in Transformers is spent in Python and in small kernels. Here
one product computes query, key and value, and one computes gate and up. Rotary angles are looked up
in a table. Each sublayer is one function instead of five levels of calls.

This network runs where `native/` is not available. Tests compare
its logits with those of the Transformers module. All other architectures run through `module.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, Self, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenleap.runtime.attention import attend_grouped, grouped_mask
from tokenleap.runtime.inputs import PassInputs, look_up, resized
from tokenleap.runtime.kv_slab import KVSlab
from tokenleap.runtime.llama import (
    DecoderLayer,
    DecoderWeights,
    JointInput,
    LayerWeights,
    LinearWeights,
    MixedInput,
)
from tokenleap.runtime.network import Need, PassOutput

Linear: TypeAlias = Callable[[Tensor], Tensor]  # [T, in] -> [T, out]


class LinearLayer(Protocol):
    """A linear layer made of a weight [out, in] and a bias [out] (see `cpu.linear_layer`)."""

    LEAST_ROWS: ClassVar[int]
    """Fewest rows for which each row's result has the same bits (see `Network.least_nodes`)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None: ...

    def forward(self, x: Tensor) -> Tensor: ...


class DenseLinear:
    """`y = x W^T + b` through `F.linear`, which needs no packed weights on a GPU."""

    LEAST_ROWS: ClassVar[int] = 1

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight.detach(), bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


@dataclass(frozen=True)
class _Layer(DecoderLayer[Linear, Linear]):
    """One decoder layer, and which sublayers run."""

    index: int = 0
    attends: bool = True
    computes: bool = True


class Layers:
    """The layers of a network on PyTorch's operations; copies of it may leave some out."""

    least_nodes: int
    exact_trees = False
    pads_rows = True
    _layers: Sequence[Any]
    _head: Linear

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def first_layers(self, count: int) -> Self:
        return self._with(self._layers[:count])

    def without(self, attention: Collection[int], mlp: Collection[int]) -> Self:
        """What is left out stays so. A layer's attention to a source goes with its other one."""
        return self._with(
            [
                replace(
                    layer,
                    attends=layer.attends and index not in attention,
                    computes=layer.computes and index not in mlp,
                )
                for index, layer in enumerate(self._layers)
            ]
        )

    def _with(self, layers: Sequence[Any]) -> Self:
        other = copy(self)
        other._layers = layers
        return other

    def _output(
        self, x: Tensor, norm: Linear, inputs: PassInputs, need: Need, hidden: dict[int, Tensor]
    ) -> PassOutput:
        """The output of a pass, from what the last layer returns [T, E]."""
        if not need.logits:
            return PassOutput(None, hidden=hidden)
        if need.last is not None:
            x = x[inputs.last_nodes(need.last, self.least_nodes)]
        return PassOutput(self._head(norm(x)), hidden=hidden)


class LeanDecoder(Layers):
    """A decoder of the Llama family, or a drafting head with such layers (see `Network`).

    Embedding and norms are shared, and linear layers are converted.
    """

    def __init__(self, weights: DecoderWeights, linear: type[LinearLayer]) -> None:
        self.least_nodes = linear.LEAST_ROWS
        self._rotary = weights.rotary
        self._heads, self._key_heads = weights.heads, weights.key_heads
        self._width, self._scaling, self._epsilon = weights.width, weights.scaling, weights.epsilon
        self._embedding, self._norm = weights.embedding, weights.norm
        joint = weights.joint
        self._joint = joint if isinstance(joint, JointInput) else None
        mixed = joint.linear if isinstance(joint, MixedInput) else None
        self._mix = None if mixed is None else linear(mixed.weight, mixed.bias).forward
        self._more: Tensor | None = None  # [L, E] of the tokens after the vocabulary
        self._angles: tuple[Tensor, Tensor] | None = None
        self._layers = [
            _layer(index, weights.layer(index), linear) for index in range(weights.num_layers)
        ]
        self._windows = {layer.window for layer in self._layers}
        self._head = linear(weights.head.weight, weights.head.bias).forward

    name = "lean"

    def _with(self, layers: Sequence[_Layer]) -> Self:
        other = super()._with(layers)
        other._windows = {layer.window for layer in layers}
        return other

    def narrowed(self, size: int) -> Self:
        return self._with(
            [replace(layer, window=resized(layer.window, size)) for layer in self._layers]
        )

    def between(self, first: int, last: int) -> Self:
        return self._with(self._layers[first:last])

    def feed(self, states: Tensor) -> int:
        self._more = states.to(self._embedding)
        return len(self._embedding)

    def extend(self, rows: Tensor) -> int:
        rows = rows.to(self._embedding)
        known = rows[:0] if self._more is None else self._more
        self._more = torch.cat([known, rows])
        return len(self._embedding) + len(known)

    def forward(self, inputs: PassInputs, slab: KVSlab, need: Need) -> PassOutput:
        x, joined = self._begin(inputs)
        cos, sin = self._angles_at(inputs.flat(inputs.positions))  # [T, 1, D]
        nodes, group = inputs.nodes, self._heads // self._key_heads
        masks = {w: grouped_mask(inputs.mask_within(w), nodes, group) for w in self._windows}
        hidden: dict[int, Tensor] = {}
        for place, layer in enumerate(self._layers):
            if place in need.hidden:
                hidden[place] = x
            if layer.attends:
                read = self._normalised(x, layer.attention_norm) if joined is None else joined
                x = x + self._attention(layer, read, (cos, sin), inputs, masks[layer.window], slab)
                joined = None  # only the first layer of a drafting head reads it
            if layer.computes:
                x = x + self._mlp(layer, x)
        if len(self._layers) in need.hidden:
            behind = self._joint is not None and self._joint.norm_output
            hidden[len(self._layers)] = self._normalised(x, self._norm) if behind else x
        return self._output(x, lambda y: self._normalised(y, self._norm), inputs, need, hidden)

    def _begin(self, inputs: PassInputs) -> tuple[Tensor, Tensor | None]:
        """The residual stream [T, E]; of a drafting head, also its first attention's input."""
        x = look_up(inputs.flat(inputs.tokens), self._embedding, self._more)
        if self._joint is None and self._mix is None:
            return x, None
        states = inputs.states_of_nodes
        if self._mix is not None:
            return self._mix(torch.cat([x, states], dim=-1)), None
        assert self._joint is not None
        normed = self._normalised(states, self._joint.state_norm)
        joined = torch.cat([self._normalised(x, self._joint.embedding_norm), normed], dim=-1)
        return (normed if self._joint.norm_before_residual else states), joined

    def _attention(
        self,
        layer: _Layer,
        read: Tensor,
        angles: tuple[Tensor, Tensor],
        inputs: PassInputs,
        mask: Tensor,
        slab: KVSlab,
    ) -> Tensor:
        cos, sin = angles
        heads, turned = self._heads, self._heads + self._key_heads
        qkv = layer.qkv(read)
        qkv = qkv.view(len(read), turned + self._key_heads, self._width)
        qk = qkv[:, :turned]
        if layer.query_norm is not None and layer.key_norm is not None:
            q = self._normalised(qk[:, :heads], layer.query_norm)
            qk = torch.cat([q, self._normalised(qk[:, heads:], layer.key_norm)], dim=1)
        first, second = qk.chunk(2, dim=-1)
        # rotate_half without a negation: `sin` has the signs.
        qk = (torch.cat([second, first], dim=-1) * sin).addcmul_(qk, cos)
        keys, values = slab.write(qk[:, heads:], qkv[:, turned:], layer.index)
        query = inputs.padded(qk[:, :heads])  # [B, N, H, D]
        mixed = attend_grouped(query, keys, values, mask, self._scaling)
        return layer.output(inputs.flat(mixed))

    def _mlp(self, layer: _Layer, x: Tensor) -> Tensor:
        gate, up = layer.gate_up(self._normalised(x, layer.mlp_norm)).chunk(2, dim=-1)
        return layer.down(F.silu(gate) * up)

    def _normalised(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return x
        return F.rms_norm(x, weight.shape, weight, self._epsilon)

    def _angles_at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [T, 1, D] of the rotary angles at these positions [T]."""
        last = int(positions.max())
        if self._angles is None or last >= len(self._angles[0]):
            self._angles = self._tables(max(1024, 2 * last))
        cos, sin = self._angles
        return cos[positions, None], sin[positions, None]

    def _tables(self, size: int) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [size, D] for positions 0 to `size` - 1."""
        cos, sin = self._rotary.angles(0, size, self._embedding.dtype)
        signs = torch.ones_like(sin)
        signs[:, : self._width // 2] = -1
        return cos, sin * signs


def _layer(index: int, weights: LayerWeights, linear: type[LinearLayer]) -> _Layer:
    def of(part: Any) -> Any:
        if not isinstance(part, LinearWeights):
            return part
        # `forward` itself, because `nn.Module.__call__` would add overhead four times a layer.
        return linear(part.weight, part.bias).forward

    return _Layer(index=index, **{name: of(part) for name, part in vars(weights).items()})
