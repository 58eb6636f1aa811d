"""`NativeSeq2Seq`: encoder-decoders in the layouts of BART and T5, in C++."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import CDLL
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tokenleap.core.source import Source
from tokenleap.runtime.cpu import linear_layer
from tokenleap.runtime.inputs import PassInputs, RowNodes
from tokenleap.runtime.kv_slab import KVSlab
from tokenleap.runtime.native.build import library
from tokenleap.runtime.native.c_structures import CPass, CSource
from tokenleap.runtime.native.network import NativeNetwork, checked
from tokenleap.runtime.native.stacks import packed_stack, wrong_stack
from tokenleap.runtime.native.support import wrong_place
from tokenleap.runtime.network import Need
from tokenleap.runtime.seq2seq.cross import are_same, states_of
from tokenleap.runtime.seq2seq.encoder import EncoderSide, TorchEncoder, probe_source
from tokenleap.runtime.seq2seq.positions import TablePositions
from tokenleap.runtime.seq2seq.structure import Stack, describe, describe_encoder
from tokenleap.runtime.source_network import RowState

__all__ = ["NativeEncoder", "NativeSeq2Seq", "why_not_native_seq2seq"]


def why_not_native_seq2seq(model: PreTrainedModel) -> str | None:
    """Why the C++ code cannot run an encoder-decoder, on any machine; None if it can.

    Raises:
        CompatibilityError: it is of an unknown kind.
    """
    if (reason := wrong_place(model, ("cpu",))) is not None:
        return reason
    reason = wrong_stack(describe(model), model.dtype)
    return reason and f"{reason} of {type(model).__name__}"


class NativeEncoder(NativeNetwork):
    """An encoder: a pass in which every node sees all others, and which returns their states.

    Args:
        loaded: the library.
        stack: the encoder.
        dtype: of the model.
        quantization: see `packed_stack`.
    """

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
        """The encoder of a model; None if the C++ code cannot run it."""
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
        """See `SourceNetwork.encoded`."""
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

    Args:
        model: a model for which `why_not_native_seq2seq` returns None; it is not changed.
        quantization: "int8", "int4", `DRAFTING` or None. With "int4", the output layer is int8;
            with all, what runs in PyTorch is.
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
