"""Structured outputs: a grammar says which tokens may come next (invariant 6).

The sampler masks p at every node of the tree, over that node's own path. Speculation under a
grammar is therefore as exact as without one.

The library llguidance compiles JSON schemas, regular expressions and Lark grammars, and computes a
mask in microseconds. Its matchers can roll back as well as advance, which the paths of a token tree
need. They also know which tokens are forced; the drafter `regex` proposes those.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from foretoken.core.common_prefix import common_prefix
from foretoken.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Form", "Grammar", "Grammars", "check_grammar"]


class Form(Protocol):
    """The form an output must have: the part of `StructuredOutputs` that this file needs."""

    disable_any_whitespace: bool

    @property
    def kind(self) -> str:
        """One of "json", "regex", "choice", "grammar" and "json_object"."""
        ...

    @property
    def value(self) -> Any:
        """The schema, the expression, the choices or the grammar."""
        ...


def check_grammar(outputs: Form) -> None:
    """Check that a form can be compiled.

    Raises:
        ConfigError: llguidance refuses the form (the message is its first error line), or
            llguidance is not installed.
    """
    if message := _library().LLMatcher.validate_grammar(_source(outputs)):
        lines = [line.strip() for line in message.splitlines()]
        reason = next((line for line in lines if line.startswith("error:")), lines[0])
        raise ConfigError(f"not a valid {outputs.kind}: {reason.removeprefix('error: ')}")


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ConfigError(
            "structured outputs need llguidance: pip install 'foretoken[structured]'"
        ) from None
    return llguidance


def _source(outputs: Form) -> str:
    """The grammar in llguidance's own format."""
    matcher = _library().LLMatcher
    compact = {"whitespace_flexible": not outputs.disable_any_whitespace}
    value = outputs.value
    match outputs.kind:
        case "json":
            schema = json.loads(value) if isinstance(value, str) else value
            source = matcher.grammar_from_json_schema(schema, overrides=compact)
        case "json_object":
            source = matcher.grammar_from_json_schema({"type": "object"}, overrides=compact)
        case "regex":
            source = matcher.grammar_from_regex(value)
        case "choice":
            strings = (json.dumps(choice, ensure_ascii=False) for choice in value)
            source = matcher.grammar_from_lark(f"start: {' | '.join(strings)}")
        case _:
            source = matcher.grammar_from_lark(value)
    return str(source)


class Grammars:
    """Compiles grammars over one model's tokens; indexes the vocabulary once, on first use.

    Args:
        tokenizer: the model's tokenizer, or None if it has none.
        vocab_size: V, the width of the logits.
        eos_token_ids: the tokens that may follow a complete output. Without any, only
            `Grammar.forced` is useful.
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

    def compile(self, outputs: Form) -> Grammar:
        """Compile a grammar for one request.

        Raises:
            ConfigError: the model has no fast tokenizer, or llguidance refuses the form.
        """
        matcher = _library().LLMatcher(self._vocabulary, _source(outputs), log_level=0)
        if matcher.is_error():
            raise ConfigError(f"structured_outputs: {matcher.get_error().splitlines()[0]}")
        return Grammar(matcher, self._vocab_size)

    @cached_property
    def _vocabulary(self) -> Any:
        _library()
        from llguidance.hf import from_tokenizer

        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if self._tokenizer is None or backend is None:
            raise ConfigError("structured_outputs need a model with a fast tokenizer.")
        return from_tokenizer(
            self._tokenizer,  # type: ignore[arg-type]
            n_vocab=self._vocab_size,
            eos_token=self._eos_token_ids or None,
        )


class Grammar:
    """The grammar of one request, for any continuation of its prompt.

    It keeps the matcher's state after the last query. The next query rolls back to the common
    prefix and advances from there.

    Args:
        matcher: an `llguidance.LLMatcher` that has consumed nothing yet.
        vocab_size: V, the width of the logits.
    """

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._tokens: list[int] = []  # output tokens the matcher has consumed

    def allowed(self, output_ids: Sequence[int]) -> Tensor | None:
        """The tokens that may come next.

        Args:
            output_ids: the output so far, including drafted tokens on the node's path.

        Returns:
            [V] bool, or None if the grammar does not allow the output so far. End-of-sequence
            tokens are allowed where the output is complete.
        """
        if not self._move_to(output_ids):
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little")
        return torch.from_numpy(mask.view(np.bool_))

    def forced(self, output_ids: Sequence[int]) -> list[int]:
        """The tokens that must come next; empty if there is a choice.

        Args:
            output_ids: the output so far.
        """
        if not self._move_to(output_ids):
            return []
        tokens: list[int] = self._matcher.compute_ff_tokens()
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
        self._tokens = output[: agreed + consumed]
        return consumed == len(rest)
