"""Structured outputs: a grammar says which tokens may come next (invariant 6).

The grammars are llguidance's: it takes JSON schemas, regular expressions and Lark grammars, needs
microseconds for a mask, goes back as well as forwards (a tree is verified path by path), and knows
which bytes are forced, which is what the drafter `regex` proposes. Because p itself is masked at
every node, over that node's own path, speculation under a grammar is as exact as without one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from foretoken.core.common_prefix import common_prefix
from foretoken.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from foretoken.core.params import StructuredOutputs

__all__ = ["Grammar", "Grammars", "check_grammar"]


def check_grammar(outputs: StructuredOutputs) -> None:
    """Refuse what cannot be compiled.

    Raises:
        ConfigError: with the library's first line of complaint, or because it is missing.
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


def _source(outputs: StructuredOutputs) -> str:
    """The grammar in llguidance's own form."""
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
    """Grammars over one model's tokens; the vocabulary is indexed once, when first needed.

    Args:
        tokenizer: the model's, or None where it has none.
        vocab_size: V, the width of the logits.
        eos_token_ids: what may follow a complete output; without any, only `Grammar.forced` is of
            use.
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

    def compile(self, outputs: StructuredOutputs) -> Grammar:
        """A grammar at its beginning.

        Raises:
            ConfigError: the model has no fast tokenizer.
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
    """The grammar of one request; asked about any continuation of its prompt.

    It remembers where it was asked last, so that going on from there costs nothing.
    """

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._tokens: list[int] = []  # where the matcher stands

    def allowed(self, output_ids: Sequence[int]) -> Tensor | None:
        """Which tokens may come next, [V] bool; None where the output is not in the grammar.

        The end-of-sequence tokens are among them where the output is complete.
        """
        if not self._move_to(output_ids):
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little")
        return torch.from_numpy(mask.view(np.bool_))

    def forced(self, output_ids: Sequence[int]) -> list[int]:
        """The tokens that must come next; empty where there is a choice."""
        if not self._move_to(output_ids):
            return []
        tokens: list[int] = self._matcher.compute_ff_tokens()
        return tokens

    def _move_to(self, output_ids: Sequence[int]) -> bool:
        """Go back to what is common and forwards from there; whether all of it is allowed."""
        output = list(output_ids)
        agreed = len(self._tokens)
        if output[:agreed] != self._tokens:
            agreed = common_prefix(self._tokens, output)
            self._matcher.rollback(len(self._tokens) - agreed)
        rest = output[agreed:]
        taken = self._matcher.try_consume_tokens(rest) if rest else 0
        self._tokens = output[: agreed + taken]
        return taken == len(rest)
