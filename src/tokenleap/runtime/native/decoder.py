"""`NativeDecoder`: the Llama family, and drafting heads with such layers, in C++."""

from __future__ import annotations

from torch import Tensor

from tokenleap.runtime.llama import DecoderWeights
from tokenleap.runtime.native.angles import AngleTables
from tokenleap.runtime.native.build import library
from tokenleap.runtime.native.c_structures import CLayer
from tokenleap.runtime.native.kept_weights import KeptWeights
from tokenleap.runtime.native.network import DecoderParts, NativeNetwork, checked
from tokenleap.runtime.native.packed import PackedDecoder, Packing
from tokenleap.runtime.native.structures import structures

__all__ = ["NativeDecoder"]


class NativeDecoder(NativeNetwork):
    """A decoder of the Llama family, or a drafting head with such layers (see `Network`).

    Args:
        weights: its weights, in float32 or bfloat16; those of a model for which `why_not_native`
            returns None. Linear layers are packed copies, unless they are packed already.
        quantization: "int8", "int4" (with the head in int8), or None; not for packed weights.
        *flags: further flags for the compiler (see `library`).
        beside: a network that stays in memory. What has the same bits in its embedding or linear
            layers is in memory once.

    Raises:
        NativeLibraryError: the library is not available.
    """

    def __init__(
        self,
        weights: DecoderWeights | PackedDecoder,
        quantization: str | None = None,
        *flags: str,
        beside: NativeDecoder | None = None,
    ) -> None:
        loaded = checked(library(*flags))
        packed = weights if isinstance(weights, PackedDecoder) else Packing(weights, quantization)
        sizes = packed.sizes
        rotaries = [sizes.rotary, *([] if sizes.local_rotary is None else [sizes.local_rotary])]
        kept = KeptWeights(None if beside is None else beside._kept)
        decoder, layers = structures(packed, kept)
        kept.close()
        parts = DecoderParts(
            decoder,
            layers,
            kept,
            AngleTables(rotaries, sizes.width),
            sizes.traits.learnt_scale,
            reads_states=sizes.joint is not None,
        )
        super().__init__(loaded, parts)

    def between(self, first: int, last: int) -> NativeDecoder:
        """See `ContinuingNetwork.between`."""
        return self._with(self._layers[first:last])

    def feed(self, states: Tensor) -> int:
        """See `ContinuingNetwork.feed`."""
        self._more = states.to(self._more).contiguous()
        self._decoder.more = self._more.data_ptr()
        return int(self._decoder.vocabulary)

    def narrowed(self, size: int) -> NativeDecoder:
        """See `WindowedNetwork.narrowed`."""
        layers = [CLayer.from_buffer_copy(layer) for layer in self._layers]
        for layer in layers:
            layer.window = size if layer.window else 0
        return self._with(layers)
