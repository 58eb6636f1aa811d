"""`SampledOptions`: the parameters that a drafter's q has of its own."""

from __future__ import annotations

from typing import Annotated, Self

from annotated_types import Ge, Gt, Le
from pydantic import FiniteFloat, model_validator

from tokenleap.core.params import GREEDY_BELOW
from tokenleap.drafters.base import DrafterOptions

__all__ = ["OF_Q", "SampledOptions"]

OF_Q = ("draft_temperature", "draft_top_k", "draft_top_p")
"""The fields of `SampledOptions`."""


class SampledOptions(DrafterOptions):
    """Options of drafters that draw their tokens.

    q is the distribution after temperature, top-k and top-p, and tokens are drawn from it. So every
    lossless rule stays lossless (Leviathan et al., section 2.2: standardized sampling).

    Args:
        draft_temperature: temperature of the draft. None takes the request's; 0 drafts the most
            probable token, for sampled requests too.
        draft_top_k: draw from the k most probable tokens; 0 from all. None takes the request's
            `top_k`.
        draft_top_p: draw from the smallest set of most probable tokens whose mass reaches this; 1
            from all. None takes the request's `top_p`.
    """

    draft_temperature: Annotated[FiniteFloat, Ge(0), Le(100)] | None = None
    draft_top_k: Annotated[int, Ge(0)] | None = None
    draft_top_p: Annotated[float, Gt(0), Le(1)] | None = None

    @model_validator(mode="after")
    def _truncates_what_is_drawn(self) -> Self:
        temperature = self.draft_temperature
        if temperature is not None and temperature < GREEDY_BELOW:
            for name in OF_Q[1:]:
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name} has no effect with draft_temperature 0, which draws nothing: "
                        "remove one of the two."
                    )
        return self
