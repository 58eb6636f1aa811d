"""The loop: draft, verify, accept, roll back. Every method of this library goes through `step`.

This file depends only on two protocols: `Verifier` is what the loop needs of a target
(`runtime.target`), and `Speculates` is what it needs of the drafting side (`speculation`). A
drafter may therefore run the loop itself, as `cascade` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tokenleap.core import clock
from tokenleap.core.acceptance.base import AcceptanceRule, Accepted
from tokenleap.core.beams import BeamDraft, scores_of, search
from tokenleap.core.sampler import TreeDistributions, draw_roots
from tokenleap.core.tree import Draft, TokenTree
from tokenleap.outputs import StreamedToken
from tokenleap.request import Request
from tokenleap.runtime.network import Need, PassOutput, states_of
from tokenleap.trace import StepTrace, record


@dataclass(frozen=True)
class StepTimes:
    """Seconds that the parts of a step took, for the whole batch.

    Args:
        draft: controllers and drafters, before the target's pass.
        verify: the target's pass.
        accept: computing p, acceptance, commit and detokenization.
    """

    draft: float
    verify: float
    accept: float


@dataclass(frozen=True)
class Outcome:
    """The result of one step for one request. Drafters and controllers learn from it.

    Args:
        request: the request. Its tokens already include the committed ones.
        draft: the verified draft.
        accepted: the rule's decision.
        committed: the tokens that became part of the output. A stop may have cut some off.
        output: the target's output after every node of the draft's tree; valid until the next
            pass.
        p: the target's distributions, computed where the rule read them; valid until the next
            pass.
    """

    request: Request
    draft: Draft
    accepted: Accepted
    committed: tuple[StreamedToken, ...]
    output: PassOutput
    p: TreeDistributions

    @property
    def root(self) -> int:
        """Index of the root in the request's tokens."""
        return len(self.request.token_ids) - len(self.committed) - 1

    def kept_of(self, proposal: TokenTree) -> list[int]:
        """The nodes of a proposal whose tokens were drafted and are part of the output."""
        kept = self.accepted.path[: len(self.committed)]
        return proposal.walk(self.draft.tree.tokens[node] for node in kept)

    @property
    def hidden(self) -> Mapping[int, Tensor]:
        """Layer id -> [1 + path, E] hidden states of the root and the accepted path."""
        nodes = [0, *self.accepted.path]
        in_order = nodes[-1] == len(nodes) - 1  # which copies nothing
        return states_of(self.output.hidden, slice(len(nodes)) if in_order else nodes)


class Verifier(Protocol):
    """The target, as the loop needs it: score trees, commit paths."""

    def verify(
        self,
        keys: Sequence[int],
        trees: Sequence[TokenTree],
        num_computed: Sequence[int] | None = None,
        need: Need = ...,
    ) -> list[PassOutput]:
        """The output after every node of each tree, from one forward pass."""
        ...

    def commit(self, key: int, nodes: Sequence[int], kept: Sequence[int] = ()) -> None:
        """Commit the KV of these nodes, root included; discard the rest but `kept` (`KVSlab`)."""
        ...


class Speculates(Protocol):
    """The drafting side, as the loop needs it."""

    def draft(self, batch: Sequence[Request]) -> list[Draft]:
        """A token tree per request; without drafted nodes the step is plain decoding."""
        ...

    def rule(self, request: Request) -> AcceptanceRule:
        """The acceptance rule of a request."""
        ...

    def hidden_layers(self, batch: Sequence[Request]) -> tuple[int, ...]:
        """Layers whose hidden states the batch's drafters need."""
        ...

    def give_up(self, request: Request, error: Exception) -> None:
        """Stop drafting for a request: its draft could not be judged, and was left out."""
        ...

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> float:
        """Learn from a step; returns the seconds that drafters took for that."""
        ...


@torch.inference_mode()
def step(target: Verifier, speculation: Speculates, batch: Sequence[Request]) -> list[Outcome]:
    """Advance every request of the batch by at least one token, with one target pass.

    A beam search advances by at least one step of the search, which may commit no token.

    If a request's own data (its distribution, its grammar, its text) makes its step fail, the
    request ends with `finish_reason` "error". The others advance. If only its draft does, by a q
    that is computed when it is read, the request advances without the draft.

    Args:
        target: holds the KV of every request: all tokens but the last (invariant 1).
        speculation: drafts, says which rule accepts, and learns.
        batch: requests that have not finished.

    Returns:
        An outcome for each request that advanced; none for a beam search, whose tree says nothing
        about what a drafter or a controller could learn.
    """
    began = clock.now()
    drafts = speculation.draft(batch)
    drafted = clock.now()
    need = Need(hidden=speculation.hidden_layers(batch))
    outputs = target.verify([r.key for r in batch], [d.tree for d in drafts], need=need)
    verified = clock.now()
    ps = {
        request.key: _distributions(request, draft, output)
        for request, draft, output in zip(batch, drafts, outputs, strict=True)
        if not isinstance(draft, BeamDraft)
    }
    draw_roots(
        ps[request.key]
        for request, draft in zip(batch, drafts, strict=True)
        if request.key in ps
        and (not draft.tree.num_drafted or speculation.rule(request).couples_draft)
    )
    outcomes: list[Outcome] = []
    for request, draft, output in zip(batch, drafts, outputs, strict=True):
        try:
            if isinstance(draft, BeamDraft):
                _search(target, request, draft, output)
                continue
            p = ps[request.key]
            outcomes.append(_advance(target, speculation, request, draft, output, p))
        except Exception as error:  # of this request alone: the others go on
            request.fail(error)
    times = StepTimes(drafted - began, verified - drafted, clock.now() - verified)
    learning = speculation.observe(outcomes, times)
    for request in batch:
        if request.failure is None:
            request.record_times(times.draft + learning, times.verify, times.accept)
    return outcomes


def _distributions(request: Request, draft: Draft, output: PassOutput) -> TreeDistributions:
    return TreeDistributions(
        output.scores,
        draft.tree,
        request.sampler,
        request.output_ids,
        output.argmax,
        request.noise,
        len(request.token_ids),
    )


def _advance(
    target: Verifier,
    speculation: Speculates,
    request: Request,
    draft: Draft,
    output: PassOutput,
    p: TreeDistributions,
) -> Outcome:
    """Accept, commit the accepted path, and append its tokens to the request."""
    rule = speculation.rule(request)
    try:
        accepted, trace = _judged(rule, request, draft, p)
    except Exception as error:
        if not draft.tree.num_drafted:
            raise
        root = slice(1)
        draft, output = Draft.empty(request.root), output.rows(root, root)
        p = _distributions(request, draft, output)
        accepted, trace = _judged(rule, request, draft, p)
        speculation.give_up(request, error)  # without the draft, nothing failed
    target.commit(request.key, (0, *accepted.path))
    committed = request.extend(draft, p, accepted, trace)
    return Outcome(request, draft, accepted, tuple(committed), output, p)


def _judged(
    rule: AcceptanceRule, request: Request, draft: Draft, p: TreeDistributions
) -> tuple[Accepted, StepTrace]:
    """The rule's decision about a draft, and the step's trace."""
    accepted = rule.accept(draft, p, request.noise.at(len(request.token_ids)))
    return accepted, record(draft, p, accepted, everything=request.trace_all)


def _search(target: Verifier, request: Request, draft: BeamDraft, output: PassOutput) -> None:
    """Advance a beam search, and commit what all that is left of it begins with."""
    searched = search(draft, scores_of(draft, output.scores, request.sampler, request.output_ids))
    target.commit(request.key, searched.cached, searched.kept)
    request.follow(draft, searched)
