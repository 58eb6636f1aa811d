"""`JobSpec`: what a user asks for one prompt. A new option of requests is a field of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenleap.config import SpeculativeConfig
from tokenleap.core.params import Sampling, SamplingParams
from tokenleap.core.references import NO_REFERENCES, References
from tokenleap.core.sequence import SHARED, Scope
from tokenleap.engine.prompts import Prompt, as_list, one_per_prompt
from tokenleap.engine.references import (
    GivenPrediction,
    GivenReferences,
    per_prompt,
    predictions_per_prompt,
)
from tokenleap.engine.strategies import Speculative

__all__ = ["JobSpec", "ReadSpec", "specs_of"]


@dataclass(frozen=True)
class JobSpec:
    """One prompt with all that belongs to it, as the user gave it; nothing is checked yet.

    Args:
        prompt: see `LLM.generate`; so are the others.
        params: sampling parameters.
        speculative_config: how its requests speculate.
        references: what drafts may quote; texts that were read already are taken as they are.
        prediction: what the output is expected to repeat; the same.
        trace: whether the trace has p of every drafted token.
        scope: what its requests share with others; a prompt's `cache_salt` replaces the salt.
    """

    prompt: Prompt
    params: Sampling = None
    speculative_config: Speculative = None
    references: GivenReferences | References = None
    prediction: GivenPrediction | References = None
    trace: bool = False
    scope: Scope = SHARED


def specs_of(
    prompts: Any,
    params: Any = None,
    *,
    speculative_config: Any = None,
    references: Any = None,
    prediction: Any = None,
    trace: bool = False,
) -> list[JobSpec]:
    """The prompts of one call of `LLM.generate`; arguments as there.

    Raises:
        PromptError, ConfigError: there are more or fewer of an argument than prompts.
    """
    listed = as_list(prompts)
    columns = (
        listed,
        one_per_prompt("sampling_params", listed, params),
        one_per_prompt("speculative_config", listed, speculative_config),
        per_prompt(len(listed), references),
        predictions_per_prompt(len(listed), prediction),
    )
    return [JobSpec(*each, trace=trace) for each in zip(*columns, strict=True)]


@dataclass(frozen=True)
class ReadSpec:
    """A `JobSpec` whose parameters are checked and whose texts are tokens.

    Args:
        given: the specification.
        params: sampling parameters.
        config: how its requests speculate; None takes the `LLM`'s configuration.
        references: what drafts may quote.
        prediction: what the output is expected to repeat.
    """

    given: JobSpec
    params: SamplingParams
    config: SpeculativeConfig | None = None
    references: References = NO_REFERENCES
    prediction: References = NO_REFERENCES

    @property
    def searches_beams(self) -> bool:
        """Whether the outputs come from a beam search."""
        return self.params.beam_width > 1

    @property
    def needs_strategy(self) -> bool:
        """Whether its requests may speculate in another way than by default."""
        return self.config is not None or self.searches_beams or bool(self.prediction)
