"""`EncoderSide`: what a network of an encoder-decoder does with a source.

The encoder runs once per source: the Transformers module itself, on packed linear layers, or
`NativeEncoder`. So do the linear layers that make keys and values of what it returns, for the
decoder's attention to the source.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tokenleap.core.source import Source
from tokenleap.runtime.attention import key_span
from tokenleap.runtime.cpu import Int8Linear, PackedLinear, pack
from tokenleap.runtime.lean import DenseLinear, LinearLayer
from tokenleap.runtime.seq2seq.cross import padded_state
from tokenleap.runtime.seq2seq.layers import source_layer_of
from tokenleap.runtime.seq2seq.structure import Structure
from tokenleap.runtime.share import share
from tokenleap.runtime.source_network import RowState, SourceNetwork

__all__ = ["EncoderSide", "TorchEncoder", "probe_source"]

_PROBE_TOKENS = 5


class TorchEncoder:
    """An encoder in PyTorch's operations: the Transformers module.

    Args:
        model: the model; it is not changed.
        linear: the class of linear layers to use; None keeps the model's own.
    """

    def __init__(
        self, model: PreTrainedModel, linear: type[PackedLinear | Int8Linear] | None
    ) -> None:
        module: Any = model.get_encoder()
        encoder = share(module) if linear is None else pack(module, linear)
        self._encoder = encoder.train(False)
        self._dtype, self._device = model.dtype, model.device

    @torch.inference_mode()
    def __call__(self, source: Source) -> Tensor:
        """See `SourceNetwork.encoded`."""
        inputs = source.inputs(self._device, self._dtype)
        encoded: Tensor = self._encoder(**inputs).last_hidden_state[0]
        return encoded


def probe_source(model: PreTrainedModel) -> Source:
    """See `SourceNetwork.probe_source`."""
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
    """What a network of an encoder-decoder has besides its decoder (see `SourceNetwork`).

    Args:
        model: the model; it is not changed.
        parts: of it.
        linear: the class of linear layers that read what the encoder returns; None keeps the
            model's own.
        encoder: runs it.
    """

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
        self._sources = [source_layer_of(layer.cross, kind) for layer in parts.layers]
        self.encoded_size = cross.key.in_features
        self.encoder_readers = WeakSet()
        sizes, self._probe_source = _Sizes.of(model), probe_source(model)
        self.source_vocab_size, self.source_limit = sizes.vocab_size, sizes.limit
        self.num_bins = sizes.num_bins

    def encoded(self, source: Source) -> Tensor:
        """See `SourceNetwork.encoded`."""
        return self._encoder(source)

    def read(self, encoded: Tensor, *, keep: bool = False) -> RowState:
        """See `SourceNetwork.read`."""
        shape = (len(encoded), 2, self._cross_heads, -1)
        # [L, 2, H, n, D]
        both = torch.stack([layer(encoded).view(shape) for layer in self._sources]).permute(
            0, 2, 3, 1, 4
        )
        kept = encoded if keep else encoded[:0].clone()
        return padded_state(both[:, 0].contiguous(), both[:, 1].contiguous(), kept)

    @property
    def probe_source(self) -> Source:
        """See `SourceNetwork.probe_source`."""
        return self._probe_source

    def state_bytes(self, source: Source) -> int:
        """See `SourceNetwork.state_bytes`."""
        positions = len(source) if self.num_bins is None else len(source) // 2
        cell = 2 * len(self._sources) * self._cross_heads * self._cross_width + 1
        kept = positions * self.encoded_size if self.keeps_encoded else 0
        return (key_span(positions) * cell + kept) * self._itemsize
