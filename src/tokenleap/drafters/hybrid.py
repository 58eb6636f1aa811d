"""`hybrid`: per step and request a lookup or a trained draft, whichever is worth more.

The lookup is made first, because it takes little time and how it found its tokens tells what they
are worth. A `Chooser` then decides which requests get a trained draft. The default controller
decides by expected tokens per second (`control.hybrid_model`), and all other controllers leave it
to `MoreTokens`. No choice depends on a sampled token (invariant 2).

Where a trained draft contains the beginning of the lookup, the rest of the lookup is grafted below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import nan
from typing import Protocol

from tokenleap.control import Budget
from tokenleap.control.evidence import agreed, disagreed, path_probs, prior_rate
from tokenleap.core.distribution import Distribution
from tokenleap.core.tree import Draft, TokenTree
from tokenleap.decode import Outcome, StepTimes
from tokenleap.drafters.base import Drafter
from tokenleap.drafters.combine import Several
from tokenleap.drafters.options.combined import HybridOptions
from tokenleap.request import Request

__all__ = ["Chooser", "Hybrid", "HybridOptions", "MoreTokens", "graft"]

_TRAINED_RATE = 0.6
"""Acceptance rate that `MoreTokens` assumes of trained drafts."""


class Chooser(Protocol):
    """Decides which requests get a trained draft."""

    def choose(
        self, batch: Sequence[Request], budgets: Sequence[Budget], found: Sequence[Draft]
    ) -> list[Budget]:
        """Choose between the lookup and a trained draft for each request.

        Args:
            batch: the requests of this step.
            budgets: the limits of each request's draft.
            found: the lookups.

        Returns:
            The limits of each trained draft; an empty one where the lookup is the draft.
        """
        ...


class MoreTokens:
    """Takes what has more expected tokens, as known beforehand; the clock has no say.

    Args:
        levels: number of levels of a full trained draft.
    """

    def __init__(self, levels: int) -> None:
        self._levels = levels

    def choose(
        self, batch: Sequence[Request], budgets: Sequence[Budget], found: Sequence[Draft]
    ) -> list[Budget]:
        """See `Chooser.choose`."""
        return [
            replace(budget, nodes=0) if self._is_better(draft, budget) else budget
            for budget, draft in zip(budgets, found, strict=True)
        ]

    def _is_better(self, lookup: Draft, budget: Budget) -> bool:
        depth = min(budget.chain, self._levels)
        trained = sum(_TRAINED_RATE**level for level in range(1, depth + 1))
        return sum(path_probs(lookup, prior_rate)) > trained


class Hybrid(Several):
    """A lookup, a trained drafter, and the choice between them.

    Args:
        lookup: drafts with features (`Drafter.looks_up`).
        trained: drafts with a model.
        max_nodes: most nodes of a trained draft.
    """

    def __init__(self, lookup: Drafter, trained: Drafter, max_nodes: int) -> None:
        super().__init__([lookup, trained])
        self._lookup, self._trained = lookup, trained
        self._max_nodes = max_nodes
        self.chooser: Chooser = MoreTokens(len(self.level_sizes(max_nodes)))
        self.learnable = trained.learnable
        self.drafts_trees = lookup.drafts_trees or trained.drafts_trees
        self.reads_target_kv = trained.reads_target_kv
        self.drafts_at_once = trained.drafts_at_once
        self.stops_early = trained.stops_early
        self.independent_siblings = trained.independent_siblings and not lookup.drafts_trees
        self._adds_siblings = self.drafts_trees and not self.independent_siblings

    def with_lookup(self, make: Callable[[Drafter], Drafter]) -> Hybrid:
        """The same trained drafter beside a lookup that is made of the present one."""
        return Hybrid(make(self._lookup), self._trained, self._max_nodes)

    def level_sizes(self, limit: int) -> Sequence[int]:
        """Nodes at depths 1, 2, ... of a full trained draft, also if it is a chain."""
        most = min(limit, self._max_nodes)
        sizes = self._trained.level_sizes(most)
        return [1] * most if sizes is None else sizes

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """Lookups, and trained drafts with what the lookups add to them."""
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

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> None:
        """Both see every outcome: the trained drafter needs all hidden states."""
        self._lookup.observe(outcomes, times)
        self._trained.observe(outcomes, times)


def graft(trained: Draft, found: Draft, limit: int, *, siblings: bool) -> Draft:
    """Append a lookup to a trained draft with the same root, where the two agree.

    The nodes of the trained draft keep their indices, so that none is dropped. The features of the
    result tell where a token comes from: 0 is a token of the trained draft alone.

    Args:
        trained: the trained draft.
        found: a draft with features; nothing is appended if it is empty.
        limit: most drafted nodes of the result.
        siblings: whether a node of the trained draft that has children may get another one.
    """
    tree = trained.tree
    tokens, parents = list(tree.tokens), list(tree.parents)
    distributions: list[Distribution] = list(trained.q)
    features = [0] * tree.num_drafted
    place = {0: 0}  # node of the lookup -> node of the result
    for node, feature in enumerate(found.features, 1):
        token, parent = found.tree.tokens[node], place.get(found.tree.parents[node])
        if parent is None:
            continue
        among = tree.children[parent] if parent < len(tree) else ()
        same = next((child for child in among if tree.tokens[child] == token), None)
        if same is not None:
            features[same - 1] = agreed(feature)
            place[node] = same
        elif len(distributions) < limit and (siblings or not among):
            place[node] = len(tokens)
            tokens.append(token)
            parents.append(parent)
            distributions.append(found.q_of(node))
            features.append(disagreed(feature) if among else feature)
    if not any(features):
        return trained
    grafted = range(len(tree), len(tokens))
    draws = trained.draws and (*trained.draws, *((n, distributions[n - 1]) for n in grafted))
    grown = TokenTree(tuple(tokens), tuple(parents))
    probs = trained.path_probs and (*trained.path_probs, *(nan for _ in grafted))
    return Draft(grown, tuple(distributions), tuple(features), draws, probs)
