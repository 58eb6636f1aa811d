"""Which sublayers `layer_skip` should leave out: the search behind `foretoken tune-layers`.

Zhang et al., "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative
Decoding", choose among 2^(2L) skip sets by Bayesian optimisation, where every probe is a real
generation. Here most of a probe is predicted from what is cheap to measure, and only the few most
promising sets are run:

    screening   alpha of every sublayer left out alone
    path        from nothing on, the least harmful next, a small beam re-measured at every size
    prediction  alpha and the cost ratio c give the speed-up (Leviathan et al., theorem 3.8)
    race        real generations against plain decoding, the better half again and again

This file knows no model: what is measured is behind `Objective` (see `layer_laboratory`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from foretoken.tuning.skip_sets import (
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
"""Sets of each size that are grown further."""
TRIES = 3
"""Sublayers that are tried as the next one of a set."""
FINALISTS = 12
"""Best sets, one of each size, whose own cost is measured."""
SETS = 5
"""Sets that are run at most."""
CONFIRMED = 3
"""Runs after which the speed of the last set left is believed."""

SCREENED, FOUND, ROUND = 0.35, 0.6, 0.85
"""Shares of the time after which screening, the path and the race's first round end."""


class LayerSearch:
    """The search, stage by stage; what it has found can be read at any time.

    Args:
        objective: what can be measured.
        num_layers: L; there are 2 L sublayers.
        deadline: when to end; stages are cut short, but something is always run.
        num_trials: most runs of the race.

    Attributes:
        report: told in a few words what is being done.
        estimates: every set whose alpha was measured.
        trials: every set and draft length that was run.
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
        self._floor = 0.0
        self._seconds_per_set = 0.0
        self.report: Callable[[str], None] = lambda _: None
        self.estimates: dict[SkipSet, Estimate] = {}
        self.trials: list[Trial] = []

    @property
    def best(self) -> Trial | None:
        """The fastest of those that were run most often; None before the first run."""
        run = [trial for trial in self.trials if trial.runs]
        return max(run, key=lambda trial: (len(trial.runs), trial.ratio), default=None)

    @property
    def confirmed(self) -> bool:
        """Whether the best was run often enough not to have been lucky."""
        return self.best is not None and len(self.best.runs) >= CONFIRMED

    def run(self) -> Trial:
        """Search."""
        self._find_savings()
        self._grow(self._screen())
        self._race(self._shortlist())
        assert self.best is not None, "one run at least whatever the time"
        return self.best

    # What a set is worth

    def _find_savings(self) -> None:
        """What leaving out one sublayer saves: all of a kind at once, as one drowns in noise."""
        self.report("Timing passes")
        for kind in KINDS:
            whole = frozenset(Sublayer(kind, layer) for layer in range(self._num_layers))
            saved = 1 - self._objective.cost(whole)
            self._savings[kind] = max(0.0, saved) / self._num_layers
        self._floor = self._rough_cost(frozenset(self._outwards()))

    def _rough_cost(self, skip: SkipSet) -> float:
        return max(0.0, 1 - sum(self._savings[sublayer.kind] for sublayer in skip))

    def _estimate(self, skip: SkipSet) -> Estimate:
        if skip not in self.estimates:
            alpha = self._objective.alpha(skip)
            curve = self._objective.verify_cost
            self.estimates[skip] = Estimate(skip, alpha, self._rough_cost(skip), curve)
        return self.estimates[skip]

    # Stages

    def _outwards(self) -> list[Sublayer]:
        """All sublayers, those in the middle first: they are the least needed as a rule."""
        middle = (self._num_layers - 1) / 2
        layers = sorted(range(self._num_layers), key=lambda layer: abs(layer - middle))
        return [Sublayer(kind, layer) for layer in layers for kind in KINDS]

    def _screen(self) -> list[Sublayer]:
        """Sublayers by what leaving out each alone promises, best first."""
        found: dict[Sublayer, float] = {}
        every, began = self._outwards(), self._deadline.spent
        for number, sublayer in enumerate(every, 1):
            if found and self._deadline.passed(SCREENED):
                break
            self.report(f"Leaving out one sublayer, {number} of {len(every)}")
            found[sublayer] = self._estimate(frozenset([sublayer])).score
        self._seconds_per_set = (self._deadline.spent - began) / len(found)
        return sorted(found, key=lambda sublayer: -found[sublayer])

    def _grow(self, order: Sequence[Sublayer]) -> None:
        """Larger and larger sets, until none that is larger still can pay or time is up."""
        stride = self._stride(len(order))
        beam: list[SkipSet] = [frozenset()]
        while beam:
            grown: list[Estimate] = []
            for skip in dict.fromkeys(larger for s in beam for larger in _larger(s, order, stride)):
                if self._deadline.passed(FOUND):
                    return
                self.report(f"Leaving out {len(skip)} of {2 * self._num_layers} sublayers")
                grown.append(self._estimate(skip))
            # Corollary 3.9: alpha has to be above c, and c is not going to fall below the floor.
            hopeful = [estimate for estimate in grown if estimate.alpha > self._floor]
            beam = [e.skip for e in sorted(hopeful, key=lambda e: -e.score)[:BEAM]]

    def _stride(self, num_sublayers: int) -> int:
        """Sublayers to leave out at a time so that the path gets to its end in time."""
        seconds_per_size = self._seconds_per_set * BEAM * TRIES
        left = max(0.0, self._deadline.left(FOUND))
        return max(1, math.ceil(num_sublayers * seconds_per_size / left)) if left else num_sublayers

    def _shortlist(self) -> list[Trial]:
        """The most promising sets, of different sizes, each with a few draft lengths."""
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
        """Run all, then the better half again, and so on; the last one a few times."""
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
    """Sets with `stride` more sublayers, beginning with the first, second, ... that is left."""
    left = [sublayer for sublayer in order if sublayer not in skip]
    for first in range(min(TRIES, len(left))):
        yield skip | frozenset(left[first : first + stride])
