"""The form an output must have, and the check that it can be compiled (`grammar.py` does that).

This file needs neither PyTorch nor NumPy, so options are checked without waiting for them.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

from foretoken.errors import ConfigError

__all__ = ["Form", "check_grammar", "library", "source"]


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
    if message := library().LLMatcher.validate_grammar(source(outputs)):
        lines = [line.strip() for line in message.splitlines()]
        reason = next((line for line in lines if line.startswith("error:")), lines[0])
        raise ConfigError(f"not a valid {outputs.kind}: {reason.removeprefix('error: ')}")


def library() -> Any:
    """The module `llguidance`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import llguidance
    except ImportError:
        raise ConfigError(
            "structured outputs need llguidance: pip install 'foretoken[structured]'"
        ) from None
    return llguidance


def source(outputs: Form) -> str:
    """The grammar of a form in llguidance's own format.

    Raises:
        ConfigError: llguidance is not installed.
    """
    matcher = library().LLMatcher
    compact = {"whitespace_flexible": not outputs.disable_any_whitespace}
    value = outputs.value
    match outputs.kind:
        case "json":
            schema = json.loads(value) if isinstance(value, str) else value
            grammar = matcher.grammar_from_json_schema(schema, overrides=compact)
        case "json_object":
            grammar = matcher.grammar_from_json_schema({"type": "object"}, overrides=compact)
        case "regex":
            grammar = matcher.grammar_from_regex(value)
        case "choice":
            strings = (json.dumps(choice, ensure_ascii=False) for choice in value)
            # One terminal: as rules, the choices would reach the parser's limit of 2000 items.
            grammar = matcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(strings)}")
        case _:
            grammar = matcher.grammar_from_lark(value)
    return str(grammar)
