"""What a training says about its course, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Evaluation", "Progress", "Step"]

_SCORED_LENGTH = 4
"""Chains of this length decide which drafter is the best."""


@dataclass(frozen=True)
class Step:
    """One step of the optimizer.

    Args:
        step: its number, from 1.
        total: number of steps of the whole training.
        tokens: tokens of its batches on this process.
        seconds: how long it took.
        losses: mean loss of each level that was learnt.
        accuracy: for each of them, the share of its places whose token was right.
    """

    step: int
    total: int
    tokens: int
    seconds: float
    losses: tuple[float, ...]
    accuracy: tuple[float, ...]


@dataclass(frozen=True)
class Evaluation:
    """What held-out conversations show after a step.

    Args:
        step: the step.
        loss: mean loss of the steps since the evaluation before.
        by_position: for each level, the probability that it is accepted if those before were.
        mean_lengths: mean acceptance lengths of chains of 1 to L tokens.
        best: whether no evaluation before was better.
    """

    step: int
    loss: float
    by_position: tuple[float, ...]
    mean_lengths: tuple[float, ...]
    best: bool

    @property
    def score(self) -> float:
        """What the best drafter has most of."""
        return self.mean_lengths[min(_SCORED_LENGTH, len(self.mean_lengths)) - 1]


@dataclass
class Progress:
    """Where training stands; a part of checkpoints."""

    step: int = 0
    epoch: int = 0
    batches: int = 0
    """Batches of this epoch that are done."""
    round: int = 0
    """See `rounds.Rounds`."""
    losses: list[float] = field(default_factory=list)
    """Of the steps since the last evaluation."""
    history: list[Evaluation] = field(default_factory=list)
    finished: bool = False
    averaged: bool = False
    """Whether the last weights were averaged."""

    @property
    def evaluated(self) -> int:
        """The last step after which there was an evaluation; 0 if there was none."""
        return self.history[-1].step if self.history else 0

    @property
    def since_best(self) -> int:
        """Evaluations after the best one."""
        best = [index for index, each in enumerate(self.history) if each.best]
        return len(self.history) - 1 - best[-1] if best else 0
