"""`NativeSeq2Seq`: encoder-decoders in the layouts of BART and T5, in C++."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from ctypes import CDLL
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenleap.core.references import Source
from tokenleap.runtime.cpu import linear_layer
from tokenleap.runtime.inputs import PassInputs, RowNodes
from tokenleap.runtime.kv_slab import KVSlab
from tokenleap.runtime.llama import Activation, LinearWeights
from tokenleap.runtime.native.build import FORMATS, library, wrong_place, wrong_shape
from tokenleap.runtime.native.network import DecoderParts, NativeNetwork, checked
from tokenleap.runtime.native.pack import Format, in_turns, pack
from tokenleap.runtime.native.packed import QUANTIZED
from tokenleap.runtime.native.structures import (
    AngleTables,
    CDecoder,
    CLayer,
    CLinear,
    CNorm,
    CPass,
    CSource,
    KeptWeights,
    layer_of,
)
from tokenleap.runtime.network import Need, RowState
from tokenleap.runtime.seq2seq.network import (
    EncoderSide,
    TorchEncoder,
    are_same,
    probe_source,
    states_of,
)
from tokenleap.runtime.seq2seq.structure import (
    AttentionParts,
    DecoderLayerParts,
    LayerParts,
    RelativePositions,
    Scaled,
    Stack,
    Structure,
    TablePositions,
    describe,
    describe_encoder,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def why_not_native_seq2seq(model: PreTrainedModel) -> str | None:
    """Why the C++ code cannot run an encoder-decoder, on any machine; None if it can."""
    if (reason := wrong_place(model, ("cpu",))) is not None:
        return reason
    reason = wrong_stack(describe(model), model.dtype)
    return reason and f"{reason} of {type(model).__name__}"


class NativeEncoder(NativeNetwork):
    """An encoder: a pass in which every node sees all others, and which returns their states."""

    def __init__(
        self, loaded: CDLL, stack: Stack, dtype: torch.dtype, quantization: str | None
    ) -> None:
        super().__init__(loaded, packed_stack(stack, dtype, quantization))
        self._slab, self._dtype = KVSlab(), dtype
        self._slab.add_row()
        positions = stack.positions
        self._unplaced = positions.without if isinstance(positions, TablePositions) else None

    @classmethod
    def of(cls, model: PreTrainedModel, loaded: CDLL, quantization: str | None) -> Self | None:
        """None if the C++ code cannot run the model's encoder."""
        stack = describe_encoder(model)
        if stack is None or wrong_stack(stack, model.dtype) is not None:
            return None
        made = cls(loaded, stack, model.dtype, None)
        source = probe_source(model)
        own = TorchEncoder(model, None)(source).float()
        alike = (made(source).float() - own).abs().max() <= _TOLERANCE[model.dtype] * own.std()
        if not alike:
            return None
        return cls(loaded, stack, model.dtype, quantization) if quantization else made

    def __call__(self, source: Source) -> Tensor:
        tokens, count = source.tokens, len(source.tokens)
        nodes = RowNodes(0, tokens, self._positions(tokens), [count] * count)
        span = self._slab.begin(0, [0], [count], count)
        inputs = PassInputs([nodes], 0, count, span, self._dtype, torch.device("cpu"))
        last = self.num_layers
        return self.forward(inputs, self._slab, Need(logits=False, hidden=(last,))).hidden[last]

    def _positions(self, tokens: Sequence[int]) -> Sequence[int]:
        """Tokens without a position take none (M2M100's padding)."""
        if self._unplaced is None or self._unplaced not in tokens:
            return range(len(tokens))
        placed, found = 0, []
        for token in tokens:
            found.append(placed)
            placed += token != self._unplaced
        return found


_TOLERANCE = {torch.float32: 0.01, torch.bfloat16: 0.3}
"""Of the largest difference between the states of an encoder and those of the module."""


class NativeSeq2Seq(EncoderSide, NativeNetwork):
    """An encoder-decoder (see `Network`). Encoders that are not supported run in PyTorch.

    With "int4", the output layer is int8; with all, what runs in PyTorch is.
    """

    def __init__(
        self, model: PreTrainedModel, quantization: str | None = None, *flags: str
    ) -> None:
        loaded, parts = checked(library(*flags)), describe(model)
        linear = linear_layer(model.dtype, model.device, quantization)
        encoder = NativeEncoder.of(model, loaded, quantization) or TorchEncoder(model, linear)
        EncoderSide.__init__(self, model, parts, linear, encoder)
        NativeNetwork.__init__(self, loaded, packed_stack(parts, model.dtype, quantization))
        self._read: list[RowState | None] = []
        self._sources_of_rows = (CSource * 0)()

    def _prepare(self, arguments: CPass, inputs: PassInputs, slab: KVSlab) -> None:
        super()._prepare(arguments, inputs, slab)
        states = [None] * inputs.first + states_of(inputs, slab)  # by their rows in the slab
        if not are_same(states, self._read):
            self._read = states
            self._sources_of_rows = (CSource * len(states))(*map(_source, states))
        arguments.sources = ctypes.addressof(self._sources_of_rows)


def _source(state: RowState | None) -> CSource:
    if state is None:
        return CSource()
    assert all(part.is_contiguous() for part in (state.keys, state.values))
    positions = int((state.mask == 0).sum())
    return CSource(state.keys.data_ptr(), state.values.data_ptr(), state.keys.shape[2], positions)


# Encoders and decoders of encoder-decoders, as the C++ code takes them.
#
# Norms and activations are known by what they compute, not by their classes.


_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    Activation.GELU: F.gelu,
    Activation.RELU: F.relu,
}


def wrong_stack(parts: Stack, dtype: torch.dtype) -> str | None:
    """The part of an encoder or a decoder that the kernels lack; None if they have all."""
    first = parts.layers[0]
    size, width = first.attention.query.in_features, _width(first.attention)
    if (reason := wrong_shape(width, size, first.down.in_features)) is not None:
        return reason
    alike: tuple[set[Any], ...] = (
        {_shape(each) for layer in parts.layers for each in _attentions(layer)},
        {(_activation(layer), len(layer.up)) for layer in parts.layers},
        {None if (norm := _Norm.of(each)) is None else norm.epsilon for each in _norms(parts)},
        {layer.down.weight.dtype for layer in parts.layers} | {dtype},
    )
    known = _activation(first) is not None and _embedding_scale(parts) is not None
    if any(len(kinds) > 1 or None in kinds for kinds in alike) or not known:
        return "it does not support this configuration"
    return None


def packed_stack(parts: Stack, dtype: torch.dtype, quantization: str | None) -> DecoderParts:
    return _Packing(parts, dtype, quantization).parts()


def _width(attention: AttentionParts) -> int:
    return attention.query.out_features // attention.heads


def _attentions(layer: LayerParts) -> Sequence[AttentionParts]:
    own = (layer.attention,)
    return (*own, layer.cross) if isinstance(layer, DecoderLayerParts) else own


def _shape(attention: AttentionParts) -> tuple[int, int, float]:
    return attention.heads, _width(attention), attention.scaling


def _norms(parts: Stack) -> Iterator[nn.Module]:
    for norm in (parts.embedding_norm, parts.final_norm):
        if norm is not None and not isinstance(norm, nn.Identity):
            yield norm
    for layer in parts.layers:
        yield from (layer.attention_norm, layer.mlp_norm)
        if isinstance(layer, DecoderLayerParts):
            yield layer.cross_norm


@dataclass(frozen=True)
class _Norm:
    """A norm, known by what it does: RMSNorm, or LayerNorm if there is a bias."""

    weight: Tensor
    bias: Tensor | None
    epsilon: float

    @classmethod
    def of(cls, module: nn.Module) -> _Norm | None:
        """None if it does something else."""
        if isinstance(module, Scaled):
            inner = cls.of(module.norm)
            return inner and inner.times(module.factor)
        epsilon = getattr(module, "eps", getattr(module, "variance_epsilon", None))
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if weight is None or epsilon is None:
            return None
        found = cls(
            weight.detach().float(), None if bias is None else bias.detach().float(), float(epsilon)
        )
        given = torch.linspace(-1, 2, len(weight), device=weight.device, dtype=weight.dtype)
        close = 16 * torch.finfo(weight.dtype).eps
        same = torch.allclose(found._computed(given.float()), module(given).float(), close, close)
        return found if same else None

    def _computed(self, x: Tensor) -> Tensor:
        centred = x if self.bias is None else x - x.mean()
        normal = centred * (centred.square().mean() + self.epsilon).rsqrt() * self.weight
        return normal if self.bias is None else normal + self.bias

    def times(self, factor: float) -> _Norm:
        bias = None if self.bias is None else self.bias * factor
        return _Norm(self.weight * factor, bias, self.epsilon)


def _activation(layer: LayerParts) -> Activation | None:
    """The activation of a layer, known by what it does; None for others."""
    given = torch.linspace(-6, 6, 49)
    found = layer.activation(given)
    alike = (
        kind for kind, known in _ACTIVATIONS.items() if torch.allclose(found, known(given), 0, 1e-6)
    )
    return next(alike, None)


def _embedding_scale(parts: Stack) -> float | None:
    """The factor from rows of the embedding to the beginning of the residual stream, if one."""
    embedding = parts.embedding
    weight = getattr(embedding, "weight", None)
    if weight is None:
        return None
    tokens = torch.arange(min(4, len(weight)), device=weight.device)
    factor = float(getattr(embedding, "embed_scale", 1.0))
    same = torch.allclose(embedding(tokens).float(), weight[tokens].float() * factor, 0.01, 1e-6)
    return factor * parts.embedding_scale if same else None


def _gate_up(layer: LayerParts) -> LinearWeights:
    merged = LinearWeights.of(*layer.up)
    return merged if len(layer.up) == 1 else in_turns(merged)


class _Packing:
    def __init__(self, parts: Stack, dtype: torch.dtype, quantization: str | None) -> None:
        self._parts, self._dtype, self._kept = parts, dtype, KeptWeights()
        self._format = FORMATS[dtype] if quantization is None else QUANTIZED[quantization]
        self._head_format = Format.INT8 if quantization == "int4" else self._format

    def parts(self) -> DecoderParts:
        layers = [self._layer(index, layer) for index, layer in enumerate(self._parts.layers)]
        scale = _embedding_scale(self._parts)
        assert scale is not None
        learnt = self._parts.embedding_scale  # what the embedding does itself is in learnt rows
        angles = AngleTables((), 0)
        return DecoderParts(self._decoder(scale), layers, self._kept, angles, learnt_scale=learnt)

    def _decoder(self, scale: float) -> CDecoder:
        parts = self._parts
        first = parts.layers[0]
        norm = _Norm.of(first.attention_norm)
        activation = _activation(first)
        assert norm is not None
        assert activation is not None
        embedding = parts.embedding.weight
        assert isinstance(embedding, Tensor)
        return CDecoder(
            norm=self._norm(parts.final_norm),
            embedding=self._kept.keep(embedding.detach().contiguous()).data_ptr(),
            vocabulary=len(embedding),
            hidden_size=first.attention.query.in_features,
            heads=first.attention.heads,
            key_heads=first.attention.heads,
            width=_width(first.attention),
            intermediate=first.down.in_features,
            is_bf16=self._dtype == torch.bfloat16,
            epsilon=norm.epsilon,
            scaling=first.attention.scaling,
            embedding_scale=scale,
            residual_scale=1.0,
            logit_scale=1.0,
            activation=activation,
            ungated=len(first.up) == 1,
            norms_sums=not parts.norm_first,
            embedding_norm=self._norm(parts.embedding_norm),
            **self._positions(),
            **self._output(),
        )

    def _positions(self) -> dict[str, Any]:
        """The fields of `CDecoder` that say how it knows positions."""
        positions = self._parts.positions
        if isinstance(positions, RelativePositions):
            return {
                "unplaced_token": -1,
                "distance_bias": self._kept.floats(positions.by_distance),
                "distances_behind": positions.behind,
                "distances_before": positions.by_distance.shape[2] - 1 - positions.behind,
                "distance_bias_stride": positions.by_distance[0].numel()
                if len(positions.by_distance) > 1
                else 0,
            }
        assert isinstance(positions, TablePositions)
        return {
            "position_embedding": self._kept.floats(positions.table),
            "embedded_positions": len(positions.table),
            "unplaced_token": -1 if positions.without is None else positions.without,
        }

    def _output(self) -> dict[str, Any]:
        """A decoder's output layer. An encoder returns what lies before it."""
        if not isinstance(self._parts, Structure):
            return {"norm_output": True}
        head, more = LinearWeights.of(self._parts.head), self._parts.logits_bias
        if more is not None:
            head = LinearWeights(head.weight, more if head.bias is None else head.bias + more)
        return {"head": self._linear(head, self._head_format)}

    def _layer(self, index: int, layer: LayerParts) -> CLayer:
        attention = layer.attention
        return layer_of(
            index,
            [self._linears(attention.query, attention.key, attention.value)],
            self._linears(attention.output),
            [self._linear(_gate_up(layer), self._format)],
            self._linears(layer.down),
            attention_norm=self._norm(layer.attention_norm),
            mlp_norm=self._norm(layer.mlp_norm),
            angles=-1,
            **self._reading(layer),
        )

    def _reading(self, layer: LayerParts) -> dict[str, Any]:
        """The fields of `CLayer` for what reads a source."""
        if not isinstance(layer, DecoderLayerParts):
            return {}
        return {
            "source_query": self._linears(layer.cross.query),
            "source_output": self._linears(layer.cross.output),
            "source_norm": self._norm(layer.cross_norm),
        }

    def _linears(self, *linears: nn.Linear) -> CLinear:
        return self._linear(LinearWeights.of(*linears), self._format)

    def _linear(self, weights: LinearWeights, form: Format) -> CLinear:
        return self._kept.linear(pack(weights, form))

    def _norm(self, module: nn.Module | None) -> CNorm:
        if module is None or isinstance(module, nn.Identity):
            return CNorm()
        norm = _Norm.of(module)
        assert norm is not None
        return CNorm(self._kept.floats(norm.weight), self._kept.floats(norm.bias))
