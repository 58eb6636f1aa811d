"""Measure what the theory assumes: alpha, c, and the cost of a pass by the tokens it verifies.

A `Laboratory` runs the target of an `LLM` with many draft lengths. It measures alpha as Leviathan
et al. (2023) define it (corollary 3.6): the mean of the rule's beta (`AcceptanceRule.beta`), which
is the sum of min(p, q) in speculative sampling. The drafter proposes at every position of a text,
and each step gives one token. Counting acceptances instead would weight positions by how often a
step begins there. The text is the target's own, or, under a lossy rule, what that rule makes of it.
`tokenleap plan --measure` and `tokenleap.tuning` use it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import ClassVar, TypeAlias

import torch

from tokenleap.analysis.compare import Assumptions, StepSample
from tokenleap.control import Budget, Fixed
from tokenleap.core.acceptance import AcceptanceRule, Accepted, TargetDistributions
from tokenleap.core.acceptance.rules import Lenient
from tokenleap.core.noise import StepNoise
from tokenleap.core.params import SamplingParams
from tokenleap.core.tree import Draft, chain
from tokenleap.decode import Outcome
from tokenleap.drafters.base import Drafter
from tokenleap.drafters.lookups import NoDrafter
from tokenleap.engine.jobs import JobSpec
from tokenleap.engine.scheduler import Scheduler
from tokenleap.errors import CompatibilityError, ConfigError
from tokenleap.llm import LLM
from tokenleap.request import Request
from tokenleap.runtime.passes import INTERNAL_KEY
from tokenleap.speculation import Speculation, Strategy
from tokenleap.trace import Trace

Judge: TypeAlias = Callable[[Draft, TargetDistributions, StepNoise], float]
"""A figure of the first drafted token, such as `AcceptanceRule.beta`."""

PASSES = 7
"""Timed passes per width and prompt, of which the median counts."""


class Watch(AcceptanceRule):
    """Judges the first drafted token and commits one token, so that it sees every position.

    Under a lossless rule, the token is drawn from p: the text is that of plain decoding. A lossy
    rule decides itself on the first drafted token, so that the text is the rule's.

    Args:
        judges: what is recorded of the first drafted token; None is the rule's own beta.

    Attributes:
        betas: a list per judge, with an entry for every step that drafted.
    """

    name: ClassVar[str] = "watch"
    lossless: ClassVar[bool] = True
    takes_trees: ClassVar[bool] = False

    def __init__(self, rule: AcceptanceRule, judges: Sequence[Judge] | None = None) -> None:
        super().__init__()
        self._rule = rule
        self._judges = (rule.beta,) if judges is None else judges
        self.betas: list[list[float]] = [[] for _ in self._judges]

    def accept(self, draft: Draft, p: TargetDistributions, noise: StepNoise) -> Accepted:
        if not draft.tree.num_drafted:
            return Accepted((), noise.draw(p[0], 0))
        for judge, betas in zip(self._judges, self.betas, strict=True):
            betas.append(judge(draft, p, noise))
        return Accepted((), self._next(draft, p, noise), reason="watched only")

    def _next(self, draft: Draft, p: TargetDistributions, noise: StepNoise) -> int:
        if self._rule.lossless:
            return noise.draw(p[0], 0)
        decision = self._rule.accept(draft.only([1]), p, noise)
        return draft.tree.tokens[1] if decision.path else decision.token


class Recorder(Fixed):
    """A fixed draft length that records the lengths of the drafts.

    It does not shorten drafts at the end of the output, where `Fixed` does: no draft is kept, and
    every position should count alike.
    """

    def __init__(self, num_speculative_tokens: int, max_model_len: int) -> None:
        super().__init__(num_speculative_tokens)
        self._max_model_len = max_model_len
        self.lengths: list[int] = []

    def budgets(self, batch: Sequence[Request], rows: int) -> list[Budget]:
        length = self.num_speculative_tokens
        rooms = [self._max_model_len - len(request.token_ids) for request in batch]
        return [Budget(length, max(0, min(length, room))) for room in rooms]

    def observe(self, outcomes: Sequence[Outcome], draft_seconds: float) -> None:
        self.lengths += [outcome.draft.tree.num_drafted for outcome in outcomes]


@dataclass
class _Findings:
    betas: list[float] = field(default_factory=list)
    lengths: list[tuple[int, ...]] = field(default_factory=list)  # per prompt
    c: list[float] = field(default_factory=list)  # per prompt
    curves: list[list[float]] = field(default_factory=list)  # per prompt [G+1]
    pass_seconds: list[float] = field(default_factory=list)  # per prompt


class Laboratory:
    """Runs the target and the drafter of an `LLM` with many draft lengths in turn."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._target, self._config = llm.engine.target, llm.speculative_config
        self._rule = self._config.rule
        self._strategies = llm.engine.strategies.sharing_models()
        if self._fresh_drafter().traits.drafts_trees:
            raise CompatibilityError(
                f"method '{self._config.method_name}' drafts trees: the theory of alpha and "
                "gamma is about chains."
            )

    def assumptions(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        max_gamma: int,
        report: Callable[[int], object] = lambda _: None,
    ) -> Assumptions:
        """Measure alpha, c and the cost of verification."""
        found = _Findings()
        for done, prompt in enumerate(prompts, 1):
            self._examine(prompt, params, max_gamma, found)
            report(done)
        if not found.betas or not found.c:
            raise self.nothing_drafted()
        return Assumptions(
            alpha=sum(found.betas) / len(found.betas),
            c=median(found.c),
            verify_cost=tuple(median(costs) for costs in zip(*found.curves, strict=True)),
            draft_lengths=tuple(found.lengths),
            betas=tuple(found.betas),
            pass_seconds=median(found.pass_seconds),
        )

    def betas(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        judges: Sequence[Judge],
        report: Callable[[int], object] = lambda _: None,
    ) -> list[list[float]]:
        """Every judge's verdict on the first drafted token, at each position with a draft."""
        watch = Watch(self._rule, judges)
        for done, prompt in enumerate(prompts, 1):
            recorder = Recorder(1, self.llm.max_model_len)
            self._generate(prompt, params, Strategy(self._fresh_drafter(), recorder, watch))
            report(done)
        return watch.betas

    def nothing_drafted(self) -> ConfigError:
        return ConfigError(
            f"method '{self._config.method_name}' drafted nothing on these prompts: there is no "
            "alpha to measure. Take other prompts or more tokens."
        )

    def run(self, prompt: Sequence[int], params: SamplingParams, gamma: int) -> list[StepSample]:
        """Generate with this draft length and return what every step did."""
        drafter = self._fresh_drafter() if gamma else NoDrafter()
        strategy = Strategy(drafter, Fixed(gamma), self._rule)
        return steps_of(self._generate(prompt, params, strategy)[1])

    def _examine(
        self, prompt: Sequence[int], params: SamplingParams, max_gamma: int, found: _Findings
    ) -> None:
        """Measure one prompt; time the passes right after it, under the same load."""
        recorder = Recorder(max_gamma, self.llm.max_model_len)
        watch = Watch(self._rule)
        strategy = Strategy(self._fresh_drafter(), recorder, watch)
        request, trace = self._generate(prompt, params, strategy)
        # The average length of the context while generating.
        average = (len(prompt) + len(request.token_ids)) // 2
        passes = self._time_passes(request.token_ids[:average], max_gamma)
        found.betas += watch.betas[0]
        found.lengths.append(tuple(recorder.lengths))
        found.curves.append([seconds / passes[0] for seconds in passes])
        found.pass_seconds.append(passes[0])
        drafting = [s.draft_seconds / s.drafted for s in steps_of(trace) if s.drafted]
        if drafting:
            found.c.append(median(drafting) / passes[0])

    def _generate(
        self, prompt: Sequence[int], params: SamplingParams, strategy: Strategy
    ) -> tuple[Request, Trace]:
        scheduler = Scheduler(self._target, Speculation(strategy), max_num_seqs=1)
        (request,) = self.llm.engine.make_requests(JobSpec(list(prompt), params))
        scheduler.add(request)
        try:
            while not request.finished:
                scheduler.step()
        finally:
            scheduler.abort([request])
        return request, request.output().trace

    def _time_passes(self, tokens: Sequence[int], max_gamma: int) -> list[float]:
        """[G+1] median seconds of a pass over 0 to G drafted tokens, timed in turn."""
        tokens = tokens[: max(1, self.llm.max_model_len - max_gamma - 1)]
        trees = [chain([tokens[-1]] * (gamma + 1)) for gamma in range(max_gamma + 1)]
        seconds: list[list[float]] = [[] for _ in trees]
        key = INTERNAL_KEY
        self._target.add(key)
        try:
            self._target.prefill(key, tokens[:-1])
            for _ in range(PASSES):
                for tree, times in zip(trees, seconds, strict=True):
                    began = time.perf_counter()
                    self._target.verify([key], [tree])
                    self._wait()
                    times.append(time.perf_counter() - began)
        finally:
            self._target.remove(key)
        return [median(times) for times in seconds]

    def _wait(self) -> None:
        if self.llm.device.type == "cuda":
            torch.cuda.synchronize(self.llm.device)

    def _fresh_drafter(self) -> Drafter:
        """A new drafter for every run, so that none learns from runs of another length."""
        return self._strategies.drafter(self._config, self._rule)


def steps_of(trace: Trace) -> list[StepSample]:
    """The steps of a trace without the first, in which a draft model reads the whole prompt."""
    return [
        StepSample(
            drafted=len(step.drafted),
            accepted=len(step.accepted),
            committed=step.committed,
            draft_seconds=step.draft_seconds,
            verify_seconds=step.verify_seconds,
            seconds=step.seconds,
        )
        for step in trace.steps[1:]
    ]


# Alpha by lenience: table 5 of Leviathan et al. (2023), for a drafter and prompts of one's own.
#
# Alpha is measured over the target's own text, as in the paper. At each position, the betas of all
# leniences are computed from the same p and q, so they differ by lenience alone. `tokenleap plan
# --lenience` prints the table.


LENIENCES = (1.0, 0.5, 0.3, 0.1)
"""Those of table 5."""


@dataclass(frozen=True)
class LenienceRow:
    """One drafter."""

    positions: int
    rejection_sampling: float
    alphas: tuple[float, ...]


def alpha_by_lenience(
    laboratory: Laboratory,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    leniences: Sequence[float] = LENIENCES,
    report: Callable[[int], object] = lambda _: None,
) -> LenienceRow:
    """Measure one drafter.

    In greedy decoding, a drafted x passes if p(x) >= l max p, with p at temperature 1 (A.5).
    """
    rules = [Lenient(Lenient.Options(lenience=lenience)) for lenience in leniences]
    judges: list[Judge] = [rejection_sampling, *(rule.beta for rule in rules)]
    found = laboratory.betas(prompts, params, judges, report)
    if not found[0]:
        raise laboratory.nothing_drafted()
    first, *others = map(fmean, found)
    return LenienceRow(len(found[0]), first, tuple(others))


def rejection_sampling(draft: Draft, p: TargetDistributions, noise: StepNoise) -> float:
    """Beta of rejection sampling without iteration, on supports."""
    probs = p[0].probs  # [S]
    drafted = draft.q_of(1).at(p[0].tokens).to(probs)  # [S]
    return min(1.0, float((drafted / probs).min()))
