"""Options of methods that combine others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from annotated_types import Ge, Le, MinLen
from pydantic import Field, field_validator, model_validator

from tokenleap.drafters.base import DrafterOptions, InnerConfig
from tokenleap.drafters.model_set import drafters_in
from tokenleap.drafters.options.models import LONGEST_CHAIN, DraftQuantization

__all__ = [
    "CascadeOptions",
    "CombineOptions",
    "HorizontalOptions",
    "HybridOptions",
    "SwitchOptions",
]


class CascadeOptions(DrafterOptions):
    """Options of `cascade`.

    Args:
        drafter: configuration of the inner drafter: `method` and that method's own fields. It may
            be another cascade.
        inner_num_speculative_tokens: draft length of the inner drafter, in tokens.
        draft_quantization: see `DraftQuantization`.
    """

    drafter: InnerConfig
    inner_num_speculative_tokens: Annotated[int, Ge(1), Le(64)] = 3
    draft_quantization: DraftQuantization = None

    def longest_chain(self) -> int | None:
        """See `DrafterOptions.longest_chain`: chains end early where the middle model is unsure."""
        return LONGEST_CHAIN


class CombineOptions(DrafterOptions):
    """Options of `ensemble`.

    Args:
        drafters: at least two configurations, each with `method` and that method's own fields; or
            the folder of draft models that `tokenleap train boost` has written.
    """

    drafters: Annotated[tuple[InnerConfig, ...], MinLen(2)]

    @field_validator("drafters", mode="before")
    @classmethod
    def _drafters_of_a_folder(cls, value: Any) -> Any:
        return drafters_in(value) if isinstance(value, str | Path) else value


class SwitchOptions(CombineOptions):
    """Options of `switch`.

    Args:
        drafters: see `CombineOptions`.
        try_every: a request tries another drafter in every such drafting step (16: every 16th).
    """

    try_every: Annotated[int, Ge(2)] = 16


class HorizontalOptions(DrafterOptions):
    """Options of `horizontal_cascade`.

    Args:
        drafters: configurations in order of position, each with `method` and that method's fields.
        tokens: most tokens that each drafter adds, in the same order.
    """

    drafters: Annotated[tuple[InnerConfig, ...], MinLen(2)]
    tokens: tuple[Annotated[int, Ge(1)], ...]

    @model_validator(mode="after")
    def _one_number_per_drafter(self) -> Self:
        if len(self.tokens) != len(self.drafters):
            raise ValueError(
                f"tokens: give one number per drafter, got {len(self.tokens)} for "
                f"{len(self.drafters)} drafters."
            )
        return self

    def default_num_speculative_tokens(self) -> int:
        """The tokens of all drafters together."""
        return sum(self.tokens)


class HybridOptions(DrafterOptions):
    """Options of `hybrid`.

    Args:
        lookup: configuration of the lookup: `method` and that method's own fields.
        drafter: configuration of the trained drafter in the same way, without `model`, which is
            that of `hybrid`. `num_speculative_tokens` is the most nodes of a trained draft.
    """

    lookup: InnerConfig = Field({"method": "suffix"})
    drafter: InnerConfig = Field({"method": "eagle"})

    @model_validator(mode="after")
    def _drafter_fits(self) -> Self:
        if "model" in self.drafter:
            raise ValueError("drafter takes the 'model' of 'hybrid': set it there.")
        most = self.drafter.get("num_speculative_tokens", 1)
        if type(most) is not int or not 1 <= most <= 256:
            raise ValueError(f"drafter: num_speculative_tokens must be 1 to 256, got {most!r}.")
        return self
