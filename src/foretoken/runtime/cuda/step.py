"""`DeviceStep`: `decode.step` for batches that the device can advance by itself.

Which of the two runs is decided before the step, from what does not change while the requests do:
`obstacle` says what stands in the way of a request. Where nothing does, for no request of the
batch, the step is one graph (`chain.py`) and one transfer; text, stop strings and traces are made
of its report. Otherwise the whole batch takes the general path. Tokens are the same on both, but
for rounding: passes of another shape have other kernels, and near ties may fall the other way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foretoken.acceptance.base import AcceptanceRule
from foretoken.acceptance.coupled import Coupled
from foretoken.control import Controller
from foretoken.decode import Outcome, StepTimes, keep, step, tell
from foretoken.drafters.base import Drafter
from foretoken.drafters.ngram import NgramDrafter
from foretoken.drafters.none import NoDrafter
from foretoken.drafters.per_request import PerRequest
from foretoken.request import Request
from foretoken.runtime.cuda.buckets import Buckets, doubled
from foretoken.runtime.cuda.chain import ChainStep, Drafting, Report
from foretoken.runtime.cuda.drawn import Drawn
from foretoken.runtime.cuda.network import CudaNetwork
from foretoken.runtime.cuda.rows import DeviceRows
from foretoken.runtime.cuda.slab import StaticSlab
from foretoken.runtime.cuda.without_captures import WithoutCaptures
from foretoken.sampling import Laws
from foretoken.target import Target
from foretoken.tree import Draft, chain

__all__ = ["DeviceStep", "drafting_of", "obstacle", "step_for"]

_LONGEST_DRAFT = 63

_MOST_SAMPLED = 128
"""Places of a step in which a request is sampled: its noise takes 34 bytes for each of them and
each token of the vocabulary, 0.6 GiB for a vocabulary of 150 000."""

_SIZES = Buckets(nodes=(1, 2, 4, 8, 16, 32, 64))
"""Few, so that a draft that is cut short at the end of an output seldom needs another graph."""


def step_for(target: Target) -> DeviceStep | None:
    """Steps on the device, where the target's network captures them."""
    network = target.network
    captures = isinstance(network, CudaNetwork) and network.capture is not None
    return DeviceStep(target) if captures else None


def obstacle(request: Request) -> str | None:
    """What of a request the device does not do; None where it can advance it."""
    params = request.params
    asked = {
        "top_k, top_p or min_p": not params.greedy
        and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0),
        "penalties": (
            params.repetition_penalty != 1
            or params.presence_penalty != 0
            or params.frequency_penalty != 0
        ),
        "logit_bias or allowed_token_ids": bool(params.logit_bias)
        or params.allowed_token_ids is not None,
        "min_tokens": params.min_tokens > 0,
        "structured_outputs": params.form is not None,
        "logprobs": params.logprobs is not None,
        "a trace of all p": request.trace_all,
    }
    return next((name for name, wanted in asked.items() if wanted), None)


def drafting_of(
    drafter: Drafter, rule: AcceptanceRule, batch: Sequence[Request]
) -> Drafting | None:
    """How the device would draft for all of these requests, if asked to; None where it cannot."""
    own = drafter.sole(batch) if isinstance(drafter, PerRequest) else drafter
    if type(rule) is not Coupled:
        return None
    if type(own) is NoDrafter:
        return Drafting(0, 1, 1)
    if type(own) is not NgramDrafter:
        return None
    options = own.options
    return Drafting(_LONGEST_DRAFT, options.prompt_lookup_min, options.prompt_lookup_max)


@dataclass(frozen=True)
class _Shape:
    """What a captured step depends on."""

    rows: int
    span: int
    drafting: Drafting
    sampled: bool


@dataclass(frozen=True)
class _Plan:
    """A step that the device can do now: what it reports to, its graph, what each row may draft."""

    chain_step: ChainStep
    replay: Callable[[], None]
    limits: Sequence[int]


class DeviceStep:
    """A drop-in for `decode.step` on a target with the GPU runtime.

    Args:
        target: the only target it will be called with, on a `CudaNetwork` that captures and a
            `StaticSlab`.
        buckets: the numbers of rows and nodes that steps are captured for.

    Attributes:
        num_steps: steps that ran on the device.
    """

    def __init__(self, target: Target, buckets: Buckets | None = None) -> None:
        network, slab = target.network, target._slab
        assert isinstance(network, CudaNetwork)
        assert isinstance(slab, StaticSlab)
        self._target, self._network, self._slab = target, network, slab
        self._buckets = _SIZES if buckets is None else buckets
        self._rows = DeviceRows(slab.rows, slab.positions, target.device)
        self._version = slab.version
        self._steps: dict[_Shape, tuple[ChainStep, Callable[[], None]]] = {}
        self.num_steps = 0

    @torch.inference_mode()
    def __call__(
        self,
        target: Target,
        drafter: Drafter,
        rule: AcceptanceRule,
        controller: Controller,
        batch: Sequence[Request],
    ) -> list[Outcome]:
        """See `decode.step`."""
        assert target is self._target
        plan = self._plan(drafter, rule, controller, batch)
        if plan is None:
            watching = WithoutCaptures(controller, self._network)
            return step(target, drafter, rule, watching, batch)
        began = time.perf_counter()  # what was captured for it took no part of its time
        reports = self._run(plan, batch)
        done = time.perf_counter()
        outcomes = self._outcomes(plan, rule, batch, reports)
        # Draft, verification and acceptance are one piece of work and cannot be told apart.
        times = StepTimes(0.0, done - began, time.perf_counter() - done)
        tell(drafter, controller, outcomes, times)
        return outcomes

    # Before a step

    def _plan(
        self,
        drafter: Drafter,
        rule: AcceptanceRule,
        controller: Controller,
        batch: Sequence[Request],
    ) -> _Plan | None:
        """What the device is to do; None where it cannot.

        Raises:
            SlabFull: the drafts find no room. Nothing has been done.
        """
        drafting = drafting_of(drafter, rule, batch)
        if drafting is None or any(obstacle(request) for request in batch):
            return None
        most = self._most_nodes(batch)
        if not most:
            return None
        longest = min(drafting.length, most - 1)
        limits = [min(budget.chain, longest) for budget in controller.budgets(batch)]
        captured = self._captured(self._shape(drafting, batch, limits))
        return None if captured is None else _Plan(*captured, limits)

    def _most_nodes(self, batch: Sequence[Request]) -> int:
        """Most nodes of each row in a step on the device; 0 if there is no such step."""
        rows = self._num_rows(batch)
        if rows is None or self._network.capture is None or not self._slab.allocated:
            return 0
        most = self._buckets.most_places
        if _sampled(batch):
            most = min(most, _MOST_SAMPLED)
        return max((n for n in self._buckets.nodes if n * rows <= most), default=0)

    def _num_rows(self, batch: Sequence[Request]) -> int | None:
        last = max(self._row(request) for request in batch)
        return self._buckets.fit_rows(last + 1, self._slab.rows)

    def _shape(self, drafting: Drafting, batch: Sequence[Request], limits: Sequence[int]) -> _Shape:
        """The step that serves the batch; the slab has room for it.

        Raises:
            SlabFull: it has not. Nothing has been done.
        """
        nodes = min(n for n in self._buckets.nodes if n > max(limits))
        # Padding takes no room.
        needed = max(len(r.token_ids) + limit for r, limit in zip(batch, limits, strict=True))
        self._slab.make_room(needed)
        rows = self._num_rows(batch)
        assert rows is not None, "making room takes no rows"
        span = min(doubled(needed), self._slab.positions)
        return _Shape(rows, span, replace(drafting, length=nodes - 1), _sampled(batch))

    def _captured(self, shape: _Shape) -> tuple[ChainStep, Callable[[], None]] | None:
        """A step and its graph; None where it cannot be captured, and no other from then on."""
        if self._version != self._slab.version:  # the buffers have moved
            self._steps.clear()
            self._rows = DeviceRows(self._slab.rows, self._slab.positions, self._target.device)
            self._version = self._slab.version
        if shape not in self._steps:
            captured = self._network.attempt(lambda: self._capture(shape))
            if captured is None:
                self._steps.clear()
                return None
            self._steps[shape] = captured
        return self._steps[shape]

    def _capture(self, shape: _Shape) -> tuple[ChainStep, Callable[[], None]]:
        chain_step = ChainStep(
            self._network,
            self._slab,
            self._rows,
            shape.rows,
            shape.span,
            shape.drafting,
            sampled=shape.sampled,
            dtype=self._target.dtype,
        )
        assert self._network.capture is not None
        with self._rows.idle():
            chain_step.run()
            run = self._network.compiled(chain_step.run)
            return chain_step, self._network.capture.capture(run)

    # A step

    def _run(self, plan: _Plan, batch: Sequence[Request]) -> list[Report]:
        """What the device has done to each row, once it has."""
        rows = [self._row(request) for request in batch]
        for row, request in zip(rows, batch, strict=True):
            assert self._slab.lengths[row] == len(request.token_ids) - 1, "law 1"
        self._rows.show(dict(zip(rows, zip(batch, plan.limits, strict=True), strict=True)))
        plan.replay()
        self._target.num_passes += 1
        self.num_steps += 1
        return plan.chain_step.fetch()

    def _outcomes(
        self,
        plan: _Plan,
        rule: AcceptanceRule,
        batch: Sequence[Request],
        reports: Sequence[Report],
    ) -> list[Outcome]:
        rows = [self._row(request) for request in batch]
        logits = plan.chain_step.logits
        outcomes = [
            self._outcome(rule, request, reports[row], logits[row])
            for row, request in zip(rows, batch, strict=True)
        ]
        for row, request in zip(rows, batch, strict=True):
            self._rows.extended(row, request)
        return outcomes

    def _outcome(
        self, rule: AcceptanceRule, request: Request, report: Report, logits: Tensor
    ) -> Outcome:
        """With what the device has drawn in place of p and noise."""
        draft = Draft.deterministic(chain([request.root, *report.drafted]))
        noise = request.noise.at(len(request.token_ids))
        accepted = rule.accept(draft, Drawn(report.drawn), noise)
        assert len(accepted.path) == report.accepted, "host and device accept alike"
        logits = logits[: len(draft.tree)]
        p = Laws(logits, draft.tree, request.sampler, request.output_ids, report.drawn)
        return keep(self._target, request, draft, accepted, logits, p)

    def _row(self, request: Request) -> int:
        return self._target._keys.index(request.key)


def _sampled(batch: Sequence[Request]) -> bool:
    return not all(request.params.greedy for request in batch)
