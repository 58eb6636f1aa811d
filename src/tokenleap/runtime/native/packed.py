"""The packed weights of a decoder: packed from its modules' weights here, or mapped from files.

`NativeDecoder` reads either. `packed_files.py` writes and maps files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from tokenleap.runtime.choices import DRAFTING
from tokenleap.runtime.llama import DecoderWeights, LinearWeights, MixedInput
from tokenleap.runtime.native.pack import Format, PackedWeights, in_turns, pack
from tokenleap.runtime.native.support import FORMATS
from tokenleap.runtime.windows import Window

__all__ = ["QUANTIZED", "PackedDecoder", "PackedLayer", "Packing"]

QUANTIZED = {"int8": Format.INT8, "int4": Format.INT4, DRAFTING: Format.INT4}
"""The format of linear layers by the name of a quantization."""


@dataclass(frozen=True)
class PackedLayer:
    """The weights of one decoder layer as the kernels read them; see `LayerWeights`.

    Query, key and value are one matrix, or several with a format each, one below the other. Gate
    and up are one with their panels in turns, or two. Formats of floats do not occur beside others:
    they read other inputs. Files do not hold `window` and `rotates`.
    """

    attention_norm: Tensor | None
    qkv: tuple[PackedWeights, ...]
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: PackedWeights
    mlp_norm: Tensor | None
    gate_up: tuple[PackedWeights, ...]
    down: PackedWeights
    attention_after: Tensor | None = None
    mlp_after: Tensor | None = None
    window: Window | None = None
    rotates: bool = True


class PackedDecoder(ABC):
    """A decoder whose linear layers are packed."""

    sizes: DecoderWeights
    """Everything but the linear layers."""

    @abstractmethod
    def head(self) -> PackedWeights:
        """The output layer."""

    @abstractmethod
    def mix(self) -> PackedWeights | None:
        """The linear layer of a `MixedInput`."""

    @abstractmethod
    def layer(self, index: int) -> PackedLayer:
        """The weights of a layer."""


class Packing(PackedDecoder):
    """Packs a decoder's weights, a layer at a time.

    Args:
        sizes: the weights, in float32 or bfloat16.
        quantization: "int8", "int4" (with the head in int8), `DRAFTING`, or None.
    """

    def __init__(self, sizes: DecoderWeights, quantization: str | None) -> None:
        self.sizes = sizes
        dtype = sizes.embedding.dtype
        # In int4 the head, which ranks all tokens, would lose more accuracy than the layers. That
        # of a draft model may: it is a large part of a small model.
        self._finer_head = quantization == "int4"
        self._form = FORMATS[dtype] if quantization is None else QUANTIZED[quantization]

    def head(self) -> PackedWeights:
        """See `PackedDecoder.head`."""
        return self.pack_head(self.sizes.head)

    def pack_head(self, head: LinearWeights) -> PackedWeights:
        """Pack the output layer, or some of its rows."""
        return pack(head, Format.INT8 if self._finer_head else self._form)

    def mix(self) -> PackedWeights | None:
        """See `PackedDecoder.mix`."""
        joint = self.sizes.joint
        return self._pack(joint.linear) if isinstance(joint, MixedInput) else None

    def layer(self, index: int) -> PackedLayer:
        """See `PackedDecoder.layer`."""
        layer = self.sizes.layer(index)
        return PackedLayer(
            attention_norm=layer.attention_norm,
            qkv=(self._pack(layer.qkv),),
            query_norm=layer.query_norm,
            key_norm=layer.key_norm,
            output=self._pack(layer.output),
            mlp_norm=layer.mlp_norm,
            gate_up=(self._pack(in_turns(layer.gate_up)),),
            down=self._pack(layer.down),
            attention_after=layer.attention_after,
            mlp_after=layer.mlp_after,
            window=layer.window,
            rotates=layer.rotates,
        )

    def _pack(self, weights: LinearWeights) -> PackedWeights:
        return pack(weights, self._form)
