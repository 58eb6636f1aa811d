"""Several drafters at once: `ensemble` merges their drafts, `switch` picks one per request.

Merging is SpecInfer's (Miao et al., section 4): the drafts become branches of one tree, which one
pass verifies. Switching is a bandit on goodput: each request uses the drafter with the most
committed tokens per second of recent steps, and tries the others from time to time. Where the
output's bits depend on the drafts, it counts tokens per step instead, so that the clock decides
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isnan, nan
from operator import itemgetter
from typing import Protocol, TypeAlias

from torch import Tensor

from tokenleap.control import Budget
from tokenleap.control.estimates import Decayed
from tokenleap.control.features import agreed, disagreed, path_probs, prior_rate
from tokenleap.core.distribution import Distribution, OneHots
from tokenleap.core.tree import Draft, GrowingTree
from tokenleap.decode import Outcome, StepTimes
from tokenleap.drafters.base import Drafter, DrafterTraits, PerRequest, layers_of
from tokenleap.drafters.growth import GrowingChain
from tokenleap.drafters.options import (
    HorizontalOptions,
    SwitchOptions,
)
from tokenleap.errors import CompatibilityError
from tokenleap.request import Request


class Several(Drafter):
    """Several drafters that serve the same requests: the base of what combines them."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        traits = [drafter.traits for drafter in drafters]
        self.inner = list(drafters)
        self.traits = DrafterTraits(
            hidden_layers=layers_of(drafters),
            token_limit=max(each.token_limit for each in traits),
            quotes_references=any(each.quotes_references for each in traits),
            follows_prediction=any(each.follows_prediction for each in traits),
        )

    def observe_prefill(self, request: Request, start: int, hidden: Mapping[int, Tensor]) -> None:
        for drafter in self.inner:
            if drafter.traits.hidden_layers:
                drafter.observe_prefill(request, start, hidden)

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> None:
        """All see every outcome: trained drafters need all hidden states."""
        for drafter in self.inner:
            drafter.observe(outcomes, times)

    def rewind(self, request: Request) -> None:
        for drafter in self.inner:
            drafter.rewind(request)


class Ensemble(Several):
    """All drafters propose, and `merge` makes one tree of their drafts."""

    def __init__(self, drafters: Sequence[Drafter], *, shares_nodes: bool = False) -> None:
        super().__init__(drafters)
        self._shares_nodes = shares_nodes
        looks_up = all(drafter.traits.looks_up for drafter in drafters)
        self.traits = replace(self.traits, drafts_trees=True, looks_up=looks_up)

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        # Drafts of several drafters must be independent, so each drafter has its own noise.
        proposals = [
            drafter.propose([r.with_noise(r.noise.in_lane(lane)) for r in batch], budgets)
            for lane, drafter in enumerate(self.inner)
        ]
        return [
            merge(drafts, budget.nodes, shared=self._shares_nodes)
            for drafts, budget in zip(zip(*proposals, strict=True), budgets, strict=True)
        ]


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
        limit: most drafted nodes of the tree. A sampled node is dropped where a tree of so many
            nodes has no room for a new one, even if it could share one: its token must not matter.
    """
    into = GrowingTree(drafts[0].tree.tokens[0])
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
        has_room = len(into) <= limit
        place = into.child(parent, token) if one_hot or (shared and has_room) else None
        if place is None:
            if not has_room:
                continue
            place = into.add(parent, token)
            draws.append((place, distribution))
            features.append(0)
        elif not one_hot:
            draws.append((place, distribution))
        merged[index][node] = place
        if has_features:
            better = max(features[place - 1], draft.features[node - 1], key=prior_rate)
            features[place - 1] = better
    merged_draft = Draft.drawn(into.tree(), draws)
    return replace(merged_draft, features=tuple(features)) if has_features else merged_draft


def _is_ranked(draft: Draft) -> bool:
    """Whether features may order a draft's nodes: not those of sampled ones (invariant 2)."""
    is_complete = len(draft.features) == draft.tree.num_drafted
    return is_complete and all(q.certain is not None for _, q in draft.all_draws)


_Draw: TypeAlias = tuple[int, int, Distribution]
"""A draft's index, a node of it, and the q of one of its draws."""


def _by_depth(drafts: Sequence[Draft]) -> list[_Draw]:
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


@dataclass
class _Choice:
    """One request's bandit: tokens per unit of cost of each drafter, and the drafter in use."""

    arms: list[Decayed]
    current: int = 0
    steps: int = 0
    drafting: bool = False
    """Whether the request may draft in the current step."""
    begun: set[int] = field(default_factory=set)
    """Drafters that have read the text, which the first draft's time includes."""

    def next(self, try_every: int) -> int:
        """The drafter with the best goodput; every `try_every` drafting steps the next in turn."""
        self.steps += 1
        if self.steps % try_every == 0:
            return (self.steps // try_every) % len(self.arms)
        return max(range(len(self.arms)), key=lambda i: self.arms[i].mean)


class Switch(Several):
    """Each request drafts with the drafter that had the best goodput in its recent steps.

    The cost of a step is its duration, or 1 after `ignore_times`.
    """

    def __init__(self, drafters: Sequence[Drafter], options: SwitchOptions) -> None:
        super().__init__(drafters)
        self._options = options
        self._choices = PerRequest(lambda: _Choice([Decayed(memory=0.9) for _ in drafters]))
        self._timed = True
        traits = [drafter.traits for drafter in drafters]
        self.traits = replace(
            self.traits,
            drafts_trees=any(each.drafts_trees for each in traits),
            reads_target_kv=any(each.reads_target_kv for each in traits),
            independent_siblings=all(
                each.independent_siblings or not each.drafts_trees for each in traits
            ),
        )

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """Each drafter proposes for the requests that use it.

        A request with an empty budget keeps its drafter.
        """
        chosen: dict[int, list[tuple[Request, Budget]]] = {}
        for request, budget in zip(batch, budgets, strict=True):
            choice = self._choices[request.key]
            choice.drafting = budget.chain > 0
            if choice.drafting:
                choice.current = choice.next(self._options.try_every)
            chosen.setdefault(choice.current, []).append((request, budget))
        drafts: dict[int, Draft] = {}
        for index, pairs in chosen.items():
            requests, limits = zip(*pairs, strict=True)
            proposed = self.inner[index].propose(requests, limits)
            drafts.update((r.key, d) for r, d in zip(requests, proposed, strict=True))
        return [drafts[request.key] for request in batch]

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> None:
        cost = times.draft + times.verify + times.accept if self._timed else 1.0
        for outcome in outcomes:
            choice = self._choices[outcome.request.key]
            if choice.drafting and choice.current in choice.begun:
                choice.arms[choice.current].add(len(outcome.accepted.path) + 1, cost)
            elif choice.drafting:
                choice.begun.add(choice.current)
            # Until the next draft: plain steps do not count for any drafter.
            choice.drafting = False
            for index, drafter in enumerate(self.inner):
                if index == choice.current or drafter.traits.hidden_layers:
                    drafter.observe([outcome], times)

    def ignore_times(self) -> None:
        self._timed = False
        super().ignore_times()


# `horizontal_cascade`: better drafters for early positions, cheaper ones for later positions.
#
# The horizontal cascade of Chen et al., "Cascade Speculative Drafting for Even Faster LLM
# Inference". A late token of a draft is useful only if all tokens before it are accepted, so it
# should cost less. Each drafter continues the chain of the drafters before it. The q of a token is
# that of the drafter that drew it.


class _Chain(GrowingChain):
    def __init__(self, request: Request, budget: Budget) -> None:
        super().__init__(request.root, budget)
        self.request = request

    def rest(self, max_tokens: int) -> Budget:
        """The budget of the next drafter, for at most `max_tokens` tokens."""
        budget, left = self.budget, self.budget.chain - len(self.tokens)
        length = 0 if self.ended else min(left, max_tokens)
        min_path_prob = budget.min_path_prob / self.path_prob if self.path_prob else 0.0
        return replace(budget, nodes=length, depth=length, min_path_prob=min_path_prob)

    def extend(self, draft: Draft) -> None:
        for each in zip(draft.tree.tokens[1:], draft.q, _token_probs(draft), strict=True):
            self.add(*each)


def _token_probs(draft: Draft) -> list[float]:
    """The probability of each token of a chain, by which its drafter decides where to stop."""
    drafted = list(zip(draft.q, draft.tree.tokens[1:], strict=True))
    if not draft.path_probs:
        return [q.prob(token) for q, token in drafted]
    above, probs = 1.0, []
    for (q, token), below in zip(drafted, draft.path_probs, strict=True):
        if isnan(below):  # of an appended token, only q is known
            probs.append(q.prob(token))
        else:
            probs.append(below / above if above else 0.0)
        above = below
    return probs


class HorizontalCascade(Several):
    """Chains that the first drafter begins and the next ones continue."""

    def __init__(self, drafters: Sequence[Drafter], options: HorizontalOptions) -> None:
        for index, drafter in enumerate(drafters):
            method = options.drafters[index]["method"]
            if drafter.traits.drafts_trees:
                raise CompatibilityError(
                    f"a horizontal cascade joins chains, and drafter '{method}' proposes trees."
                )
            if index and drafter.traits.reads_target_kv:
                raise CompatibilityError(
                    f"'{method}' drafts from the target's own KV, which ends with the committed "
                    "tokens: in a horizontal cascade it can only come first."
                )
        if any(drafter.traits.hidden_layers for drafter in drafters[1:]):
            raise CompatibilityError(
                "a drafter that reads hidden states, which end with the committed tokens, can only "
                "come first in a horizontal cascade."
            )
        super().__init__(drafters)
        self.traits = replace(self.traits, reads_target_kv=drafters[0].traits.reads_target_kv)
        self._stages = [_Stage(*pair) for pair in zip(drafters, options.tokens, strict=True)]

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        chains = [_Chain(*pair) for pair in zip(batch, budgets, strict=True)]
        for lane, stage in enumerate(self._stages):
            stage.extend(chains, lane)
        return [drafted.draft(with_probs=False) for drafted in chains]

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> None:
        for stage in self._stages:
            stage.observe(outcomes, times)

    def observe_prefill(self, request: Request, start: int, hidden: Mapping[int, Tensor]) -> None:
        self._stages[0].observe_prefill(request, start, hidden)

    def rewind(self, request: Request) -> None:
        """Nothing to do: `_Stage.extend` rewinds a drafter whose tokens differ from the text."""

    def release(self, request: Request) -> None:
        for stage in self._stages:
            stage.release(request)


class _Stage:
    """One drafter of the cascade, and for each request the tokens that it was shown last."""

    def __init__(self, drafter: Drafter, max_tokens: int) -> None:
        self._drafter = drafter
        self._max_tokens = max_tokens
        self._seen = PerRequest[list[int]](list)

    def extend(self, chains: Sequence[_Chain], lane: int) -> None:
        budgets = [drafted.rest(self._max_tokens) for drafted in chains]
        growing = [pair for pair in zip(chains, budgets, strict=True) if pair[1].chain]
        if not growing:
            return
        # As in an ensemble, each stage has its own noise: a position may be drafted by one stage in
        # this step and by another one in a later step.
        shown = [
            drafted.request.extended(drafted.tokens, drafted.request.noise.in_lane(lane))
            for drafted, _ in growing
        ]
        for request in shown:
            seen = self._seen[request.key]
            if request.token_ids[: len(seen)] != seen:
                self._drafter.rewind(request)
            self._seen[request.key] = request.token_ids
        drafts = self._drafter.propose(shown, [budget for _, budget in growing])
        for (drafted, _), draft in zip(growing, drafts, strict=True):
            drafted.extend(draft)

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> None:
        if self._drafter.traits.hidden_layers:  # it needs all outcomes
            for outcome in outcomes:
                self._seen.setdefault(outcome.request.key, [])  # so that `release` reaches it
        else:
            outcomes = [outcome for outcome in outcomes if outcome.request.key in self._seen]
        if outcomes:
            self._drafter.observe(outcomes, times)

    def observe_prefill(self, request: Request, start: int, hidden: Mapping[int, Tensor]) -> None:
        self._seen.setdefault(request.key, [])  # so that `release` reaches the drafter
        self._drafter.observe_prefill(request, start, hidden)

    def release(self, request: Request) -> None:
        if self._seen.pop(request.key, None) is not None:
            self._drafter.release(request)


# `hybrid`: per step and request a lookup or a trained draft, whichever is worth more.
#
# The lookup is made first, because it takes little time and how it found its tokens tells what they
# are worth. A `Chooser` then decides which requests get a trained draft. The default controller
# decides by expected tokens per second (`HybridModel`), and all other controllers leave it to
# `MoreTokens`. No choice depends on a sampled token (invariant 2).
#
# Where a trained draft contains the beginning of the lookup, the rest of the lookup is grafted
# below.


_TRAINED_RATE = 0.6
"""Acceptance rate that `MoreTokens` assumes of trained drafts."""


class Chooser(Protocol):
    """Decides which requests get a trained draft."""

    def choose(
        self, batch: Sequence[Request], budgets: Sequence[Budget], found: Sequence[Draft]
    ) -> list[Budget]:
        """Choose between the lookup and a trained draft for each request.

        Returns:
            The limits of each trained draft; an empty one where the lookup is the draft.
        """
        ...


class MoreTokens:
    """Takes what has more expected tokens, as known beforehand; the clock has no say."""

    def __init__(self, levels: int) -> None:
        self._levels = levels

    def choose(
        self, batch: Sequence[Request], budgets: Sequence[Budget], found: Sequence[Draft]
    ) -> list[Budget]:
        return [
            replace(budget, nodes=0) if self._is_better(draft, budget) else budget
            for budget, draft in zip(budgets, found, strict=True)
        ]

    def _is_better(self, lookup: Draft, budget: Budget) -> bool:
        depth = min(budget.chain, self._levels)
        trained = sum(_TRAINED_RATE**level for level in range(1, depth + 1))
        return sum(path_probs(lookup, prior_rate)) > trained


class Hybrid(Several):
    """A lookup, a trained drafter, and the choice between them."""

    def __init__(self, lookup: Drafter, trained: Drafter, max_nodes: int) -> None:
        super().__init__([lookup, trained])
        self._lookup, self._trained = lookup, trained
        self._max_nodes = max_nodes
        self.chooser: Chooser = MoreTokens(len(self.level_sizes(max_nodes)))
        ours, theirs = lookup.traits, trained.traits
        self.traits = replace(
            self.traits,
            drafts_trees=ours.drafts_trees or theirs.drafts_trees,
            independent_siblings=theirs.independent_siblings and not ours.drafts_trees,
            reads_target_kv=theirs.reads_target_kv,
            level_share=theirs.level_share,
            stops_early=theirs.stops_early,
            learnable=theirs.learnable,
        )
        self._adds_siblings = self.traits.drafts_trees and not self.traits.independent_siblings

    def with_lookup(self, make: Callable[[Drafter], Drafter]) -> Hybrid:
        """The same trained drafter beside a lookup that is made of the present one."""
        return Hybrid(make(self._lookup), self._trained, self._max_nodes)

    def level_sizes(self, limit: int) -> Sequence[int]:
        """Nodes at depths 1, 2, ... of a full trained draft, also if it is a chain."""
        most = min(limit, self._max_nodes)
        sizes = self._trained.level_sizes(most)
        return [1] * most if sizes is None else sizes

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        found = [Draft.empty(request.root) for request in batch]
        if any(budget.nodes for budget in budgets):
            found = self._lookup.propose(batch, budgets)
        chosen = self.chooser.choose(batch, budgets, found)
        rows = [row for row, budget in enumerate(chosen) if budget.chain]
        if not rows:
            return found
        trained = self._trained.propose(
            [batch[row] for row in rows],
            [replace(chosen[row], nodes=min(chosen[row].nodes, self._max_nodes)) for row in rows],
        )
        drafts = list(found)
        for row, draft in zip(rows, trained, strict=True):
            if draft.tree.num_drafted:
                drafts[row] = graft(
                    draft, found[row], budgets[row].nodes, siblings=self._adds_siblings
                )
        return drafts


def graft(trained: Draft, found: Draft, limit: int, *, siblings: bool) -> Draft:
    """Append a lookup to a trained draft with the same root, where the two agree.

    The nodes of the trained draft keep their indices, so that none is dropped. The features of the
    result tell where a token comes from: 0 is a token of the trained draft alone.
    """
    tree = trained.tree
    grown = GrowingTree(tree.tokens[0])
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        grown.add(parent, token)
    one_hot = trained.is_one_hot and found.is_one_hot
    added = list[int]()  # nodes of the lookup
    features = [0] * tree.num_drafted
    place = {0: 0}  # node of the lookup -> node of the result
    for node, feature in enumerate(found.features, 1):
        token, above = found.tree.tokens[node], place.get(found.tree.parents[node])
        if above is None:
            continue
        among = above < len(tree) and tree.children[above]
        same = grown.child(above, token)
        if same is not None and same < len(tree):
            features[same - 1] = agreed(feature)
            place[node] = same
        elif len(grown) <= limit and (siblings or not among):
            place[node] = grown.add(above, token)
            added.append(node)
            features.append(disagreed(feature) if among else feature)
    if not any(features):
        return trained
    q = OneHots(grown.tokens[1:]) if one_hot else (*trained.q, *map(found.q_of, added))
    draws = trained.draws and (*trained.draws, *((place[n], found.q_of(n)) for n in added))
    probs = trained.path_probs and (*trained.path_probs, *(nan for _ in added))
    return Draft(grown.tree(), q, tuple(features), draws, probs)
