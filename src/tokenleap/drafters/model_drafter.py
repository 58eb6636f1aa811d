"""`ModelDrafter`: drafting with a model, for `draft_model`, `eagle`, `early_exit`, `layer_skip`.

A tree grows level by level, with one pass of the drafting model per level for all requests
together. A chain is a tree of width 1. The methods differ in their `Scorer`: which model scores the
nodes, and whose KV it uses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isnan
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from tokenleap.control import Budget
from tokenleap.core.distribution import Distribution, Limits, Truncation
from tokenleap.core.noise import Noise
from tokenleap.core.per_request import drop_request
from tokenleap.core.tree import Draft, TokenTree
from tokenleap.decode import Outcome, StepTimes
from tokenleap.drafters.base import Drafter, DrafterTraits
from tokenleap.drafters.growth import (
    Drawn,
    Growth,
    allowed_part,
    clearest,
    coupled_draws,
    distinct,
    excludes_all,
    grown_draws,
    independent,
    most_probable,
    most_probable_below,
    named,
    spread,
    truncates,
)
from tokenleap.drafters.shapes import Node, TreeOptions, shape_of
from tokenleap.errors import RequestError
from tokenleap.request import Request
from tokenleap.runtime.growth_plan import GrowthDraw, GrowthPlan
from tokenleap.runtime.inputs import StateRows
from tokenleap.runtime.network import (
    GrownTree,
    GrowthLimit,
    Need,
    PassOutput,
    num_states,
    states_of,
)
from tokenleap.runtime.passes import Passes
from tokenleap.runtime.target import Target


def scored(num_computed: Sequence[int], hidden: tuple[int, ...] = ()) -> Need:
    """Outputs that a pass needs: before the first level, logits of the root (`Scorer.verify`)."""
    return Need(last=None if any(num_computed) else 1, hidden=hidden)


class Scorer(ABC):
    """A drafting model with its KV: the part of `ModelDrafter` that differs between methods."""

    _model: Passes
    """The drafting model, where `verify` and `grow` are those below."""

    grows: bool = True
    """Whether the model can draft a tree in one call, if its network can."""

    reads_target_kv: bool = False
    """See `DrafterTraits.reads_target_kv`."""

    partial: bool = False
    """Whether the drafting model lacks some of the target's tokens. Their logits are -inf."""

    translates: bool = False
    """Whether its model cannot even read all of the target's tokens."""

    token_ids: Tensor | None = None
    """[Vd] the target's ids of the tokens that logits stand for, ascending; None if these are all
    tokens of the target."""

    most_depth: int | None = None
    """Levels of its deepest draft; None without a limit of its own."""

    @property
    def level_share(self) -> float:
        """See `DrafterTraits`; if it is 0, `expect` says how many levels there will be."""
        return 1.0

    @abstractmethod
    def room(self, request: Request) -> int:
        """Most tokens it can draft after the committed ones; below 1 it cannot draft."""

    def admit(self, requests: Sequence[Request], num_nodes: int) -> Sequence[Request]:
        """The requests for which it has memory to score `num_nodes` drafted nodes each."""
        return requests

    def expect(self, depths: Mapping[int, int]) -> None:  # noqa: B027 - of few models
        """Request key -> levels of its next draft, at least 1."""

    @abstractmethod
    def pending(self, request: Request) -> list[int]:
        """Committed tokens whose KV is missing, the root last; the others are in the cache."""

    def verify(
        self, keys: Sequence[int], trees: Sequence[TokenTree], num_computed: Sequence[int]
    ) -> list[PassOutput]:
        """One pass over the new nodes of each tree.

        Args:
            num_computed: [B] nodes at the beginning of each tree that earlier passes computed.
                It is 0 in the first pass, which has no drafted nodes.

        Returns:
            [B] outputs with logits [n, V] of the n new nodes of each tree, or [n, Vd] with
            `token_ids`. In the first pass, the last one's are enough: those of the root.
        """
        return self._model.verify(keys, trees, num_computed, scored(num_computed))

    def grow(
        self,
        keys: Sequence[int],
        pending: Sequence[Sequence[int]],
        plan: GrowthPlan,
        limits: Sequence[GrowthLimit],
    ) -> list[GrownTree] | None:
        """[B] trees of the target's tokens, drafted in one call (see `Passes.grow`).

        None if the model cannot do this.
        """
        return self._model.grow(keys, pending, plan, limits) if self.grows else None

    @abstractmethod
    def finish_draft(self, request: Request, num_tokens: int) -> None:
        """End the draft of a request and free the KV of its drafted nodes.

        Args:
            num_tokens: nodes at the beginning of its last tree that are committed tokens. A model
                with KV of its own keeps theirs.
        """

    def release(self, request: Request) -> None:
        drop_request(self, request.key)


class TargetScorer(Scorer):
    """A part of the target as drafting model, on the target's own KV rows.

    Args:
        target: the target, or a part of its network over the same rows.
    """

    reads_target_kv = True

    def __init__(self, target: Target) -> None:
        self._model = target

    def room(self, request: Request) -> int:
        return self._model.max_model_len - len(request.token_ids)

    def pending(self, request: Request) -> list[int]:
        """Only the root: the target's rows hold the KV of all tokens before it (invariant 1)."""
        return [request.root]

    def finish_draft(self, request: Request, num_tokens: int) -> None:
        """Nothing to do: verification computes all nodes again, in all layers."""


class Head(Scorer):
    """A `Scorer` that is shown the target's hidden states.

    Attributes:
        layers: ids of the target's layers whose hidden states it reads.
    """

    layers: tuple[int, ...]

    @abstractmethod
    def keep(self, request: Request, start: int, hidden: Mapping[int, Tensor]) -> None:
        """Keep what is needed of the states of the committed tokens from `start` on.

        Args:
            hidden: layer id -> [n, E] the target's hidden states.
        """

    @abstractmethod
    def rewind(self, request: Request) -> None:
        """Forget what belongs to tokens that were taken back."""


class ModelDrafter(Drafter):
    """Trees and chains from a drafting model.

    Args:
        coupled: whether to draw with the target's own noise.
        shares_nodes: whether equal draws below a node share a node (`Draft.draws`).
    """

    def __init__(
        self, scorer: Scorer, options: TreeOptions, *, coupled: bool, shares_nodes: bool = False
    ) -> None:
        self._scorer = scorer
        self._options = options
        self._shape = shape_of(options)
        self._coupled = coupled
        self._independent = options.expansion == "sample_with_replacement"
        self._shares = shares_nodes and self._independent and self._shape.branches
        self.traits = DrafterTraits(
            drafts_trees=self._shape.branches,
            stops_early=not self._shape.branches,
            level_share=scorer.level_share,
            reads_target_kv=scorer.reads_target_kv,
            independent_siblings=self._independent,
        )

    @property
    def scorer(self) -> Scorer:
        """The drafting model, for beam searches."""
        return self._scorer

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """One pass of the drafting model per level, over all requests still drafting."""
        if not any(budget.chain for budget in budgets):
            return [Draft.empty(request.root) for request in batch]
        limits = self._limits(batch, budgets)
        growths = [
            Growth(request, limits[request.key], self._scorer.pending(request))
            if request.key in limits
            else None
            for request in batch
        ]
        self._grow_at_once([growth for growth in growths if growth])
        while growing := [growth for growth in growths if growth and growth.frontier]:
            outputs = self._scorer.verify(
                [growth.request.key for growth in growing],
                [growth.tree() for growth in growing],
                [growth.num_computed for growth in growing],
            )
            for growth, output in zip(growing, outputs, strict=True):
                self._expand(growth, output.scores)
                if not growth.frontier:
                    # Now, not after the loop: the next pass of the other requests may include this
                    # row, and padding is written after its committed KV.
                    self._scorer.finish_draft(growth.request, len(growth.pending))
        return [
            growth.draft(self._shape) if growth else Draft.empty(request.root)
            for request, growth in zip(batch, growths, strict=True)
        ]

    def level_sizes(self, limit: int) -> Sequence[int] | None:
        if not self._shape.branches:
            return None
        return self._shape.level_sizes(limit)[: self._scorer.most_depth]

    def release(self, request: Request) -> None:
        self._scorer.release(request)

    def rewind(self, request: Request) -> None:
        """Nothing to do: `Scorer.pending` rolls back to the common prefix."""

    def _limits(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> dict[int, Budget]:
        """Request key -> budget, for the requests that can be drafted for in this step."""
        if not self._shape.width(()):
            return {}
        limits: dict[int, Budget] = {}
        for request, budget in zip(batch, budgets, strict=True):
            budget = self._fitted(budget, self._scorer.room(request))
            if budget.chain >= 1:
                limits[request.key] = budget
        wanted = [request for request in batch if request.key in limits]
        # Rows are padded to the longest row of their pass, so each needs room for the largest tree.
        nodes = max((self._shape.positions(budget) for budget in limits.values()), default=0)
        found = {r.key: limits[r.key] for r in self._scorer.admit(wanted, nodes)}
        if (most := self._scorer.most_depth) is None:
            return found
        found = {key: self._shallow(budget, most) for key, budget in found.items()}
        self._scorer.expect({key: budget.depth for key, budget in found.items()})
        return found

    def _shallow(self, budget: Budget, most: int) -> Budget:
        """The same with no more levels than its nodes may have and the model drafts."""
        levels = len(self._shape.level_sizes(budget.nodes))
        return replace(budget, depth=min(budget.depth, levels, most))

    def _fitted(self, budget: Budget, room: int) -> Budget:
        """The budget, cut to the room that the drafting model's context and memory have left."""
        if max(budget.nodes, budget.depth) > room:
            budget = replace(budget, nodes=min(budget.nodes, room), depth=min(budget.depth, room))
        while budget.chain and self._shape.positions(budget) > room:
            budget = replace(budget, depth=budget.depth - 1)
        return budget

    def _grow_at_once(self, growths: Sequence[Growth]) -> None:
        """Draft trees in one call, if the scorer can.

        `_expand` would grow the same trees level by level, but for unlikely tokens that transitions
        make the best ones. Only where tokens are forbidden, by the model's own rules or as bad
        words, it drafts others in the place of most probable ones; here they are cut off with what
        is below them.
        """
        for growth in growths:
            growth.at_once = self._growth_draw(growth.request)
        self._grow_alike([each for each in growths if self._can_grow_at_once(each)])
        self._grow_alike([each for each in growths if self._can_draw_at_once(each)])

    def _grow_alike(self, growths: Sequence[Growth]) -> None:
        """The same for trees that all draw their tokens, or all take the most probable ones."""
        depth = max((growth.budget.depth for growth in growths), default=0)
        plan = self._shape.plan(depth) if growths else None
        if plan is None:
            return
        trees = self._scorer.grow(
            [growth.request.key for growth in growths],
            [growth.pending for growth in growths],
            plan,
            [self._growth_limit(growth) for growth in growths],
        )
        for growth, tree in zip(growths, trees or (), strict=trees is not None):
            if not tree.undecided and not isnan(sum(tree.probabilities)):  # `_draw` refuses NaN
                self._take(growth, allowed_part(growth.request, tree))

    def _growth_limit(self, growth: Growth) -> GrowthLimit:
        budget = growth.budget
        # Of what is forbidden and then cut off, nothing takes the place of something else.
        keeps_all = self._shape.prunes and growth.request.sampler.has_masks
        return GrowthLimit(
            budget.depth,
            None if keeps_all else budget.nodes,
            self._shape.positions(budget),
            budget.min_token_prob,
            budget.min_path_prob,
            growth.at_once,
        )

    def _growth_draw(self, request: Request) -> GrowthDraw | None:
        if self._takes_most_probable(request):
            return None
        limits: Limits = self._truncation(request) or request.params
        noise, temperature = self._noise(request), self._temperature(request)
        return GrowthDraw(noise, temperature, limits, self._coupled)

    def _take(self, growth: Growth, tree: GrownTree) -> None:
        request, draw = growth.request, growth.at_once

        if draw is None or tree.logits is None:
            growth.grown = tree
        else:

            def q_of(logits: Tensor) -> Distribution:
                q = request.sampler.distribution(logits, (), draw.temperature, draw.limits)
                return named(q, self._scorer.token_ids)

            for parent, drawn in grown_draws(tree, draw, q_of):
                above = None if parent < 0 else growth.nodes[parent]
                growth.nodes += growth.children(above, drawn, shared=False)
        growth.frontier = []
        self._scorer.finish_draft(growth.request, len(growth.pending))

    def _can_grow_at_once(self, growth: Growth) -> bool:
        """Whether the children of a node are the most probable tokens of the raw logits.

        The model's own rules and bad words may forbid some of them, which are then not drafted.
        """
        return growth.at_once is None and not growth.request.sampler.params_change_logits

    def _can_draw_at_once(self, growth: Growth) -> bool:
        """Whether the children of a node are drawn without replacement from the raw logits."""
        draw, budget = growth.at_once, growth.budget
        if draw is None or self._independent or growth.request.sampler.changes_logits:
            return False
        # Of independent draws, probabilities after truncation are known only later.
        stops = budget.min_token_prob or budget.min_path_prob
        return draw.coupled or not (stops and truncates(draw.limits))

    def _expand(self, growth: Growth, logits: Tensor) -> None:
        """Add the children of the frontier; the shape chooses the next frontier among them.

        Args:
            logits: [n, V] or [n, Vd] of nodes of the pass; the last ones are the frontier's.
        """
        frontier, budget = growth.frontier, growth.budget
        growth.num_computed = len(growth.pending) + len(growth.scored)
        level: list[Node] = []
        drawn = self._draw_level(growth, logits[-len(frontier) :])
        for node, children in zip(frontier, drawn, strict=True):
            level += growth.children(node, children, shared=self._shares)
        growth.nodes += level
        depth = level[0].depth if level else budget.depth
        wanted: list[Node] = []
        has_room = self._shape.prunes or growth.size < budget.nodes
        if depth < budget.depth and has_room:
            wanted = self._shape.frontier([node for node in level if not node.stopped])
        growth.frontier = list(wanted)
        growth.scored += wanted

    def _draw_level(self, growth: Growth, logits: Tensor) -> list[list[Drawn]]:
        """The children of each node of the frontier, from its logits [f, V] or [f, Vd]."""
        frontier = growth.frontier
        widths = [self._shape.width(node.ranks if node else ()) for node in frontier]
        request, ids = growth.request, self._scorer.token_ids
        if self._takes_most_probable(request) and not request.sampler.changes_logits:
            levels = most_probable_below(logits, widths, ids)
            if levels is not None:  # `_draw` refuses NaN
                return levels
        nodes = zip(frontier, logits, widths, strict=True)
        try:
            return [self._draw(growth, *each) for each in nodes]
        except RequestError as error:
            if logits.amax(-1).isfinite().all():
                raise
            depth = 0 if frontier[0] is None else frontier[0].depth
            # A head that reads its own outputs may make them larger at each level, without an end.
            advice = "draft fewer, or use another one." if depth else "its weights are damaged."
            raise RequestError(
                f"the drafting model's logits are NaN or infinite after {depth} drafted tokens: "
                + advice
            ) from error

    def _draw(self, growth: Growth, node: Node | None, logits: Tensor, width: int) -> list[Drawn]:
        request, output = growth.request, growth.output_to(node)
        sampler, ids = request.sampler, self._scorer.token_ids
        if ids is not None and sampler.changes_logits:  # masks and penalties are of all tokens
            logits, ids = spread(logits, ids, sampler.vocab_size), None
        some_excluded = self._scorer.partial or self._scorer.token_ids is not None
        if some_excluded and excludes_all(sampler.shaped(logits, output)):
            return []
        temperature = self._temperature(request)
        if self._takes_most_probable(request):
            return most_probable(named(sampler.untempered(logits, output), ids), width)
        limits = self._truncation(request)
        distribution = named(sampler.distribution(logits, output, temperature, limits), ids)
        depth, noise = 0 if node is None else node.depth, self._noise(request)
        if self._shape.prunes:
            return clearest(distribution, noise, depth, width)
        if self._options.expansion == "sample_with_replacement":
            return independent(distribution, noise, depth, width)
        draw = coupled_draws if self._coupled else distinct
        return draw(distribution, noise, depth, width)

    def _noise(self, request: Request) -> Noise:
        return request.noise.at(len(request.token_ids)).drafting(coupled=self._coupled)

    def _takes_most_probable(self, request: Request) -> bool:
        return self._options.takes_most_probable(self._temperature(request), coupled=self._coupled)

    def _temperature(self, request: Request) -> float:
        own = self._options.draft_temperature
        return request.params.temperature if own is None else own

    def _truncation(self, request: Request) -> Truncation | None:
        """How q is truncated, if not as the request's p."""
        top_k, top_p = self._options.draft_top_k, self._options.draft_top_p
        if top_k is None and top_p is None:
            return None
        params = request.params
        return Truncation(
            params.min_p,
            params.top_k if top_k is None else top_k,
            params.top_p if top_p is None else top_p,
        )


class HeadDrafter(ModelDrafter):
    """Chains and trees from a trained head."""

    _scorer: Head

    def __init__(
        self, head: Head, options: TreeOptions, *, coupled: bool, shares_nodes: bool = False
    ) -> None:
        super().__init__(head, options, coupled=coupled, shares_nodes=shares_nodes)
        self.traits = replace(self.traits, hidden_layers=tuple(sorted(head.layers)))

    def observe_prefill(self, request: Request, start: int, hidden: Mapping[int, Tensor]) -> None:
        self._scorer.keep(request, start, hidden)

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> None:
        """Take the hidden states of the committed nodes."""
        for outcome in outcomes:
            hidden, kept = outcome.hidden, len(outcome.committed)
            if kept <= len(outcome.accepted.path):  # the end of the output cut the accepted path
                hidden = states_of(hidden, slice(kept))
            self._scorer.keep(outcome.request, outcome.root, hidden)

    def rewind(self, request: Request) -> None:
        self._scorer.rewind(request)


# States of the committed text, which heads make from the target's hidden states.


Hidden: TypeAlias = Mapping[int, Tensor]
"""Layer id -> [n, E] the target's hidden states of n tokens."""

_MOST_WAITING = 512
"""Parts of a text whose states are not made yet: each of them holds on to the output of a pass."""


class States:
    """States of adjacent tokens, or of the nodes of a tree, in one buffer.

    Args:
        most: keeps only so many of the last ones; None keeps all.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._buffer = torch.empty(0, 0)
        self._first = self._length = 0

    def __len__(self) -> int:
        return self._length

    def keep(self, start: int, states: Tensor) -> None:
        """Keep states [n, E] of the tokens from `start` on; those after them are forgotten."""
        self.cut(start)
        if self._most is not None:
            start, states = start + max(0, len(states) - self._most), states[-self._most :]
        if self._first + self._length != start:
            assert self._most is not None, "states of tokens before these are missing"
            self._first, self._length = start, 0
        self.added(len(states), states).tensor[:] = states
        stop = self._length
        if self._most is not None and stop > self._most:
            self._buffer[: self._most] = self._buffer[stop - self._most : stop].clone()
            self._first, self._length = self._first + stop - self._most, self._most

    def added(self, count: int, like: Tensor) -> StateRows:
        """Room for so many more states, which the caller is to write; `like` is [..., E]."""
        begin, stop = self._length, self._length + count
        if stop > self._buffer.shape[0]:
            larger = like.new_empty(max(64, 2 * stop), like.shape[-1])
            if begin:
                larger[:begin] = self._buffer[:begin]
            self._buffer = larger
        self._length = stop
        return StateRows(self._buffer, begin, count)

    def last(self, count: int) -> StateRows:
        return StateRows(self._buffer, self._length - count, count)

    def cut(self, length: int) -> None:
        """Forget all but the first `length` tokens of the text."""
        self._length = max(0, min(self._length, length - self._first))

    def __getitem__(self, places: slice | Sequence[int]) -> Tensor:
        """[n, E] a view for a slice, else a copy."""
        index = places if isinstance(places, slice) else list(places)
        return self._buffer[: self._length][index]

    def at(self, index: int) -> Tensor | None:
        """[1, E] the state of a token; None if it is not kept."""
        place = index - self._first
        return self[place : place + 1] if 0 <= place < self._length else None


class Fuses(Protocol):
    """Makes states of hidden states."""

    like: Tensor
    """[0, E] in the dtype of the states, where they are."""

    def __call__(self, parts: Sequence[Hidden], to: StateRows) -> None:
        """Write the states of n tokens, whose hidden states are given in parts."""
        ...


class Committed:
    """The states of a request's committed tokens. They are made when they are first read.

    A head that drafts in only some of the steps then makes the states of many tokens at once.

    Args:
        fusion: makes them.
    """

    def __init__(self, fusion: Fuses) -> None:
        self.fusion = fusion
        self._made = States()
        self._waiting: list[Hidden] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def keep(self, start: int, hidden: Hidden) -> None:
        """Keep the hidden states of the tokens from `start` on."""
        assert start <= self._length, "hidden states of tokens before these are missing"
        if start < self._length:
            self.cut(start)
        self._waiting.append(hidden)
        self._length += num_states(hidden)
        if len(self._waiting) == _MOST_WAITING:
            self._make()

    def cut(self, length: int) -> None:
        """Forget all but the first `length`."""
        while self._waiting and self._length > length:
            hidden = self._waiting.pop()
            count = num_states(hidden)
            left = max(0, count - (self._length - length))
            self._length -= count - left
            if left:
                self._waiting.append(states_of(hidden, slice(left)))
        self._made.cut(length)
        self._length = min(self._length, length)

    def __getitem__(self, tokens: slice) -> Tensor:
        """[n, E] a view."""
        if self._waiting:
            self._make()
        return self._made[tokens]

    def last(self, count: int) -> StateRows:
        """The states of the last tokens."""
        if self._waiting:
            self._make()
        return self._made.last(count)

    @torch.inference_mode()  # as in a step, since prompts are shown outside of one
    def _make(self) -> None:
        missing = self._length - len(self._made)
        self.fusion(self._waiting, self._made.added(missing, self.fusion.like))
        self._waiting = []
