"""Early exit by saturation: layers run until one no longer changes the token.

Schuster et al., "Confident Adaptive Language Modeling", section 3.4, for drafting (Xia et al.,
"Unlocking Efficiency in Large Language Model Inference", self-drafting by early exiting). The
layers of a list are checked one after the other for each node. The first whose most probable token
is that of the checked layer before, or that is confident of it, gives the node's distribution.

The decision reads the node's logits alone and no drawn token. So q, the distribution of the layer
where a node stopped, is the exact distribution its children are drawn from (invariant 2).

A node that runs deeper than its ancestors needs their KV in these layers. They go on from their
hidden states in the same pass, and in a tree all nodes before it do.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from tokenleap.core.tree import TokenTree
from tokenleap.drafters.scorer import TargetScorer
from tokenleap.errors import CompatibilityError
from tokenleap.request import Request
from tokenleap.runtime.network import ContinuingNetwork, Need, PassOutput
from tokenleap.runtime.target import Target

__all__ = ["SaturatingLayers"]


class _Row:
    """What a draft of one request has computed.

    Args:
        stages: number of checked layers.
    """

    def __init__(self, stages: int) -> None:
        self.states: list[list[Tensor]] = [[] for _ in range(stages)]
        """[stages] the hidden states [E] behind each checked layer, of the tree's first nodes."""
        self.start = 0  # the first node of this pass
        self.logits: list[Tensor] = []  # [V] of each node of this pass, at its deepest layer so far
        self.tokens: list[int] = []  # their argmax
        self.open: list[int] = []  # nodes of this pass that have not stopped


class SaturatingLayers(TargetScorer):
    """A growing part of the target as drafting model, on the target's own KV (see `Scorer`).

    Args:
        target: the target.
        layers: numbers of layers, ascending, behind which a node may stop; at least two.
        confidence: a node also stops where its most probable token has this probability; None: not.

    Raises:
        CompatibilityError: the target's network cannot go on from hidden states.
    """

    def __init__(self, target: Target, layers: Sequence[int], confidence: float | None) -> None:
        network = target.network
        if not isinstance(network, ContinuingNetwork):
            raise CompatibilityError(
                f"exit_layers: runtime '{network.name}' cannot go on from a layer for this model: "
                "set exit_layer, for one fixed layer."
            )
        super().__init__(target)
        self._confidence = confidence
        self._first = target.with_network(network.first_layers(layers[0]))
        self._counts = [layers[0], *(last - first for first, last in pairwise(layers))]
        self._later = [network.between(*pair) for pair in pairwise(layers)]
        self._rows: dict[int, _Row] = {}

    def verify(
        self, keys: Sequence[int], trees: Sequence[TokenTree], num_computed: Sequence[int]
    ) -> list[PassOutput]:
        """A pass of the first layers, and of further ones over the nodes that have not stopped."""
        need = Need(hidden=(self._counts[0],))
        outputs = self._first.verify(keys, trees, num_computed, need)
        for key, computed, output in zip(keys, num_computed, outputs, strict=True):
            if not computed:
                self._rows[key] = _Row(len(self._counts))
            self._begin(self._rows[key], computed, output)
        for stage in range(1, len(self._counts)):
            still = [(key, tree) for key, tree in zip(keys, trees, strict=True) if self._opens(key)]
            if not still:
                break
            self._go_on(stage, still)
        return [PassOutput(torch.stack(self._rows[key].logits)) for key in keys]

    def _opens(self, key: int) -> bool:
        return bool(self._rows[key].open)

    def _begin(self, row: _Row, start: int, output: PassOutput) -> None:
        row.start = start
        row.states[0] += output.hidden[self._counts[0]].clone()
        row.logits = list(output.scores.clone())
        row.tokens = [output.argmax_of(node) for node in range(len(row.logits))]
        row.open = [n for n, logits in enumerate(row.logits) if not self._is_confident(logits)]

    def _go_on(self, stage: int, still: Sequence[tuple[int, TokenTree]]) -> None:
        """Run the layers of one stage for the nodes that have not stopped.

        Args:
            stage: number of the checked layer behind them, from 1.
            still: keys and trees of the requests that have such nodes.
        """
        rows = [self._rows[key] for key, _ in still]
        done = [len(row.states[stage]) for row in rows]
        ends = [row.start + row.open[-1] + 1 for row in rows]
        states = [
            row.states[stage - 1][first:last]
            for row, first, last in zip(rows, done, ends, strict=True)
        ]
        network = self._later[stage - 1]
        begin = network.feed(torch.stack([state for own in states for state in own]))
        offsets = accumulate(map(len, states), initial=begin)
        trees = [
            _fed(tree, first, last, offset)
            for (_, tree), first, last, offset in zip(still, done, ends, offsets, strict=False)
        ]
        # Nodes before the first one that has not stopped are there for their KV alone.
        judged = max(last - row.start - row.open[0] for row, last in zip(rows, ends, strict=True))
        need = Need(last=judged, hidden=(self._counts[stage],))
        passes = self._target.with_network(network)
        outputs = passes.verify([key for key, _ in still], trees, done, need)
        for row, output in zip(rows, outputs, strict=True):
            row.states[stage] += output.hidden[self._counts[stage]].clone()
            self._check(row, len(row.states[stage]), output)

    def _check(self, row: _Row, last: int, output: PassOutput) -> None:
        """Take the deeper logits of the nodes that have not stopped, and see which of them do.

        Args:
            row: what the draft has computed.
            last: nodes of the tree that have passed these layers.
            output: has the logits of the last ones of these nodes.
        """
        scores, going = output.scores.clone(), []
        first = last - len(scores)
        for node in row.open:
            index = row.start + node - first
            token, logits = output.argmax_of(index), scores[index]
            saturated, row.tokens[node] = token == row.tokens[node], token
            row.logits[node] = logits
            if not saturated and not self._is_confident(logits):
                going.append(node)
        row.open = going

    def _is_confident(self, logits: Tensor) -> bool:
        if self._confidence is None:
            return False
        return float(logits.float().softmax(-1).max()) >= self._confidence

    def finish_draft(self, request: Request, num_tokens: int) -> None:
        """Forget the draft: verification computes all of its nodes again, in all layers."""
        self._rows.pop(request.key, None)

    def release(self, request: Request) -> None:
        """Forget the request; the engine frees the target's row."""
        self._rows.pop(request.key, None)


def _fed(tree: TokenTree, first: int, last: int, begin: int) -> TokenTree:
    """The first `last` nodes of a tree; those from `first` on have the ids of fed states."""
    tokens = (*tree.tokens[:first], *range(begin, begin + last - first))
    return TokenTree(tokens, tree.parents[:last])
