"""Skip sets: the sublayers that a draft skips, what can be measured of them, and their predictions.

`tune_layers` searches among them, and `layer_laboratory` measures them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal, NamedTuple, Protocol

from tokenleap.analysis.formulas import improvement_on_curve

__all__ = [
    "KINDS",
    "Deadline",
    "Estimate",
    "Kind",
    "Objective",
    "Run",
    "SkipSet",
    "Sublayer",
    "Trial",
]

Kind = Literal["attention", "mlp"]
KINDS: tuple[Kind, ...] = ("attention", "mlp")


class Sublayer(NamedTuple):
    """One attention or MLP block of a layer."""

    kind: Kind
    layer: int


SkipSet = frozenset[Sublayer]


class Run(NamedTuple):
    """Tokens per second on the same prompts with the skip set and without, measured in turn."""

    drafted: float
    plain: float

    @property
    def ratio(self) -> float:
        """The speed-up over plain decoding."""
        return self.drafted / self.plain


class Objective(Protocol):
    """What can be measured about a skip set."""

    @property
    def verify_cost(self) -> Sequence[float]:
        """[G+1] time of verifying 0 to G drafted tokens over time of a plain pass."""
        ...

    def alpha(self, skip: SkipSet) -> float:
        """Mean of sum min(p, q) over texts that the target generated."""
        ...

    def cost(self, skip: SkipSet) -> float:
        """Time of a pass without these sublayers over time of a full pass."""
        ...

    def measure(self, skip: SkipSet, gamma: int) -> Run:
        """Generate with this skip set and draft length, and time it."""
        ...


class Deadline:
    """A time limit that starts now."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._began = clock()

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._began

    def left(self, share: float = 1.0) -> float:
        """Seconds left of this share of the limit; 0 or below when it is over."""
        return share * self._seconds - self.spent

    def passed(self, share: float = 1.0) -> bool:
        """Whether this share of the limit is over."""
        return self.left(share) <= 0


@dataclass(frozen=True)
class Estimate:
    """A skip set with its measured alpha, and the speed-up to expect."""

    skip: SkipSet
    alpha: float
    cost: float
    verify_cost: Sequence[float]

    def predicted(self, gamma: int) -> float:
        """Expected speed-up with this draft length: `improvement_on_curve`."""
        return improvement_on_curve(self.alpha, gamma, self.cost, self.verify_cost)

    @property
    def gamma(self) -> int:
        """The best draft length, at least 1."""
        return max(range(1, len(self.verify_cost)), key=self.predicted)

    @property
    def score(self) -> float:
        """Expected speed-up with the best draft length."""
        return self.predicted(self.gamma)

    @property
    def gammas(self) -> list[int]:
        """Draft lengths worth timing, best first, since acceptance is never exactly i.i.d."""
        near = {self.gamma // 2, self.gamma, 2 * self.gamma} & set(range(1, len(self.verify_cost)))
        return sorted(near, key=self.predicted, reverse=True)


@dataclass
class Trial:
    """A skip set and a draft length, with its timed runs."""

    estimate: Estimate
    gamma: int
    runs: list[Run] = field(default_factory=list)

    @property
    def predicted(self) -> float:
        """Expected speed-up with this draft length."""
        return self.estimate.predicted(self.gamma)

    @property
    def ratio(self) -> float:
        """Mean of the measured speed-ups."""
        return fmean(run.ratio for run in self.runs)

    @property
    def low(self) -> float:
        """Speed-up of the slowest run."""
        return min(run.ratio for run in self.runs)

    @property
    def high(self) -> float:
        """Speed-up of the fastest run."""
        return max(run.ratio for run in self.runs)

    def as_dict(self) -> dict[str, Any]:
        """The trial for JSON, without the skip set."""
        return {
            "sublayers": len(self.estimate.skip),
            "alpha": self.estimate.alpha,
            "c": self.estimate.cost,
            "gamma": self.gamma,
            "predicted": self.predicted,
            "speedup": self.ratio,
            "low": self.low,
            "high": self.high,
            "runs": len(self.runs),
            "tokens_per_second": fmean(run.drafted for run in self.runs),
            "plain_tokens_per_second": fmean(run.plain for run in self.runs),
        }
