"""The form an output must have, and the check that it can be compiled (`grammar.py` does that).

This file needs neither PyTorch nor NumPy, so options are checked without waiting for them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Protocol

from tokenleap.core.files import levels
from tokenleap.errors import ConfigError, in_one_line

__all__ = ["Form", "checked_source", "library"]

MAX_LENGTH = 256 << 10
"""Most characters of a form."""
MAX_VALUES = 10_000
"""Most objects, lists and values in a schema, and most choices."""
MAX_DEPTH = 128
"""Most levels of objects and lists in a schema; llguidance has this limit, too."""
MAX_DEFINITIONS = 1000
"""Most rules and terminals of a grammar, and most definitions that a schema refers to."""

_TOO_DEEP = f"json: a schema has at most {MAX_DEPTH} levels: nest it less."
_TRIVIAL = 1000
"""Choices that are shorter than this together need no trial."""
_DEFINITION = re.compile(r"^[ \t]*[?!]*[A-Za-z_]\w*[^:\n]{0,80}:", re.MULTILINE)


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


def checked_source(outputs: Form) -> str:
    """The grammar of a form in llguidance's own format.

    Raises:
        ConfigError: the form is too large, is refused by llguidance or takes it too long; or
            llguidance is not installed.
    """
    library()
    try:
        made = _source(outputs)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:  # no JSON; half of a character
        raise ConfigError(f"{outputs.kind}: {in_one_line(error)[:200]}") from None
    trivial = outputs.kind == "choice" and len(made) < _TRIVIAL
    if not trivial and outputs.kind != "json_object":
        from tokenleap.core.trials import what_is_wrong

        if reason := what_is_wrong(made):
            raise ConfigError(f"{outputs.kind}: {reason}.")
    return made


def _source(outputs: Form) -> str:
    matcher, kind, value = library().LLMatcher, outputs.kind, outputs.value
    compact = {"whitespace_flexible": not outputs.disable_any_whitespace}
    match kind:
        case "json":
            grammar = matcher.grammar_from_json_schema(_checked_schema(value), overrides=compact)
        case "json_object":
            grammar = matcher.grammar_from_json_schema({"type": "object"}, overrides=compact)
        case "regex":
            _at_most(MAX_LENGTH, "characters", len(value), kind)
            grammar = matcher.grammar_from_regex(value)
        case "choice":
            _at_most(MAX_LENGTH, "characters", sum(map(len, value)), kind)
            _at_most(MAX_VALUES, "choices", len(value), kind)
            strings = (json.dumps(choice, ensure_ascii=False) for choice in value)
            # One terminal: as rules, the choices would reach the parser's limit of 2000 items.
            grammar = matcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(strings)}")
        case _:
            _at_most(MAX_LENGTH, "characters", len(value), kind)
            _at_most(MAX_DEFINITIONS, "rules and terminals", len(_DEFINITION.findall(value)), kind)
            grammar = matcher.grammar_from_lark(value)
    return str(grammar)


def _at_most(most: int, what: str, found: int, kind: str) -> None:
    if found > most:
        raise ConfigError(f"{kind}: at most {most} {what}, got {found}: make it smaller.")


def _checked_schema(given: Mapping[str, Any] | str) -> Any:
    """A JSON schema, or text that has one, within the limits; no part of it is read recursively."""
    if isinstance(given, str):
        _at_most(MAX_LENGTH, "characters", len(given), "json")
        try:
            given = json.loads(given)
        except RecursionError:
            raise ConfigError(_TOO_DEEP) from None
        except ValueError as error:
            raise ConfigError(f"json: the schema is not valid JSON: {error}") from None
        if not isinstance(given, dict):
            raise ConfigError("json: a schema is a JSON object, such as {...}")
    values, size, references = 0, 0, set[str]()
    for depth, level in enumerate(levels(given)):
        if depth == MAX_DEPTH:
            raise ConfigError(_TOO_DEEP)
        for value in level:
            named = isinstance(value, dict)
            inner = [*value.values()] if named else value
            texts = [*value, *inner] if named else inner
            values += len(inner)
            size += sum(len(text) for text in texts if isinstance(text, str))
            if named and isinstance(reference := value.get("$ref"), str):
                references.add(reference)
        _at_most(MAX_VALUES, "values", values, "json")
        _at_most(MAX_LENGTH, "characters", size, "json")
        _at_most(MAX_DEFINITIONS, "definitions that are referred to", len(references), "json")
    return given


def library() -> Any:
    """The module `llguidance`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import llguidance
    except ImportError:
        raise ConfigError(
            "structured outputs need llguidance: pip install 'tokenleap[structured]'"
        ) from None
    return llguidance
