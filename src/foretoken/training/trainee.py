"""`Trainee`: a drafting head with its loss, the module that the trainer wraps.

Heads differ in what their levels compute (`outputs`) and in the weights that make logits of it
(`logits`). What a level is to learn, and how often it is right, is the same for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from foretoken.training.batches import Batch
from foretoken.training.losses import Loss, Teacher

__all__ = ["Learnt", "Trainee", "at_roots"]


class Learnt(NamedTuple):
    """What one batch showed.

    Args:
        losses: [L] mean loss of each level.
        right: [B, L, Q] whether the most probable token of the draft is the one that the target
            wrote; false where there is nothing to learn.
    """

    losses: Tensor
    right: Tensor


def at_roots(x: Tensor, roots: Tensor) -> Tensor:
    """[B, T, ...] at the indices [B, Q] -> [B, Q, ...]."""
    return x[torch.arange(len(x), device=x.device).unsqueeze(-1), roots]


class Trainee(nn.Module, ABC):
    """A head that is being trained.

    Args:
        draft_tokens: [Vd] the target's ids of the draft vocabulary, ascending.
        vocab_size: V.
        loss: of each place.
        max_levels: most levels of a draft; None if there is no limit.
    """

    places: Tensor
    draft_tokens: Tensor

    def __init__(
        self, draft_tokens: Tensor, vocab_size: int, loss: Loss, max_levels: int | None = None
    ) -> None:
        super().__init__()
        self.max_levels = max_levels
        places = torch.full((vocab_size,), -1)
        places[draft_tokens] = torch.arange(len(draft_tokens))
        self.register_buffer("places", places, persistent=False)
        self.register_buffer("draft_tokens", draft_tokens, persistent=False)
        self._loss = loss

    @property
    def matrices(self) -> list[nn.Parameter]:
        """The weights that multiply states; embeddings only look rows up. See `optimizers`."""
        return [
            weight for weight in self.parameters() if weight.requires_grad and weight.dim() == 2
        ]

    @abstractmethod
    def outputs(self, batch: Batch, num_levels: int) -> Iterator[Tensor]:
        """For each level [B, Q, E]: what `logits` is computed of, for every root."""

    @abstractmethod
    def logits(self, outputs: Tensor, level: int) -> Tensor:
        """[N, E] outputs of a level -> [N, Vd] in float32."""

    def forward(self, batch: Batch, num_levels: int) -> Learnt:
        """Losses and hits of the first levels of all drafts of a batch."""
        losses, hits = [], []
        for level, outputs in enumerate(self.outputs(batch, num_levels)):
            valid = batch.levels.valid[:, level]
            logits = self.logits(outputs[valid], level)
            labels = batch.levels.labels[:, level][valid]
            teacher = Teacher.of(
                labels,
                batch.levels.teacher_tokens[:, level][valid],
                batch.levels.teacher_logprobs[:, level][valid],
                self.places,
            )
            losses.append(self._loss(logits, teacher).sum() / max(1, len(labels)))
            right = torch.zeros_like(valid)
            right[valid] = self.draft_tokens[logits.detach().argmax(-1)] == labels
            hits.append(right)
        return Learnt(torch.stack(losses), torch.stack(hits, dim=1))
