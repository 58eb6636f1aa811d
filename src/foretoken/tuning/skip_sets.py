"""Skip sets, what can be measured about one, and what is expected of it: see `tune_layers`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal, NamedTuple, Protocol

from foretoken.analysis.formulas import improvement_on_curve

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
    """One attention or MLP of the stack."""

    kind: Kind
    layer: int


SkipSet = frozenset[Sublayer]


class Run(NamedTuple):
    """Tokens per second on the same prompts, with the skip set and without, in turn."""

    drafted: float
    plain: float

    @property
    def ratio(self) -> float:
        """How many times faster than plain decoding."""
        return self.drafted / self.plain


class Objective(Protocol):
    """What can be measured about a skip set."""

    @property
    def verify_cost(self) -> Sequence[float]:
        """[G+1] cost of verifying n drafted tokens over a plain pass; G is the longest draft."""
        ...

    def alpha(self, skip: SkipSet) -> float:
        """Mean sum of min(p, q) over a text of the target's own."""
        ...

    def cost(self, skip: SkipSet) -> float:
        """Time of a pass without these sublayers over that of a whole one."""
        ...

    def measure(self, skip: SkipSet, gamma: int) -> Run:
        """Really generate."""
        ...


class Deadline:
    """Time that may be spent, from now on.

    Args:
        seconds: how much.
        clock: the time in seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._began = clock()

    @property
    def spent(self) -> float:
        """Seconds since the beginning."""
        return self._clock() - self._began

    def left(self, share: float = 1.0) -> float:
        """Seconds left of the first `share` of the time; 0 or below when it is over."""
        return share * self._seconds - self.spent

    def passed(self, share: float = 1.0) -> bool:
        """Whether the first `share` of the time is over."""
        return self.left(share) <= 0


@dataclass(frozen=True)
class Estimate:
    """A skip set whose alpha was measured, and what is to be expected of it.

    Args:
        skip: what is left out.
        alpha: measured.
        cost: c, estimated from its number of sublayers, or measured.
        verify_cost: [G+1] as in `Objective`.
    """

    skip: SkipSet
    alpha: float
    cost: float
    verify_cost: Sequence[float]

    def predicted(self, gamma: int) -> float:
        """Expected speed-up with this draft length: theorem 3.8 on the curve of pass costs."""
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
        """Draft lengths worth a try, best first: acceptance is never quite i.i.d."""
        near = {self.gamma // 2, self.gamma, 2 * self.gamma} & set(range(1, len(self.verify_cost)))
        return sorted(near, key=self.predicted, reverse=True)


@dataclass
class Trial:
    """A skip set and a draft length that are really run."""

    estimate: Estimate
    gamma: int
    runs: list[Run] = field(default_factory=list)

    @property
    def predicted(self) -> float:
        """Expected speed-up."""
        return self.estimate.predicted(self.gamma)

    @property
    def ratio(self) -> float:
        """Measured speed-up, the mean over the runs."""
        return fmean(run.ratio for run in self.runs)

    @property
    def low(self) -> float:
        """Of the slowest run."""
        return min(run.ratio for run in self.runs)

    @property
    def high(self) -> float:
        """Of the fastest run."""
        return max(run.ratio for run in self.runs)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, without the skip set itself."""
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
