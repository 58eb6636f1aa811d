"""`StructuredOutputs`: the form that an output must have. `grammar.py` applies it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from annotated_types import MinLen
from pydantic import BeforeValidator, Field, model_validator

from tokenleap.core.config import Config
from tokenleap.core.form import checked_source
from tokenleap.errors import ConfigError

__all__ = ["Structured", "StructuredOutputs"]


class StructuredOutputs(Config):
    """The form an output must have, under vLLM's names. Exactly one of the first five is given.

    Args:
        json: a JSON schema, as a dict or as text.
        regex: a regular expression that the whole output matches.
        choice: the output is one of these strings.
        grammar: a context-free grammar in Lark's notation.
        json_object: any JSON object.
        disable_any_whitespace: write JSON without optional whitespace. More tokens are then forced,
            and the drafter `regex` proposes forced tokens at no cost.

    Raises:
        ConfigError: not exactly one form is given, it cannot be compiled, or it is too large or too
            complex (`core.form` and `core.trial` have the limits).
    """

    json_schema: Mapping[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[tuple[Annotated[str, MinLen(1)], ...], MinLen(1)] | None = None
    grammar: str | None = None
    json_object: Literal[True] | None = None
    disable_any_whitespace: bool = False

    @property
    def kind(self) -> str:
        """Public name of the field that is given, such as "json"."""
        return self._given()[0]

    @property
    def value(self) -> Any:
        """Value of the field that is given."""
        return self.json_schema if self.kind == "json" else getattr(self, self.kind)

    def _given(self) -> list[str]:
        kinds = ("regex", "choice", "grammar", "json_object")
        given = [kind for kind in kinds if getattr(self, kind) is not None]
        return given if self.json_schema is None else ["json", *given]

    @model_validator(mode="after")
    def _one_valid_grammar(self) -> Self:
        given = self._given()
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise ConfigError(f"give one of json, regex, choice, grammar, json_object: got {found}")
        if self.disable_any_whitespace and self.kind not in ("json", "json_object"):
            raise ConfigError(f"disable_any_whitespace is for json, not for {self.kind}: remove it")
        checked_source(self)
        return self


def _structured(value: Any) -> Any:
    # The constructor explains an error in one line; pydantic's own conversion does not.
    return StructuredOutputs(**value) if isinstance(value, Mapping) else value


Structured = Annotated[StructuredOutputs | Mapping[str, Any], BeforeValidator(_structured)]
"""The type of a field that accepts `StructuredOutputs` or a dict of its fields.

The field always stores `StructuredOutputs`.
"""
