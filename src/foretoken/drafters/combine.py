"""Several drafters at once: `ensemble` merges their drafts, `switch` picks one per request.

Merging is SpecInfer's (Miao et al., section 4): the drafts become branches of one tree, verified in
one pass. Switching is a bandit on goodput: the drafter with the most committed tokens per second of
step time lately, with an occasional try of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, MinLen

from foretoken.control import Budget
from foretoken.control.evidence import at_first, path_odds
from foretoken.drafters.base import Drafter, DrafterOptions
from foretoken.law import Law
from foretoken.request import Request
from foretoken.tree import Draft, TokenTree

if TYPE_CHECKING:
    from foretoken.decode import Outcome, StepTimes

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

    makes_branches = True

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
    could neither succeed nor change the law. A drawn node is never merged, because its q changes
    the residual whatever its token is (the drafting law). Where all drafts were looked up a merged
    node has the better of its grounds, and the likeliest nodes come first; else the highest ones.
    """
    tokens, parents = [drafts[0].tree.tokens[0]], [-1]
    laws: list[Law] = []
    grounds: list[int] = []
    places: list[dict[int, int]] = [{0: 0} for _ in drafts]  # of each draft's nodes in the tree
    known = all(len(draft.grounds) == draft.tree.num_drafted for draft in drafts)
    for index, node in (_by_odds if known else _by_depth)(drafts):
        draft = drafts[index]
        parent = places[index].get(draft.tree.parents[node])
        if parent is None:
            continue  # its parent did not fit
        token, law = draft.tree.tokens[node], draft.law(node)
        place = _child(tokens, parents, parent, token) if law.certain is not None else None
        if place is None and len(laws) < limit:
            place = len(tokens)
            tokens.append(token)
            parents.append(parent)
            laws.append(law)
            grounds.append(0)
        if place is not None:
            places[index][node] = place
            if known:
                grounds[place - 1] = max(grounds[place - 1], draft.grounds[node - 1], key=at_first)
    tree = TokenTree(tuple(tokens), tuple(parents))
    return Draft(tree, tuple(laws), tuple(grounds) if known else ())


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
        self.makes_branches = any(drafter.makes_branches for drafter in drafters)
        self.reads_target_kv = any(drafter.reads_target_kv for drafter in drafters)
        self.independent_siblings = all(
            drafter.independent_siblings or not drafter.makes_branches for drafter in drafters
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
            self._drafters[choice.current].observe([outcome], times)

    def release(self, request: Request) -> None:
        """Forget the request everywhere; a rewind leaves what was learnt of the drafters."""
        self._choices.pop(request.key, None)
        super().release(request)

    def _choice(self, request: Request) -> _Choice:
        if request.key not in self._choices:
            self._choices[request.key] = _Choice([_Arm() for _ in self._drafters])
        return self._choices[request.key]
