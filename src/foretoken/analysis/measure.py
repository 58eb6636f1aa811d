"""Measuring what the theory assumes: alpha, c, and what a pass costs by what it verifies.

A `Laboratory` is an `LLM` that runs many draft lengths on one target in memory. It measures alpha
as the paper defines it, over the tokens of the target's own text and from p and q themselves: the
drafter proposes at every position, nothing it proposes is kept, and beta = sum of min(p, q) of the
first drafted token is recorded. Counting acceptances instead would weigh positions by how often a
step happens to begin there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import ClassVar

import torch

from foretoken.analysis.compare import Assumptions, StepSample
from foretoken.control import Budget, Fixed
from foretoken.core.acceptance import AcceptanceRule, Accepted, TargetDistributions
from foretoken.core.distribution import Distribution
from foretoken.core.noise import StepNoise
from foretoken.core.params import SamplingParams
from foretoken.core.sampler import TreeDistributions
from foretoken.core.tree import Draft, chain
from foretoken.decode import Outcome
from foretoken.drafters.base import Drafter
from foretoken.drafters.none import NoDrafter
from foretoken.engine.scheduler import Scheduler
from foretoken.errors import CompatibilityError, ConfigError
from foretoken.llm import LLM
from foretoken.request import Request
from foretoken.speculation import Speculation, Strategy
from foretoken.trace import Trace

__all__ = ["Laboratory", "Recorder", "Watch", "overlap", "steps_of"]

PASSES = 7
"""Timed passes of each width and prompt; the median counts."""


def overlap(p: Distribution, q: Distribution) -> float:
    """Beta = sum over x of min(p(x), q(x)), for distributions on their support: theorem 3.5."""
    q_probs = q.at(p.tokens).to(p.probs)  # [S]
    return float(torch.minimum(p.probs, q_probs).sum())


class Watch(AcceptanceRule):
    """Keeps nothing that was drafted and draws the next token from p: plain decoding, watched."""

    name: ClassVar[str] = "watch"
    lossless: ClassVar[bool] = True
    takes_trees: ClassVar[bool] = False

    def accept(self, draft: Draft, p: TargetDistributions, noise: StepNoise) -> Accepted:
        """See `AcceptanceRule.accept`."""
        reason = "watched only" if draft.tree.num_drafted else ""
        return Accepted((), noise.draw(p[0], 0), reason=reason)


class Recorder(Fixed):
    """A fixed draft length that writes down beta and the drafts' lengths.

    The end of the output does not shorten drafts: nothing of them is kept anyway, and the lengths
    should be those of any position.

    Args:
        num_speculative_tokens: drafted tokens per step.
        max_model_len: the context, which drafts must not leave.

    Attributes:
        betas: sum of min(p, q) of the first drafted token, for every step that drafted.
        lengths: drafted tokens of every step.
    """

    def __init__(self, num_speculative_tokens: int, max_model_len: int) -> None:
        super().__init__(num_speculative_tokens)
        self._max_model_len = max_model_len
        self.betas: list[float] = []
        self.lengths: list[int] = []

    def budgets(self, batch: Sequence[Request], rows: int) -> list[Budget]:
        """The full length wherever the context has room."""
        length = self.num_speculative_tokens
        rooms = [self._max_model_len - len(request.token_ids) for request in batch]
        return [Budget(length, max(0, min(length, room))) for room in rooms]

    def observe(self, outcomes: Sequence[Outcome], draft_seconds: float) -> None:
        """Record one step; the logits are valid until the next pass."""
        for outcome in outcomes:
            request, tree = outcome.request, outcome.draft.tree
            self.lengths.append(tree.num_drafted)
            if tree.num_drafted:
                before = request.output_ids[: -len(outcome.committed)]
                p = TreeDistributions(outcome.output.scores, tree, request.sampler, before)
                self.betas.append(overlap(p[0], outcome.draft.q_of(1)))


@dataclass
class _Findings:
    """What was found so far, over all prompts."""

    betas: list[float] = field(default_factory=list)
    lengths: list[tuple[int, ...]] = field(default_factory=list)  # per prompt
    c: list[float] = field(default_factory=list)  # per prompt
    curves: list[list[float]] = field(default_factory=list)  # per prompt [G+1]
    pass_seconds: list[float] = field(default_factory=list)  # per prompt


class Laboratory:
    """Runs an `LLM`'s target and draft model at many draft lengths in turn.

    Args:
        llm: with the method to be measured.

    Raises:
        CompatibilityError: the drafter proposes trees, which the theory is not about.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._target, self._config = llm.engine.target, llm.speculative_config
        self._rule = self._config.rule
        self._strategies = llm.engine.strategies.sharing_models()
        if self._fresh_drafter(1).drafts_trees:
            raise CompatibilityError(
                f"method '{self._config.method_name}' drafts trees: the theory of alpha and "
                "gamma is about chains."
            )

    def assumptions(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, max_gamma: int
    ) -> Assumptions:
        """Measure alpha, c and the cost of verification.

        Args:
            prompts: token ids; at least one prompt.
            params: how to sample; p and q are the distributions under these parameters.
            max_gamma: longest draft of interest, at least 1.

        Raises:
            ConfigError: nothing was drafted at all, so that there is nothing to predict from.
        """
        found = _Findings()
        for prompt in prompts:
            self._examine(prompt, params, max_gamma, found)
        if not found.betas or not found.c:
            raise ConfigError(
                f"method '{self._config.method_name}' drafted nothing on these prompts: "
                "there is no alpha to measure. Take other prompts or more tokens."
            )
        return Assumptions(
            alpha=sum(found.betas) / len(found.betas),
            c=median(found.c),
            verify_cost=tuple(median(costs) for costs in zip(*found.curves, strict=True)),
            draft_lengths=tuple(found.lengths),
            betas=tuple(found.betas),
            pass_seconds=median(found.pass_seconds),
        )

    def run(self, prompt: Sequence[int], params: SamplingParams, gamma: int) -> list[StepSample]:
        """Generate with this draft length, 0 for none; what every step did.

        Args:
            prompt: token ids.
            params: how to sample.
            gamma: drafted tokens per step.
        """
        drafter = self._fresh_drafter(gamma) if gamma else NoDrafter()
        strategy = Strategy(drafter, Fixed(gamma), self._rule)
        return steps_of(self._generate(prompt, params, strategy)[1])

    def _examine(
        self, prompt: Sequence[int], params: SamplingParams, max_gamma: int, found: _Findings
    ) -> None:
        """One prompt, watched; the passes are timed right after, so that they see one machine."""
        recorder = Recorder(max_gamma, self.llm.max_model_len)
        strategy = Strategy(self._fresh_drafter(max_gamma), recorder, Watch())
        request, trace = self._generate(prompt, params, strategy)
        # A context as long as the average one while generating.
        average = (len(prompt) + len(request.token_ids)) // 2
        passes = self._time_passes(request.token_ids[:average], max_gamma)
        found.betas += recorder.betas
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
        (request,) = self.llm.engine.make_requests(list(prompt), params)
        scheduler.add(request)
        try:
            while not request.finished:
                scheduler.step()
        finally:
            scheduler.abort([request])
        return request, request.output().trace

    def _time_passes(self, tokens: Sequence[int], max_gamma: int) -> list[float]:
        """[G+1] median seconds of a pass over 0 to G drafted tokens, taken in turn."""
        tokens = tokens[: max(1, self.llm.max_model_len - max_gamma - 1)]
        trees = [chain([tokens[-1]] * (gamma + 1)) for gamma in range(max_gamma + 1)]
        seconds: list[list[float]] = [[] for _ in trees]
        key = -2  # no request has it
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
        """Until the device has done what it was told."""
        if self.llm.device.type == "cuda":
            torch.cuda.synchronize(self.llm.device)

    def _fresh_drafter(self, gamma: int) -> Drafter:
        """A drafter of its own for every run: none learns from the runs of another length."""
        return self._strategies.drafter(self._config, self._rule)


def steps_of(trace: Trace) -> list[StepSample]:
    """What every step did, without the first: there a draft model reads the whole prompt."""
    return [
        StepSample(
            drafted=len(step.drafted),
            accepted=len(step.accepted),
            committed=step.committed,
            draft_seconds=step.draft_seconds,
            verify_seconds=step.verify_seconds,
            seconds=step.draft_seconds + step.verify_seconds + step.accept_seconds,
        )
        for step in trace.steps[1:]
    ]
