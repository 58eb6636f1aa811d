"""Several drafters at once: `ensemble` merges their drafts, `switch` picks one per request.

Merging is SpecInfer's (Miao et al., section 4): the drafts become branches of one tree, verified in
one pass. Switching is a bandit on goodput: the drafter with the most committed tokens per second of
step time lately, with an occasional try of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, MinLen
from torch import Tensor

from foretoken.control import Budget
from foretoken.control.evidence import at_first, path_odds
from foretoken.core.distribution import Distribution
from foretoken.core.tree import Draft, TokenTree
from foretoken.decode import Outcome, StepTimes
from foretoken.drafters.base import Drafter, DrafterOptions, layers_of
from foretoken.request import Request

__all__ = ["CombineOptions", "Ensemble", "Switch", "SwitchOptions", "merge"]


class CombineOptions(DrafterOptions):
    """Options of `ensemble`.

    Args:
        drafters: at least two configurations, each with `method` and that method's own fields.
    """

    drafters: Annotated[tuple[Mapping[str, Any], ...], MinLen(2)]


class SwitchOptions(CombineOptions):
    """Options of `switch`.

    Args:
        drafters: see `CombineOptions`.
        try_every: after how many drafting steps of a request another drafter is tried.
    """

    try_every: Annotated[int, Ge(2)] = 16


class _Several(Drafter):
    """Drafters that all see the same requests come and go."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = list(drafters)
        self.hidden_layers = layers_of(drafters)

    def observe_prefill(self, request: Request, start: int, hidden: Mapping[int, Tensor]) -> None:
        """Every drafter that asks for hidden states sees them."""
        for drafter in self._drafters:
            if drafter.hidden_layers:
                drafter.observe_prefill(request, start, hidden)

    def rewind(self, request: Request) -> None:
        """Every drafter takes the tokens back."""
        for drafter in self._drafters:
            drafter.rewind(request)

    def release(self, request: Request) -> None:
        """Every drafter forgets the request."""
        for drafter in self._drafters:
            drafter.release(request)

    def forget(self) -> None:
        """Every drafter forgets earlier requests."""
        for drafter in self._drafters:
            drafter.forget()


class Ensemble(_Several):
    """All drafters propose; their drafts are merged into one tree (`merge`)."""

    drafts_trees = True

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        super().__init__(drafters)
        self.looks_up = all(drafter.looks_up for drafter in drafters)

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """Merged trees, cut to the budget's number of nodes."""
        # Siblings must be independent: every drafter draws from a lane of its own.
        proposals = [
            drafter.propose([r.with_noise(r.noise.in_lane(lane)) for r in batch], budgets)
            for lane, drafter in enumerate(self._drafters)
        ]
        return [
            merge(drafts, budget.nodes)
            for drafts, budget in zip(zip(*proposals, strict=True), budgets, strict=True)
        ]

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> None:
        """Every drafter sees what came of the whole."""
        for drafter in self._drafters:
            drafter.observe(outcomes, times)


def merge(drafts: Sequence[Draft], limit: int) -> Draft:
    """One tree of all drafts with at most `limit` drafted nodes.

    A node that was not drawn at random (one-hot q) is merged with an elder sibling of its token:
    once that one is turned down the residual leaves the token nothing, so that trying it again
    could neither succeed nor change the distribution. A drawn node is never merged, because its q
    changes the residual whatever its token is (the drafting invariant). Where all drafts were
    looked up a merged node has the better of its features, and the likeliest nodes come first; else
    the highest ones.
    """
    tokens, parents = [drafts[0].tree.tokens[0]], [-1]
    distributions: list[Distribution] = []
    features: list[int] = []
    places: list[dict[int, int]] = [{0: 0} for _ in drafts]  # of each draft's nodes in the tree
    known = all(len(draft.features) == draft.tree.num_drafted for draft in drafts)
    for index, node in (_by_odds if known else _by_depth)(drafts):
        draft = drafts[index]
        parent = places[index].get(draft.tree.parents[node])
        if parent is None:
            continue  # its parent did not fit
        token, distribution = draft.tree.tokens[node], draft.q_of(node)
        place = _child(tokens, parents, parent, token) if distribution.certain is not None else None
        if place is None and len(distributions) < limit:
            place = len(tokens)
            tokens.append(token)
            parents.append(parent)
            distributions.append(distribution)
            features.append(0)
        if place is not None:
            places[index][node] = place
            if known:
                features[place - 1] = max(
                    features[place - 1], draft.features[node - 1], key=at_first
                )
    tree = TokenTree(tuple(tokens), tuple(parents))
    return Draft(tree, tuple(distributions), tuple(features) if known else ())


def _by_depth(drafts: Sequence[Draft]) -> list[tuple[int, int]]:
    """(draft, node) of all drafted nodes level by level, so that no draft takes all the room."""
    nodes = [
        (draft.tree.depths[node], index, node)
        for index, draft in enumerate(drafts)
        for node in range(1, len(draft.tree))
    ]
    return [(index, node) for _, index, node in sorted(nodes)]


def _by_odds(drafts: Sequence[Draft]) -> list[tuple[int, int]]:
    """(draft, node) of all drafted nodes, the likeliest path first; parents before children."""
    nodes = [
        (-odds, index, node)
        for index, draft in enumerate(drafts)
        for node, odds in enumerate(path_odds(draft, at_first), 1)
    ]
    return [(index, node) for _, index, node in sorted(nodes)]


def _child(tokens: Sequence[int], parents: Sequence[int], parent: int, token: int) -> int | None:
    for node in range(parent + 1, len(tokens)):
        if parents[node] == parent and tokens[node] == token:
            return node
    return None


@dataclass
class _Arm:
    """Decayed tokens and seconds of one drafter."""

    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens = 0.9 * self.tokens + tokens
        self.seconds = 0.9 * self.seconds + seconds

    @property
    def goodput(self) -> float:
        """Tokens per second; an untried arm comes first."""
        return self.tokens / self.seconds if self.seconds else float("inf")


@dataclass
class _Choice:
    """What a request knows of the drafters."""

    arms: list[_Arm]
    current: int = 0
    steps: int = 0
    drafting: bool = False
    """Whether there is anything to choose, and to credit, in the present step."""

    def next(self, try_every: int) -> int:
        """The best arm; each `try_every`-th drafting step the next one in turn."""
        self.steps += 1
        if self.steps % try_every == 0:
            return (self.steps // try_every) % len(self.arms)
        return max(range(len(self.arms)), key=lambda i: self.arms[i].goodput)


class Switch(_Several):
    """Each request drafts with the drafter that has served it best lately."""

    def __init__(self, drafters: Sequence[Drafter], options: SwitchOptions) -> None:
        super().__init__(drafters)
        self._options = options
        self._choices: dict[int, _Choice] = {}
        self.drafts_trees = any(drafter.drafts_trees for drafter in drafters)
        self.reads_target_kv = any(drafter.reads_target_kv for drafter in drafters)
        self.independent_siblings = all(
            drafter.independent_siblings or not drafter.drafts_trees for drafter in drafters
        )

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """Each drafter proposes for the requests that chose it; who may not draft stays with it."""
        chosen: dict[int, list[tuple[Request, Budget]]] = {}
        for request, budget in zip(batch, budgets, strict=True):
            choice = self._choice(request)
            choice.drafting = budget.chain > 0
            if choice.drafting:
                choice.current = choice.next(self._options.try_every)
            chosen.setdefault(choice.current, []).append((request, budget))
        drafts: dict[int, Draft] = {}
        for index, pairs in chosen.items():
            requests, limits = zip(*pairs, strict=True)
            proposed = self._drafters[index].propose(requests, limits)
            drafts.update((r.key, d) for r, d in zip(requests, proposed, strict=True))
        return [drafts[request.key] for request in batch]

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> None:
        """Credit the chosen drafter with the tokens of its step; pass the outcome on to it."""
        seconds = times.draft + times.verify + times.accept
        for outcome in outcomes:
            choice = self._choices[outcome.request.key]
            if choice.drafting:
                choice.arms[choice.current].add(len(outcome.accepted.path) + 1, seconds)
            for index, drafter in enumerate(self._drafters):
                if index == choice.current or drafter.hidden_layers:
                    drafter.observe([outcome], times)

    def release(self, request: Request) -> None:
        """Forget the request everywhere; a rewind leaves what was learnt of the drafters."""
        self._choices.pop(request.key, None)
        super().release(request)

    def _choice(self, request: Request) -> _Choice:
        if request.key not in self._choices:
            self._choices[request.key] = _Choice([_Arm() for _ in self._drafters])
        return self._choices[request.key]
