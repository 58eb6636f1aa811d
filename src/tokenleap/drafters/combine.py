"""Several drafters at once: `ensemble` merges their drafts, `switch` picks one per request.

Merging is SpecInfer's (Miao et al., section 4): the drafts become branches of one tree, which one
pass verifies. Switching is a bandit on goodput: each request uses the drafter with the most
committed tokens per second of recent steps, and tries the others from time to time. Where the
output's bits depend on the drafts, it counts tokens per step instead, so that the clock decides
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TypeAlias

from torch import Tensor

from tokenleap.control import Budget
from tokenleap.control.evidence import path_probs, prior_rate
from tokenleap.core.distribution import Distribution
from tokenleap.core.tree import Draft, TokenTree
from tokenleap.decode import Outcome, StepTimes
from tokenleap.drafters.base import Drafter, layers_of
from tokenleap.drafters.options.combined import CombineOptions, SwitchOptions
from tokenleap.request import Request

__all__ = ["CombineOptions", "Ensemble", "Several", "Switch", "SwitchOptions", "merge"]


class Several(Drafter):
    """Base of `Ensemble`, `Switch` and `Hybrid`: several drafters that serve the same requests.

    Args:
        drafters: the drafters, in the order of the options.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = list(drafters)
        self.hidden_layers = layers_of(drafters)
        self.token_limit = max(drafter.token_limit for drafter in drafters)
        self.quotes_references = any(drafter.quotes_references for drafter in drafters)
        self.follows_prediction = any(drafter.follows_prediction for drafter in drafters)

    def observe_prefill(self, request: Request, start: int, hidden: Mapping[int, Tensor]) -> None:
        """Show the hidden states to every drafter that needs any."""
        for drafter in self._drafters:
            if drafter.hidden_layers:
                drafter.observe_prefill(request, start, hidden)

    def rewind(self, request: Request) -> None:
        """Rewind every drafter."""
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

    def ignore_times(self) -> None:
        """No drafter decides by the clock."""
        for drafter in self._drafters:
            drafter.ignore_times()


class Ensemble(Several):
    """All drafters propose, and `merge` makes one tree of their drafts.

    Args:
        drafters: the drafters, in the order of the options.
    """

    drafts_trees = True

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        super().__init__(drafters)
        self.looks_up = all(drafter.looks_up for drafter in drafters)

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """Merged trees, cut to the budget's number of nodes."""
        # Drafts of several drafters must be independent, so each drafter has its own noise.
        proposals = [
            drafter.propose([r.with_noise(r.noise.in_lane(lane)) for r in batch], budgets)
            for lane, drafter in enumerate(self._drafters)
        ]
        return [
            merge(drafts, budget.nodes, shared=self.shares_nodes)
            for drafts, budget in zip(zip(*proposals, strict=True), budgets, strict=True)
        ]

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> None:
        """Every drafter sees the outcome of the merged draft."""
        for drafter in self._drafters:
            drafter.observe(outcomes, times)


def merge(drafts: Sequence[Draft], limit: int, *, shared: bool = False) -> Draft:
    """Merge drafts of one request into one tree.

    A node that was not sampled (one-hot q) is merged with an earlier sibling that has the same
    token. If that sibling is rejected, the residual distribution gives the token probability 0. A
    second try could neither succeed nor change the distribution. Trying a sampled node changes the
    residual distribution, whatever its token (invariant 2). So a sampled node gets a node of its
    own; or with `shared`, it is another draw of the sibling's node (`Draft.draws`).

    If all nodes have features and none was sampled, those with the highest path probability are
    kept, and a merged node has the better of its features. Otherwise the nodes closest to the root
    are kept.

    Args:
        drafts: drafts with the same root.
        limit: most drafted nodes of the tree. A sampled node is dropped where a tree of so many
            nodes has no room for a new one, even if it could share one: its token must not matter.
        shared: whether equal draws share a node.
    """
    tokens, parents = [drafts[0].tree.tokens[0]], [-1]
    draws: list[tuple[int, Distribution]] = []
    features: list[int] = []
    merged: list[dict[int, int]] = [{0: 0} for _ in drafts]  # per draft: its node -> merged node
    has_features = all(map(_is_ranked, drafts))
    for index, node, distribution in (_by_path_prob if has_features else _by_depth)(drafts):
        draft = drafts[index]
        parent = merged[index].get(draft.tree.parents[node])
        if parent is None:
            continue  # the limit left no room for its parent
        token, one_hot = draft.tree.tokens[node], distribution.certain is not None
        has_room = len(tokens) <= limit
        shares = one_hot or (shared and has_room)
        into = _child(tokens, parents, parent, token) if shares else None
        if into is None and has_room:
            into = len(tokens)
            tokens.append(token)
            parents.append(parent)
            draws.append((into, distribution))
            features.append(0)
        elif into is not None and not one_hot:
            draws.append((into, distribution))
        if into is not None:
            merged[index][node] = into
            if has_features:
                features[into - 1] = max(
                    features[into - 1], draft.features[node - 1], key=prior_rate
                )
    merged_draft = Draft.drawn(TokenTree(tuple(tokens), tuple(parents)), draws)
    return replace(merged_draft, features=tuple(features)) if has_features else merged_draft


def _is_ranked(draft: Draft) -> bool:
    """Whether features may order a draft's nodes: not those of sampled ones (invariant 2)."""
    is_complete = len(draft.features) == draft.tree.num_drafted
    return is_complete and all(q.certain is not None for _, q in draft.all_draws)


_Draw: TypeAlias = tuple[int, int, Distribution]
"""A draft's index, a node of it, and the q of one of its draws."""


def _by_depth(drafts: Sequence[Draft]) -> list[_Draw]:
    """All draws level by level, so that every draft gets a share."""
    draws = [
        (draft.tree.depths[node], index, node, distribution)
        for index, draft in enumerate(drafts)
        for node, distribution in draft.all_draws
    ]
    return [draw[1:] for draw in sorted(draws, key=itemgetter(0, 1))]  # it keeps their order


def _by_path_prob(drafts: Sequence[Draft]) -> list[_Draw]:
    """All nodes of drafts with features, the most probable path first, parents first."""
    nodes = [
        (-path_prob, index, node)
        for index, draft in enumerate(drafts)
        for node, path_prob in enumerate(path_probs(draft, prior_rate), 1)
    ]
    return [(index, node, drafts[index].q_of(node)) for _, index, node in sorted(nodes)]


def _child(tokens: Sequence[int], parents: Sequence[int], parent: int, token: int) -> int | None:
    for node in range(parent + 1, len(tokens)):
        if parents[node] == parent and tokens[node] == token:
            return node
    return None


@dataclass
class _Arm:
    """The bandit's record of one drafter: decayed sums of committed tokens and of costs."""

    tokens: float = 0.0
    cost: float = 0.0

    def add(self, tokens: int, cost: float) -> None:
        self.tokens = 0.9 * self.tokens + tokens
        self.cost = 0.9 * self.cost + cost

    @property
    def goodput(self) -> float:
        """Committed tokens per unit of cost; infinite for a drafter that was not tried yet."""
        return self.tokens / self.cost if self.cost else float("inf")


@dataclass
class _Choice:
    """One request's bandit: its record of each drafter, and the drafter in use."""

    arms: list[_Arm]
    current: int = 0
    steps: int = 0
    drafting: bool = False
    """Whether the request may draft in the current step."""

    def next(self, try_every: int) -> int:
        """The drafter with the best goodput; every `try_every` drafting steps the next in turn."""
        self.steps += 1
        if self.steps % try_every == 0:
            return (self.steps // try_every) % len(self.arms)
        return max(range(len(self.arms)), key=lambda i: self.arms[i].goodput)


class Switch(Several):
    """Each request drafts with the drafter that had the best goodput in its recent steps.

    The cost of a step is its duration, or 1 after `ignore_times`.

    Args:
        drafters: the drafters, in the order of the options.
        options: see `SwitchOptions`.
    """

    def __init__(self, drafters: Sequence[Drafter], options: SwitchOptions) -> None:
        super().__init__(drafters)
        self._options = options
        self._choices: dict[int, _Choice] = {}
        self._timed = True
        self.drafts_trees = any(drafter.drafts_trees for drafter in drafters)
        self.reads_target_kv = any(drafter.reads_target_kv for drafter in drafters)
        self.independent_siblings = all(
            drafter.independent_siblings or not drafter.drafts_trees for drafter in drafters
        )

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """Each drafter proposes for the requests that use it.

        A request with an empty budget keeps its drafter.
        """
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
        """Record the step's goodput for the drafter in use, and show it the outcome."""
        cost = times.draft + times.verify + times.accept if self._timed else 1.0
        for outcome in outcomes:
            choice = self._choice(outcome.request)
            if choice.drafting:
                choice.arms[choice.current].add(len(outcome.accepted.path) + 1, cost)
            # Until the next draft: plain steps do not count for any drafter.
            choice.drafting = False
            for index, drafter in enumerate(self._drafters):
                if index == choice.current or drafter.hidden_layers:
                    drafter.observe([outcome], times)

    def ignore_times(self) -> None:
        """Choose by committed tokens per step."""
        self._timed = False
        super().ignore_times()

    def release(self, request: Request) -> None:
        """Forget the request. A rewind, in contrast, keeps the records of the drafters."""
        self._choices.pop(request.key, None)
        super().release(request)

    def _choice(self, request: Request) -> _Choice:
        if request.key not in self._choices:
            self._choices[request.key] = _Choice([_Arm() for _ in self._drafters])
        return self._choices[request.key]
