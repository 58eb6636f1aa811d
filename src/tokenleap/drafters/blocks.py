"""Drafting models that compute all levels of a draft in one pass: `parallel`, `spec_drafter`.

The logits depend on the depth, and with `Transitions` on the token in front. So the q of each node
is exact: the model's distribution for this depth after its parent. Without transitions, all nodes
of a level of a tree have the same children.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tokenleap.core.per_request import PerRequest
from tokenleap.core.tree import TokenTree
from tokenleap.drafters.models import OwnModel
from tokenleap.request import Request
from tokenleap.runtime.growth_plan import GrowthPlan
from tokenleap.runtime.network import (
    CHAIN_CANDIDATES,
    MOST_ADDED,
    ChainingNetwork,
    GrownTree,
    GrowthLimit,
    PassOutput,
)

# Trees of most probable tokens, of logits that one pass has computed for all depths.


_Choices: TypeAlias = Callable[[int, int, int], tuple[list[int], list[float]]]
"""The most probable children of a node: of its level, its place among the candidates of that level,
and a width; places among the candidates of their level, and probabilities."""


def _independent(probabilities: list[list[float]]) -> _Choices:
    """Children that depend on their level alone."""
    return lambda level, _, width: (list(range(width)), probabilities[level][:width])


def _dependent(probabilities: Tensor, added: Tensor, width: int) -> _Choices:
    """Children that depend on their parent, too.

    Args:
        probabilities: [K, C] of the candidates, without transitions.
        added: [K - 1, C, C], see `TokenTransitions.between`.
    """
    weights = probabilities[1:, None] * added.clamp(max=MOST_ADDED).exp()
    # Nothing is added to the other tokens of the vocabulary, so their mass stays.
    others = (1 - probabilities[1:].sum(-1)).clamp(min=0)
    total = weights.sum(-1, keepdim=True) + others[:, None, None]
    best = (weights / total).topk(width)
    first: list[float] = probabilities[0].tolist()
    places: list[list[list[int]]] = best.indices.tolist()
    found: list[list[list[float]]] = best.values.tolist()

    def children(level: int, place: int, width: int) -> tuple[list[int], list[float]]:
        if level == 0:
            return list(range(width)), first[:width]
        return places[level - 1][place][:width], found[level - 1][place][:width]

    return children


class _Product:
    """A tree that grows level by level."""

    def __init__(self, limit: GrowthLimit) -> None:
        self._limit = limit
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.probabilities: list[float] = []
        self.places: list[int] = []  # of each node among the candidates of its level
        self._paths: list[float] = []  # the probability of the path down to each node

    def add(
        self, parent: int, tokens: list[int], places: list[int], probabilities: list[float]
    ) -> list[int]:
        """Add children; returns those that may have children themselves."""
        limit, above = self._limit, self._paths[parent] if parent >= 0 else 1.0
        extendable = []
        for place, probability in zip(places, probabilities, strict=True):
            if probability == 0:
                break
            self.tokens.append(tokens[place])
            self.parents.append(parent)
            self.probabilities.append(probability)
            self.places.append(place)
            self._paths.append(above * probability)
            if probability >= limit.min_token_prob and self._paths[-1] >= limit.min_path_prob:
                extendable.append(len(self.tokens) - 1)
        return extendable

    def best(self, level: list[int], count: int | None) -> list[int]:
        """The nodes of a level with the highest path probabilities; all of them with None."""
        return level if count is None else sorted(level, key=lambda n: -self._paths[n])[:count]

    @property
    def is_full(self) -> bool:
        return self._limit.nodes is not None and len(self.tokens) >= self._limit.nodes


def product_tree(
    logits: Tensor,
    token_ids: Tensor | None,
    plan: GrowthPlan,
    limit: GrowthLimit,
    transitions: TokenTransitions | None = None,
) -> GrownTree:
    """Grow as `GrowingNetwork.grow`, from logits that do not depend on the drafted tokens.

    Args:
        logits: [K, Vd] of the tokens at depths 1 to K, with K at least `limit.depth`.
        token_ids: [Vd] the tokens that logits stand for; None if these are 0, 1, ...
    """
    widths = plan.widths[: limit.depth]
    width = min(max(widths), logits.shape[-1])
    count = width if transitions is None else min(max(width, CHAIN_CANDIDATES), logits.shape[-1])
    best = logits[: len(widths)].float().softmax(-1).topk(count)
    choices: _Choices = (
        _independent(best.values.tolist())
        if transitions is None
        else _dependent(best.values, transitions.between(best.indices), width)
    )
    tokens = best.indices if token_ids is None else token_ids[best.indices]
    return _grown(tokens.tolist(), choices, plan, limit, width)


def product_chain(
    chain: tuple[Sequence[int], Sequence[float]], token_ids: Tensor | None, limit: GrowthLimit
) -> GrownTree:
    """`product_tree` for one child per node, of what `ChainingNetwork.best_chain` has chosen."""
    tokens, probabilities = chain
    path, count = 1.0, 0
    for probability in probabilities:
        if probability == 0 or count == limit.nodes:
            break
        count, path = count + 1, path * probability
        if probability < limit.min_token_prob or path < limit.min_path_prob:
            break
    ids = tokens[:count]
    if token_ids is not None:
        ids = token_ids[list(ids)].tolist()
    return GrownTree(ids, [*range(-1, count - 1)], probabilities[:count])


def _grown(
    tokens: list[list[int]], choices: _Choices, plan: GrowthPlan, limit: GrowthLimit, most: int
) -> GrownTree:
    tree, frontier = _Product(limit), [-1]
    for level, size in enumerate(plan.widths[: limit.depth]):
        found: list[int] = []
        for parent in frontier:
            place = tree.places[parent] if parent >= 0 else 0
            found += tree.add(parent, tokens[level], *choices(level, place, min(size, most)))
        frontier = tree.best(found, plan.beam)
        if plan.beam is None and tree.is_full:
            break
    return GrownTree(tree.tokens, tree.parents, tree.probabilities)


# What a drafted token says about the next one, for drafters that compute all levels at once.
#
# A block of masks is predicted in one pass, each of its tokens without a look at the others. Where
# several continuations are likely, such a draft mixes them, or repeats a token. `Transitions` adds
# what depends on the token before: the logit of a token w after a token u is
#
#     logit(w | u) = logit(w) + W_w^T M W_u
#
# with the rows W of the output layer, and a learnt matrix M [E, E] that is zero at first. Sun et
# al., "Fast Structured Decoding for Sequence Models", arXiv 1910.11555, have such terms between the
# tokens of a parallel decoder, of two low-rank tables.


TRANSITIONS_FILE, MATRIX = "transitions.safetensors", "matrix"
"""The file, and the name of its only tensor."""


class Transitions(nn.Module):
    """The matrix M, which is learnt."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(size, size))

    def forward(self, rows: Tensor) -> Tensor:
        """The addition to states after tokens.

        Args:
            rows: [..., E] the output layer's rows of the tokens.

        Returns:
            [..., E].
        """
        return rows @ self.matrix.T.to(rows)


class TokenTransitions:
    """Transitions between the tokens of a drafter: two tables of the size of its output layer.

    What a token adds to all logits alike is left out. It changes no distribution, but it would
    count where transitions are added to some tokens only, see `between`.

    Args:
        matrix: [E, E] M.
        rows: [V, E] W.
    """

    def __init__(self, matrix: Tensor, rows: Tensor) -> None:
        self._added = rows @ matrix.T.to(rows)
        self._rows = (rows - rows.float().mean(0)).to(rows)

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """[V, E] what tokens add to states after them, and [V, E] W minus its mean."""
        return self._added, self._rows

    def added_after(self, tokens: Tensor) -> Tensor:
        """[N, V] what is added to the logits after tokens [N]."""
        return (self._added[tokens] @ self._rows.T).float()

    def between(self, candidates: Tensor) -> Tensor:
        """The additions of candidates for a place to the logits of those for the next.

        Args:
            candidates: [K, C] tokens.

        Returns:
            [K - 1, C, C] for each of a place, the logits that those of the next place get.
        """
        above, below = self._added[candidates[:-1]], self._rows[candidates[1:]]
        return torch.bmm(above.float(), below.float().transpose(1, 2))


def save_transitions(transitions: Transitions, folder: Path) -> None:
    matrix = transitions.matrix.detach().to("cpu", torch.bfloat16)
    save_file({MATRIX: matrix}, folder / TRANSITIONS_FILE)


class BlockScorer(OwnModel):
    """A model with KV rows of its own whose first pass computes all levels.

    Attributes:
        transitions: between the tokens that logits stand for; None if there are none.
    """

    most_depth: int
    transitions: TokenTransitions | None = None

    @property
    def level_share(self) -> float:
        return 0.0

    def prepare_blocks(self, most_depth: int) -> None:
        """Say how deep drafts can be."""
        self.most_depth = most_depth
        self._depths = PerRequest[int]()  # levels of the next draft
        # The number of nodes before the root, and [K, Vd] the logits of all levels.
        self._levels = PerRequest[tuple[int, Tensor]]()

    def expect(self, depths: Mapping[int, int]) -> None:
        self._depths.update(depths)

    @abstractmethod
    def block(self, keys: Sequence[int], pending: Sequence[Sequence[int]]) -> list[Tensor]:
        """One pass over pending tokens.

        Returns:
            [B] the logits [K, Vd] of the levels that `expect` has announced, or of more.
        """

    def _compute(self, keys: Sequence[int], pending: Sequence[Sequence[int]]) -> None:
        blocks = self.block(keys, pending)
        for key, tokens, logits in zip(keys, pending, blocks, strict=True):
            self._levels[key] = len(tokens) - 1, logits

    def verify(
        self, keys: Sequence[int], trees: Sequence[TokenTree], num_computed: Sequence[int]
    ) -> list[PassOutput]:
        """See `Scorer.verify`: a pass of the model for the first level, nothing for the others."""
        new = zip(keys, trees, num_computed, strict=True)
        first = {key: tree.tokens for key, tree, done in new if not done}
        if first:
            self._compute(list(first), list(first.values()))
        computed = zip(keys, trees, num_computed, strict=True)
        return [PassOutput(self._logits_of_level(*each)) for each in computed]

    def _logits_of_level(self, key: int, tree: TokenTree, num_computed: int) -> Tensor:
        """[n, Vd] of the new nodes; of the root alone in the first level."""
        before_root, logits = self._levels[key]
        if not num_computed:
            return logits[:1]
        depths = [depth - before_root for depth in tree.depths[num_computed:]]
        if len(set(depths)) > 1:  # the tree of a beam search
            found = logits[depths]
        else:
            found = logits[depths[0] : depths[0] + 1].expand(len(depths), -1)
        if self.transitions is None:
            return found
        tokens = torch.tensor(tree.tokens[num_computed:], device=logits.device)
        if self.token_ids is not None:
            tokens = torch.searchsorted(self.token_ids, tokens)
        return found.float() + self.transitions.added_after(tokens)

    def grow(
        self,
        keys: Sequence[int],
        pending: Sequence[Sequence[int]],
        plan: GrowthPlan,
        limits: Sequence[GrowthLimit],
    ) -> list[GrownTree] | None:
        """See `Scorer.grow`; None for drawn tokens."""
        if any(limit.draw is not None for limit in limits):
            return None
        self._compute(keys, pending)
        return [
            self._grown(self._levels[key][1], plan, limit)
            for key, limit in zip(keys, limits, strict=True)
        ]

    def _grown(self, logits: Tensor, plan: GrowthPlan, limit: GrowthLimit) -> GrownTree:
        network, widths = self._model.network, plan.widths[: limit.depth]
        if max(widths) == 1 and isinstance(network, ChainingNetwork):
            tables = None if self.transitions is None else self.transitions.tables
            chain = network.best_chain(logits[: len(widths)], tables)
            if chain is not None:
                return product_chain(chain, self.token_ids, limit)
        return product_tree(logits, self.token_ids, plan, limit, self.transitions)

    def finish_draft(self, request: Request, num_tokens: int) -> None:
        super().finish_draft(request, num_tokens)
        self._levels.pop(request.key, None)
