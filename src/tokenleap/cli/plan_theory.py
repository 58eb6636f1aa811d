"""The predictions of theory for given alpha, c and c_hat: the rows of `tokenleap plan`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Plan", "PlanRow", "planned"]


@dataclass(frozen=True)
class PlanRow:
    """One draft length: equation 1, theorem 3.8 and theorem 3.11 of Leviathan et al. (2023)."""

    gamma: int
    expected_tokens: float
    improvement: float
    operations: float


@dataclass(frozen=True)
class Plan:
    """All draft lengths up to a limit, and the best of all lengths up to `analysis.MAX_GAMMA`."""

    alpha: float
    c: float
    c_hat: float
    rows: tuple[PlanRow, ...]
    best: PlanRow
    oracle: float
    unbounded: bool
    """Whether a longer draft is always better; `best` is then the longest one considered."""

    def as_dict(self) -> dict[str, Any]:
        """The plan for JSON; an infinite oracle improvement is null there."""
        return {
            "alpha": self.alpha,
            "c": self.c,
            "c_hat": self.c_hat,
            "pays": self.best.gamma > 0,
            "best_gamma": self.best.gamma,
            "best_improvement": self.best.improvement,
            "longer_is_always_better": self.unbounded,
            "oracle_improvement": None if self.oracle == float("inf") else self.oracle,
            "table": [asdict(row) for row in self.rows],
        }


def planned(alpha: float, c: float, c_hat: float, max_gamma: int) -> Plan:
    """Apply the formulas.

    Args:
        alpha: acceptance rate, in [0, 1].
        c: time of a draft step over that of a target pass.
        c_hat: the same for operations.
        max_gamma: longest draft in the rows; the search for the best one ignores it.

    Raises:
        ConfigError: an argument is out of range.
    """
    from tokenleap import analysis

    def row(gamma: int) -> PlanRow:
        return PlanRow(
            gamma,
            analysis.expected_tokens(alpha, gamma),
            analysis.improvement(alpha, gamma, c),
            analysis.operations(alpha, gamma, c_hat),
        )

    best = analysis.best_gamma(alpha, c)
    return Plan(
        alpha,
        c,
        c_hat,
        tuple(row(gamma) for gamma in range(max_gamma + 1)),
        row(best),
        analysis.oracle_improvement(alpha, c),
        unbounded=(c == 0 and alpha > 0) or (alpha == 1 and c < 1),
    )
