"""`BeamSearchParams` and the results of `LLM.beam_search`, under vLLM's names.

The search is `LLM.generate` with `SamplingParams(beam_width=...)`; here are only its other face's
parameters and results.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Le
from pydantic import FiniteFloat
from transformers import PreTrainedTokenizerBase

from tokenleap.core.config import Config
from tokenleap.core.params import GREEDY_BELOW, SamplingParams
from tokenleap.outputs import BeamOutput, CompletionOutput, RequestOutput

__all__ = ["BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence", "sequences_of"]


class BeamSearchParams(Config):
    """What `LLM.beam_search` looks for; names and meanings are vLLM's.

    `SamplingParams(beam_width=...)` has more options, for `LLM.generate`.

    Args:
        beam_width: number of beams, and of sequences that are found.
        max_tokens: most tokens of a sequence, without the prompt.
        ignore_eos: continue past the end-of-sequence token.
        temperature: only 0; a search does not sample.
        length_penalty: a sequence's score is the sum of its tokens' log-probabilities, divided by
            their number to this power.

    Raises:
        ConfigError: a field is unknown or out of range.
    """

    beam_width: Annotated[int, Ge(1), Le(64)]
    max_tokens: Annotated[int, Ge(1)]
    ignore_eos: bool = False
    temperature: Annotated[FiniteFloat, Ge(0), Le(GREEDY_BELOW)] = 0.0
    length_penalty: Annotated[float, Ge(-5), Le(5)] = 1.0

    @property
    def sampling_params(self) -> SamplingParams:
        """The same for `LLM.generate`; a width of 1 is greedy decoding."""
        beams: dict[str, Any] = {"logprobs": 0}
        if self.beam_width > 1:
            beams = {"beam_width": self.beam_width, "length_penalty": self.length_penalty}
        return SamplingParams(
            temperature=0, max_tokens=self.max_tokens, ignore_eos=self.ignore_eos, **beams
        )


@dataclass(frozen=True)
class BeamSearchSequence:
    """A sequence that `LLM.beam_search` has found.

    Args:
        tokens: those of the prompt (of an encoder-decoder, the decoder's), and the ones found.
        text: their text; empty without a tokenizer.
        cum_logprob: the sum of the log-probabilities of the tokens found.
        score: this sum after the length penalty.
        finish_reason: "stop" behind an end-of-sequence token, else "length".
    """

    tokens: tuple[int, ...]
    text: str
    cum_logprob: float
    score: float
    finish_reason: str


@dataclass(frozen=True)
class BeamSearchOutput:
    """What `LLM.beam_search` has found for one prompt: `beam_width` sequences, best first."""

    sequences: tuple[BeamSearchSequence, ...]


def sequences_of(
    result: RequestOutput,
    params: BeamSearchParams,
    tokenizer: PreTrainedTokenizerBase | None,
    eos_token_ids: Collection[int],
) -> BeamSearchOutput:
    """The result of a search that `LLM.generate` has run."""

    def sequence(beam: BeamOutput) -> BeamSearchSequence:
        tokens = (*result.prompt_token_ids, *beam.token_ids)
        text = ""
        if tokenizer is not None:
            text = str(tokenizer.decode(list(tokens), skip_special_tokens=True))
        ended = not params.ignore_eos and beam.token_ids[-1] in eos_token_ids
        reason = "stop" if ended else "length"
        return BeamSearchSequence(tokens, text, beam.cumulative_logprob, beam.score, reason)

    (output,) = result.outputs
    beams = output.beams or (_greedy(output, params.length_penalty),)
    return BeamSearchOutput(tuple(map(sequence, beams)))


def _greedy(output: CompletionOutput, length_penalty: float) -> BeamOutput:
    """A greedy output as that of a search with one beam."""
    total = sum(each.logprob for each in output.logprobs or ())
    score = total / len(output.token_ids) ** length_penalty
    return BeamOutput(output.token_ids, output.text, score, total)
