"""`NativeDecoder`: runs the Llama family through the C++ code in this folder (see `Network`).

Every kernel sums in one order, whatever else the pass computes. So invariant 7 holds for any number
of nodes (down to one), rows and threads, and for trees, too. Logits are float32. With bfloat16,
int8 and int4, numbers between linear layers are rounded less often than in PyTorch.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from copy import copy
from ctypes import (
    CDLL,
    Array,
    addressof,
    byref,
    c_int32,
    c_size_t,
    sizeof,
)
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foretoken.runtime.inputs import PassInputs
from foretoken.runtime.kv_slab import KVSlab
from foretoken.runtime.llama import LayerWeights, LinearWeights, LlamaWeights, is_llama
from foretoken.runtime.native.arguments import CBuffers, CDecoder, CLayer, CPass, NodeArrays
from foretoken.runtime.native.build import NativeLibraryError, library
from foretoken.runtime.native.pack import GROUP, CLinear, Format, PackedWeights, in_turns, pack
from foretoken.runtime.network import Need, PassOutput

__all__ = ["NativeDecoder", "why_not_native"]

_WIDTHS = (32, 64, 96, 128)
_MOST_HIDDEN_SIZE = 16384
"""`MOST_HIDDEN_SIZE` in decoder.cpp: `Run::normalise` has room for this many numbers."""
_ANGLES = 256
"""Rotary angles are computed for this many positions at once."""

_FORMATS = {torch.float32: Format.FLOAT32, torch.bfloat16: Format.BFLOAT16}
_QUANTIZED = {"int8": Format.INT8, "int4": Format.INT4}


def why_not_native(model: PreTrainedModel) -> str | None:
    """Why the model cannot run natively here; None if it can."""
    if not is_llama(model):
        return "it supports only Llama, Mistral, Qwen2 and Qwen3"
    if model.device.type != "cpu" or model.dtype not in _FORMATS:
        return (
            "it supports only float32 and bfloat16 on CPUs, "
            f"not {model.dtype} on {model.device.type}"
        )
    if (reason := _wrong_sizes(model)) is not None:
        return reason
    try:
        library()
    except NativeLibraryError as error:
        return str(error)
    return None


def _wrong_sizes(model: PreTrainedModel) -> str | None:
    """Which of the model's sizes the kernels do not support; None if they support all."""
    config: Any = model.config
    body: Any = model.model
    embedding, head = body.embed_tokens.weight, model.get_output_embeddings()  # type: ignore[no-untyped-call]
    width = body.layers[0].self_attn.head_dim
    sizes = (config.hidden_size, config.intermediate_size)
    if width not in _WIDTHS:
        return f"head_dim must be one of {', '.join(map(str, _WIDTHS))}, and is {width}"
    if any(size % GROUP for size in sizes):
        return f"hidden_size and intermediate_size must be multiples of {GROUP}, and are {sizes}"
    if config.hidden_size > _MOST_HIDDEN_SIZE:
        return f"hidden_size must be at most {_MOST_HIDDEN_SIZE}, and is {config.hidden_size}"
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        return "some of the model's weights are not in CPU memory"
    if len(embedding) < len(head.weight):
        return (
            f"the model has {len(head.weight)} output tokens and only {len(embedding)} embeddings"
        )
    return None


class NativeDecoder:
    """A decoder-only model of the Llama family (see `Network`).

    Args:
        model: a model for which `why_not_native` returns None. Its linear layers are packed copies.
        quantization: "int8", "int4" (with the head in int8), or None.
        *flags: further flags for the compiler (see `library`).

    Raises:
        NativeLibraryError: the library is not available.
    """

    least_nodes = 1
    name = "native"
    exact_trees = True

    def __init__(
        self, model: PreTrainedModel, quantization: str | None = None, *flags: str
    ) -> None:
        self._library = _checked(library(*flags))
        self._lock = Lock()  # the workspace serves one thread at a time
        form = _FORMATS[model.dtype] if quantization is None else _QUANTIZED[quantization]
        weights = LlamaWeights(model)
        self._kept: list[Tensor | PackedWeights] = []
        layers = [
            self._layer(index, weights.layer(index), form) for index in range(weights.num_layers)
        ]
        self._vocab_size = len(weights.head.weight)
        self._rotary = weights.rotary
        self._cos, self._sin = _empty(0, weights.width // 2), _empty(0, weights.width // 2)
        self._workspace = _empty(0, dtype=torch.uint8)
        self._seen_addresses: list[tuple[int, int, int, int]] = []
        self._buffers = (CBuffers * 0)()
        self._like = _empty(1, weights.key_heads, 1, weights.width, dtype=model.dtype)
        self._decoder = CDecoder(
            # In int4 the head, which ranks all tokens, would lose more accuracy than the layers.
            head=self._linear(weights.head, Format.INT8 if form is Format.INT4 else form),
            norm=self._float(weights.norm),
            embedding=self._keep(weights.embedding.to(model.dtype).contiguous()).data_ptr(),
            hidden_size=weights.hidden_size,
            heads=weights.heads,
            key_heads=weights.key_heads,
            width=weights.width,
            intermediate=weights.inner_size,
            is_bf16=model.dtype == torch.bfloat16,
            epsilon=weights.epsilon,
            scaling=weights.scaling,
        )
        self._use(layers)

    def _use(self, layers: Sequence[CLayer]) -> None:
        self._layers = (CLayer * len(layers))(*layers)
        self._decoder.layers = self._layers
        self._decoder.num_layers = len(layers)

    def _layer(self, index: int, weights: LayerWeights, form: Format) -> CLayer:
        return CLayer(
            qkv=self._linear(weights.qkv, form),
            output=self._linear(weights.output, form),
            gate_up=self._linear(in_turns(weights.gate_up), form),
            down=self._linear(weights.down, form),
            attention_norm=self._float(weights.attention_norm),
            query_norm=self._float(weights.query_norm),
            key_norm=self._float(weights.key_norm),
            mlp_norm=self._float(weights.mlp_norm),
            index=index,
            attends=True,
            computes=True,
        )

    def _linear(self, weights: LinearWeights, form: Format) -> CLinear:
        packed = pack(weights, form)
        self._kept.append(packed)
        return packed.c

    def _float(self, weight: Tensor | None) -> int | None:
        return None if weight is None else self._keep(weight.float().contiguous()).data_ptr()

    def _keep(self, tensor: Tensor) -> Tensor:
        self._kept.append(tensor)
        return tensor

    @property
    def num_layers(self) -> int:
        """Decoder layers, including those whose sublayers are skipped."""
        return len(self._layers)

    def first_layers(self, count: int) -> NativeDecoder:
        """See `Network.first_layers`."""
        return self._with(self._layers[:count])

    def without(self, attention: Collection[int], mlp: Collection[int]) -> NativeDecoder:
        """See `Network.without`."""
        layers = []
        for place, layer in enumerate(self._layers):
            other = CLayer.from_buffer_copy(layer)
            other.attends = layer.attends and place not in attention
            other.computes = layer.computes and place not in mlp
            layers.append(other)
        return self._with(layers)

    def _with(self, layers: Sequence[CLayer]) -> NativeDecoder:
        other = copy(self)
        other._decoder = CDecoder.from_buffer_copy(self._decoder)
        other._use(layers)
        return other

    def forward(self, inputs: PassInputs, slab: KVSlab, need: Need) -> PassOutput:
        """See `Network.forward`; padding is not computed."""
        nodes = NodeArrays(inputs)
        logits = _empty(len(nodes) if need.logits else 0, self._vocab_size)
        argmax = array("q", bytes(8 * len(logits)))
        shape = (len(need.hidden), len(nodes), self._decoder.hidden_size)
        hidden = _empty(*shape, dtype=self._like.dtype)
        arguments = CPass(
            nodes=len(nodes),
            need_logits=need.logits,
            threads=torch.get_num_threads(),
            most_seen=inputs.span,
            logits=logits.data_ptr(),
            argmax=argmax.buffer_info()[0],
            **nodes.addresses(),
        )
        if need.hidden:
            slots = self._hidden_slots(need.hidden)
            arguments.hidden, arguments.hidden_slots = hidden.data_ptr(), slots.buffer_info()[0]
        with self._lock:
            self._reach(inputs.span)
            self._run(arguments, slab)
        states = dict(zip(need.hidden, hidden, strict=True))
        return PassOutput(logits, argmax, states) if need.logits else PassOutput(None, None, states)

    def _hidden_slots(self, layers: Sequence[int]) -> array[int]:
        """[num_layers + 1] each layer id's index in `layers`, or -1 if it is not there."""
        slots = array("i", [-1] * (self.num_layers + 1))
        for slot, layer in enumerate(layers):
            slots[layer] = slot
        return slots

    def _run(self, arguments: CPass, slab: KVSlab) -> None:
        arguments.buffers = addressof(self._buffers_of(slab))
        arguments.cos, arguments.sin = self._cos.data_ptr(), self._sin.data_ptr()
        needed = self._library.foretoken_workspace(byref(self._decoder), byref(arguments))
        if len(self._workspace) < needed:
            self._workspace = _empty(needed, dtype=torch.uint8)
        arguments.workspace = self._workspace.data_ptr()
        self._library.foretoken_forward(byref(self._decoder), byref(arguments))

    def _buffers_of(self, slab: KVSlab) -> Array[CBuffers]:
        """The slab's buffers as `Pass` takes them; updated when they have moved."""
        if self._seen_addresses is not slab.addresses:
            slab.reserve([layer.index for layer in self._layers], self._like)
            addresses = self._seen_addresses = slab.addresses
            self._buffers = (CBuffers * len(addresses))(*(CBuffers(*at) for at in addresses))
        return self._buffers

    def _reach(self, positions: int) -> None:
        """Extend the tables of rotary angles to at least this many positions.

        They grow by pieces of one size, because the bits of PyTorch's results may depend on the
        number of positions (invariant 7).
        """
        known, half = self._cos.shape
        pieces = [
            self._rotary.angles(first, _ANGLES, torch.float32)
            for first in range(known, positions, _ANGLES)
        ]
        if pieces:
            cos, sin = (torch.cat(parts)[:, :half] for parts in zip(*pieces, strict=True))
            self._cos, self._sin = torch.cat([self._cos, cos]), torch.cat([self._sin, sin])


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory for the C++ code, whatever PyTorch's default dtype and device are."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def _checked(loaded: CDLL) -> CDLL:
    """The library, after a check that its structures have the sizes of the Python ones."""
    loaded.foretoken_workspace.restype = c_size_t
    sizes = (c_int32 * 6)()
    loaded.foretoken_sizes(sizes)
    ours = [sizeof(each) for each in (CLinear, CLayer, CDecoder, CBuffers, CPass)]
    assert list(sizes) == [*ours, _MOST_HIDDEN_SIZE]
    return loaded
