"""Predicted and measured speed-ups, as in Leviathan et al.'s table 4, and why they differ.

The ratio of measured to predicted is exactly the product of one factor per assumption:

    drafts        every step drafts gamma tokens
    acceptance    every drafted token is accepted with probability alpha, independently
    verification  a pass costs the same whatever it verifies
    drafting      a drafted token costs c, as timed beforehand
    passes        a pass costs what the curve says, as timed beforehand
    overhead      a step costs its drafting and its pass and nothing else

Each factor is 1 if its assumption holds. `tokenleap plan --measure` calls `compare` with the
measurements of `measure.Laboratory`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tokenleap.analysis import formulas
from tokenleap.analysis.formulas import accepted_distribution, expected_tokens, improvement
from tokenleap.core.extras import how_to_install
from tokenleap.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


AGREEMENT = 0.15
"""Predicted and measured agree if they differ by at most this share of the prediction."""

NOTABLE = 0.05
"""An assumption fails if its factor differs from 1 by more than this."""


@dataclass(frozen=True)
class StepSample:
    """One step of a real run: numbers of tokens, and wall-clock seconds."""

    drafted: int
    accepted: int
    committed: int
    draft_seconds: float
    verify_seconds: float
    seconds: float


@dataclass(frozen=True)
class Assumptions:
    """The measured numbers that the predictions are computed from.

    Args:
        c: time of one drafted token over time of a plain target pass.
        verify_cost: [G+1] time of a pass over n drafted tokens over time of a plain pass.
        draft_lengths: tokens drafted at every position of each text, at most G.
        betas: the probability that the rule accepts the first drafted token, at every position
            with a draft; in speculative sampling the sum of min(p, q).
    """

    alpha: float
    c: float
    verify_cost: tuple[float, ...]
    draft_lengths: tuple[tuple[int, ...], ...]
    betas: tuple[float, ...]
    pass_seconds: float

    @property
    def drafting_share(self) -> float:
        return len(self.betas) / self.positions

    @property
    def positions(self) -> int:
        return sum(len(text) for text in self.draft_lengths)

    def predicted(self, gamma: int) -> float:
        """The speed-up by theorem 3.8: gamma tokens in every step, the same cost for every pass."""
        return improvement(self.alpha, gamma, self.c)

    def predicted_on_curve(self, gamma: int) -> float:
        """The speed-up with the measured costs of passes and the draft length at each position."""
        walks = [self._walk([min(n, gamma) for n in text]) for text in self.draft_lengths]
        return sum(tokens for tokens, _ in walks) / sum(cost for _, cost in walks)

    def _walk(self, lengths: Sequence[int]) -> tuple[float, float]:
        """Expected tokens, and cost in plain passes, of generating a text.

        Steps do not begin at all positions equally often: an accepted draft skips positions, often
        those with long drafts. The recursion over positions t assumes i.i.d. acceptance:

            cost(t) = n_t c + v(n_t) + sum over k of P(k accepted of n_t) cost(t + k + 1)

        n_t is the draft length at t and v the cost of verification. The expected tokens follow in
        the same way. With one draft length everywhere this is theorem 3.8 with v in place of 1.
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
        """The numbers for JSON, without those of single positions."""
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
    """Measured over predicted speed-up, one factor per assumption (see the module)."""

    drafts: float
    acceptance: float
    verification: float
    drafting: float
    passes: float
    overhead: float

    @property
    def product(self) -> float:
        return float(math.prod(asdict(self).values()))

    def failing(self) -> list[str]:
        """The assumptions that do not hold, the worst first."""
        by_size = sorted(asdict(self).items(), key=lambda item: -abs(math.log(item[1])))
        return [name for name, factor in by_size if abs(factor - 1) > NOTABLE]


@dataclass(frozen=True)
class Trial:
    """One draft length: predicted and measured.

    Args:
        predicted_on_curve: the speed-up with measured costs of passes and lengths of drafts.
        measured: the speed over the speed without drafts, over all rounds.
        accepted: [gamma+1] shares of the full drafts with 0 to gamma accepted tokens.
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
        """Whether the measured speed-up is within `AGREEMENT` of theorem 3.8."""
        return abs(self.measured / self.predicted - 1) <= AGREEMENT

    @property
    def agrees_on_curve(self) -> bool:
        """Whether the measured speed-up is within `AGREEMENT` of `predicted_on_curve`."""
        return abs(self.measured / self.predicted_on_curve - 1) <= AGREEMENT

    @property
    def distance(self) -> float:
        """Total variation distance between accepted lengths and the geometric distribution."""
        return float(np.abs(np.subtract(self.accepted, self.geometric)).sum() / 2)

    def as_dict(self) -> dict[str, Any]:
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
    """Compare the predictions for one draft length with the measured speed-up."""
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
    """Replace one assumption after the other by its measurement.

    Times are in plain passes of the run.
    """
    alpha, c = assumed.alpha, assumed.c
    unit = _mean(step.verify_seconds for step in plain)
    drafted = _mean(step.drafted for step in steps)
    verify = _mean(assumed.verify_cost[step.drafted] for step in steps)
    iid_tokens = _mean(expected_tokens(alpha, step.drafted) for step in steps)
    draft_time = _mean(step.draft_seconds for step in steps) / unit
    pass_time = _mean(step.verify_seconds for step in steps) / unit
    step_time = _mean(step.seconds for step in steps) / unit
    plain_time = _mean(step.seconds for step in plain) / unit
    shorter = iid_tokens / (drafted * c + 1)  # theorem 3.8 for the measured draft lengths
    return Factors(
        drafts=shorter / assumed.predicted(gamma),
        acceptance=_mean(step.committed for step in steps) / iid_tokens,
        verification=(drafted * c + 1) / (drafted * c + verify),
        drafting=(drafted * c + verify) / (draft_time + verify),
        passes=(draft_time + verify) / (draft_time + pass_time),
        overhead=(draft_time + pass_time) * plain_time / step_time,
    )


def _speed(steps: Sequence[StepSample]) -> float:
    return sum(step.committed for step in steps) / sum(step.seconds for step in steps)


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def _histogram(steps: Sequence[StepSample], gamma: int) -> NDArray[np.float64]:
    """[gamma+1] shares of accepted lengths, over steps with a draft of full length."""
    full = [step.accepted for step in steps if step.drafted == gamma]
    counts = np.bincount(np.array(full, dtype=np.int64), minlength=gamma + 1).astype(np.float64)
    shares: NDArray[np.float64] = counts / max(len(full), 1)
    return shares


ALPHAS = np.linspace(0, 1, 101)
GAMMAS = (1, 3, 5, 7, 10)
COST_RATIOS = (0.01, 0.02, 0.05, 0.1, 0.2)
BELOW_ONE = ALPHAS[:-1]
"""At alpha = 1 a longer draft is always better, so there is no best one."""


def draw(folder: Path, alpha: float, c: float) -> list[Path]:
    """Draw the paper's three figures, with the given alpha as a dashed line.

    Figure 2 shows the expected number of tokens, figure 3 the best gamma, and figure 4 the speed-up
    and the operations for a drafter whose c and c_hat are `c` (the paper has 0).
    """
    formulas.improvement(alpha, 1, c)  # check the arguments before anything is written
    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Callable[[Axes], None]] = {
        "figure2_expected_tokens.png": _expected_tokens,
        "figure3_best_gamma.png": lambda axes: _best_gamma(axes, c),
        "figure4_speed_and_operations.png": lambda axes: _speed_and_operations(axes, c),
    }
    return [_save(folder / name, alpha, contents) for name, contents in figures.items()]


def _save(path: Path, alpha: float, contents: Callable[[Axes], None]) -> Path:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"plots need Matplotlib: {how_to_install('plots')}") from error
    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    contents(axes)
    axes.axvline(alpha, color="grey", linestyle="--", linewidth=1)
    axes.set_xlabel(f"acceptance rate alpha (dashed: {alpha:.3g})")
    axes.set_xlim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    return path


def _expected_tokens(axes: Axes) -> None:
    for gamma in GAMMAS:
        values = [formulas.expected_tokens(alpha, gamma) for alpha in ALPHAS]
        axes.plot(ALPHAS, values, label=f"gamma = {gamma}")
    axes.set_ylabel("expected tokens per step")


def _best_gamma(axes: Axes, c: float) -> None:
    for ratio in sorted({*COST_RATIOS, c} - {0.0}):
        values = [formulas.best_gamma(alpha, ratio) for alpha in BELOW_ONE]
        axes.plot(BELOW_ONE, values, label=f"c = {ratio:.3g}")
    axes.set_ylim(0, 20)
    axes.set_ylabel("best gamma")


def _speed_and_operations(axes: Axes, c: float) -> None:
    for gamma in GAMMAS:
        speed = [formulas.improvement(alpha, gamma, c) for alpha in ALPHAS]
        (line,) = axes.plot(ALPHAS, speed, label=f"speed-up, gamma = {gamma}")
        work = [formulas.operations(alpha, gamma, c) for alpha in ALPHAS]
        axes.plot(ALPHAS, work, color=line.get_color(), linestyle=":")
    axes.set_ylabel(f"speed-up; operations dotted (c = {c:.3g})")
