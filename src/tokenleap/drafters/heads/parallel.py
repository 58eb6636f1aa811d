"""`parallel`: one pass of a trained head drafts a whole block (P-EAGLE, arXiv 2602.01469).

The head is an EAGLE-3 head with learnt masks behind the root (see `parallel_net.py`). Every level
of a draft is one node of its pass (see `block.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tokenleap.core.tree import chain
from tokenleap.drafters.block import BlockDrafter, BlockScorer
from tokenleap.drafters.heads.checkpoint import Checkpoint
from tokenleap.drafters.heads.eagle import EagleHead, load_parts
from tokenleap.drafters.heads.fusion import Fusion
from tokenleap.drafters.heads.head_drafter import HeadDrafter
from tokenleap.drafters.heads.parallel_net import ParallelNet
from tokenleap.runtime.network import Need
from tokenleap.runtime.passes import Passes
from tokenleap.runtime.target import Target

__all__ = ["ParallelDrafter", "ParallelHead", "load_parallel_head"]


class ParallelHead(BlockScorer, EagleHead):
    """A head with KV rows of its own whose first pass computes all levels (see `Scorer`).

    Args:
        head: computes pairs of token and state.
        fusion: makes states of hidden states.
        net: the head's tokens and its mask.
    """

    def __init__(self, head: Passes, fusion: Fusion, net: ParallelNet) -> None:
        EagleHead.__init__(self, head, fusion, net.draft_tokens)
        self.prepare_blocks(net.config.depths, net.draft_tokens.to(head.device))
        self._mask_token = net.config.mask_token_id
        self._mask_state = _mask_state(net, fusion, head)

    def block(self, keys: Sequence[int], pending: Sequence[Sequence[int]]) -> list[Tensor]:
        """See `BlockScorer.block`: as many masks as each draft needs."""
        blocks, states = [], []
        for key, tokens in zip(keys, pending, strict=True):
            masks = self._depths[key] - 1
            blocks.append(chain((*tokens, *[self._mask_token] * masks)))
            known = self._states[key][-len(tokens) :]
            states.append(torch.cat([known, self._mask_state.expand(masks, -1)]))
        need = Need(last=max(self._depths[key] for key in keys))
        outputs = self._model.verify(keys, blocks, None, need, states)
        return [
            output.scores[-self._depths[key] :] for key, output in zip(keys, outputs, strict=True)
        ]


@torch.inference_mode()
def _mask_state(net: ParallelNet, fusion: Fusion, head: Passes) -> Tensor:
    """[1, E] the state of a mask, from its features like that of a token."""
    features = net.mask_features().detach().to(head.device, head.dtype)
    return fusion.of_parts([row.unsqueeze(0) for row in features])


class ParallelDrafter(BlockDrafter, HeadDrafter):
    """Chains and trees from a head that drafts all levels at once; no deeper than it has learnt.

    Args:
        head: the head.
        layers, options, shape, coupled: see `HeadDrafter`.
    """

    _scorer: ParallelHead


def load_parallel_head(
    checkpoint: Checkpoint,
    target: Target,
    tokenizer: PreTrainedTokenizerBase | None = None,
    quantization: str | None = None,
) -> tuple[ParallelHead, Passes]:
    """The head of a checkpoint for a target, and its KV rows: see `eagle.load_parts`.

    Raises:
        CompatibilityError: it was trained for another model.
        ModelError: its file is damaged.
    """
    net, passes, fusion = load_parts(checkpoint, target, tokenizer, quantization)
    assert isinstance(net, ParallelNet), "read_checkpoint was asked for such a head"
    return ParallelHead(passes, fusion, net), passes
