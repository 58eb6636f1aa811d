"""Predicted against measured: the two columns of Leviathan et al.'s table 4, and what parts them.

The measured speed-up over the predicted one is split, exactly, into one factor per assumption:

    drafts        every step drafts gamma tokens
    acceptance    every drafted token is accepted with probability alpha, independently
    verification  a pass costs the same whatever it verifies
    drafting      a drafted token costs c, as timed beforehand
    passes        a pass costs what the curve says, as timed beforehand
    overhead      a step costs its drafting and its pass and nothing else

Each factor is 1 where its assumption holds, and their product is measured / predicted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretoken.analysis.formulas import accepted_distribution, expected_tokens, improvement
from foretoken.errors import ConfigError

__all__ = ["AGREEMENT", "Assumptions", "Factors", "StepSample", "Trial", "compare"]

AGREEMENT = 0.15
"""Predicted and measured agree when they differ by at most this part of the prediction."""

NOTABLE = 0.05
"""An assumption is named as failing when its factor is off by more than this."""


@dataclass(frozen=True)
class StepSample:
    """One step of a real run: counts of tokens, wall-clock seconds."""

    drafted: int
    accepted: int
    committed: int
    draft_seconds: float
    verify_seconds: float
    seconds: float


@dataclass(frozen=True)
class Assumptions:
    """What the predictions are made from.

    Args:
        alpha: E[sum of min(p, q)] over positions with a draft.
        c: time of one drafted token over time of a plain target pass.
        verify_cost: [G+1] time of a pass over n drafted tokens over that of a plain one.
        draft_lengths: how many tokens were drafted at every position of each text, of at most G.
        betas: sum of min(p, q) at every position with a draft.
        pass_seconds: time of a plain target pass.
    """

    alpha: float
    c: float
    verify_cost: tuple[float, ...]
    draft_lengths: tuple[tuple[int, ...], ...]
    betas: tuple[float, ...]
    pass_seconds: float

    @property
    def drafting_share(self) -> float:
        """Positions at which anything was drafted."""
        return len(self.betas) / self.positions

    @property
    def positions(self) -> int:
        """Tokens of all texts."""
        return sum(len(text) for text in self.draft_lengths)

    def predicted(self, gamma: int) -> float:
        """Theorem 3.8: gamma tokens in every step, passes of one cost."""
        return improvement(self.alpha, gamma, self.c)

    def predicted_on_curve(self, gamma: int) -> float:
        """The same with the measured cost of passes and the drafts there were at each position."""
        walks = [self._walk([min(n, gamma) for n in text]) for text in self.draft_lengths]
        return sum(tokens for tokens, _ in walks) / sum(cost for _, cost in walks)

    def _walk(self, lengths: Sequence[int]) -> tuple[float, float]:
        """Expected tokens and cost of generating a text, from the cost of steps at each position.

        Steps do not begin everywhere alike: an accepted draft jumps over positions, often just
        those with long drafts. So the text is walked, with i.i.d. acceptance:

            cost(t) = n_t c + v(n_t) + sum over k of P(k accepted of n_t) cost(t + k + 1)

        and tokens likewise. With drafts of one length this is theorem 3.8 on the curve.
        """
        tokens = np.zeros(len(lengths) + max(lengths) + 1)
        cost = np.zeros_like(tokens)
        for start in range(len(lengths) - 1, -1, -1):
            drafted = lengths[start]
            distribution = accepted_distribution(self.alpha, drafted)  # [drafted+1]
            after = slice(start + 1, start + drafted + 2)
            tokens[start] = distribution @ (np.arange(1, drafted + 2) + tokens[after])
            cost[start] = drafted * self.c + self.verify_cost[drafted] + distribution @ cost[after]
        return float(tokens[0]), float(cost[0])

    def as_dict(self) -> dict[str, Any]:
        """For JSON, without the single positions."""
        return {
            "alpha": self.alpha,
            "c": self.c,
            "verify_cost": list(self.verify_cost),
            "positions": self.positions,
            "drafting_share": self.drafting_share,
            "pass_seconds": self.pass_seconds,
        }


@dataclass(frozen=True)
class Factors:
    """Measured over predicted, by assumption (see the module)."""

    drafts: float
    acceptance: float
    verification: float
    drafting: float
    passes: float
    overhead: float

    @property
    def product(self) -> float:
        """Measured over predicted by theorem 3.8."""
        return float(math.prod(asdict(self).values()))

    def failing(self) -> list[str]:
        """Names of the assumptions that do not hold, the worst first."""
        by_size = sorted(asdict(self).items(), key=lambda item: -abs(math.log(item[1])))
        return [name for name, factor in by_size if abs(factor - 1) > NOTABLE]


@dataclass(frozen=True)
class Trial:
    """One draft length: predicted and measured.

    Args:
        gamma: the draft length.
        predicted: theorem 3.8.
        predicted_on_curve: with measured costs of passes and lengths of drafts.
        measured: speed over that without drafts, of all rounds together.
        low, high: the least and the most of a single round.
        expected_tokens: equation 1.
        measured_tokens: tokens per step.
        mean_drafted: drafted tokens per step.
        mean_verify_cost: cost of the passes that verified them, in plain passes.
        factors: what parts measured from predicted.
        accepted: [gamma+1] share of the full drafts of which 0 to gamma tokens were accepted.
        geometric: [gamma+1] the same by the i.i.d. model.
    """

    gamma: int
    predicted: float
    predicted_on_curve: float
    measured: float
    low: float
    high: float
    expected_tokens: float
    measured_tokens: float
    mean_drafted: float
    mean_verify_cost: float
    factors: Factors
    accepted: tuple[float, ...]
    geometric: tuple[float, ...]

    @property
    def agrees(self) -> bool:
        """Whether theorem 3.8 holds within `AGREEMENT`."""
        return abs(self.measured / self.predicted - 1) <= AGREEMENT

    @property
    def agrees_on_curve(self) -> bool:
        """Whether the prediction from measured costs holds within `AGREEMENT`."""
        return abs(self.measured / self.predicted_on_curve - 1) <= AGREEMENT

    @property
    def distance(self) -> float:
        """Total variation distance of the accepted lengths from the geometric law, 0 to 1."""
        return float(np.abs(np.subtract(self.accepted, self.geometric)).sum() / 2)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **asdict(self),
            "agrees": self.agrees,
            "agrees_on_curve": self.agrees_on_curve,
            "distance_from_geometric": self.distance,
            "failing": self.factors.failing(),
        }


def compare(
    assumed: Assumptions, rounds: Sequence[Mapping[int, Sequence[StepSample]]], gamma: int
) -> Trial:
    """Hold the predictions for one draft length against what was measured.

    Args:
        assumed: alpha, c and the cost of passes.
        rounds: per round the steps of each draft length, 0 (no drafts) and `gamma` among them.
        gamma: the draft length.

    Raises:
        ConfigError: outputs had no step after the first, so that there is nothing to compare.
    """
    if not all(steps[length] for steps in rounds for length in (0, gamma)):
        raise ConfigError("max_tokens: every output ended in its first step; nothing was measured.")
    ratios = [_speed(steps[gamma]) / _speed(steps[0]) for steps in rounds]
    steps = [sample for samples in rounds for sample in samples[gamma]]
    plain = [sample for samples in rounds for sample in samples[0]]
    measured = _speed(steps) / _speed(plain)
    return Trial(
        gamma=gamma,
        predicted=assumed.predicted(gamma),
        predicted_on_curve=assumed.predicted_on_curve(gamma),
        measured=measured,
        low=min(ratios),
        high=max(ratios),
        expected_tokens=expected_tokens(assumed.alpha, gamma),
        measured_tokens=_mean(step.committed for step in steps),
        mean_drafted=_mean(step.drafted for step in steps),
        mean_verify_cost=_mean(assumed.verify_cost[step.drafted] for step in steps),
        factors=_factors(assumed, gamma, steps, plain),
        accepted=tuple(_histogram(steps, gamma).tolist()),
        geometric=tuple(accepted_distribution(assumed.alpha, gamma).tolist()),
    )


def _factors(
    assumed: Assumptions, gamma: int, steps: Sequence[StepSample], plain: Sequence[StepSample]
) -> Factors:
    """Go from the model to the run, one assumption at a time; times in plain passes of the run."""
    alpha, c = assumed.alpha, assumed.c
    unit = _mean(step.verify_seconds for step in plain)
    drafted = _mean(step.drafted for step in steps)
    verify = _mean(assumed.verify_cost[step.drafted] for step in steps)
    iid_tokens = _mean(expected_tokens(alpha, step.drafted) for step in steps)
    draft_time = _mean(step.draft_seconds for step in steps) / unit
    pass_time = _mean(step.verify_seconds for step in steps) / unit
    step_time = _mean(step.seconds for step in steps) / unit
    plain_time = _mean(step.seconds for step in plain) / unit
    shorter = iid_tokens / (drafted * c + 1)  # theorem 3.8 for drafts as long as they were
    return Factors(
        drafts=shorter / assumed.predicted(gamma),
        acceptance=_mean(step.committed for step in steps) / iid_tokens,
        verification=(drafted * c + 1) / (drafted * c + verify),
        drafting=(drafted * c + verify) / (draft_time + verify),
        passes=(draft_time + verify) / (draft_time + pass_time),
        overhead=(draft_time + pass_time) * plain_time / step_time,
    )


def _speed(steps: Sequence[StepSample]) -> float:
    """Tokens per second."""
    return sum(step.committed for step in steps) / sum(step.seconds for step in steps)


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def _histogram(steps: Sequence[StepSample], gamma: int) -> NDArray[np.float64]:
    """[gamma+1] shares of accepted lengths, over steps with a draft of full length."""
    full = [step.accepted for step in steps if step.drafted == gamma]
    counts = np.bincount(np.array(full, dtype=np.int64), minlength=gamma + 1).astype(np.float64)
    shares: NDArray[np.float64] = counts / max(len(full), 1)
    return shares
