"""`draft_model`: a second, smaller model with the same vocabulary guesses.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding"; Chen et al.,
"Accelerating Large Language Model Decoding with Speculative Sampling"; trees as in SpecInfer and
EAGLE-2. The model has its own KV and draws under the request's own sampling parameters, so that q
is as close to p as it can be.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from foretoken.request import Request
from foretoken.target import Target
from foretoken.tree import TokenTree

__all__ = ["OwnModel"]

FIRST_PASS = 32
"""Committed tokens that are computed along with the first drafting pass; more are prefilled."""


class OwnModel:
    """A draft model with its own rows (see `Scorer`)."""

    def __init__(self, model: Target) -> None:
        self._model = model
        self._cached: dict[int, list[int]] = {}  # tokens whose KV the model holds

    @property
    def max_model_len(self) -> int:
        """The draft model's own context."""
        return self._model.max_model_len

    def pending(self, request: Request) -> list[int]:
        """Roll back what was not committed; prefill what would not fit into one pass."""
        key, tokens = request.key, request.token_ids
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
        self, keys: Sequence[int], trees: Sequence[TokenTree], known: Sequence[int]
    ) -> list[Tensor]:
        """One pass of the draft model."""
        return self._model.verify(keys, trees, known)

    def settle(self, request: Request, num_tokens: int) -> None:
        """The pending tokens are committed ones, so their KV stays; drafted KV goes."""
        self._model.commit(request.key, range(num_tokens))
        self._cached[request.key] = list(request.token_ids)

    def release(self, request: Request) -> None:
        """Free the request's row."""
        if self._cached.pop(request.key, None) is not None:
            self._model.remove(request.key)


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    length = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        length += 1
    return length
