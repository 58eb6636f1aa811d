"""The loop: draft, verify, accept, roll back. Every method of this library goes through `step`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from foretoken.acceptance.base import AcceptanceRule, Accepted
from foretoken.control import Controller
from foretoken.drafters.base import Drafter
from foretoken.outputs import StreamedToken
from foretoken.request import Request
from foretoken.sampling import Laws
from foretoken.trace import record
from foretoken.tree import Draft, TokenTree

__all__ = ["Outcome", "StepTimes", "Verifier", "keep", "step", "tell"]


class Verifier(Protocol):
    """What the loop needs of a target: score trees, keep paths."""

    def verify(self, keys: Sequence[int], trees: Sequence[TokenTree]) -> list[Tensor]:
        """Logits [n+1, V] after every node of each tree, in one forward pass."""
        ...

    def likeliest(self, key: int) -> Sequence[int] | None:
        """After every node of the row's last tree the token of the largest logit, where known."""
        ...

    def commit(self, key: int, nodes: Sequence[int]) -> None:
        """Keep the KV of these nodes, root included; discard the rest."""
        ...


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step's parts, for the whole batch.

    Args:
        draft: for drafting, and for what the drafter learns afterwards once it has; 0 where it was
            not told apart from the pass, and counts as that.
        verify: of the target's pass.
        accept: for everything after it.
        rows: of that pass, where a controller is shown a part of the batch; 0 where it is all.
        positions: the same.
        noted: whether another controller with the same curve of costs was shown the pass before.
    """

    draft: float
    verify: float
    accept: float
    rows: int = 0
    positions: int = 0
    noted: bool = False


@dataclass(frozen=True)
class Outcome:
    """What one step did to one request: for drafters and controllers to learn from."""

    request: Request
    draft: Draft
    accepted: Accepted
    committed: tuple[StreamedToken, ...]
    logits: Tensor
    """[n+1, V] of the target, valid until the next pass."""
    p: Laws
    """The target's laws, computed where the rule looked; valid as long."""


@torch.inference_mode()
def step(
    target: Verifier,
    drafter: Drafter,
    rule: AcceptanceRule,
    controller: Controller,
    batch: Sequence[Request],
) -> list[Outcome]:
    """Advance every request of the batch by at least one token, with one target pass.

    Args:
        target: holds the KV of every request: all tokens but the last (law 1).
        drafter: proposes a tree per request.
        rule: decides what is kept.
        controller: says how much to draft.
        batch: requests that have not finished.
    """
    began = time.perf_counter()
    drafts = controller.trim(batch, drafter.propose(batch, controller.budgets(batch)))
    drafted = time.perf_counter()
    scores = target.verify([r.key for r in batch], [draft.tree for draft in drafts])
    verified = time.perf_counter()
    outcomes = [
        _accept(target, rule, request, draft, logits)
        for request, draft, logits in zip(batch, drafts, scores, strict=True)
    ]
    times = StepTimes(drafted - began, verified - drafted, time.perf_counter() - verified)
    tell(drafter, controller, outcomes, times)
    return outcomes


def _accept(
    target: Verifier, rule: AcceptanceRule, request: Request, draft: Draft, logits: Tensor
) -> Outcome:
    best = target.likeliest(request.key)
    p = Laws(logits, draft.tree, request.sampler, request.output_ids, best)
    noise = request.noise.at(len(request.token_ids))
    return keep(target, request, draft, rule.accept(draft, p, noise), logits, p)


def keep(
    target: Verifier, request: Request, draft: Draft, accepted: Accepted, logits: Tensor, p: Laws
) -> Outcome:
    """Commit the accepted path of one request's draft, and extend the request by it."""
    target.commit(request.key, (0, *accepted.path))
    trace = record(draft, p, accepted, everything=request.trace_all)
    committed = request.extend(draft, p, accepted, trace)
    return Outcome(request, draft, accepted, tuple(committed), logits, p)


def tell(
    drafter: Drafter, controller: Controller, outcomes: Sequence[Outcome], times: StepTimes
) -> None:
    """Show a step to all who learn from it, or write it down."""
    began = time.perf_counter()
    drafter.observe(outcomes, times)
    if times.draft:
        times = replace(times, draft=times.draft + time.perf_counter() - began)
    controller.observe(outcomes, times)
    for outcome in outcomes:
        outcome.request.record_times(times.draft, times.verify, times.accept)
