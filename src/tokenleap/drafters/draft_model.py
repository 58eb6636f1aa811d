"""`draft_model`: a second, smaller model drafts.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding"; Chen et al.,
"Accelerating Large Language Model Decoding with Speculative Sampling"; trees as in SpecInfer and
EAGLE-2. The draft model has its own KV. The draft model of an encoder-decoder has an encoder, too,
which reads the same source. It draws under the request's own sampling parameters, which
brings q close to p. `OwnModel` is the `Scorer` that `ModelDrafter` uses. Draft models with another
vocabulary than the target's are in `vocabulary.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tokenleap.core.common_prefix import common_prefix
from tokenleap.core.tree import TokenTree
from tokenleap.drafters.admission import most_tokens, open_row, rows_that_fit
from tokenleap.drafters.options.models import DraftModelOptions
from tokenleap.drafters.scorer import GrowingScorer
from tokenleap.request import Request
from tokenleap.runtime.network import (
    GrownTree,
    GrowthLimit,
    GrowthPlan,
    Need,
    Network,
    PassOutput,
)
from tokenleap.runtime.passes import Passes

__all__ = ["DraftModelOptions", "OwnModel", "scored"]

FIRST_PASS = 32
"""Most committed tokens that the first drafting pass computes. If more are missing, a prefill
computes them."""


def scored(num_computed: Sequence[int], hidden: tuple[int, ...] = ()) -> Need:
    """What a pass returns: before the first level, logits of the root alone (`Scorer.verify`).

    Args:
        num_computed: of all trees of the pass.
        hidden: see `Need`.
    """
    return Need(last=None if any(num_computed) else 1, hidden=hidden)


class OwnModel(GrowingScorer):
    """A draft model with KV rows of its own (see `scorer.Scorer`).

    Args:
        model: the draft model.
        partial: see `Scorer.partial`.
    """

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
        """See `GrowingScorer`."""
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
