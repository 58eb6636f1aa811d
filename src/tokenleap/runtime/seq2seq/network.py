"""`Seq2SeqNetwork`: encoder-decoders, with the decoder in few PyTorch operations.

The decoder computes as `lean.py` does: on the nodes alone, with one product for query, key and
value. Its two layouts differ in where norms stand, how positions enter, and in the MLP. Tests
compare the logits with those of the Transformers module. `native/seq2seq.py` is the same in C++,
for one of the layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from copy import copy
from dataclasses import replace

from torch import Tensor
from transformers import PreTrainedModel

from tokenleap.runtime.attention import attend_by_head, key_span
from tokenleap.runtime.cpu import Int8Linear, PackedLinear
from tokenleap.runtime.embedding import extended
from tokenleap.runtime.inputs import PassInputs
from tokenleap.runtime.kv_slab import KVSlab
from tokenleap.runtime.lean import DenseLinear, Linear, LinearLayer
from tokenleap.runtime.network import Need, PassOutput
from tokenleap.runtime.seq2seq.cross import CrossKeys, CrossStates
from tokenleap.runtime.seq2seq.encoder import EncoderSide, TorchEncoder
from tokenleap.runtime.seq2seq.layers import Elementwise, Layer, head_of, layer_of
from tokenleap.runtime.seq2seq.structure import describe

__all__ = ["Seq2SeqNetwork"]


class Seq2SeqNetwork(EncoderSide):
    """An encoder-decoder (see `Network`).

    Args:
        model: the model; it is not changed. Embeddings and norms are shared.
        linear: the class of linear layers to use; None keeps the model's own.

    Raises:
        CompatibilityError: the model is of an unknown kind, or its linear layers do not fit.
    """

    name = "lean"
    exact_trees = False

    def __init__(
        self, model: PreTrainedModel, linear: type[PackedLinear | Int8Linear] | None
    ) -> None:
        parts = describe(model)
        super().__init__(model, parts, linear, TorchEncoder(model, linear))
        kind: type[LinearLayer] = linear or DenseLinear
        self.least_nodes = kind.LEAST_ROWS
        self._embedding, self._scale = parts.embedding, parts.embedding_scale
        self._embedding_norm = parts.embedding_norm
        self._positions = parts.positions
        self._norm_first, self._final_norm = parts.norm_first, parts.final_norm
        first = parts.layers[0]
        self._heads, self._scaling = first.attention.heads, first.attention.scaling
        self._cross_scaling = first.cross.scaling
        self._layers = [layer_of(index, layer, kind) for index, layer in enumerate(parts.layers)]
        self._head: Linear = head_of(parts.head, parts.logits_bias, kind)
        self._cross = CrossStates()

    @property
    def num_layers(self) -> int:
        """Decoder layers, including those whose sublayers are skipped."""
        return len(self._layers)

    def extend(self, rows: Tensor) -> int:
        """See `Network.extend`."""
        self._embedding, first = extended(self._embedding, rows)
        return first

    def first_layers(self, count: int) -> Seq2SeqNetwork:
        """See `Network.first_layers`."""
        return self._with(self._layers[:count])

    def without(self, attention: Collection[int], mlp: Collection[int]) -> Seq2SeqNetwork:
        """See `Network.without`; a layer's two attentions are skipped together."""
        return self._with(
            [
                replace(layer, attends=index not in attention, computes=index not in mlp)
                for index, layer in enumerate(self._layers)
            ]
        )

    def _with(self, layers: list[Layer]) -> Seq2SeqNetwork:
        other = copy(self)
        other._layers = layers
        other._cross = CrossStates()
        return other

    def forward(self, inputs: PassInputs, slab: KVSlab, need: Need) -> PassOutput:
        """See `Network.forward`."""
        x = self._embedded(inputs)
        masks = self._masks(inputs)
        cross = self._cross.of(inputs, slab)
        hidden: dict[int, Tensor] = {}
        for place, layer in enumerate(self._layers):
            if place in need.hidden:
                hidden[place] = x
            x = self._run(layer, x, inputs, masks[layer.index % len(masks)], cross, slab)
        if len(self._layers) in need.hidden:
            hidden[len(self._layers)] = x
        if not need.logits:
            return PassOutput(None, hidden=hidden)
        if need.last is not None:
            x = x[inputs.last_nodes(need.last, self.least_nodes)]
        return PassOutput(self._head(self._final_norm(x)), hidden=hidden)

    def _embedded(self, inputs: PassInputs) -> Tensor:
        x: Tensor = self._embedding(inputs.flat(inputs.tokens))
        if self._scale != 1.0:
            x = x * self._scale
        positions = self._positions.embedding(inputs)
        if positions is not None:
            x = x + positions
        return x if self._embedding_norm is None else self._embedding_norm(x)

    def _masks(self, inputs: PassInputs) -> Tensor:
        """[L, B, 1 or H, padded_rows(N), S] of self-attention; S is short for short texts.

        L is 1 if all layers have the same.
        """
        span = key_span(max(row.start for row in inputs.rows) + inputs.nodes)
        mask = inputs.mask[..., :span]
        bias = self._positions.bias(inputs.positions, mask)
        return mask[None] if bias is None else mask + bias

    def _run(
        self,
        layer: Layer,
        x: Tensor,
        inputs: PassInputs,
        mask: Tensor,
        cross: CrossKeys,
        slab: KVSlab,
    ) -> Tensor:
        """One layer: [T, E] -> [T, E]."""

        def attend(read: Tensor) -> Tensor:
            return self._attention(layer, read, inputs, mask, slab)

        def read_source(read: Tensor) -> Tensor:
            return self._cross_attention(layer, read, inputs, mask.shape[2], cross)

        x = self._added(x, layer.attention_norm, attend if layer.attends else None)
        x = self._added(x, layer.cross_norm, read_source if layer.attends else None)
        return self._added(x, layer.mlp_norm, layer.mlp if layer.computes else None)

    def _added(
        self, x: Tensor, norm: Elementwise, sublayer: Callable[[Tensor], Tensor] | None
    ) -> Tensor:
        """The residual stream behind a sublayer; None adds nothing."""
        if self._norm_first:
            return x if sublayer is None else x + sublayer(norm(x))
        return norm(x if sublayer is None else x + sublayer(x))

    def _attention(
        self, layer: Layer, read: Tensor, inputs: PassInputs, mask: Tensor, slab: KVSlab
    ) -> Tensor:
        heads = self._heads
        qkv = layer.qkv(read).view(len(read), 3 * heads, -1)
        keys, values = slab.write(qkv[:, heads : 2 * heads], qkv[:, 2 * heads :], layer.index)
        query = inputs.padded(qkv[:, :heads])  # [B, N, H, D]
        span = mask.shape[3]
        mixed = attend_by_head(query, keys[:, :, :span], values[:, :, :span], mask, self._scaling)
        return layer.output(inputs.flat(mixed))

    def _cross_attention(
        self, layer: Layer, read: Tensor, inputs: PassInputs, rows: int, cross: CrossKeys
    ) -> Tensor:
        query = inputs.padded(layer.cross_query(read).view(len(read), self._cross_heads, -1))
        keys, values = cross.keys[layer.index], cross.values[layer.index]
        mask = cross.mask.expand(-1, -1, rows, -1)
        mixed = attend_by_head(query, keys, values, mask, self._cross_scaling)
        return layer.cross_output(inputs.flat(mixed))
