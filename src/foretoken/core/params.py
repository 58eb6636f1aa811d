"""`SamplingParams`: how the next token is drawn, in vLLM's words, validated when constructed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import BeforeValidator, Field, FiniteFloat, field_validator, model_validator

from foretoken.core.config import Config
from foretoken.core.grammar import check_grammar
from foretoken.core.noise import MAX_SEED
from foretoken.errors import ConfigError

__all__ = ["GREEDY_BELOW", "SamplingParams", "StructuredOutputs"]

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM: dividing by them would overflow."""

TokenIds = Sequence[Annotated[int, Ge(0)]]

_LARGEST, _SMALLEST = 3.4e38, 1.2e-38
"""Of float32, in which distributions are computed."""

Float32 = Annotated[FiniteFloat, Ge(-_LARGEST), Le(_LARGEST)]


class StructuredOutputs(Config):
    """What form an output must have; one of the first five, named as in vLLM.

    Args:
        json: a JSON schema, as a dict or as text.
        regex: a regular expression that the whole output matches.
        choice: the output is one of these strings.
        grammar: a context-free grammar in Lark's notation.
        json_object: any JSON object.
        disable_any_whitespace: write JSON without optional whitespace, which leaves less to
            choose and more to draft for free.
    """

    json_schema: Mapping[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[tuple[Annotated[str, MinLen(1)], ...], MinLen(1)] | None = None
    grammar: str | None = None
    json_object: Literal[True] | None = None
    disable_any_whitespace: bool = False

    @property
    def kind(self) -> str:
        """Which of the fields is given, by its public name."""
        return self._given()[0]

    @property
    def value(self) -> Any:
        """What it is given as."""
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
        if isinstance(self.json_schema, str):
            try:
                is_object = isinstance(json.loads(self.json_schema), dict)
            except ValueError as error:
                raise ConfigError(f"json: the schema is not valid JSON: {error}") from None
            if not is_object:
                raise ConfigError("json: a schema is a JSON object, such as {...}")
        check_grammar(self)
        return self


def _structured(value: Any) -> Any:
    # Through the constructor, which explains what is wrong in one line.
    return StructuredOutputs(**value) if isinstance(value, Mapping) else value


Structured = Annotated[StructuredOutputs | Mapping[str, Any], BeforeValidator(_structured)]
"""A field that is given as `StructuredOutputs` or a dict of its fields, and holds the former."""


class SamplingParams(Config):
    """How the next token is drawn; names and meanings are vLLM's.

    Args:
        temperature: 0 is greedy (a one-hot distribution).
        top_k: keep the k most probable tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of most probable tokens whose mass reaches top_p.
        min_p: drop tokens less probable than min_p times the most probable one.
        repetition_penalty: logits of tokens in prompt or output are divided (if positive) or
            multiplied (if negative) by this.
        presence_penalty: subtracted from the logit of every token already in the output.
        frequency_penalty: subtracted once per occurrence in the output.
        logit_bias: added to the logits of these tokens.
        allowed_token_ids: only these tokens may be drawn.
        seed: makes sampling reproducible; the same bits for any drafter and any batch.
        max_tokens: most tokens to generate, at least 1; None runs to the end of the context.
        min_tokens: end-of-sequence and stop tokens are forbidden before this many.
        stop: stop strings, also when they cross token borders; not part of the text unless
            `include_stop_str_in_output`.
        stop_token_ids: further tokens that end the output; kept in `token_ids`, and in the text
            only with `include_stop_str_in_output`.
        ignore_eos: generate on past the end-of-sequence token.
        n: number of outputs for the prompt; output i uses seed + i.
        logprobs: report the log-probability of each token and of this many most likely ones,
            under the model itself (before temperature, penalties and masks, as in vLLM).
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the stop string or stop token in the text.
        structured_outputs: `StructuredOutputs` or a dict of its fields: only outputs of this form
            are possible, and the end comes where the form is complete.
    """

    temperature: Annotated[FiniteFloat, Ge(0), Le(_LARGEST)] = 1.0
    top_k: Annotated[int, Ge(-1)] = 0
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    min_p: Annotated[float, Ge(0), Le(1)] = 0.0
    repetition_penalty: Annotated[FiniteFloat, Ge(_SMALLEST), Le(_LARGEST)] = 1.0
    presence_penalty: Annotated[float, Ge(-2), Le(2)] = 0.0
    frequency_penalty: Annotated[float, Ge(-2), Le(2)] = 0.0
    logit_bias: Mapping[Annotated[int, Ge(0)], Float32] | None = None
    allowed_token_ids: TokenIds | None = None
    seed: Annotated[int, Ge(0), Le(MAX_SEED)] | None = None
    max_tokens: Annotated[int, Ge(1)] | None = 16
    min_tokens: Annotated[int, Ge(0)] = 0
    stop: str | Sequence[str] | None = ()
    stop_token_ids: TokenIds = ()
    ignore_eos: bool = False
    n: Annotated[int, Ge(1)] = 1
    logprobs: Annotated[int, Ge(0)] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: Structured | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_string(cls, value: Any) -> Any:
        if value is None:
            return ()
        return (value,) if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, value: Sequence[str]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError("a stop string cannot be empty")
        return tuple(value)

    @field_validator("allowed_token_ids")
    @classmethod
    def _something_allowed(cls, value: TokenIds | None) -> TokenIds | None:
        if value is not None and not value:
            raise ValueError("at least one token must be allowed")
        return value

    @model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens})."
            )
        if self.greedy and self.n > 1:
            raise ValueError(
                f"n={self.n} with temperature 0 would give {self.n} copies of one output; "
                "set temperature above 0."
            )
        for name in ("min_tokens", "ignore_eos", "allowed_token_ids"):
            if self.structured_outputs is not None and getattr(self, name):
                raise ValueError(
                    f"{name} contradicts structured_outputs, which say what may come next and "
                    "where the output ends: remove one of them."
                )
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, however it was given."""
        assert isinstance(self.stop, tuple), "the validator makes it one"
        return self.stop

    @property
    def form(self) -> StructuredOutputs | None:
        """`structured_outputs`, however they were given."""
        assert not isinstance(self.structured_outputs, Mapping), "the validator made it one"
        return self.structured_outputs

    @property
    def greedy(self) -> bool:
        """Whether the distribution is one-hot."""
        return self.temperature < GREEDY_BELOW
