"""What networks of encoder-decoders have besides `network.Network`: their rows read sources."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple
from weakref import WeakSet

from torch import Tensor

from tokenleap.core.source import Source

__all__ = ["RowState", "SourceNetwork"]


class RowState(NamedTuple):
    """What the decoder of an encoder-decoder reads of one source of n positions.

    The tensors are never changed, so rows may share them.

    Args:
        keys: [layers, H, span, D] of its cross-attention.
        values: [layers, H, span, D].
        mask: [span], 0 where there is a source position, and -inf in the padding behind.
        encoded: [n, E] what the encoder returned, for a drafter that reads it; [0, E] if there is
            none (see `SourceNetwork.keeps_encoded`).
    """

    keys: Tensor
    values: Tensor
    mask: Tensor
    encoded: Tensor


class SourceNetwork(ABC):
    """A network whose rows read a source through cross-attention: an encoder-decoder.

    Each row that takes part in a pass has the source's `RowState` as its state in the slab.

    Attributes:
        source_limit: most tokens of a source; None if there is no limit. Audio has exactly so many
            frames.
        source_vocab_size: token ids of a source are smaller; 0 if the model reads audio.
        num_bins: height of the features of audio; None if the model reads text.
        encoded_size: E, the width of what an encoder returns.
        encoder_readers: drafters without an encoder of their own, as long as they exist. They add
            themselves when they are built.
    """

    source_limit: int | None
    source_vocab_size: int
    num_bins: int | None
    encoded_size: int
    encoder_readers: WeakSet[object]

    @property
    def keeps_encoded(self) -> bool:
        """Whether row states that `encode` returns have what the encoder returned."""
        return len(self.encoder_readers) > 0

    def encode(self, source: Source) -> RowState:
        """What the decoder reads of a source."""
        return self.read(self.encoded(source), keep=self.keeps_encoded)

    @abstractmethod
    def encoded(self, source: Source) -> Tensor:
        """Run the encoder over one source alone, so that the bits depend on nothing else.

        Returns:
            [n, E].
        """

    @abstractmethod
    def read(self, encoded: Tensor, *, keep: bool = False) -> RowState:
        """What the decoder reads of what an encoder returned, its own or another model's.

        Args:
            encoded: [n, E].
            keep: whether it is a part of the state.
        """

    @property
    @abstractmethod
    def probe_source(self) -> Source:
        """A short source, which the rows of checks and measurements read."""

    @abstractmethod
    def state_bytes(self, source: Source) -> int:
        """Bytes of the state that `encode` returns."""
