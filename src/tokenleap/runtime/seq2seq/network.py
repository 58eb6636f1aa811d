"""`Seq2SeqNetwork`: encoder-decoders, with the decoder in few PyTorch operations.

The decoder computes as `lean.py` does: on the nodes alone, with one product for query, key and
value. Its two layouts differ in where norms stand, how positions enter, and in the MLP. Tests
compare the logits with those of the Transformers module. `native/seq2seq.py` is the same in C++,
for one of the layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeAlias
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenleap.core.references import Source
from tokenleap.runtime.attention import attend_by_head, key_span
from tokenleap.runtime.cpu import Int8Linear, PackedLinear, pack, share
from tokenleap.runtime.inputs import PassInputs, extended
from tokenleap.runtime.kv_slab import KVSlab
from tokenleap.runtime.lean import DenseLinear, Layers, Linear, LinearLayer
from tokenleap.runtime.llama import LinearWeights
from tokenleap.runtime.network import Need, PassOutput, RowState, SourceNetwork
from tokenleap.runtime.seq2seq.structure import (
    DecoderLayerParts,
    LayerParts,
    Structure,
    describe,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Elementwise: TypeAlias = Callable[[Tensor], Tensor]  # [T, E] -> [T, E]: a norm or an activation


@dataclass(frozen=True)
class Layer:
    """One decoder layer: see `DecoderLayerParts`; `index` is its place in slab and row states."""

    index: int
    attention_norm: Elementwise
    qkv: Linear
    output: Linear
    cross_norm: Elementwise
    cross_query: Linear
    cross_output: Linear
    mlp_norm: Elementwise
    up: Linear
    activation: Elementwise
    gated: bool
    down: Linear
    attends: bool = True
    computes: bool = True

    def mlp(self, x: Tensor) -> Tensor:
        up = self.up(x)
        if not self.gated:
            return self.down(self.activation(up))
        gate, up = up.chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)


def layer_of(index: int, parts: DecoderLayerParts, kind: type[LinearLayer]) -> Layer:
    # `forward` itself, because `nn.Module.__call__` would add overhead ten times a layer.
    attention, cross = parts.attention, parts.cross
    return Layer(
        index=index,
        attention_norm=parts.attention_norm.forward,
        qkv=_joint((attention.query, attention.key, attention.value), kind),
        output=_joint((attention.output,), kind),
        cross_norm=parts.cross_norm.forward,
        cross_query=_joint((cross.query,), kind),
        cross_output=_joint((cross.output,), kind),
        mlp_norm=parts.mlp_norm.forward,
        up=_joint(parts.up, kind),
        activation=parts.activation.forward,
        gated=len(parts.up) > 1,
        down=_down_of(parts, kind),
    )


def _down_of(parts: LayerParts, kind: type[LinearLayer]) -> Linear:
    """T5 in float16 keeps this one layer in float32, since its results exceed float16."""
    dtype = parts.down.weight.dtype
    down = _joint((parts.down,), kind)
    return down if parts.up[0].weight.dtype == dtype else lambda x: down(x.to(dtype))


def _joint(linears: tuple[nn.Linear, ...], kind: type[LinearLayer]) -> Linear:
    """One product in place of several with the same input."""
    weights = LinearWeights.of(*linears)
    return kind(weights.weight, weights.bias).forward


def head_of(head: nn.Linear, more: Tensor | None, kind: type[LinearLayer]) -> Linear:
    """The output layer [T, E] -> [T, V], with `more` [V] added to its logits."""
    biases = [bias for bias in (head.bias, more) if bias is not None]
    total = sum(biases[1:], biases[0]).to(head.weight.dtype) if biases else None
    return kind(head.weight, total).forward


# The source side of attention: what the rows of a pass read through cross-attention.


@dataclass(frozen=True)
class CrossKeys:
    """The cross-attention of B rows, over a span of S source positions with padding."""

    keys: Tensor  # [L, B, H, S, D]
    values: Tensor  # [L, B, H, S, D]
    mask: Tensor  # [B, 1, 1, S], added to the scores


def _widened(state: RowState, span: int) -> RowState:
    missing = span - len(state.mask)
    if not missing:
        return state
    keys, values = (F.pad(part, (0, 0, 0, missing)) for part in (state.keys, state.values))
    mask = F.pad(state.mask, (0, missing), value=-torch.inf)
    return RowState(keys, values, mask, state.encoded)


class CrossStates:
    """Puts together the states of the rows of a pass; those of several rows are copied once.

    Rows come and go between passes, but most passes are over the same rows as the one before.
    """

    def __init__(self) -> None:
        self._states: list[RowState | None] = []
        self._joined: CrossKeys | None = None

    def of(self, inputs: PassInputs, slab: KVSlab) -> CrossKeys:
        """Keys that the rows of a pass read. Rows without nodes need not have read a source."""
        states = states_of(inputs, slab)
        if self._joined is None or not are_same(states, self._states):
            self._states, self._joined = states, _join(states)
        return self._joined


def states_of(inputs: PassInputs, slab: KVSlab) -> list[RowState | None]:
    """The source state that each row of a pass reads; None for rows that have read no source."""
    rows = range(inputs.first, inputs.first + len(inputs.rows))
    return [RowState(*found) if (found := slab.state(row)) else None for row in rows]


def are_same(found: Sequence[RowState | None], known: Sequence[RowState | None]) -> bool:
    if len(found) != len(known):
        return False
    pairs = zip(found, known, strict=True)
    return all(
        a is b or (a is not None and b is not None and a.keys is b.keys and a.values is b.values)
        for a, b in pairs
    )


def _join(states: Sequence[RowState | None]) -> CrossKeys:
    span = max(len(state.mask) for state in states if state is not None)
    some = next(state for state in states if state is not None)
    full = [_widened(state or _nothing_like(some), span) for state in states]
    if len(full) == 1:
        (only,) = full
        return CrossKeys(
            only.keys.unsqueeze(1), only.values.unsqueeze(1), only.mask[None, None, None]
        )
    keys, values = (
        torch.stack(parts, dim=1)
        for parts in ([state.keys for state in full], [state.values for state in full])
    )
    return CrossKeys(keys, values, torch.stack([state.mask for state in full])[:, None, None])


def _nothing_like(state: RowState) -> RowState:
    """The state of a row that has no nodes. It sees a key, since a softmax over none is NaN."""
    keys, values, mask = (torch.zeros_like(part) for part in state[:3])
    return RowState(keys, values, mask, state.encoded)


# `EncoderSide`: what a network of an encoder-decoder does with a source.
#
# The encoder runs once per source: the Transformers module itself, on packed linear layers, or
# `NativeEncoder`. So do the linear layers that make keys and values of what it returns, for the
# decoder's attention to the source.


_PROBE_TOKENS = 5


class TorchEncoder:
    """The Transformers module of an encoder, on linear layers of another class if there is one."""

    def __init__(
        self, model: PreTrainedModel, linear: type[PackedLinear | Int8Linear] | None
    ) -> None:
        module: Any = model.get_encoder()
        encoder = share(module) if linear is None else pack(module, linear)
        self._encoder = encoder.train(False)
        self._dtype, self._device = model.dtype, model.device

    @torch.inference_mode()
    def __call__(self, source: Source) -> Tensor:
        inputs = source.inputs(self._device, self._dtype)
        encoded: Tensor = self._encoder(**inputs).last_hidden_state[0]
        return encoded


def probe_source(model: PreTrainedModel) -> Source:
    sizes = _Sizes.of(model)
    if sizes.num_bins is not None:
        assert sizes.limit is not None
        generator = torch.Generator().manual_seed(0)
        return Source.of_audio(torch.randn(sizes.num_bins, sizes.limit, generator=generator))
    stride = max(1, sizes.vocab_size // _PROBE_TOKENS)
    return Source(tuple(place * stride % sizes.vocab_size for place in range(_PROBE_TOKENS)))


@dataclass(frozen=True)
class _Sizes:
    """How long a source may be, and what it is made of; see `SourceNetwork`."""

    vocab_size: int
    limit: int | None
    num_bins: int | None

    @classmethod
    def of(cls, model: PreTrainedModel) -> _Sizes:
        config: Any = model.config
        if config.model_type == "whisper":
            return cls(0, 2 * int(config.max_source_positions), int(config.num_mel_bins))
        encoder: Any = model.get_encoder()
        size = int(encoder.get_input_embeddings().num_embeddings)
        return cls(size, getattr(config, "max_position_embeddings", None), None)


class EncoderSide(SourceNetwork):
    """The encoder's side of an encoder-decoder's network (see `SourceNetwork`)."""

    def __init__(
        self,
        model: PreTrainedModel,
        parts: Structure,
        linear: type[PackedLinear | Int8Linear] | None,
        encoder: Callable[[Source], Tensor],
    ) -> None:
        kind: type[LinearLayer] = linear or DenseLinear
        self._encoder = encoder
        self._itemsize = model.dtype.itemsize
        cross = parts.layers[0].cross
        self._cross_heads = cross.heads
        self._cross_width = cross.query.out_features // cross.heads
        # [n, E] -> [n, 2 H D]: keys and values of source positions
        self._sources = [_joint((each.cross.key, each.cross.value), kind) for each in parts.layers]
        self.encoded_size = cross.key.in_features
        self.encoder_readers = WeakSet()
        sizes, self._probe_source = _Sizes.of(model), probe_source(model)
        self.source_vocab_size, self.source_limit = sizes.vocab_size, sizes.limit
        self.num_bins = sizes.num_bins

    def encoded(self, source: Source) -> Tensor:
        return self._encoder(source)

    def read(self, encoded: Tensor, *, keep: bool = False) -> RowState:
        shape = (len(encoded), 2, self._cross_heads, -1)
        # [L, 2, H, n, D]
        both = torch.stack([layer(encoded).view(shape) for layer in self._sources]).permute(
            0, 2, 3, 1, 4
        )
        kept = encoded if keep else encoded[:0].clone()
        keys, values = both[:, 0].contiguous(), both[:, 1].contiguous()
        state = RowState(keys, values, keys.new_zeros(len(encoded)), kept)
        return _widened(state, key_span(len(encoded)))

    @property
    def probe_source(self) -> Source:
        return self._probe_source

    def state_bytes(self, source: Source) -> int:
        positions = len(source) if self.num_bins is None else len(source) // 2
        cell = 2 * len(self._sources) * self._cross_heads * self._cross_width + 1
        kept = positions * self.encoded_size if self.keeps_encoded else 0
        return (key_span(positions) * cell + kept) * self._itemsize


class Seq2SeqNetwork(Layers, EncoderSide):
    """An encoder-decoder (see `Network`), which shares the model's embeddings and norms."""

    name = "lean"

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
        self._head = head_of(parts.head, parts.logits_bias, kind)
        self._cross = CrossStates()

    def extend(self, rows: Tensor) -> int:
        self._embedding, first = extended(self._embedding, rows)
        return first

    def _with(self, layers: Sequence[Layer]) -> Self:
        other = super()._with(layers)
        other._cross = CrossStates()
        return other

    def forward(self, inputs: PassInputs, slab: KVSlab, need: Need) -> PassOutput:
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
        return self._output(x, self._final_norm, inputs, need, hidden)

    def _embedded(self, inputs: PassInputs) -> Tensor:
        x: Tensor = self._embedding(inputs.flat(inputs.tokens))
        if self._scale != 1.0:
            x = x * self._scale
        positions = self._positions.embedding(inputs)
        if positions is not None:
            x = x + positions
        return x if self._embedding_norm is None else self._embedding_norm(x)

    def _masks(self, inputs: PassInputs) -> Tensor:
        """[L or 1, B, 1 or H, padded_rows(N), S] of self-attention; S is short for short texts."""
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
