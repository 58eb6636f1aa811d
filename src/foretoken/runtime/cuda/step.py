"""`DeviceStep`: `decode.step` for batches that the device can advance by itself.

Which of the two runs is decided before the step, from what does not change while the requests do:
`obstacle` says what stands in the way of a request. Where nothing does, for no request of the
batch, the step is one graph (`chain.py`) and one transfer; text, stop strings and traces are made
of its report. Otherwise the whole batch takes the general path. Tokens are the same on both.
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
from foretoken.decode import Outcome, StepTimes, step
from foretoken.drafters.base import Drafter
from foretoken.drafters.ngram import NgramDrafter
from foretoken.drafters.none import NoDrafter
from foretoken.drafters.per_request import PerRequest
from foretoken.law import Law
from foretoken.request import Request
from foretoken.runtime.cuda.buckets import Buckets, doubled
from foretoken.runtime.cuda.chain import ChainStep, Drafting, Report
from foretoken.runtime.cuda.graphs import Uncaptured
from foretoken.runtime.cuda.network import CudaNetwork, compiled
from foretoken.runtime.cuda.rows import DeviceRows
from foretoken.runtime.cuda.slab import StaticSlab
from foretoken.sampling import Laws, Sampler
from foretoken.target import Target
from foretoken.trace import record
from foretoken.tree import Draft, TokenTree, chain

__all__ = ["DeviceStep", "drafting_of", "obstacle", "step_for"]

_LONGEST_DRAFT = 63

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


class DeviceStep:
    """A drop-in for `decode.step` on a target with the GPU runtime.

    Args:
        target: the only target it will be called with, on a `CudaNetwork` and a `StaticSlab`; as
            its network captures passes, steps are captured.
        buckets: the numbers of rows that steps are captured for.

    Attributes:
        num_steps: steps that ran on the device.
    """

    def __init__(self, target: Target, buckets: Buckets | None = None) -> None:
        network, slab = target.network, target._slab
        assert isinstance(network, CudaNetwork)
        assert isinstance(slab, StaticSlab)
        self._target, self._network, self._slab = target, network, slab
        self._capture = Uncaptured() if network.capture is None else network.capture
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
        began = time.perf_counter()
        drafting = drafting_of(drafter, rule, batch)
        most = 0 if any(obstacle(request) for request in batch) else self._most_nodes(batch)
        if drafting is None or not most:
            return step(target, drafter, rule, controller, batch)
        longest = min(drafting.length, most - 1)
        limits = [min(budget.chain, longest) for budget in controller.budgets(batch)]
        shape = self._shape(drafting, batch, limits)
        outcomes, done = self._step(shape, rule, batch, limits)
        # Draft, verification and acceptance are one piece of work and cannot be told apart.
        times = StepTimes(0.0, done - began, time.perf_counter() - done)
        drafter.observe(outcomes, times)
        controller.observe(outcomes, times)
        for request in batch:
            request.record_times(times.draft, times.verify, times.accept)
        return outcomes

    def _most_nodes(self, batch: Sequence[Request]) -> int:
        """Most nodes of each row in a step on the device; 0 if there is no such step."""
        rows = self._num_rows(batch)
        if rows is None or not self._slab.allocated:
            return 0
        fitting = [n for n in self._buckets.nodes if n * rows <= self._buckets.most_places]
        return max(fitting, default=0)

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
        drafting = replace(drafting, length=nodes - 1)
        return _Shape(rows, span, drafting, not all(r.params.greedy for r in batch))

    def _step(
        self, shape: _Shape, rule: AcceptanceRule, batch: Sequence[Request], limits: Sequence[int]
    ) -> tuple[list[Outcome], float]:
        """What came of it, and when the device had done its part."""
        if self._version != self._slab.version:  # the buffers have moved
            self._steps.clear()
            self._rows = DeviceRows(self._slab.rows, self._slab.positions, self._target.device)
            self._version = self._slab.version
        chain_step, replay = self._captured(shape)
        rows = {self._row(request): request for request in batch}
        for row, request in rows.items():
            assert self._slab.lengths[row] == len(request.token_ids) - 1, "law 1"
        self._rows.show(dict(zip(rows, zip(batch, limits, strict=True), strict=True)))
        replay()
        self._target.num_passes += 1
        self.num_steps += 1
        reports = chain_step.fetch()
        done = time.perf_counter()
        outcomes = [
            self._outcome(rule, request, reports[row], chain_step.logits[row])
            for row, request in rows.items()
        ]
        for row, request in rows.items():
            self._rows.extended(row, request)
        return outcomes, done

    def _row(self, request: Request) -> int:
        return self._target._keys.index(request.key)

    def _captured(self, shape: _Shape) -> tuple[ChainStep, Callable[[], None]]:
        if shape not in self._steps:
            chain_step = ChainStep(
                self._network.inner,
                self._slab,
                self._rows,
                shape.rows,
                shape.span,
                shape.drafting,
                sampled=shape.sampled,
                dtype=self._target.dtype,
                device=self._target.device,
            )
            with self._rows.idle():
                chain_step.run()
                replay = self._capture.capture(compiled(chain_step.run, self._network.compiler))
            self._steps[shape] = chain_step, replay
        return self._steps[shape]

    def _outcome(
        self, rule: AcceptanceRule, request: Request, report: Report, logits: Tensor
    ) -> Outcome:
        """As the end of `decode.step`, with what the device has drawn in place of p and noise."""
        draft = Draft.deterministic(chain([request.root, *report.drafted]))
        noise = request.noise.at(len(request.token_ids))
        accepted = rule.accept(draft, _Drawn(report.drawn), noise)
        assert len(accepted.path) == report.accepted, "host and device accept alike"
        logits = logits[: len(draft.tree)]
        p = _DeviceLaws(logits, draft.tree, request.sampler, request.output_ids, report.drawn)
        self._target.commit(request.key, (0, *accepted.path))
        trace = record(draft, p, accepted, everything=False)
        committed = request.extend(draft, p, accepted, trace)
        return Outcome(request, draft, accepted, tuple(committed), logits, p)


class _Drawn:
    """Laws of which only the tokens drawn from them are known: one-hot at those."""

    greedy = False

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens

    def __getitem__(self, node: int) -> Law:
        """The outcome of a chain's node as a law."""
        return Law.one_hot(self._tokens[node])

    def untempered(self, node: int) -> Law:
        """Asked for by lossy rules, which the device does not run."""
        raise AssertionError(f"the law of node {node} is not known")


class _DeviceLaws(Laws):
    """The target's laws, computed from the logits on the device if anyone looks.

    Those of greedy requests are known without. A trace says of the others that nobody looked.
    """

    def __init__(
        self,
        logits: Tensor,
        tree: TokenTree,
        sampler: Sampler,
        output_ids: Sequence[int],
        drawn: Sequence[int],
    ) -> None:
        # Not the parent's, which fetches the tokens of greedy laws from the device.
        self._logits, self._tree = logits, tree
        self._sampler, self._output_ids = sampler, output_ids
        known = enumerate(drawn) if sampler.plain_greedy else ()
        self._laws = {node: Law.one_hot(token) for node, token in known}
