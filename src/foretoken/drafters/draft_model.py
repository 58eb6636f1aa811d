"""`draft_model`: a second, smaller model guesses.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding"; Chen et al.,
"Accelerating Large Language Model Decoding with Speculative Sampling"; trees as in SpecInfer and
EAGLE-2. The model has its own KV and draws under the request's own sampling parameters, so that q
is as close to p as it can be. Models with other tokens than the target's: `vocabulary.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator
from transformers import PreTrainedTokenizerBase

from foretoken.core.common_prefix import common_prefix
from foretoken.core.tree import TokenTree
from foretoken.drafters.room import shared_out
from foretoken.drafters.shapes import TreeOptions
from foretoken.request import Request
from foretoken.runtime.network import PassOutput
from foretoken.runtime.target import Target

__all__ = ["DraftModelOptions", "OwnModel"]

FIRST_PASS = 32
"""Committed tokens that are computed along with the first drafting pass; more are prefilled."""


class DraftModelOptions(TreeOptions):
    """Options of `draft_model`, besides those of trees.

    Args:
        vocabulary: what to do about a draft model with other tokens than the target's. `same`
            refuses it. `intersection` drafts only tokens that both have. `text` drafts text, which
            the target's tokenizer splits anew: greedy chains only. `auto` is `same` where the
            tokens are the same, else `intersection` if the draft model has at least half of the
            target's tokens, else `text`. `LLM.vocabulary_overlap` says what was chosen.
        draft_tokenizer: the draft model's tokenizer, or a folder or alias that has it; None takes
            the one in the draft model's folder.
    """

    vocabulary: Literal["auto", "same", "intersection", "text"] = "auto"
    draft_tokenizer: str | Path | PreTrainedTokenizerBase | None = None

    @model_validator(mode="after")
    def _text_is_drafted_greedily(self) -> Self:
        if self.vocabulary == "text" and (reason := self.refused_for_text()):
            raise ValueError(reason)
        return self

    def refused_for_text(self) -> str | None:
        """Why drafts of text cannot be as the options ask; None where they can."""
        for name in ("tree", "expansion", "draft_temperature"):
            if name in self.model_fields_set:
                return (
                    f"{name}: with vocabulary 'text' drafts are greedy chains: remove it, or set "
                    "vocabulary to 'intersection'."
                )
        return None


class OwnModel:
    """A draft model with its own rows (see `Scorer`).

    Args:
        model: the draft model.
        partial: whether its logits leave out tokens of the target's.
    """

    reads_target_kv = False

    def __init__(self, model: Target, *, partial: bool = False) -> None:
        self.partial = partial
        self._model = model
        self._cached: dict[int, list[int]] = {}  # tokens whose KV the model holds

    def seen(self, request: Request) -> Sequence[int]:
        """The committed tokens as the draft model reads them."""
        return request.token_ids

    def room(self, request: Request) -> int:
        """What the draft model's own context, and its memory for one row, have left."""
        return self._model.most_tokens - len(self.seen(request))

    def admit(self, requests: Sequence[Request], num_nodes: int) -> Sequence[Request]:
        """The first ones that the memory holds; rows of others are freed if they are in the way."""
        seen = {request.key: len(self.seen(request)) for request in requests}
        held = {key: len(tokens) for key, tokens in self._cached.items()}
        missing = [seen[key] - held.get(key, 0) for key in seen]
        # A row is padded to the longest in its pass, and the first takes in what is missing.
        ahead = max([num_nodes, *(count for count in missing if count <= FIRST_PASS)])
        # One row alone is padded to none, and its draft is cut to what there is room for.
        most = self._model.most_tokens
        wanted = {key: min(tokens + ahead, most) for key, tokens in seen.items()}
        admitted, in_the_way = shared_out(self._model, wanted, held)
        for key in in_the_way:
            self._free(key)
        return [request for request in requests if request.key in admitted]

    def pending(self, request: Request) -> list[int]:
        """Roll back what was not committed; prefill what would not fit into one pass."""
        key, tokens = request.key, list(self.seen(request))
        if key not in self._cached:
            self._model.add(key)
            self._cached[key] = []
        agreed = common_prefix(self._cached[key], tokens[:-1])
        self._model.rollback(key, agreed)
        if len(tokens) - agreed > FIRST_PASS:
            self._model.prefill(key, tokens[agreed:-1])
            agreed = len(tokens) - 1
        self._cached[key] = tokens[:agreed]
        return tokens[agreed:]

    def verify(
        self, keys: Sequence[int], trees: Sequence[TokenTree], num_computed: Sequence[int]
    ) -> list[PassOutput]:
        """One pass of the draft model."""
        return self._model.verify(keys, trees, num_computed)

    def finish_draft(self, request: Request, num_tokens: int) -> None:
        """The pending tokens are committed ones, so their KV stays; drafted KV goes."""
        self._model.commit(request.key, range(num_tokens))
        self._cached[request.key] = list(self.seen(request))

    def release(self, request: Request) -> None:
        """Free the request's row."""
        self._free(request.key)

    def _free(self, key: int) -> None:
        if self._cached.pop(key, None) is not None:
            self._model.remove(key)
