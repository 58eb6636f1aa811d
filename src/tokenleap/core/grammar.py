"""Structured outputs: a grammar says which tokens may come next (invariant 6).

The sampler masks p at every node of the tree, over that node's own path. Speculation under a
grammar is therefore as exact as without one.

The library llguidance compiles JSON schemas, regular expressions and Lark grammars, and computes a
mask in microseconds. Its matchers can roll back as well as advance, which the paths of a token tree
need. They also know which tokens are forced; the drafter `regex` proposes those.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

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
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._indexing = threading.Lock()
        self._matcher = lru_cache(maxsize=KEPT)(self._compiled)

    def compile(self, outputs: StructuredOutputsParams) -> Grammar:
        try:
            matcher = self._matcher(checked_source(outputs))
        except ConfigError as error:
            raise ConfigError(f"structured_outputs: {error}") from None
        return Grammar(matcher.deep_copy, self._vocab_size)

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


class Grammar:
    """The grammar of one request, for any continuation of its prompt.

    The matcher keeps its state after a query. The next one rolls back to the common prefix.
    """

    def __init__(self, new: Callable[[], Any], vocab_size: int) -> None:
        self._new = new
        self._matcher = new()
        self._vocab_size = vocab_size
        self._tokens: list[int] = []  # output tokens the matcher has consumed

    def allowed(self, output_ids: Sequence[int]) -> Tensor | None:
        """The tokens that may come next, [V] bool; None if the output so far is not allowed.

        End-of-sequence tokens are allowed where the output is complete.
        """
        if not self._move_to(output_ids):
            return None
        content = self._matcher.compute_bitmask()
        self._check()
        bits = np.frombuffer(content, dtype=np.uint8)
        mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little")
        return torch.from_numpy(mask.view(np.bool_))

    def forced(self, output_ids: Sequence[int]) -> list[int]:
        """The tokens that must come next; empty if there is a choice."""
        if not self._move_to(output_ids):
            return []
        tokens: list[int] = self._matcher.compute_ff_tokens()
        self._check()
        return tokens

    def _move_to(self, output_ids: Sequence[int]) -> bool:
        """Roll back to the common prefix and advance; returns whether all tokens are allowed."""
        output = list(output_ids)
        agreed = len(self._tokens)
        if output[:agreed] != self._tokens:
            agreed = common_prefix(self._tokens, output)
            self._matcher.rollback(len(self._tokens) - agreed)
        rest = output[agreed:]
        consumed = self._matcher.try_consume_tokens(rest) if rest else 0
        self._check()
        self._tokens = output[: agreed + consumed]
        return consumed == len(rest)

    def _check(self) -> None:
        """Raise the matcher's error and start again with a new one: an error is for ever.

        The error may belong to a draft that is rejected, and not to the output.
        """
        if not self._matcher.is_error():
            return
        reason = first_line(self._matcher)
        self._matcher, self._tokens = self._new(), []
        raise RequestError(f"structured_outputs: {reason}", by_parameters=True)
