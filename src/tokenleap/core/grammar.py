"""Structured outputs: a grammar says which tokens may come next (invariant 6).

The sampler masks p at every node of the tree, over that node's own path. Speculation under a
grammar is therefore as exact as without one.

The library llguidance compiles JSON schemas, regular expressions and Lark grammars, and computes a
mask in microseconds. Its matchers can roll back as well as advance, which the paths of a token tree
need. They also know which tokens are forced; the drafter `regex` proposes those.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tokenleap.core.peers import ALONE, Peers
from tokenleap.core.references import common_prefix
from tokenleap.core.structured import StructuredOutputsParams, checked_source, library
from tokenleap.core.trial import first_line, matcher_of, on_stack
from tokenleap.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STACK = 16 << 20
"""Bytes of the stack on which grammars are compiled: four times that of their trial."""
KEPT = 16  # most compiled grammars that are kept for the next request with the same form


class Grammars:
    """Compiles grammars over one model's tokens; indexes the vocabulary once, on first use.

    `eos_token_ids` may follow a complete output. Without any, only `Grammar.forced` is useful.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        peers: Peers = ALONE,
    ) -> None:
        self._tokenizer, self._peers = tokenizer, peers
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._indexing = threading.Lock()
        self._matcher = lru_cache(maxsize=KEPT)(self._compiled)

    def compile(self, outputs: StructuredOutputsParams) -> Grammar:
        try:
            matcher = self._matcher(checked_source(outputs))
        except ConfigError as error:
            raise ConfigError(f"structured_outputs: {error}") from None
        return Grammar(matcher.deep_copy, self._vocab_size, self._peers.agreed)

    def _compiled(self, grammar: str) -> Any:
        """A matcher that knows its first mask, and is only copied from then on."""
        with self._indexing:
            vocabulary = self._vocabulary

        def compiled() -> Any:
            matcher = matcher_of(vocabulary, grammar)
            matcher.compute_bitmask()
            return matcher

        matcher = on_stack(STACK, compiled)
        if matcher.is_error():
            raise ConfigError(first_line(matcher))
        return matcher

    @cached_property
    def _vocabulary(self) -> Any:
        library()
        from llguidance.hf import from_tokenizer

        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if self._tokenizer is None or backend is None:
            raise ConfigError("the model needs a fast tokenizer.")
        return from_tokenizer(
            self._tokenizer,  # type: ignore[arg-type]
            n_vocab=self._vocab_size,
            eos_token=self._eos_token_ids or None,
        )


_FREE_SECONDS, _SECONDS_A_CALL = 1.0, 0.01
"""Seconds of CPU that a grammar may take for one output: so many in all, and so many more for each
query. All requests wait for it; ordinary forms take less than a millisecond a query."""

_PIECE = 16  # tokens consumed at once


class Grammar:
    """The grammar of one request, for any continuation of its prompt.

    The matcher keeps its state after a query. The next one rolls back to the common prefix.
    """

    def __init__(
        self, new: Callable[[], Any], vocab_size: int, agreed: Callable[[float], float] = float
    ) -> None:
        self._new, self._agreed = new, agreed
        self._matcher = new()
        self._vocab_size = vocab_size
        self._tokens: list[int] = []  # output tokens the matcher has consumed
        self._failed: tuple[list[int], str] | None = None  # the last output that it fails for
        self._seconds, self._calls = 0.0, 0

    def allowed(self, output_ids: Sequence[int]) -> Tensor | None:
        """The tokens that may come next, [V] bool; None if the output so far is not allowed.

        End-of-sequence tokens are allowed where the output is complete.
        """
        if not self._move_to(output_ids):
            return None
        content = self._asked(output_ids, self._matcher.compute_bitmask)
        bits = np.frombuffer(content, dtype=np.uint8)
        mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little")
        return torch.from_numpy(mask.view(np.bool_))

    def forced(self, output_ids: Sequence[int]) -> list[int]:
        """The tokens that must come next; empty if there is a choice."""
        if not self._move_to(output_ids):
            return []
        tokens: list[int] = self._asked(output_ids, self._matcher.compute_ff_tokens)
        return tokens

    def _move_to(self, output_ids: Sequence[int]) -> bool:
        """Roll back to the common prefix and advance; returns whether all tokens are allowed."""
        output = list(output_ids)
        if self._failed is not None and output[: len(self._failed[0])] == self._failed[0]:
            raise RequestError(self._failed[1], by_parameters=True)
        agreed = len(self._tokens)
        if output[:agreed] != self._tokens:
            agreed = common_prefix(self._tokens, output)
            self._matcher.rollback(len(self._tokens) - agreed)
            self._tokens = output[:agreed]
        while rest := output[agreed : agreed + _PIECE]:
            consumed = self._asked(output, partial(self._matcher.try_consume_tokens, rest))
            agreed += consumed
            self._tokens = output[:agreed]
            if consumed < len(rest):
                return False
        return True

    def _asked(self, output: Sequence[int], query: Callable[[], Any]) -> Any:
        """The answer of the matcher.

        An error ends a matcher for ever, so a new one begins: the error may belong to a draft that
        is rejected, and not to the output.
        """
        began = time.thread_time()
        answer = query()
        self._seconds += time.thread_time() - began
        self._calls += 1
        if self._matcher.is_error():
            reason = first_line(self._matcher)
            self._matcher, self._tokens = self._new(), []
            self._failed = list(output), f"structured_outputs: {reason}"
        elif self._agreed(self._seconds) > _FREE_SECONDS + _SECONDS_A_CALL * self._calls:
            reason = "it is too complex: finding what may come next takes too long"
            self._failed = [], f"structured_outputs: {reason}"
        else:
            return answer
        raise RequestError(self._failed[1], by_parameters=True)
