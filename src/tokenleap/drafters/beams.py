"""Drafts for beam searches: the tree of the search, and below its leaves what another drafter adds.

A step of the search needs the target's output at all live beams. So a draft saves a pass only if it
has a node for every beam of the next step (Leviathan et al., "Fast Inference from Transformers via
Speculative Decoding", appendix A.4). A draft model searches itself, with as many beams
(`DraftedBeams`). Other drafters draft for each beam as if it were a request of its own
(`DraftPerBeam`). Drafts that save nothing are soon made only now and then. The output is that of
the search without proposals (`core.beams.search`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tokenleap.control.base import Budget
from tokenleap.core.beams import BeamDraft, Beams, scores_of
from tokenleap.core.tree import Draft, TokenTree
from tokenleap.drafters.base import Drafter, DrafterTraits, PerRequest
from tokenleap.drafters.model_drafter import ModelDrafter, Scorer
from tokenleap.errors import CompatibilityError
from tokenleap.request import Request

LONGEST_PAUSE = 32
"""Most steps from a draft that saved no pass to the next draft."""


class Proposer(ABC):
    """Adds proposals to the tree of a search."""

    quotes_references: bool = False
    """See `DrafterTraits.quotes_references`."""

    @abstractmethod
    def extend(self, batch: Sequence[Request], levels: Sequence[int]) -> list[TokenTree]:
        """The trees of the batch's searches, with nodes for later steps after their own."""

    @abstractmethod
    def release(self, request: Request) -> None:
        """Forget a request."""


@dataclass
class _Pace:
    """How often to draft for a request: after each failure in a row half as often as before."""

    saved: int = 0  # passes saved so far
    failures: int = 0
    wait: int = 0  # steps until the next draft

    def drafts_now(self, saved: int) -> bool:
        """Whether to draft in this step. It is asked in every step."""
        if saved > self.saved:
            self.saved, self.failures, self.wait = saved, 0, 0
        if self.wait:
            self.wait -= 1
            return False
        self.wait = min(2**self.failures, LONGEST_PAUSE) - 1
        self.failures += 1
        return True


class BeamDrafter(Drafter):
    """The trees of beam searches, with proposals or without."""

    def __init__(self, proposer: Proposer | None = None) -> None:
        self._proposer = proposer
        quotes = proposer is not None and proposer.quotes_references
        self.traits = DrafterTraits(drafts_trees=True, quotes_references=quotes)
        self._paces = PerRequest(_Pace)

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        levels = {
            request.key: min(budget.chain, _steps_left(request))
            for request, budget in zip(batch, budgets, strict=True)
        }
        drafts = {request.key: request.undrafted() for request in batch}
        wanted = [r for r in batch if levels[r.key] > 0 and self._drafts_now(r)]
        if self._proposer is not None and wanted:
            trees = self._proposer.extend(wanted, [levels[request.key] for request in wanted])
            for request, tree in zip(wanted, trees, strict=True):
                drafts[request.key] = BeamDraft.of(_beams(request), tree)
        return [drafts[request.key] for request in batch]

    def _drafts_now(self, request: Request) -> bool:
        return self._paces[request.key].drafts_now(request.metrics.num_accepted_tokens)

    def release(self, request: Request) -> None:
        super().release(request)
        if self._proposer is not None:
            self._proposer.release(request)


class DraftPerBeam(Proposer):
    """Continues each beam by another drafter, as if the beam were a request of its own.

    Args:
        drafter: sees only committed tokens, so it needs neither states nor outcomes.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.quotes_references = drafter.traits.quotes_references
        self._views: dict[int, list[Request]] = {}  # request key -> the beams' own requests

    def extend(self, batch: Sequence[Request], levels: Sequence[int]) -> list[TokenTree]:
        views = [view for request in batch for view in self._update(request)]
        budgets = [
            Budget(most, most)
            for request, most in zip(batch, levels, strict=True)
            for _ in self._views[request.key]
        ]
        drafts = iter(self._drafter.propose(views, budgets))
        return [_joined(beams, [next(drafts) for _ in beams.live]) for beams in map(_beams, batch)]

    def _update(self, request: Request) -> list[Request]:
        """The requests of the live beams. One that a beam continues is kept, for its state."""
        beams = _beams(request)
        free = self._views.pop(request.key, [])
        texts = [[*request.token_ids, *beams.tree.path_tokens(node)] for _, node in beams.live]
        continued = dict[int, Request]()
        for index, text in enumerate(texts):
            before = next((v for v in free if text[: len(v.token_ids)] == v.token_ids), None)
            if before is not None:
                continued[index] = request.view(text, before.key)
                free.remove(before)
        views = [
            continued.get(index) or self._replaced(request, text, free)
            for index, text in enumerate(texts)
        ]
        for view in free:
            self._end(view)
        self._views[request.key] = views
        return views

    def _replaced(self, request: Request, text: list[int], free: list[Request]) -> Request:
        """The request of a beam that continues none of the present ones."""
        if not free:
            return request.view(text)
        view = request.view(text, free.pop().key)
        self._drafter.rewind(view)
        return view

    def release(self, request: Request) -> None:
        for view in self._views.pop(request.key, ()):
            self._end(view)

    def _end(self, view: Request) -> None:
        self._drafter.rewind(view)  # so that its text, which is no output, is kept for nobody
        self._drafter.release(view)


class DraftedBeams(Proposer):
    """The draft model's own beam search, from the target's live beams on."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    def extend(self, batch: Sequence[Request], levels: Sequence[int]) -> list[TokenTree]:
        return [self._extended(*each) for each in zip(batch, levels, strict=True)]

    def _extended(self, request: Request, levels: int) -> TokenTree:
        beams = replace(_beams(request), finished=())
        most = self._scorer.most_depth
        if most is not None:  # its levels count from the committed tokens
            known = max(beams.tree.depths[leaf] for _, leaf in beams.live)
            levels = min(levels, most - known)
            if levels < 1:
                return beams.tree
            self._scorer.expect({request.key: known + levels})
        nodes = len(beams.tree) + levels * beams.settings.width
        if self._scorer.room(request) < nodes or not self._scorer.admit([request], nodes):
            return beams.tree
        pending = self._scorer.pending(request)
        (output,) = self._scorer.verify([request.key], [_behind(pending, beams.tree, 1)], [0])
        computed = 1  # nodes of the search's tree
        for _ in range(levels):
            if computed < len(beams.tree):
                tree = _behind(pending, beams.tree, len(beams.tree))
                skipped = len(pending) - 1 + computed
                (output,) = self._scorer.verify([request.key], [tree], [skipped])
                computed = len(beams.tree)
            scores = scores_of(beams.draft, output.scores, request.sampler, request.output_ids)
            after = beams.advance(scores([node for _, node in beams.live]))
            if after.done:
                break
            beams = after
        self._scorer.finish_draft(request, len(pending))
        return beams.tree

    def release(self, request: Request) -> None:
        self._scorer.release(request)


def beam_drafter(drafter: Drafter) -> BeamDrafter:
    """A drafter for beam searches that takes its proposals from this one."""
    own = type(drafter).__name__
    traits = drafter.traits
    learns = type(drafter).observe is not Drafter.observe and not traits.only_counts
    if traits.hidden_layers or traits.reads_target_kv or traits.token_limit or learns:
        raise CompatibilityError(
            f"beam_width: {own} drafts from the target's states or from the outcome of its drafts, "
            "which beams do not have: draft with a text method or a draft model, or with "
            "{'method': 'none'}."
        )
    if isinstance(drafter, ModelDrafter):
        scorer = drafter.scorer
        if scorer.token_ids is None and not scorer.translates:
            return BeamDrafter(DraftedBeams(scorer))
    return BeamDrafter(DraftPerBeam(drafter))


def _beams(request: Request) -> Beams:
    assert request.beams is not None, "the engine gives this drafter beam searches only"
    return request.beams


def _steps_left(request: Request) -> int:
    """Steps of the search after the next one whose output is not the last one's."""
    beams = _beams(request)
    return beams.settings.max_tokens - beams.length - 1


def _joined(beams: Beams, drafts: Sequence[Draft]) -> TokenTree:
    """The tree of a search with a draft below each live beam."""
    tokens, parents = list(beams.tree.tokens), list(beams.tree.parents)
    for (_, leaf), draft in zip(beams.live, drafts, strict=True):
        shift = len(tokens) - 1
        tokens += draft.tree.tokens[1:]
        parents += [parent + shift if parent else leaf for parent in draft.tree.parents[1:]]
    return TokenTree(tuple(tokens), tuple(parents))


def _behind(pending: Sequence[int], tree: TokenTree, count: int) -> TokenTree:
    """The first `count` nodes of a tree, with these tokens as a chain down to its root."""
    shift = len(pending) - 1
    parents = [parent + shift for parent in tree.parents[1:count]]
    return TokenTree((*pending, *tree.tokens[1:count]), (*range(-1, shift), *parents))
