"""`Trainee`: a drafter with its loss, the module that the trainer wraps.

Heads differ in what their levels compute (`outputs`) and in the weights that make logits of it
(`logits`). What a level is to learn, and how often it is right, is the same for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tokenleap.training.batches import FIRST_LEARNT, Batch
from tokenleap.training.losses import Loss, Teacher

__all__ = ["Learnt", "OwnRate", "Trainee", "at_roots"]

_PLACES = 512
"""Places whose logits are in memory at a time, where they are computed again for the gradients."""


class Learnt(NamedTuple):
    """What one batch showed.

    Args:
        losses: [L] mean loss of each level.
        right: [B, L, Q] whether the most probable token of the draft is the one that the target
            wrote; false where there is nothing to learn.
        counts: [L] places of each level.
    """

    losses: Tensor
    right: Tensor
    counts: Tensor


class OwnRate(NamedTuple):
    """Weights that learn at a rate of their own: those of a target that is trained, too.

    Args:
        weights: the weights.
        learning_rate: theirs.
    """

    weights: list[nn.Parameter]
    learning_rate: float


def at_roots(x: Tensor, roots: Tensor) -> Tensor:
    """[B, T, ...] at the indices [B, Q] -> [B, Q, ...]."""
    return x[torch.arange(len(x), device=x.device).unsqueeze(-1), roots]


class Trainee(nn.Module, ABC):
    """A drafter that is being trained.

    Args:
        draft_tokens: [Vd] the target's ids of the draft vocabulary, ascending.
        vocab_size: V.
        loss: of each place.
        max_levels: most levels of a draft; None if there is no limit.
    """

    places: Tensor
    draft_tokens: Tensor

    keeps_logits: ClassVar[bool] = True
    """Whether logits are kept for the gradients. Else they are computed twice, in parts."""

    first_learnt: ClassVar[int] = FIRST_LEARNT
    """Index of the first token of a text that a draft can guess."""

    evaluated_levels: ClassVar[int] = 5
    """Levels whose acceptance is measured, if the drafter has as many; training may have fewer."""

    uses_all_weights: ClassVar[bool] = True
    """Whether every weight gets a gradient in every step."""

    reads_encoder: bool = False
    """Whether it reads what the target's encoder makes of the sources, `Batch.encoded`."""

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

    @property
    def own_rate(self) -> OwnRate | None:
        """The weights that learn at a rate of their own; they are not in `matrices`."""
        return None

    def at_step(self, step: int, total: int) -> None:
        """Called before each step with its number, from 0, and the total.

        It does nothing by default.
        """

    @abstractmethod
    def outputs(self, batch: Batch, num_levels: int) -> Iterator[Tensor]:
        """For each level [B, Q, E]: what `logits` is computed of, for every root."""

    @abstractmethod
    def logits(self, outputs: Tensor, level: int) -> Tensor:
        """[N, E] outputs of a level -> [N, Vd] in float32."""

    def forward(self, batch: Batch, num_levels: int) -> Learnt:
        """Losses and hits of the first levels of all drafts of a batch."""
        return self.learnt(self.outputs(batch, num_levels), batch)

    def learnt(self, outputs: Iterable[Tensor], batch: Batch) -> Learnt:
        """Losses and hits of levels whose outputs are [B, Q, E] each."""
        found = [self.level(each, level, batch) for level, each in enumerate(outputs)]
        losses, hits = zip(*found, strict=True)
        right = torch.stack(hits, dim=1)
        counts = batch.levels.valid[:, : right.shape[1]].sum((0, 2))
        return Learnt(torch.stack(losses), right, counts)

    def level(self, outputs: Tensor, level: int, batch: Batch) -> tuple[Tensor, Tensor]:
        """The mean loss of one level, and where it is right.

        Args:
            outputs: [B, Q, E].
            level: its number.
            batch: the batch.

        Returns:
            A scalar, and [B, Q] as in `Learnt`.
        """
        valid, levels = batch.levels.valid[:, level], batch.levels
        labels, tokens, logprobs = (
            each[:, level][valid]
            for each in (levels.labels, levels.teacher_tokens, levels.teacher_logprobs)
        )
        count = max(1, len(labels))
        size = count if self.keeps_logits else _PLACES
        given = (outputs[valid], labels, tokens, logprobs)
        parts = zip(*(torch.split(each, size) for each in given), strict=True)
        losses, guesses = zip(*(self._parts(level, *part) for part in parts), strict=True)
        right = torch.zeros_like(valid)
        right[valid] = torch.cat(guesses) == labels
        return torch.stack(losses).sum() / count, right

    def _parts(self, level: int, *given: Tensor) -> tuple[Tensor, Tensor]:
        """See `_places`; their logits are kept for the gradients, or computed again."""
        if self.keeps_logits:
            return self._places(level, *given)
        found: tuple[Tensor, Tensor] = checkpoint(self._places, level, *given, use_reentrant=False)
        return found

    def _places(
        self, level: int, outputs: Tensor, labels: Tensor, tokens: Tensor, logprobs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The sum of the losses of N places, and [N] the most probable token of each."""
        logits = self.logits(outputs, level)
        teacher = Teacher.of(labels, tokens, logprobs, self.places)
        return self._loss(logits, teacher).sum(), self.draft_tokens[logits.detach().argmax(-1)]
