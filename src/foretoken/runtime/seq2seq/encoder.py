"""`EncoderSide`: what a network of an encoder-decoder does with a source.

The encoder is the Transformers module itself, on packed linear layers. It runs once per source. So
do the linear layers that make keys and values of what it returns, for the decoder's attention to
the source.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foretoken.core.source import Source
from foretoken.runtime.attention import key_span
from foretoken.runtime.cpu import Int8Linear, PackedLinear, pack
from foretoken.runtime.lean import DenseLinear, LinearLayer
from foretoken.runtime.seq2seq.cross import padded_state
from foretoken.runtime.seq2seq.layers import source_layer_of
from foretoken.runtime.seq2seq.structure import Structure
from foretoken.runtime.share import share
from foretoken.runtime.source_network import RowState, SourceNetwork

__all__ = ["EncoderSide"]

PROBE_TOKENS = 5


class EncoderSide(SourceNetwork):
    """The encoder of a model (see `SourceNetwork`).

    Args:
        model: the model; it is not changed.
        parts: of it.
        linear: the class of linear layers to use; None keeps the model's own.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        parts: Structure,
        linear: type[PackedLinear | Int8Linear] | None,
    ) -> None:
        kind: type[LinearLayer] = linear or DenseLinear
        encoder = share(parts.encoder) if linear is None else pack(parts.encoder, linear)
        self._encoder = encoder.train(False)
        self._dtype, self._device = model.dtype, model.device
        cross = parts.layers[0].cross
        self._cross_heads = cross.heads
        self._cross_width = cross.query.out_features // cross.heads
        self._sources = [source_layer_of(layer.cross, kind) for layer in parts.layers]
        self.encoded_size = cross.key.in_features
        self.encoder_readers = WeakSet()
        self._read_sizes(model.config)

    def _read_sizes(self, config: Any) -> None:
        """How long a source may be, and what it is made of."""
        audio = config.model_type == "whisper"
        self.num_bins = int(config.num_mel_bins) if audio else None
        if audio:
            self.source_vocab_size = 0
            self.source_limit = 2 * int(config.max_source_positions)
        else:
            encoder: Any = self._encoder
            self.source_vocab_size = int(encoder.get_input_embeddings().num_embeddings)
            self.source_limit = getattr(config, "max_position_embeddings", None)

    def encoded(self, source: Source) -> Tensor:
        """See `SourceNetwork.encoded`."""
        inputs = source.inputs(self._device, self._dtype)
        encoded: Tensor = self._encoder(**inputs).last_hidden_state[0]
        return encoded

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
        if self.num_bins is not None:
            assert self.source_limit is not None
            generator = torch.Generator().manual_seed(0)
            return Source.of_audio(
                torch.randn(self.num_bins, self.source_limit, generator=generator)
            )
        stride = max(1, self.source_vocab_size // PROBE_TOKENS)
        return Source(tuple(i * stride % self.source_vocab_size for i in range(PROBE_TOKENS)))

    def state_bytes(self, source: Source) -> int:
        """See `SourceNetwork.state_bytes`."""
        positions = len(source) if self.num_bins is None else len(source) // 2
        cell = 2 * len(self._sources) * self._cross_heads * self._cross_width + 1
        kept = positions * self.encoded_size if self.keeps_encoded else 0
        return (key_span(positions) * cell + kept) * self._dtype.itemsize
