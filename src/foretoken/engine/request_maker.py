"""Makes the engine's requests from a prompt and its sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from foretoken.core.grammar import Grammar, Grammars
from foretoken.core.params import SamplingParams
from foretoken.engine.prompts import Prompt, check_prompt, token_ids
from foretoken.errors import ConfigError
from foretoken.request import Request
from foretoken.runtime.target import Target

__all__ = ["RequestMaker"]


class RequestMaker:
    """Makes requests for one model.

    Args:
        target: the model.
        eos_token_ids: its end-of-sequence tokens.
        grammars: compiles structured outputs for its tokens.
        beam_defaults: the model's own values of options of beam search.
    """

    def __init__(
        self,
        target: Target,
        eos_token_ids: Sequence[int],
        grammars: Grammars,
        beam_defaults: Mapping[str, Any],
    ) -> None:
        self._target = target
        self._beam_defaults = beam_defaults
        self._eos_token_ids = eos_token_ids
        self._grammars = grammars

    def make(
        self,
        prompt: Prompt,
        tokenizer: PreTrainedTokenizerBase | None,
        params: SamplingParams,
        *,
        trace: bool,
    ) -> list[Request]:
        """Make one request per output.

        Args:
            prompt: text, token ids or a conversation.
            tokenizer: the model's tokenizer, or None if it has none.
            params: sampling parameters.
            trace: see `LLM.generate`.

        Raises:
            PromptError: the prompt is empty, too long, or has ids outside the vocabulary.
            ConfigError: the parameters need something that the model does not have.
        """
        if params.stop_strings and tokenizer is None:
            raise ConfigError("stop: stop strings need a tokenizer, and this model has none.")
        if params.beam_width > 1:
            params = self._for_beams(params, trace=trace)
        ids = token_ids(prompt, tokenizer)
        check_prompt(ids, self._target)
        return [
            Request(
                ids,
                params,
                vocab_size=self._target.vocab_size,
                eos_token_ids=self._eos_token_ids,
                max_model_len=self._target.most_tokens,
                tokenizer=tokenizer,
                index=index,
                trace_all=trace,
                grammar=self._grammar(params),
            )
            for index in range(params.n)
        ]

    def _for_beams(self, params: SamplingParams, *, trace: bool) -> SamplingParams:
        """The parameters of a beam search, with the model's defaults for those not given."""
        if trace:
            raise ConfigError("trace: a beam search has none: leave it out.")
        widest = self._target.vocab_size // max(2, 1 + len(self._eos_token_ids))
        if params.beam_width > widest:
            raise ConfigError(
                f"beam_width: at most {widest} with this model's vocabulary, got "
                f"{params.beam_width}."
            )
        given = params.model_dump(include=set(self._beam_defaults), exclude_none=True)
        return params.model_copy(update={**self._beam_defaults, **given})

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        if params.form is None:
            return None
        if not self._eos_token_ids:
            raise ConfigError(
                "structured_outputs need an end-of-sequence token, and this model has none."
            )
        return self._grammars.compile(params.form)
