"""Drafting models that compute all levels of a draft in one pass: `parallel`, `spec_drafter`.

The logits depend on the depth, and with `Transitions` on the token in front. So the q of each node
is exact: the model's distribution for this depth behind its parent. Without transitions, all nodes
of a level of a tree have the same children.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tokenleap.control import Budget
from tokenleap.core.tree import TokenTree
from tokenleap.drafters.draft_model import OwnModel
from tokenleap.drafters.model_drafter import ModelDrafter
from tokenleap.drafters.product_tree import product_chain, product_tree
from tokenleap.drafters.transitions import TokenTransitions
from tokenleap.request import Request
from tokenleap.runtime.network import (
    ChainingNetwork,
    GrownTree,
    GrowthLimit,
    GrowthPlan,
    PassOutput,
)

__all__ = ["BlockDrafter", "BlockScorer"]


class BlockScorer(OwnModel):
    """A model with KV rows of its own whose first pass computes all levels (see `Scorer`).

    Attributes:
        most_depths: most levels of a draft.
        transitions: between the tokens that logits stand for; None if there are none.
    """

    most_depths: int
    transitions: TokenTransitions | None = None
    _vocabulary: Tensor | None

    def prepare_blocks(self, most_depths: int, vocabulary: Tensor | None = None) -> None:
        """Say how deep drafts can be, and which tokens [Vd] logits stand for, if not 0, 1, ..."""
        self.most_depths, self._vocabulary = most_depths, vocabulary
        self._depths: dict[int, int] = {}  # request key -> levels of its draft
        # Request key -> number of nodes before the root, and [K, Vd] the logits of all levels.
        self._levels: dict[int, tuple[int, Tensor]] = {}

    def expect(self, depths: Mapping[int, int]) -> None:
        """Say how many levels the next draft of each request has, at least 1."""
        self._depths.update(depths)

    @abstractmethod
    def block(self, keys: Sequence[int], pending: Sequence[Sequence[int]]) -> list[Tensor]:
        """One pass over pending tokens.

        Args:
            keys: [B] request keys.
            pending: [B] what `Scorer.pending` has returned.

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
        return found.float() + self.transitions.behind(tokens)

    def grow(
        self,
        keys: Sequence[int],
        pending: Sequence[Sequence[int]],
        plan: GrowthPlan,
        limits: Sequence[GrowthLimit],
    ) -> list[GrownTree] | None:
        """See `GrowingScorer`; None for drawn tokens."""
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
                return product_chain(chain, self._vocabulary, limit)
        return product_tree(logits, self._vocabulary, plan, limit, self.transitions)

    def finish_draft(self, request: Request, num_tokens: int) -> None:
        """See `OwnModel.finish_draft`."""
        super().finish_draft(request, num_tokens)
        self._levels.pop(request.key, None)

    def release(self, request: Request) -> None:
        """See `OwnModel.release`."""
        super().release(request)
        for kept in (self._depths, self._levels):
            kept.pop(request.key, None)


class BlockDrafter(ModelDrafter):
    """Chains and trees from a model that drafts all levels at once; no deeper than it can.

    Args:
        scorer, options, shape, coupled: see `ModelDrafter`.
    """

    drafts_at_once = True
    _scorer: BlockScorer

    def level_sizes(self, limit: int) -> Sequence[int] | None:
        """See `Drafter.level_sizes`."""
        sizes = super().level_sizes(limit)
        return None if sizes is None else sizes[: self._scorer.most_depths]

    def _limits(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> dict[int, Budget]:
        """See `ModelDrafter._limits`; the model has to know the depth of a draft beforehand."""
        found = {
            key: replace(budget, depth=self._depth(budget))
            for key, budget in super()._limits(batch, budgets).items()
        }
        self._scorer.expect({key: budget.depth for key, budget in found.items()})
        return found

    def _depth(self, budget: Budget) -> int:
        """Levels of a draft: all of its nodes, their ancestors included, lie within them."""
        levels = len(self._shape.level_sizes(budget.nodes))
        return min(budget.depth, levels, self._scorer.most_depths)
