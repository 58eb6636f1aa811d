"""`Source`: what an encoder-decoder reads, such as a sentence to translate or audio."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Source"]


@dataclass(frozen=True)
class Source:
    """The encoder's input; sources with the same input are equal.

    Args:
        tokens: [n] token ids of a text; empty for audio.
        features: [bins, frames] of audio; None for a text.
        digest: of the features (see `of_audio`), which are compared by it; empty for a text.
    """

    tokens: tuple[int, ...] = ()
    features: Tensor | None = field(default=None, compare=False, repr=False)
    digest: str = ""

    @classmethod
    def of_audio(cls, features: Tensor) -> Source:
        """Audio as its features, float [bins, frames]."""
        numbers = features.detach().float().cpu().contiguous().numpy()
        digest = hashlib.sha256(repr(numbers.shape).encode() + numbers.tobytes()).hexdigest()
        return cls(features=features, digest=digest)

    def inputs(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """The arguments by which Transformers' models take it, in a batch of one."""
        if self.features is not None:
            return {"input_features": self.features[None].to(device, dtype)}
        return {"input_ids": torch.tensor([self.tokens], device=device)}

    def __len__(self) -> int:
        """Number of tokens, or of audio frames."""
        return len(self.tokens) if self.features is None else int(self.features.shape[-1])
