"""`parallel`: one pass of a trained head drafts a whole block (P-EAGLE, arXiv 2602.01469).

The head is an EAGLE-3 head with learnt masks behind the root (see `parallel_net.py`). Its logits
depend on the depth alone, not on the tokens drafted before. So all nodes of a level of a tree have
the same children, and the q of each is exact: the head's distribution for this depth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from foretoken.control import Budget
from foretoken.core.tree import TokenTree, chain
from foretoken.drafters.heads.checkpoint import Checkpoint
from foretoken.drafters.heads.eagle import EagleHead, load_parts
from foretoken.drafters.heads.fusion import Fusion
from foretoken.drafters.heads.head_drafter import HeadDrafter
from foretoken.drafters.heads.parallel_net import ParallelNet
from foretoken.drafters.heads.product_tree import product_tree
from foretoken.drafters.shapes import Shape
from foretoken.drafters.tree_options import TreeOptions
from foretoken.request import Request
from foretoken.runtime.network import GrownTree, GrowthLimit, GrowthPlan, Need, PassOutput
from foretoken.runtime.passes import Passes
from foretoken.runtime.target import Target

__all__ = ["ParallelDrafter", "ParallelHead", "load_parallel_head"]


class ParallelHead(EagleHead):
    """A head with KV rows of its own whose first pass computes all levels (see `Scorer`).

    Args:
        head: computes pairs of token and state.
        fusion: makes states of hidden states.
        net: the head's tokens and its mask.
    """

    def __init__(self, head: Passes, fusion: Fusion, net: ParallelNet) -> None:
        super().__init__(head, fusion, net.draft_tokens)
        self._vocabulary = net.draft_tokens.to(head.device)
        self.most_depths = net.config.depths
        self._mask_token = net.config.mask_token_id
        self._mask_state = _mask_state(net, fusion, head)
        self._depths: dict[int, int] = {}  # request key -> levels of its draft
        # Request key -> number of nodes before the root, and [K, Vd] the logits of all levels.
        self._levels: dict[int, tuple[int, Tensor]] = {}

    def expect(self, depths: Mapping[int, int]) -> None:
        """Say how many levels the next draft of each request has, at least 1."""
        self._depths.update(depths)

    def verify(
        self, keys: Sequence[int], trees: Sequence[TokenTree], num_computed: Sequence[int]
    ) -> list[PassOutput]:
        """See `Scorer.verify`: a pass of the head for the first level, nothing for the others."""
        new = zip(keys, trees, num_computed, strict=True)
        first = {key: tree.tokens for key, tree, done in new if not done}
        if first:
            self._compute(list(first), list(first.values()))
        computed = zip(keys, trees, num_computed, strict=True)
        return [PassOutput(self._logits_of_level(*each)) for each in computed]

    def _compute(self, keys: Sequence[int], pending: Sequence[Sequence[int]]) -> None:
        """One pass over the pending tokens and as many masks as each draft needs."""
        blocks, states = [], []
        for key, tokens in zip(keys, pending, strict=True):
            masks = self._depths[key] - 1
            blocks.append(chain((*tokens, *[self._mask_token] * masks)))
            known = self._states[key][-len(tokens) :]
            states.append(torch.cat([known, self._mask_state.expand(masks, -1)]))
        need = Need(last=max(self._depths[key] for key in keys))
        outputs = self._model.verify(keys, blocks, None, need, states)
        for key, tokens, output in zip(keys, pending, outputs, strict=True):
            self._levels[key] = len(tokens) - 1, output.scores[-self._depths[key] :]

    def _logits_of_level(self, key: int, tree: TokenTree, num_computed: int) -> Tensor:
        """[n, Vd] of the new nodes, which have one depth; of the root alone in the first level."""
        before_root, logits = self._levels[key]
        if not num_computed:
            return logits[:1]
        depth = tree.depths[num_computed] - before_root
        return logits[depth : depth + 1].expand(len(tree) - num_computed, -1)

    def grow(
        self,
        keys: Sequence[int],
        pending: Sequence[Sequence[int]],
        plan: GrowthPlan,
        limits: Sequence[GrowthLimit],
    ) -> list[GrownTree] | None:
        """See `GrowingScorer`."""
        self._compute(keys, pending)
        return [
            product_tree(self._levels[key][1], self._vocabulary, plan, limit)
            for key, limit in zip(keys, limits, strict=True)
        ]

    def finish_draft(self, request: Request, num_tokens: int) -> None:
        """See `OwnModel.finish_draft`."""
        super().finish_draft(request, num_tokens)
        self._levels.pop(request.key, None)

    def release(self, request: Request) -> None:
        """See `EagleHead.release`."""
        super().release(request)
        for kept in (self._depths, self._levels):
            kept.pop(request.key, None)


@torch.inference_mode()
def _mask_state(net: ParallelNet, fusion: Fusion, head: Passes) -> Tensor:
    """[1, E] the state of a mask, from its features like that of a token."""
    features = net.mask_features().detach().to(head.device, head.dtype)
    return fusion.of_parts([row.unsqueeze(0) for row in features])


class ParallelDrafter(HeadDrafter):
    """Chains and trees from a head that drafts all levels at once; no deeper than it has learnt.

    Args:
        head: the head.
        layers, options, shape, coupled: see `HeadDrafter`.
    """

    _scorer: ParallelHead

    def __init__(
        self,
        head: ParallelHead,
        layers: Sequence[int],
        options: TreeOptions,
        shape: Shape,
        *,
        coupled: bool,
    ) -> None:
        super().__init__(head, layers, options, shape, coupled=coupled)
        self._most = head.most_depths

    def level_sizes(self, limit: int) -> Sequence[int] | None:
        """See `Drafter.level_sizes`."""
        sizes = super().level_sizes(limit)
        return None if sizes is None else sizes[: self._most]

    def _limits(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> dict[int, Budget]:
        """See `ModelDrafter._limits`; the head has to know the depth of a draft beforehand."""
        found = {
            key: replace(budget, depth=self._depth(budget))
            for key, budget in super()._limits(batch, budgets).items()
        }
        self._scorer.expect({key: budget.depth for key, budget in found.items()})
        return found

    def _depth(self, budget: Budget) -> int:
        """Levels of a draft: all of its nodes, their ancestors included, lie within them."""
        levels = len(self._shape.level_sizes(budget.nodes))
        return min(budget.depth, levels, self._most)


def load_parallel_head(
    checkpoint: Checkpoint, target: Target, tokenizer: PreTrainedTokenizerBase | None = None
) -> tuple[ParallelHead, Passes]:
    """The head of a checkpoint for a target, and its KV rows.

    Raises:
        CompatibilityError: it was trained for another model.
        ModelError: its file is damaged.
    """
    net, passes, fusion = load_parts(checkpoint, target, tokenizer)
    assert isinstance(net, ParallelNet), "read_checkpoint was asked for such a head"
    return ParallelHead(passes, fusion, net), passes
