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

import torch
from torch import Tensor
from torch.nn import functional

from tokenleap.core.references import Source, common_prefix
from tokenleap.core.tree import TokenTree
from tokenleap.drafters.model_drafter import GrowingScorer
from tokenleap.drafters.options import DraftModelOptions
from tokenleap.request import Request
from tokenleap.runtime.network import (
    LOGITS,
    GrownTree,
    GrowthLimit,
    GrowthPlan,
    Need,
    Network,
    PassOutput,
)
from tokenleap.runtime.passes import Passes, Rows
from tokenleap.runtime.target import Target

__all__ = [
    "DraftModelOptions",
    "OwnModel",
    "most_tokens",
    "open_row",
    "resized",
    "rows_that_fit",
    "scored",
]


FIRST_PASS = 32
"""Most committed tokens that the first drafting pass computes. If more are missing, a prefill
computes them."""


def scored(num_computed: Sequence[int], hidden: tuple[int, ...] = ()) -> Need:
    """What a pass returns: before the first level, logits of the root alone (`Scorer.verify`)."""
    return Need(last=None if any(num_computed) else 1, hidden=hidden)


class OwnModel(GrowingScorer):
    """A draft model with KV rows of its own (see `scorer.Scorer`)."""

    reads_target_kv = False
    token_ids: Tensor | None = None

    def __init__(self, model: Passes, *, partial: bool = False) -> None:
        self.partial = partial
        self._model = model
        self._cached: dict[int, list[int]] = {}  # request key -> tokens whose KV the model holds

    def use(self, network: Network) -> None:
        """Draft with another network of the same sizes, on the KV that is there."""
        self._model.network = network

    def seen(self, request: Request) -> Sequence[int]:
        """The committed tokens in the draft model's vocabulary."""
        return request.token_ids

    def room(self, request: Request) -> int:
        """Tokens left in the draft model's context and in its memory for one row.

        It is negative if the source is too long for the draft model's encoder.
        """
        return most_tokens(self._model, request.source) - len(self.seen(request))

    def admit(self, requests: Sequence[Request], num_nodes: int) -> Sequence[Request]:
        """The oldest requests that fit into the model's memory (see `admission`)."""
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
        """Open the request's row, which reads the source if there is one."""
        open_row(self._model, request.key, request.source)

    def _prefill(self, request: Request, start: int, stop: int) -> None:
        """Compute and commit the KV of `seen(request)[start:stop]`."""
        self._model.prefill(request.key, self.seen(request)[start:stop])

    def verify(
        self, keys: Sequence[int], trees: Sequence[TokenTree], num_computed: Sequence[int]
    ) -> list[PassOutput]:
        """One pass of the draft model."""
        return self._model.verify(keys, trees, num_computed, scored(num_computed))

    def grow(
        self,
        keys: Sequence[int],
        pending: Sequence[Sequence[int]],
        plan: GrowthPlan,
        limits: Sequence[GrowthLimit],
    ) -> list[GrownTree] | None:
        return self._model.grow(keys, pending, plan, limits)

    def finish_draft(self, request: Request, num_tokens: int) -> None:
        """Keep the KV of the pending tokens, which are committed; discard that of the draft."""
        self._model.commit(request.key, range(num_tokens))
        self._cached[request.key] = list(self.seen(request))

    def release(self, request: Request) -> None:
        """Free the request's KV row; after a failure its numbers, which may be NaN, too."""
        if request.failed and request.key in self._cached:
            self._model.wipe(request.key)
        self._free(request.key)

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
# Vocabularies are padded behind their last token to a size that suits the hardware, and models of
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
        assert read_logits is None, "nobody asks a draft model for a prompt's probabilities"
        return super().prefill(key, self._without_padding(tokens), hidden_layers, states)

    def verify(
        self,
        keys: Sequence[int],
        trees: Sequence[TokenTree],
        num_computed: Sequence[int] | None = None,
        need: Need = LOGITS,
        states: Sequence[Tensor] | None = None,
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
        states: Sequence[Tensor] | None = None,
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
        """Logits [n, V] from the model's own logits [n, own V]."""
        missing = max(0, self.vocab_size - self._own_size)
        return functional.pad(logits[:, : self.vocab_size], (0, missing), value=-torch.inf)
