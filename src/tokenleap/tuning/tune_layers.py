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

The search knows no model: `Objective` measures (see `LayerLaboratory`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from tokenleap.analysis.formulas import improvement_on_curve
from tokenleap.analysis.measure import Laboratory
from tokenleap.config import SpeculativeConfig
from tokenleap.control import Fixed
from tokenleap.core.distribution import Distribution
from tokenleap.core.params import SamplingParams
from tokenleap.core.sampler import TreeDistributions
from tokenleap.core.tree import chain
from tokenleap.drafters.base import Drafter
from tokenleap.drafters.lookups import NoDrafter
from tokenleap.drafters.models import leave_out
from tokenleap.errors import CompatibilityError, ConfigError
from tokenleap.llm import LLM
from tokenleap.request import Request
from tokenleap.runtime.inputs import PassInputs, RowNodes
from tokenleap.runtime.kv_slab import KVSlab
from tokenleap.runtime.network import LOGITS, Network
from tokenleap.runtime.passes import INTERNAL_KEY
from tokenleap.runtime.target import Target
from tokenleap.speculation import Strategy

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
        return self.drafted / self.plain


class Objective(Protocol):
    """A measurement of a skip set."""

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
        return self._clock() - self._began

    def left(self, share: float = 1.0) -> float:
        """Seconds left of this share of the limit; 0 or below when it is over."""
        return share * self._seconds - self.spent

    def passed(self, share: float = 1.0) -> bool:
        return self.left(share) <= 0


@dataclass(frozen=True)
class Estimate:
    """A skip set with its measured alpha, and the speed-up to expect."""

    skip: SkipSet
    alpha: float
    cost: float
    verify_cost: Sequence[float]

    def predicted(self, gamma: int) -> float:
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
        return self.estimate.predicted(self.gamma)

    @property
    def ratio(self) -> float:
        return fmean(run.ratio for run in self.runs)

    @property
    def low(self) -> float:
        return min(run.ratio for run in self.runs)

    @property
    def high(self) -> float:
        return max(run.ratio for run in self.runs)

    def as_dict(self) -> dict[str, Any]:
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


MAX_GAMMA = 10
"""Longest draft that the search considers."""
MAX_TEXTS = 32
"""Maximum prompts that are used, since their KV stays in memory."""
PASSES = 11
"""Timed passes per skip set, in turn with the whole model; the median counts."""
CHUNK = 256
"""Positions per pass."""


def layers_of(skip: SkipSet) -> dict[str, tuple[int, ...]]:
    """The layers of a skip set as options of `layer_skip`."""
    return {
        f"skip_{kind}": tuple(sorted(s.layer for s in skip if s.kind == kind)) for kind in KINDS
    }


class Text:
    """A prompt and the target's continuation, with the target's distributions and KV."""

    def __init__(self, request: Request, model: Target) -> None:
        self.prompt = list(request.prompt_ids)
        self.average = self.prompt + request.output_ids[: len(request.output_ids) // 2]
        """Context of the average length while generating."""
        self._sampler = request.sampler
        self._roots = range(len(self.prompt) - 1, len(request.token_ids) - 1)
        self._tokens = torch.tensor(request.token_ids)
        self._slab = KVSlab()
        self._slab.add_row()
        for part in _chunks(range(self._roots.start)):
            self._pass(model, part, commit=True)
        self._p = self._distributions(model, commit=True)

    @property
    def positions(self) -> int:
        return len(self._roots)

    def betas(self, model: Target) -> list[float]:
        """Sum of min(p, q) for every generated token, with q from `model` on the target's KV."""
        drafted = self._distributions(model, commit=False)
        return [p.overlap(q) for p, q in zip(self._p, drafted, strict=True)]

    def _distributions(self, model: Target, *, commit: bool) -> list[Distribution]:
        """The sampler's distribution of every generated token, by this model."""
        passes = [self._pass(model, part, commit=commit) for part in _chunks(self._roots)]
        tokens = self._tokens[self._roots.start : self._roots.stop].tolist()
        distributions = TreeDistributions(torch.cat(passes), chain(tokens), self._sampler, ())
        return [distributions[node] for node in range(len(tokens))]

    @torch.inference_mode()
    def _pass(self, model: Target, part: range, *, commit: bool) -> Tensor:
        """Logits [n, V] of one pass, whose KV is appended to the committed KV.

        A position sees its own new KV and the KV of all positions before it. That is the committed
        KV if it exists, and otherwise the new KV of this pass.
        """
        committed, network = self._slab.lengths[0], model.network
        nodes = RowNodes(
            start=committed,
            tokens=self._tokens[part.start : part.stop].tolist(),
            positions=part,
            prefixes=part,
            tails=[[committed + node] for node in range(len(part))],
        )
        size = max(len(part), network.least_nodes)
        span = self._slab.begin(0, [committed], [len(part)], size)
        inputs = PassInputs([nodes], 0, size, span, model.dtype, model.device)
        logits = network.forward(inputs, self._slab, LOGITS).scores
        if commit:
            self._slab.commit(0, range(len(part)))
        return logits[: len(part)]


def _chunks(positions: range) -> list[range]:
    return [positions[first : first + CHUNK] for first in range(0, len(positions), CHUNK)]


class LayerLaboratory(Laboratory):
    """A model with calibration texts: the `Objective` of the search."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(llm)
        if self._target.reads_source:
            raise CompatibilityError(
                "layers are chosen for decoder-only models, and this is an encoder-decoder."
            )
        self.num_layers = self._target.network.num_layers
        every = range(self.num_layers)
        self._target.network.without(every, every)  # refuse the architecture before any work
        self._texts: list[Text] = []
        self._params = SamplingParams()
        self.verify_cost: Sequence[float] = ()

    @property
    def num_texts(self) -> int:
        return len(self._texts)

    @property
    def temperature(self) -> float:
        return self._params.temperature

    @property
    def positions(self) -> int:
        return sum(text.positions for text in self._texts)

    def calibrate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        enough: Callable[[], bool] = lambda: False,
    ) -> None:
        """Generate the texts that the other methods measure on."""
        assert params.seed is not None
        self._params = params
        self._texts = []
        for prompt in prompts[:MAX_TEXTS]:
            if self._texts and enough():
                break
            self._texts.append(Text(self._continue(prompt, NoDrafter(), 0), self._target))
        if self.positions == len(self._texts):
            raise ConfigError(
                "every output ends at its first token, so there is nothing to draft. Take other "
                "prompts or more tokens."
            )
        seconds = self._time_passes(self._texts[0].average, MAX_GAMMA)
        self.verify_cost = tuple(costs / seconds[0] for costs in seconds)

    def alpha(self, skip: SkipSet) -> float:
        """See `Objective.alpha`: corollary 3.6 of Leviathan et al. (2023), over all positions."""
        model = self._target.with_network(self._without(skip))
        return fmean(beta for text in self._texts for beta in text.betas(model))

    def cost(self, skip: SkipSet) -> float:
        model = self._target.with_network(self._without(skip))
        *context, root = self._texts[0].average
        key = INTERNAL_KEY
        seconds: dict[Any, list[float]] = {self._target: [], model: []}
        self._target.add(key)
        try:
            self._target.prefill(key, context)
            for _ in range(PASSES):
                for scorer, times in seconds.items():
                    began = time.perf_counter()
                    scorer.verify([key], [chain([root])])
                    self._wait()
                    times.append(time.perf_counter() - began)
        finally:
            self._target.remove(key)
        return median(seconds[model]) / median(seconds[self._target])

    def measure(self, skip: SkipSet, gamma: int) -> Run:
        """See `Objective.measure`; every text runs with and without drafts, under the same load."""
        fields: dict[str, Any] = {"method": "layer_skip", **layers_of(skip)}
        drafter = self._strategies.drafter(SpeculativeConfig.parse(fields), self._rule)
        plain, drafted = _Speed(), _Speed()
        ways: list[tuple[Drafter, int, _Speed]]
        ways = [(NoDrafter(), 0, plain), (drafter, gamma, drafted)]
        for text in self._texts:
            for how, length, speed in ways:
                speed.add(self._continue(text.prompt, how, length))
            ways.reverse()
        return Run(drafted.tokens_per_second, plain.tokens_per_second)

    def _without(self, skip: SkipSet) -> Network:
        return leave_out(self._target.network, layers_of(skip))

    def _continue(self, prompt: Sequence[int], drafter: Drafter, gamma: int) -> Request:
        strategy = Strategy(drafter, Fixed(gamma), self._rule)
        return self._generate(prompt, self._params, strategy)[0]


class _Speed:
    """Tokens and seconds of several outputs, without their prefill."""

    def __init__(self) -> None:
        self._tokens, self._seconds = 0, 0.0

    def add(self, request: Request) -> None:
        self._tokens += request.metrics.generated_tokens
        self._seconds += request.metrics.seconds - request.metrics.prefill_seconds

    @property
    def tokens_per_second(self) -> float:
        return self._tokens / self._seconds


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
        return self.best is not None and len(self.best.runs) >= CONFIRMED

    def run(self) -> Trial:
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
