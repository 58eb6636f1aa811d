"""Self-drafting: the target drafts for itself, with some of its layers left out.

`early_exit` keeps the first layers (Elhoushi et al., "LayerSkip"; Kangaroo without its adapter).
`layer_skip` leaves out chosen attention and MLP sublayers (Zhang et al., "Draft & Verify"). There
is no second model and no second cache. Drafting reads the target's own KV of the context and
writes behind it, and verification then overwrites these slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from tokenleap.core.tree import TokenTree
from tokenleap.drafters.model_drafter import GrowingScorer, Scorer, TargetScorer
from tokenleap.drafters.options import EarlyExitOptions, LayerSkipOptions
from tokenleap.errors import CompatibilityError, ConfigError
from tokenleap.request import Request
from tokenleap.runtime.network import (
    ContinuingNetwork,
    GrownTree,
    GrowthLimit,
    GrowthPlan,
    Need,
    Network,
    PassOutput,
)
from tokenleap.runtime.target import Target

__all__ = [
    "EarlyExitOptions",
    "LayerSkipOptions",
    "SaturatingLayers",
    "SharedLayers",
    "exit_early",
    "leave_out",
    "skip_layers",
]


class SharedLayers(TargetScorer, GrowingScorer):
    """A part of the target as drafting model, on the target's own KV (see `Scorer`).

    Args:
        network: the network that drafts: a part of the target's layers.
    """

    def __init__(self, target: Target, network: Network) -> None:
        super().__init__(target.with_network(network))

    def verify(
        self, keys: Sequence[int], trees: Sequence[TokenTree], num_computed: Sequence[int]
    ) -> list[PassOutput]:
        """One pass of the remaining layers; see `Scorer.verify`."""
        return self._target.verify(keys, trees, num_computed)

    def grow(
        self,
        keys: Sequence[int],
        pending: Sequence[Sequence[int]],
        plan: GrowthPlan,
        limits: Sequence[GrowthLimit],
    ) -> list[GrownTree] | None:
        return self._target.grow(keys, pending, plan, limits)


def exit_early(target: Target, options: EarlyExitOptions) -> Scorer:
    """The target's first layers with its final norm and head, as a drafting model."""
    layers = target.network.num_layers
    if options.exit_layers is not None:
        if options.exit_layers[-1] >= layers:
            raise ConfigError(
                f"exit_layers: must be 1 to {layers - 1} for this model of {layers} layers, got "
                f"{options.exit_layers[-1]}."
            )
        return SaturatingLayers(target, options.exit_layers, options.exit_confidence)
    count = layers // 2 if options.exit_layer is None else options.exit_layer
    if not 1 <= count < layers:
        raise ConfigError(
            f"exit_layer: must be 1 to {layers - 1} for this model of {layers} layers, got {count}."
        )
    return SharedLayers(target, target.network.first_layers(count))


def skip_layers(target: Target, options: LayerSkipOptions) -> SharedLayers:
    """The target without the chosen sublayers, as a drafting model."""
    skipped = options.skipped(target.network.num_layers)
    return SharedLayers(target, leave_out(target.network, skipped))


def leave_out(network: Network, skipped: Mapping[str, Sequence[int]]) -> Network:
    """A network without some sublayers, over the same weights."""
    for field, indices in skipped.items():
        for index in indices:
            if not 0 <= index < network.num_layers:
                raise ConfigError(
                    f"{field}: must be 0 to {network.num_layers - 1} for this model of "
                    f"{network.num_layers} layers, got {index}."
                )
    return network.without(skipped["skip_attention"], skipped["skip_mlp"])


# Early exit by saturation: layers run until one no longer changes the token.
#
# Schuster et al., "Confident Adaptive Language Modeling", section 3.4, for drafting (Xia et al.,
# "Unlocking Efficiency in Large Language Model Inference", self-drafting by early exiting). The
# layers of a list are checked one after the other for each node. The first whose most probable
# token is that of the checked layer before, or that is confident of it, gives the node's
# distribution.
#
# The decision reads the node's logits alone and no drawn token. So q, the distribution of the layer
# where a node stopped, is the exact distribution its children are drawn from (invariant 2).
#
# A node that runs deeper than its ancestors needs their KV in these layers. They go on from their
# hidden states in the same pass, and in a tree all nodes before it do.


class _Row:
    """What a draft of one request has computed."""

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
        layers: numbers of layers, ascending, behind which a node may stop; at least two.
        confidence: a node also stops where its most probable token has this probability; None: not.
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
        """Run the layers of one stage for the nodes that have not stopped."""
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
        """Take the deeper logits of the nodes that have not stopped, and see which of them do."""
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
