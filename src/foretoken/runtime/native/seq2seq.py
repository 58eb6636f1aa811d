"""`NativeSeq2Seq`: encoder-decoders in the layouts of BART and T5, with the decoder in C++."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from foretoken.runtime.cpu import linear_layer
from foretoken.runtime.families import Activation
from foretoken.runtime.inputs import PassInputs
from foretoken.runtime.kv_slab import KVSlab
from foretoken.runtime.llama import LinearWeights
from foretoken.runtime.native.angles import AngleTables
from foretoken.runtime.native.build import library
from foretoken.runtime.native.c_structures import CDecoder, CLayer, CNorm, CPass, CSource
from foretoken.runtime.native.kept_weights import KeptWeights
from foretoken.runtime.native.network import DecoderParts, NativeNetwork, checked
from foretoken.runtime.native.pack import CLinear, Format, in_turns, pack
from foretoken.runtime.native.packed import QUANTIZED
from foretoken.runtime.native.support import FORMATS, wrong_shape
from foretoken.runtime.seq2seq.encoder import EncoderSide
from foretoken.runtime.seq2seq.positions import RelativePositions, TablePositions
from foretoken.runtime.seq2seq.structure import (
    AttentionParts,
    LayerParts,
    Scaled,
    Structure,
    describe,
)
from foretoken.runtime.source_network import RowState

__all__ = ["NativeSeq2Seq", "why_not_native_seq2seq"]

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    Activation.GELU: F.gelu,
    Activation.RELU: F.relu,
}


def why_not_native_seq2seq(model: PreTrainedModel) -> str | None:
    """Why the C++ code cannot run an encoder-decoder, on any machine; None if it can.

    Raises:
        CompatibilityError: it is of an unknown kind.
    """
    if model.device.type != "cpu" or model.dtype not in FORMATS:
        return (
            "it supports only float32 and bfloat16 on CPUs, "
            f"not {model.dtype} on {model.device.type}"
        )
    parts = describe(model)
    first = parts.layers[0]
    size, width = first.attention.query.in_features, _width(first.attention)
    if (reason := wrong_shape(width, size, first.down.in_features)) is not None:
        return reason
    alike: tuple[set[Any], ...] = (
        {_shape(each) for layer in parts.layers for each in (layer.attention, layer.cross)},
        {(_activation(layer), len(layer.up)) for layer in parts.layers},
        {None if (norm := _Norm.of(each)) is None else norm.epsilon for each in _norms(parts)},
        {layer.down.weight.dtype for layer in parts.layers} | {model.dtype},
    )
    known = _activation(first) is not None and _embedding_scale(parts) is not None
    if any(len(kinds) > 1 or None in kinds for kinds in alike) or not known:
        return f"it does not support {type(model).__name__} with this configuration"
    return None


def _width(attention: AttentionParts) -> int:
    """D, of a head."""
    return attention.query.out_features // attention.heads


def _shape(attention: AttentionParts) -> tuple[int, int, float]:
    return attention.heads, _width(attention), attention.scaling


def _norms(parts: Structure) -> Iterator[nn.Module]:
    for norm in (parts.embedding_norm, parts.final_norm):
        if norm is not None and not isinstance(norm, nn.Identity):
            yield norm
    for layer in parts.layers:
        yield from (layer.attention_norm, layer.cross_norm, layer.mlp_norm)


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
        """[E] -> [E]."""
        centred = x if self.bias is None else x - x.mean()
        normal = centred * (centred.square().mean() + self.epsilon).rsqrt() * self.weight
        return normal if self.bias is None else normal + self.bias

    def times(self, factor: float) -> _Norm:
        """The norm with a factor on its results."""
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


def _embedding_scale(parts: Structure) -> float | None:
    """The factor between rows of the embedding's weights and what begins the residual stream.

    None if it is not one factor.
    """
    embedding = parts.embedding
    weight = getattr(embedding, "weight", None)
    if weight is None:
        return None
    tokens = torch.arange(min(4, len(weight)), device=weight.device)
    factor = float(getattr(embedding, "embed_scale", 1.0))
    same = torch.allclose(embedding(tokens).float(), weight[tokens].float() * factor, 0.01, 1e-6)
    return factor * parts.embedding_scale if same else None


class NativeSeq2Seq(EncoderSide, NativeNetwork):
    """An encoder-decoder (see `Network`). The encoder runs in PyTorch.

    Args:
        model: a model for which `why_not_native_seq2seq` returns None; it is not changed.
        quantization: "int8", "int4" or None, of the decoder. With int4 the output layer, the
            encoder and the keys and values of the source are int8.
        *flags: further flags for the compiler (see `library`).

    Raises:
        NativeLibraryError: the library is not available.
        CompatibilityError: the encoder's layers cannot be quantized.
    """

    def __init__(
        self, model: PreTrainedModel, quantization: str | None = None, *flags: str
    ) -> None:
        loaded, parts = checked(library(*flags)), describe(model)
        linear = linear_layer(model.dtype, model.device, quantization)
        EncoderSide.__init__(self, model, parts, linear)
        NativeNetwork.__init__(self, loaded, _Packing(parts, model.dtype, quantization).parts())
        self._read: list[RowState | None] = []
        self._sources_of_rows = (CSource * 0)()

    def _prepare(self, arguments: CPass, inputs: PassInputs, slab: KVSlab) -> None:
        super()._prepare(arguments, inputs, slab)
        rows = range(inputs.first + len(inputs.rows))
        states = [_state(slab, row) if row >= inputs.first else None for row in rows]
        if not _are_same(states, self._read):
            self._read = states
            self._sources_of_rows = (CSource * len(states))(*map(_source, states))
        arguments.sources = ctypes.addressof(self._sources_of_rows)


def _state(slab: KVSlab, row: int) -> RowState | None:
    """What a row reads; rows without nodes need not have read a source."""
    found = slab.state(row)
    return RowState(*found) if found else None


def _are_same(states: Sequence[RowState | None], known: Sequence[RowState | None]) -> bool:
    keys = ([None if each is None else each.keys for each in some] for some in (states, known))
    first, second = keys
    return len(first) == len(second) and all(a is b for a, b in zip(first, second, strict=True))


def _source(state: RowState | None) -> CSource:
    if state is None:
        return CSource()
    assert all(part.is_contiguous() for part in (state.keys, state.values))
    positions = int((state.mask == 0).sum())
    return CSource(state.keys.data_ptr(), state.values.data_ptr(), state.keys.shape[2], positions)


def _gate_up(layer: LayerParts) -> LinearWeights:
    merged = LinearWeights.of(*layer.up)
    return merged if len(layer.up) == 1 else in_turns(merged)


class _Packing:
    """Makes the C structures of a decoder.

    Args:
        parts: of the model.
        dtype: of the model.
        quantization: see `NativeSeq2Seq`.
    """

    def __init__(self, parts: Structure, dtype: torch.dtype, quantization: str | None) -> None:
        self._parts, self._dtype, self._kept = parts, dtype, KeptWeights()
        self._format = FORMATS[dtype] if quantization is None else QUANTIZED[quantization]
        self._head_format = Format.INT8 if quantization == "int4" else self._format

    def parts(self) -> DecoderParts:
        """The decoder."""
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
            head=self._linear(self._head(), self._head_format),
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
        )

    def _positions(self) -> dict[str, Any]:
        """The fields of `CDecoder` that say how it knows positions."""
        positions = self._parts.positions
        if isinstance(positions, RelativePositions):
            return {
                "unplaced_token": -1,
                "distance_bias": self._floats(positions.by_distance),
                "distances": positions.by_distance.shape[1],
            }
        assert isinstance(positions, TablePositions)
        return {
            "position_embedding": self._floats(positions.table),
            "embedded_positions": len(positions.table),
            "unplaced_token": -1 if positions.without is None else positions.without,
        }

    def _head(self) -> LinearWeights:
        head, more = LinearWeights.of(self._parts.head), self._parts.logits_bias
        if more is None:
            return head
        return LinearWeights(head.weight, more if head.bias is None else head.bias + more)

    def _layer(self, index: int, layer: LayerParts) -> CLayer:
        attention, cross = layer.attention, layer.cross
        qkv = self._linears(attention.query, attention.key, attention.value)
        return CLayer(
            qkv=(CLinear * 3)(qkv),
            output=self._linears(attention.output),
            source_query=self._linears(cross.query),
            source_output=self._linears(cross.output),
            gate_up=(CLinear * 2)(self._linear(_gate_up(layer), self._format)),
            down=self._linears(layer.down),
            attention_norm=self._norm(layer.attention_norm),
            source_norm=self._norm(layer.cross_norm),
            mlp_norm=self._norm(layer.mlp_norm),
            index=index,
            attends=True,
            computes=True,
            angles=-1,
        )

    def _linears(self, *linears: nn.Linear) -> CLinear:
        return self._linear(LinearWeights.of(*linears), self._format)

    def _linear(self, weights: LinearWeights, form: Format) -> CLinear:
        packed = pack(weights, form)
        for kept in (packed.weight, packed.bias):
            if kept is not None:
                self._kept.keep(kept)
        return packed.c

    def _norm(self, module: nn.Module | None) -> CNorm:
        if module is None or isinstance(module, nn.Identity):
            return CNorm()
        norm = _Norm.of(module)
        assert norm is not None
        return CNorm(
            self._floats(norm.weight), None if norm.bias is None else self._floats(norm.bias)
        )

    def _floats(self, weight: Tensor) -> int:
        return self._kept.keep(weight.detach().float().contiguous()).data_ptr()
