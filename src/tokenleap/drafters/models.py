"""`draft_model`: a second, smaller model drafts.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding"; Chen et al.,
"Accelerating Large Language Model Decoding with Speculative Sampling"; trees as in SpecInfer and
EAGLE-2. The draft model has its own KV. The draft model of an encoder-decoder has an encoder, too,
which reads the same source. It draws under the request's own sampling parameters, which
brings q close to p. `OwnModel` is the `Scorer` that `ModelDrafter` uses. Draft models with another
vocabulary than the target's are in `vocabulary.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn import functional

from tokenleap.control.base import Budget, within
from tokenleap.core.acceptance.base import AcceptanceRule
from tokenleap.core.references import Source, common_prefix
from tokenleap.core.tree import Draft, TokenTree
from tokenleap.decode import Outcome, StepTimes, step
from tokenleap.drafters.base import Drafter, DrafterTraits, PerRequest
from tokenleap.drafters.growth import GrowingChain
from tokenleap.drafters.model_drafter import Scorer, TargetScorer
from tokenleap.drafters.options import (
    CascadeOptions,
    EarlyExitOptions,
    LayerSkipOptions,
)
from tokenleap.errors import CompatibilityError, ConfigError
from tokenleap.request import Request
from tokenleap.runtime.growth_plan import GrowthPlan
from tokenleap.runtime.inputs import StateRows
from tokenleap.runtime.network import (
    LOGITS,
    ContinuingNetwork,
    GrownTree,
    GrowthLimit,
    Need,
    Network,
    PassOutput,
)
from tokenleap.runtime.passes import Passes, Rows
from tokenleap.runtime.target import Target

FIRST_PASS = 32
"""Most committed tokens that the first drafting pass computes. If more are missing, a prefill
computes them."""


class OwnModel(Scorer):
    """A draft model with KV rows of its own."""

    def __init__(self, model: Passes, *, partial: bool = False) -> None:
        self.partial = partial
        self._model = model
        self._cached = PerRequest[list[int]]()  # tokens whose KV the model holds

    def use(self, network: Network) -> None:
        """Draft with another network of the same sizes, on the KV that is there."""
        self._model.network = network

    def seen(self, request: Request) -> Sequence[int]:
        return request.token_ids

    def room(self, request: Request) -> int:
        """Tokens left in the draft model's context and in its memory for one row.

        It is negative if the source is too long for the draft model's encoder.
        """
        return most_tokens(self._model, request.source) - len(self.seen(request))

    def admit(self, requests: Sequence[Request], num_nodes: int) -> Sequence[Request]:
        """The oldest requests that fit into the model's memory."""
        if self._model.slab.limit is None:
            return requests
        seen = {request.key: len(self.seen(request)) for request in requests}
        held = {key: len(tokens) for key, tokens in self._cached.items()}
        missing = [seen[key] - held.get(key, 0) for key in seen]
        # A row is padded to the longest row of its pass, and the first pass also computes the
        # missing committed tokens.
        ahead = max([num_nodes, *(count for count in missing if count <= FIRST_PASS)])
        # A row alone in its pass is not padded, and its draft is cut to the room that is left.
        most = {r.key: most_tokens(self._model, r.source) for r in requests}
        wanted = {key: min(tokens + ahead, most[key]) for key, tokens in seen.items()}
        admitted, to_free = rows_that_fit(self._model, wanted, held, self._state_bytes(requests))
        for key in to_free:
            self._free(key)
        return [request for request in requests if request.key in admitted]

    def _state_bytes(self, requests: Sequence[Request]) -> dict[int, int] | None:
        """Request key -> bytes that a row has of its source; None of a decoder-only model."""
        if not self._model.reads_source:
            return None
        held = {key: sum(t.nbytes for t in self._model.state(key)) for key in self._cached}
        return held | {r.key: self._model.state_bytes(r.source) for r in requests}

    def pending(self, request: Request) -> list[int]:
        """Roll the KV back to the committed tokens; prefill if too many of them are missing."""
        key, tokens = request.key, list(self.seen(request))
        if key not in self._cached:
            self._open_row(request)
            self._cached[key] = []
        agreed = common_prefix(self._cached[key], tokens[:-1])
        self._model.rollback(key, agreed)
        if len(tokens) - agreed > FIRST_PASS:
            self._prefill(request, agreed, len(tokens) - 1)
            agreed = len(tokens) - 1
        self._cached[key] = tokens[:agreed]
        return tokens[agreed:]

    def _open_row(self, request: Request) -> None:
        open_row(self._model, request.key, request.source)

    def _prefill(self, request: Request, start: int, stop: int) -> None:
        self._model.prefill(request.key, self.seen(request)[start:stop])

    def finish_draft(self, request: Request, num_tokens: int) -> None:
        """Keep the KV of the pending tokens, which are committed; discard that of the draft."""
        self._model.commit(request.key, range(num_tokens))
        self._cached[request.key] = list(self.seen(request))

    def release(self, request: Request) -> None:
        """Free the request's KV row; after a failure its numbers, which may be NaN, too."""
        if request.failed and request.key in self._cached:
            self._model.wipe(request.key)
        self._free(request.key)
        super().release(request)

    def _free(self, key: int) -> None:
        if self._cached.pop(key, None) is not None:
            self._model.remove(key)


# Which requests a draft model has KV memory for, if `kv_cache_memory` limits it, and their rows.
#
# Drafters with a model of their own call `rows_that_fit` before they compute anything. The oldest
# requests are drafted for. The others get empty drafts in this step: they run slower, and their
# output does not change (invariant 3). A request that is too long to fit even alone gets none
# either. If a step needs more memory than was estimated here, the slab raises `OverBudget`, and the
# engine runs that step without drafts.
#
# A draft model that is an encoder-decoder reads the request's source once, when its row is opened;
# or what the target's encoder made of it. What its decoder reads of the source is counted into the
# same memory.


def most_tokens(model: Passes, source: Source | None) -> int:
    """Most tokens of a row that reads this source; 0 if it is too long for the model's encoder."""
    network = None if source is None else model.source_network
    if network is None or source is None:
        return model.most_tokens
    if network.source_limit is not None and len(source) > network.source_limit:
        return 0
    return model.most_tokens_beside(network.state_bytes(source))


def open_row(model: Passes, key: int, source: Source | None, encoded: Tensor | None = None) -> None:
    """Open a row of the draft model, which reads the source if there is one.

    Args:
        encoded: [n, E] what another model's encoder made of the source; None runs the draft
            model's own.
    """
    model.add(key)
    if source is None:
        return
    try:
        if encoded is None:
            model.encode(key, source)
        else:
            model.read_encoded(key, encoded)
    except Exception:
        model.remove(key)
        raise


def rows_that_fit(
    model: Rows,
    wanted: Mapping[int, int],
    held: Mapping[int, int],
    states: Mapping[int, int] | None = None,
) -> tuple[set[int], list[int]]:
    """Choose the requests whose rows fit into the model's memory together.

    Args:
        states: request key -> bytes of the row's state, of all these rows; None if they have none.

    Returns:
        The keys to draft for, and the keys of rows to free first. The tokens of a freed row are
        computed again when its request is admitted again.
    """
    sizes = states or {}
    in_use = sum(sizes.get(key, 0) for key in held)

    def fit(keys: Collection[int], longest: int) -> bool:
        added = sum(sizes.get(key, 0) for key in keys) - in_use
        return model.has_room(len(keys), longest, added)

    wanted = {key: tokens for key, tokens in wanted.items() if fit([key], tokens)}
    admitted = list(wanted)
    while admitted and not fit(admitted, max(wanted[key] for key in admitted)):
        admitted.pop()
    others = [key for key in held if key not in admitted]
    lengths = [*(wanted[key] for key in admitted), *(held[key] for key in others)]
    fits = fit([*admitted, *others], max(lengths, default=0))
    return set(admitted), [] if fits else others


# Draft models whose logits have another width than the target's, with the same tokens.
#
# Vocabularies are padded after their last token to a size that suits the hardware, and models of
# one family may be padded differently. `resized` cuts a draft model's logits to the target's width,
# or pads them with minus infinity. `draft_model` and `cascade` use it.


def resized(model: Target, vocab_size: int) -> Target:
    """A model with logits of width `vocab_size`; `model` itself if it has this width."""
    return model if model.vocab_size == vocab_size else _Resized(model, vocab_size)


class _Resized(Target):
    """A model over another model's rows and weights, with logits of another width."""

    def __init__(self, model: Target, vocab_size: int) -> None:
        vars(self).update(vars(model))  # share all state instead of loading again
        self._own_size = model.vocab_size
        self.vocab_size = vocab_size

    def prefill(
        self,
        key: int,
        tokens: Sequence[int],
        hidden_layers: tuple[int, ...] = (),
        states: Tensor | None = None,
        read_logits: Callable[[Tensor], object] | None = None,
    ) -> Mapping[int, Tensor]:
        assert read_logits is None, "a draft model is never asked for a prompt's probabilities"
        return super().prefill(key, self._without_padding(tokens), hidden_layers, states)

    def verify(
        self,
        keys: Sequence[int],
        trees: Sequence[TokenTree],
        num_computed: Sequence[int] | None = None,
        need: Need = LOGITS,
        states: Sequence[StateRows] | None = None,
    ) -> list[PassOutput]:
        trees = [TokenTree(self._without_padding(tree.tokens), tree.parents) for tree in trees]
        outputs = super().verify(keys, trees, num_computed, need, states)
        # Without an argmax: the network's may be a token that is cut off.
        return [PassOutput(self._fitted(o.scores), hidden=o.hidden) for o in outputs]

    def grow(
        self,
        keys: Sequence[int],
        pending: Sequence[Sequence[int]],
        plan: GrowthPlan,
        limits: Sequence[GrowthLimit],
        token_ids: Tensor | None = None,
        states: Sequence[StateRows] | None = None,
    ) -> list[GrownTree] | None:
        """See `Passes.grow`; None if the most probable tokens may be some that are cut off."""
        if self._own_size > self.vocab_size:
            return None
        pending = [self._without_padding(tokens) for tokens in pending]
        return super().grow(keys, pending, plan, limits, token_ids, states)

    def _without_padding(self, tokens: Sequence[int]) -> tuple[int, ...]:
        # The target's padding tokens have no meaning, and this model has no embedding for them.
        return tuple(token if token < self._own_size else 0 for token in tokens)

    def _fitted(self, logits: Tensor) -> Tensor:
        missing = max(0, self.vocab_size - self._own_size)
        return functional.pad(logits[:, : self.vocab_size], (0, missing), value=-torch.inf)


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
    return TargetScorer(target.with_network(target.network.first_layers(count)))


def skip_layers(target: Target, options: LayerSkipOptions) -> TargetScorer:
    """The target without the chosen sublayers, as a drafting model."""
    skipped = options.skipped(target.network.num_layers)
    return TargetScorer(target.with_network(leave_out(target.network, skipped)))


def leave_out(network: Network, skipped: Mapping[str, Sequence[int]]) -> Network:
    """A network without some sublayers, over the same weights."""
    for part, indices in skipped.items():
        for index in indices:
            if not 0 <= index < network.num_layers:
                raise ConfigError(
                    f"{part}: must be 0 to {network.num_layers - 1} for this model of "
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
    """The computed part of one request's draft."""

    def __init__(self, stages: int) -> None:
        self.states: list[list[Tensor]] = [[] for _ in range(stages)]
        """[stages] the hidden states [E] after each checked layer, of the tree's first nodes."""
        self.start = 0  # the first node of this pass
        self.logits: list[Tensor] = []  # [V] of each node of this pass, at its deepest layer so far
        self.tokens: list[int] = []  # their argmax
        self.open: list[int] = []  # nodes of this pass that have not stopped


class SaturatingLayers(TargetScorer):
    """A growing part of the target as drafting model, on the target's own KV (see `Scorer`).

    Args:
        layers: numbers of layers, ascending, after which a node may stop; at least two.
        confidence: a node also stops where its most probable token has this probability; None: not.
    """

    grows = False

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
        self._rows = PerRequest[_Row]()

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
        passes = self._model.with_network(network)
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


def _fed(tree: TokenTree, first: int, last: int, begin: int) -> TokenTree:
    """The first `last` nodes of a tree; those from `first` on have the ids of fed states."""
    tokens = (*tree.tokens[:first], *range(begin, begin + last - first))
    return TokenTree(tokens, tree.parents[:last])


@dataclass(frozen=True)
class _InnerSpeculation:
    """The drafting side of the middle model's steps (see `decode.Speculates`)."""

    drafter: Drafter
    length: int
    acceptance: AcceptanceRule

    def draft(self, batch: Sequence[Request]) -> list[Draft]:
        return self.drafter.propose(batch, [within(request, self.length) for request in batch])

    def rule(self, _: Request) -> AcceptanceRule:
        return self.acceptance

    def give_up(self, _: Request, error: Exception) -> None:
        """A failure of the inner drafter is one of the cascade."""
        raise error

    def hidden_layers(self, _: Sequence[Request]) -> tuple[int, ...]:
        return self.drafter.traits.hidden_layers

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> float:
        """The inner drafter learns. The outer step measures the time of the whole cascade."""
        self.drafter.observe(outcomes, times)
        return 0.0


class _Chain(GrowingChain):
    """The middle model's draft for a request.

    Probabilities of greedy requests are those at temperature 1, since q is one-hot. Those of
    sampled ones are q's, also under the rule `coupled`: clarity takes a fifth of a level's time.

    Args:
        inner: the middle model's request; its tokens begin with the outer request's.
        start: index of the root among its tokens.
    """

    def __init__(self, inner: Request, start: int, budget: Budget) -> None:
        super().__init__(inner.token_ids[start], budget)
        self.inner, self._start = inner, start

    def grow(self, outcome: Outcome) -> None:
        """Append what a step of the middle model has generated, up to the limits."""
        p, nodes = outcome.p, (0, *outcome.accepted.path)
        generated = self.inner.token_ids[self._start + 1 + len(self.tokens) :]
        for token, node in zip(generated, nodes, strict=False):
            self.add(token, p[node], (p.untempered(node) if p.greedy else p[node]).prob(token))
            if self.ended:
                break


class Cascade(Drafter):
    """Chains drawn from a middle model, which an inner drafter accelerates.

    Args:
        rule: the inner acceptance rule. It must be lossless, else q would not be the distribution
            the tokens were drawn from.
    """

    def __init__(
        self,
        model: Target,
        drafter: Drafter,
        rule: AcceptanceRule,
        options: CascadeOptions,
        *,
        coupled: bool,
    ) -> None:
        assert rule.lossless
        self.traits = DrafterTraits(
            stops_early=True,
            quotes_references=drafter.traits.quotes_references,
            follows_prediction=drafter.traits.follows_prediction,
        )
        self._model = model
        self._drafter = drafter
        self.inner = [drafter]
        self._speculation = _InnerSpeculation(drafter, options.inner_num_speculative_tokens, rule)
        self._coupled = coupled
        self._inner = PerRequest[Request]()  # the middle model's

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        limits = self._limits(batch, budgets)
        chains = {
            request.key: _Chain(self._catch_up(request), len(request.token_ids) - 1, limit)
            for request, limit in zip(batch, limits, strict=True)
            if limit.chain
        }
        while drafting := [each for each in chains.values() if not each.ended]:
            self._advance(drafting)
        return [
            chains[request.key].draft() if request.key in chains else Draft.empty(request.root)
            for request in batch
        ]

    def _limits(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Budget]:
        """The budgets as far as the middle model's context goes; empty if its memory is full.

        They are also empty if the source is too long for the middle model's encoder.
        """
        most = {r.key: most_tokens(self._model, r.source) for r in batch}  # each row alone
        lengths = {
            request.key: max(0, min(budget.chain, most[request.key] - len(request.token_ids)))
            for request, budget in zip(batch, budgets, strict=True)
        }
        wanted = [request for request in batch if lengths[request.key]]
        ahead = max(lengths.values(), default=0) + self._speculation.length
        sources = {key: inner.source for key, inner in self._inner.items()}
        sources |= {request.key: request.source for request in wanted}
        admitted, to_free = rows_that_fit(
            self._model,
            {r.key: min(len(r.token_ids) + ahead, most[r.key]) for r in wanted},
            {key: len(inner.token_ids) for key, inner in self._inner.items()},
            {key: self._model.state_bytes(source) for key, source in sources.items()},
        )
        for key in to_free:
            self._free(key)
        return [
            replace(budget, depth=lengths[request.key] if request.key in admitted else 0)
            for request, budget in zip(batch, budgets, strict=True)
        ]

    def _advance(self, chains: Sequence[_Chain]) -> None:
        """One step of the middle model for these chains."""
        by_key = {each.inner.key: each for each in chains}
        outcomes = step(self._model, self._speculation, [each.inner for each in chains])
        for each in chains:
            if each.inner.failure is not None:
                raise each.inner.failure
        for outcome in outcomes:
            by_key[outcome.request.key].grow(outcome)

    def _catch_up(self, request: Request) -> Request:
        """The inner request, brought up to the committed tokens, with its KV (invariant 1)."""
        # New noise in every step, unless the outer rule couples the draft with the target.
        position = len(request.token_ids)
        noise = request.noise if self._coupled else request.noise.derived(position)
        before = self._inner.get(request.key)
        key = None if before is None else before.key
        inner = request.shadow(noise, self._model.most_tokens, key)
        if before is None:
            open_row(self._model, inner.key, inner.source)
            agreed = 0
        else:
            cached = before.token_ids[: self._model.cached(inner.key)]
            agreed = common_prefix(cached, inner.token_ids[:-1])
            if inner.token_ids[: len(before.token_ids)] != before.token_ids:
                self._drafter.rewind(inner)
                if self._drafter.traits.hidden_layers:  # it is shown all of them anew
                    agreed = 0
        self._inner[request.key] = inner
        self._model.rollback(inner.key, agreed)
        layers = self._drafter.traits.hidden_layers
        hidden = self._model.prefill(inner.key, inner.token_ids[agreed:-1], layers)
        if hidden:
            self._drafter.observe_prefill(inner, agreed, hidden)
        return inner

    def rewind(self, request: Request) -> None:
        """Nothing to do: `_catch_up` rolls the inner request back to the common prefix."""

    def release(self, request: Request) -> None:
        """Free the inner request and its KV; after a failure its numbers, which may be NaN, too."""
        inner = self._inner.get(request.key)
        if inner is not None:
            inner.fail_with(request)
            if inner.failed:
                self._model.wipe(inner.key)
        self._free(request.key)

    def _free(self, key: int) -> None:
        inner = self._inner.pop(key, None)
        if inner is not None:
            self._drafter.release(inner)
            self._model.remove(inner.key)
