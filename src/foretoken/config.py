"""What a user may ask for: validated when it is constructed, in vLLM's words.

`Config` turns pydantic's findings into one line that names the field, the range and, for an
unknown field, the nearest known one. `SamplingParams` says how tokens are drawn; how they are
guessed and checked stands in `speculative.py`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

from annotated_types import Ge, Gt, Le
from pydantic import (
    BaseModel,
    ConfigDict,
    FiniteFloat,
    ValidationError,
    field_validator,
    model_validator,
)

from foretoken.errors import ConfigError
from foretoken.noise import MAX_SEED

__all__ = ["GREEDY_BELOW", "Config", "SamplingParams", "nearest"]

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM: dividing by them would overflow."""

TokenIds = Sequence[Annotated[int, Ge(0)]]


def nearest(name: str, known: list[str]) -> str:
    """' Did you mean ...?' for the closest known name, or the list of all."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean '{close[0]}'?"
    return f"known: {', '.join(sorted(known))}."


class Config(BaseModel):
    """Base of all configurations: frozen, strict about names and types, errors in one line."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise ConfigError(self._explain(error)) from None

    @classmethod
    def _explain(cls, error: ValidationError) -> str:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        if first["type"] == "extra_forbidden":
            return f"{cls.__name__} has no field '{name}': {nearest(name, cls.field_names())}"
        reason = first["msg"].removeprefix("Value error, ")
        if not name:
            return reason
        return f"{name}: {reason[0].lower()}{reason[1:]}, got {first['input']!r}."

    @classmethod
    def field_names(cls) -> list[str]:
        """Names a user may set."""
        return list(cls.model_fields)


class SamplingParams(Config):
    """How the next token is drawn; names and meanings are vLLM's.

    Args:
        temperature: 0 is greedy (a one-hot law).
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
    """

    temperature: Annotated[FiniteFloat, Ge(0)] = 1.0
    top_k: Annotated[int, Ge(-1)] = 0
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    min_p: Annotated[float, Ge(0), Le(1)] = 0.0
    repetition_penalty: Annotated[FiniteFloat, Gt(0)] = 1.0
    presence_penalty: Annotated[float, Ge(-2), Le(2)] = 0.0
    frequency_penalty: Annotated[float, Ge(-2), Le(2)] = 0.0
    logit_bias: Mapping[Annotated[int, Ge(0)], FiniteFloat] | None = None
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
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, however it was given."""
        assert isinstance(self.stop, tuple), "the validator makes it one"
        return self.stop

    @property
    def greedy(self) -> bool:
        """Whether the law is one-hot."""
        return self.temperature < GREEDY_BELOW
