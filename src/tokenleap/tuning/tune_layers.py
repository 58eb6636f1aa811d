"""Which sublayers `layer_skip` should skip: the search behind `tokenleap tune-layers`.

Zhang et al., "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative
Decoding", choose among 2^(2L) skip sets by Bayesian optimisation, which generates text for every
set it tries. This search predicts speed-ups from cheap measurements and generates text for the most
promising sets only:

    screening   measure alpha of every sublayer skipped alone
    path        from the empty set on, add the least harmful sublayer; a small beam keeps the best
                sets of every size, and alpha is measured again for each
    prediction  alpha and the cost ratio c give the speed-up (Leviathan et al., theorem 3.8)
    race        time the best sets against plain decoding, then the faster half again, and so on

The search knows no model: `Objective` measures (see `layer_laboratory`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from tokenleap.tuning.skip_sets import (
    KINDS,
    Deadline,
    Estimate,
    Kind,
    Objective,
    SkipSet,
    Sublayer,
    Trial,
)

__all__ = ["LayerSearch"]

BEAM = 2
"""Sets of each size that the path extends."""
TRIES = 3
"""Sublayers that the path tries to add to a set."""
FINALISTS = 12
"""Maximum sets whose cost is measured: the best of every size."""
SETS = 5
"""Maximum sets that the race runs."""
CONFIRMED = 3
"""Runs after which the speed of the winner counts as confirmed."""

SCREENED, FOUND, ROUND = 0.35, 0.6, 0.85
"""Shares of the time limit at which screening, the path and the race's first round end."""


class LayerSearch:
    """The search, stage by stage. Its results can be read at any time.

    Args:
        deadline: the time limit. It shortens stages, but at least one set is always run.
    """

    def __init__(
        self,
        objective: Objective,
        num_layers: int,
        deadline: Deadline,
        num_trials: int,
    ) -> None:
        self._objective = objective
        self._num_layers = num_layers
        self._deadline = deadline
        self._num_trials = num_trials
        self._savings: dict[Kind, float] = {}
        self._lowest_cost = 0.0
        self._seconds_per_set = 0.0
        self.report: Callable[[str], None] = lambda _: None
        self.estimates: dict[SkipSet, Estimate] = {}
        self.trials: list[Trial] = []

    @property
    def best(self) -> Trial | None:
        """The fastest of the trials with the most runs; None before the first run."""
        run = [trial for trial in self.trials if trial.runs]
        return max(run, key=lambda trial: (len(trial.runs), trial.ratio), default=None)

    @property
    def confirmed(self) -> bool:
        """Whether the best trial had at least `CONFIRMED` runs."""
        return self.best is not None and len(self.best.runs) >= CONFIRMED

    def run(self) -> Trial:
        """Run all stages and return the best trial."""
        self._find_savings()
        self._grow(self._screen())
        self._race(self._shortlist())
        assert self.best is not None, "there is always at least one run"
        return self.best

    # Estimates

    def _find_savings(self) -> None:
        """Measure the saving per sublayer by skipping all of a kind: one alone is within noise."""
        self.report("Timing passes")
        for kind in KINDS:
            whole = frozenset(Sublayer(kind, layer) for layer in range(self._num_layers))
            saved = 1 - self._objective.cost(whole)
            self._savings[kind] = max(0.0, saved) / self._num_layers
        self._lowest_cost = self._rough_cost(frozenset(self._middle_first()))

    def _rough_cost(self, skip: SkipSet) -> float:
        return max(0.0, 1 - sum(self._savings[sublayer.kind] for sublayer in skip))

    def _estimate(self, skip: SkipSet) -> Estimate:
        if skip not in self.estimates:
            alpha = self._objective.alpha(skip)
            curve = self._objective.verify_cost
            self.estimates[skip] = Estimate(skip, alpha, self._rough_cost(skip), curve)
        return self.estimates[skip]

    # Stages

    def _middle_first(self) -> list[Sublayer]:
        """All sublayers, the middle layers first, as they are usually the least harmful to skip."""
        middle = (self._num_layers - 1) / 2
        layers = sorted(range(self._num_layers), key=lambda layer: abs(layer - middle))
        return [Sublayer(kind, layer) for layer in layers for kind in KINDS]

    def _screen(self) -> list[Sublayer]:
        """Sublayers by predicted speed-up of skipping each alone, best first."""
        found: dict[Sublayer, float] = {}
        every, began = self._middle_first(), self._deadline.spent
        for number, sublayer in enumerate(every, 1):
            if found and self._deadline.passed(SCREENED):
                break
            self.report(f"Leaving out one sublayer, {number} of {len(every)}")
            found[sublayer] = self._estimate(frozenset([sublayer])).score
        self._seconds_per_set = (self._deadline.spent - began) / len(found)
        return sorted(found, key=lambda sublayer: -found[sublayer])

    def _grow(self, order: Sequence[Sublayer]) -> None:
        """Extend sets by more sublayers until no larger set can pay, or time is up."""
        stride = self._stride(len(order))
        beam: list[SkipSet] = [frozenset()]
        while beam:
            grown: list[Estimate] = []
            for skip in dict.fromkeys(larger for s in beam for larger in _larger(s, order, stride)):
                if self._deadline.passed(FOUND):
                    return
                self.report(f"Leaving out {len(skip)} of {2 * self._num_layers} sublayers")
                grown.append(self._estimate(skip))
            # Corollary 3.9: a set pays only if alpha > c, and no c is below the lowest cost.
            promising = [estimate for estimate in grown if estimate.alpha > self._lowest_cost]
            beam = [e.skip for e in sorted(promising, key=lambda e: -e.score)[:BEAM]]

    def _stride(self, num_sublayers: int) -> int:
        """Sublayers to add at a time, so that the path ends within its share of the time."""
        seconds_per_size = self._seconds_per_set * BEAM * TRIES
        left = max(0.0, self._deadline.left(FOUND))
        return max(1, math.ceil(num_sublayers * seconds_per_size / left)) if left else num_sublayers

    def _shortlist(self) -> list[Trial]:
        """The sets with the best predictions, of different sizes, with a few draft lengths each."""
        of_size: dict[int, Estimate] = {}
        for estimate in sorted(self.estimates.values(), key=lambda e: e.score):
            of_size[len(estimate.skip)] = estimate
        leaders = sorted(of_size.values(), key=lambda e: -e.score)[:FINALISTS]
        self.report("Timing passes of the best")
        timed = [replace(e, cost=self._objective.cost(e.skip)) for e in leaders]
        spacing = max(1, self._num_layers // 12)
        chosen: list[Estimate] = []
        for estimate in sorted(timed, key=lambda e: -e.score):
            sizes = [abs(len(estimate.skip) - len(other.skip)) for other in chosen]
            if min(sizes, default=spacing) >= spacing:
                chosen.append(estimate)
        trials = [Trial(estimate, gamma) for estimate in chosen[:SETS] for gamma in estimate.gammas]
        # Every set with its best draft length, then the others.
        return sorted(trials, key=lambda t: (t.gamma != t.estimate.gamma, -t.predicted))

    def _race(self, entrants: list[Trial]) -> None:
        """Run all, then the faster half again, and so on; confirm the last one."""
        entrants = entrants[: max(1, self._num_trials // 2)]
        share = ROUND
        while len(entrants) > 1 or len(entrants[0].runs) < CONFIRMED:
            for trial in entrants:
                if self.trials and self._spent(share):
                    break
                self._run(trial)
            if self._spent(1):
                return
            ranked = sorted((t for t in entrants if t.runs), key=lambda t: -t.ratio)
            entrants, share = ranked[: max(1, len(ranked) // 2)], 1.0

    def _run(self, trial: Trial) -> None:
        number = self._runs() + 1
        best = f", best so far {self.best.ratio:.2f}x" if self.best else ""
        self.report(f"Run {number} of at most {self._num_trials}{best}")
        trial.runs.append(self._objective.measure(trial.estimate.skip, trial.gamma))
        if len(trial.runs) == 1:
            self.trials.append(trial)

    def _runs(self) -> int:
        return sum(len(trial.runs) for trial in self.trials)

    def _spent(self, share: float) -> bool:
        return self._deadline.passed(share) or self._runs() >= self._num_trials


def _larger(skip: SkipSet, order: Sequence[Sublayer], stride: int) -> Iterator[SkipSet]:
    """Sets with `stride` more sublayers, from the first, second, ... remaining one on."""
    left = [sublayer for sublayer in order if sublayer not in skip]
    for first in range(min(TRIES, len(left))):
        yield skip | frozenset(left[first : first + stride])
