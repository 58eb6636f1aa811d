"""Makes the engine's requests from a prompt and its sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from transformers import PreTrainedTokenizerBase

from tokenleap.core.bad_words import BadWords
from tokenleap.core.checks import check_token_ids
from tokenleap.core.grammar import Grammar, Grammars
from tokenleap.core.noise import fresh_seed
from tokenleap.core.params import SamplingParams
from tokenleap.core.rules import DecodingRules
from tokenleap.core.source import Source
from tokenleap.engine.job_spec import ReadSpec
from tokenleap.engine.prompts import (
    Prompt,
    cache_salt,
    check_prompt,
    check_room,
    checked_text,
    token_ids,
    tokens_of,
)
from tokenleap.engine.sources import SourceReader
from tokenleap.errors import ConfigError
from tokenleap.request import Request
from tokenleap.runtime.target import Target

__all__ = ["RequestMaker"]


class RequestMaker:
    """Makes requests for one model.

    Args:
        target: the model.
        tokenizer: its tokenizer, or None if it has none.
        eos_token_ids: its end-of-sequence tokens.
        grammars: compiles structured outputs for its tokens.
        rules: what the model's generation config does to its logits.
        sampling_defaults: the model's own values of sampling parameters.
        beam_defaults: the model's own values of options of beam search.
        reader: reads the prompts of an encoder-decoder; None for a decoder-only model.
    """

    def __init__(
        self,
        target: Target,
        tokenizer: PreTrainedTokenizerBase | None,
        eos_token_ids: Sequence[int],
        grammars: Grammars,
        rules: DecodingRules,
        *,
        sampling_defaults: Mapping[str, Any],
        beam_defaults: Mapping[str, Any],
        reader: SourceReader | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.sampling_defaults = sampling_defaults
        self._target = target
        self._beam_defaults = beam_defaults
        self._eos_token_ids = eos_token_ids
        self._grammars = grammars
        self._reader = reader
        self._rules = rules
        self._new_seed = partial(target.peers.from_first, fresh_seed)

    def make(self, spec: ReadSpec) -> list[Request]:
        """Make one request per output.

        Args:
            spec: what the user asks for.

        Raises:
            PromptError: the prompt is empty, too long, or has ids outside the vocabulary.
            ConfigError: the parameters need something that the model does not have.
        """
        params, trace = spec.params, spec.given.trace
        bad_words = self._bad_words(params)
        if params.stop_strings and self.tokenizer is None:
            raise ConfigError("stop: stop strings need a tokenizer, and this model has none.")
        if params.beam_width > 1:
            params = self._for_beams(params, trace=trace)
        source, ids = self.read(spec.given.prompt)
        scope, salt = spec.given.scope, cache_salt(spec.given.prompt)
        if salt is not None:
            scope = replace(scope, salt=salt)
        rules = self._rules
        if self._reader and (timestamps := self._reader.timestamps(spec.given.prompt)):
            rules = replace(rules, timestamps=timestamps)
        state_bytes = self._target.state_bytes(source)
        most = self._target.most_tokens_beside(state_bytes)
        if params.truncate_prompt_tokens is not None:
            ids = _truncated(ids, params, most, reads_source=source is not None)
        check_prompt(ids, self._target, state_bytes)
        check_room(ids, params, self._target.max_model_len, most)
        return [
            Request(
                ids,
                params,
                vocab_size=self._target.vocab_size,
                eos_token_ids=self._eos_token_ids,
                max_model_len=self._target.max_model_len,
                most_kept=most,
                tokenizer=self.tokenizer,
                index=index,
                trace_all=trace,
                grammar=self._grammar(params),
                source=source,
                rules=rules,
                references=spec.references,
                prediction=spec.prediction,
                bad_words=bad_words,
                scope=scope,
                new_seed=self._new_seed,
            )
            for index in range(params.n)
        ]

    def encode(self, prompt: Prompt) -> Sequence[int]:
        """Token ids of a prompt; of an encoder-decoder, those of the source.

        Raises:
            PromptError: the prompt is malformed.
        """
        source, ids = self.read(prompt)
        return ids if source is None else source.tokens

    def read(self, prompt: Prompt) -> tuple[Source | None, Sequence[int]]:
        """The source, if the model reads one, and the prompt that it continues.

        Raises:
            PromptError: the prompt is malformed, or the encoder cannot read its source.
        """
        if self._reader is None:
            return None, token_ids(prompt, self.tokenizer)
        return self._reader.read(prompt)

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

    def _bad_words(self, params: SamplingParams) -> BadWords | None:
        """The tokens of `params.bad_words`, with and without a space before each word.

        vLLM leaves out the second if it has another number of tokens. Then the word could still
        come in the middle of a text.
        """
        if not params.bad_words:
            return None
        if self.tokenizer is None:
            raise ConfigError("bad_words: words need a tokenizer, and this model has none.")
        written = partial(tokens_of, self.tokenizer, in_output=self._target.reads_source)
        words = {
            tuple(written(checked_text("bad_words", begin + word.lstrip())))
            for word in params.bad_words
            for begin in ("", " ")
        }
        check_token_ids("bad_words", chain.from_iterable(words), self._target.vocab_size)
        return BadWords(word for word in words if word)

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        if params.form is None:
            return None
        if not self._eos_token_ids:
            raise ConfigError(
                "structured_outputs need an end-of-sequence token, and this model has none."
            )
        return self._grammars.compile(params.form)


def _truncated(
    ids: Sequence[int], params: SamplingParams, most: int, *, reads_source: bool
) -> Sequence[int]:
    """The last tokens of a prompt, as many as `params.truncate_prompt_tokens` keeps.

    Args:
        ids: the prompt.
        params: sampling parameters.
        most: most tokens of prompt and output together.
        reads_source: whether the model is an encoder-decoder.

    Raises:
        ConfigError: it is an encoder-decoder, whose text to cut is the source.
    """
    kept = params.truncate_prompt_tokens
    assert kept is not None
    if reads_source:
        raise ConfigError(
            "truncate_prompt_tokens: an encoder-decoder's prompt is the beginning of the output: "
            "shorten the source yourself."
        )
    if kept < 0:
        kept = max(1, most - max(1, params.max_tokens or 1))
    return ids[-kept:]
