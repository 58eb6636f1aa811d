"""Drafting with a `StateNet`: chains and trees from heads that have no attention and no KV.

`StateHead` is the `Scorer` that `ModelDrafter` uses, so trees, expansion and exact q come from
there. Between steps it keeps the target's hidden states of the last committed tokens; while a draft
grows, the states of its deepest level. A state has the same bits for any number of nodes that are
computed with it, so drafts do not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenleap.core.per_request import PerRequest
from tokenleap.core.tree import TokenTree
from tokenleap.drafters.heads.state_net import (
    FrozenLinear,
    StateNet,
)
from tokenleap.drafters.model_drafter import Head, States
from tokenleap.drafters.options import StateHeadOptions
from tokenleap.request import Request
from tokenleap.runtime.cpu import linear_layer
from tokenleap.runtime.network import PassOutput
from tokenleap.runtime.target import Target

__all__ = [
    "StateHead",
    "StateHeadOptions",
]

KEPT = 64
"""Tokens at the end of the text whose hidden states are kept. Only one is needed, except after
tokens were taken back."""

NO_LIMIT = 1 << 30


class StateHead(Head):
    """A head in the target's dtype.

    Args:
        net: the head. It is changed: its linear layers are packed.
    """

    grows = False

    def __init__(self, net: StateNet, target: Target) -> None:
        assert target.final_norm is not None
        self.layers, self._norm = (target.network.num_layers,), target.final_norm
        self._dtype, self._device = target.dtype, target.device
        self.use(net)
        self.most_depth = self.num_heads = net.config.num_heads
        whole = net.config.draft_vocab_size == net.config.vocab_size
        self.token_ids: Tensor | None = None if whole else self._net.draft_tokens
        self._recent = PerRequest(lambda: States(KEPT))  # of the last tokens
        self._roots = PerRequest[Tensor]()  # [1, E] normalised, before the root
        # The number of nodes before those of the deepest level, and [n, S] theirs.
        self._levels = PerRequest[tuple[int, Tensor]]()
        self._all = PerRequest[Tensor]()  # [K, Vd] logits of all depths

    def use(self, net: StateNet) -> None:
        """Draft with this head, of the same sizes. It is changed: its linear layers are packed."""
        packed = net.to(self._device, self._dtype)
        least_rows = _pack(packed, self._dtype, self._device)  # it may raise
        self._net, self._least_rows = packed, least_rows

    def room(self, request: Request) -> int:
        """See `Scorer.room`; 0 without the hidden state of the token before the root."""
        known = self._recent[request.key].at(len(request.token_ids) - 2)
        return 0 if known is None else NO_LIMIT

    @torch.inference_mode()
    def pending(self, request: Request) -> list[int]:
        """See `Scorer.pending`: the root; what else was committed needs no pass."""
        hidden = self._recent[request.key].at(len(request.token_ids) - 2)
        assert hidden is not None, "room() is 0 without it"
        self._roots[request.key] = self._norm(hidden)
        return [request.root]

    @torch.inference_mode()
    def verify(
        self, keys: Sequence[int], trees: Sequence[TokenTree], num_computed: Sequence[int]
    ) -> list[PassOutput]:
        """The logits of one level of each tree; the levels before were computed."""
        (depth,) = {tree.depths[done] for tree, done in zip(trees, num_computed, strict=True)}
        counts = [len(tree) - done for tree, done in zip(trees, num_computed, strict=True)]
        if not self._net.reads_tokens:
            rows = self._logits_of_depth(keys, depth)
            logits = [row.expand(count, -1) for row, count in zip(rows, counts, strict=True)]
        else:
            states = self._next_states(keys, trees, num_computed, depth)
            for key, done, part in zip(
                keys, num_computed, torch.split(states, counts), strict=True
            ):
                self._levels[key] = done, part
            found = self._rows(lambda x: self._net.logits(x, depth), states)
            logits = list(torch.split(found, counts))
        return [PassOutput(each) for each in logits]

    def _next_states(
        self,
        keys: Sequence[int],
        trees: Sequence[TokenTree],
        num_computed: Sequence[int],
        depth: int,
    ) -> Tensor:
        """[n, S] the states of the new nodes of all trees."""
        new = list(zip(keys, trees, num_computed, strict=True))
        tokens = torch.tensor(
            [token for _, tree, done in new for token in tree.tokens[done:]],
            device=self._net.d2t.device,
        )
        if depth == 0:
            hidden = torch.cat([self._roots[key] for key in keys])
            return self._rows(self._net.start, hidden, tokens)
        parents = []
        for key, tree, done in new:
            first, states = self._levels[key]
            parents.append(states[[parent - first for parent in tree.parents[done:]]])
        return self._rows(lambda x, t: self._net.advance(x, t, depth), torch.cat(parents), tokens)

    def _logits_of_depth(self, keys: Sequence[int], depth: int) -> list[Tensor]:
        """For each request, [1, Vd] the logits of all nodes of a depth, whatever their tokens."""
        hidden = torch.cat([self._roots[key] for key in keys])
        if self._net.config.own_rows:
            return list(torch.split(self._rows(lambda x: self._net.logits(x, depth), hidden), 1))
        if depth == 0:
            # All depths read the same output rows, which takes the time: read them once.
            every = self._rows(self._outputs_of_all_depths, hidden)  # [n, K, E]
            logits = self._rows(self._net.output_layer(0), every.flatten(0, 1))
            shape = (len(keys), self.num_heads, -1)
            self._all.update(zip(keys, logits.view(shape), strict=True))
        return [self._all[key][depth : depth + 1] for key in keys]

    def _outputs_of_all_depths(self, hidden: Tensor) -> Tensor:
        outputs = [self._net.outputs(hidden, depth) for depth in range(self.num_heads)]
        return torch.stack(outputs, dim=1)

    def _rows(self, compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Compute on rows [n, ...], with as many as the linear layers need for the same bits."""
        count = len(inputs[0])
        missing = self._least_rows - count
        if missing > 0:
            inputs = tuple(F.pad(x, (*(0, 0) * (x.dim() - 1), 0, missing)) for x in inputs)
        return compute(*inputs)[:count]

    def finish_draft(self, request: Request, num_tokens: int) -> None:
        for kept in (self._roots, self._levels, self._all):
            kept.pop(request.key, None)

    @torch.inference_mode()  # as in a step, since prompts are shown outside of one
    def keep(self, request: Request, start: int, hidden: Mapping[int, Tensor]) -> None:
        """Keep the target's hidden states of the committed tokens from `start` on."""
        self._recent[request.key].keep(start, hidden[self.layers[0]])

    def rewind(self, request: Request) -> None:
        self._recent[request.key].cut(len(request.token_ids) - 1)


def _pack(net: StateNet, dtype: torch.dtype, device: torch.device) -> int:
    """Pack all linear layers, if there is something faster here."""
    kind = linear_layer(dtype, device, None)
    if kind is None:
        return 1
    for module in list(net.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear | FrozenLinear):
                setattr(module, name, kind(child.weight, child.bias))
    return kind.LEAST_ROWS
