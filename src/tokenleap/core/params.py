"""`SamplingParams`: how the next token is drawn, under vLLM's names.

Users pass it to `LLM.generate`. All fields are validated when it is constructed. `Sampler` turns it
into distributions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from annotated_types import Ge, Gt, Le
from pydantic import ConfigDict, FiniteFloat, field_validator, model_validator

from tokenleap.core.config import Config
from tokenleap.core.structured import Structured, StructuredOutputsParams
from tokenleap.errors import ConfigError

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM: dividing by them would overflow."""

MAX_SEED = 2**63 - 1

TokenIds = Sequence[Annotated[int, Ge(0)]]

_LARGEST, _SMALLEST = 3.4e38, 1.2e-38
"""Range of float32: distributions are computed in it."""

_STRUCTURED = "use structured_outputs"

_NOT_FOR_BEAMS = (
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "logprobs",
    "structured_outputs",
)

Float32 = Annotated[FiniteFloat, Ge(-_LARGEST), Le(_LARGEST)]


class SamplingParams(Config):
    """How the next token is drawn; names and meanings are vLLM's.

    The server's fields and the shell's options are made of these: a field's first sentence is an
    option's help.

    Raises:
        ConfigError: a field is unknown, out of range, or contradicts another one.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)

    foreign_names: ClassVar[Mapping[str, str]] = {
        "max_new_tokens": "use 'max_tokens', which does not count the prompt either.",
        "max_length": "use 'max_tokens', which does not count the prompt.",
        "n_predict": "use 'max_tokens'.",
        "num_predict": "use 'max_tokens'.",
        "min_new_tokens": "use 'min_tokens'.",
        "do_sample": "use 'temperature', where 0 is greedy.",
        "num_beams": "use 'beam_width' with temperature 0.",
        "num_return_sequences": "use 'n'; with beam_width, an output's 'beams' has all of them.",
        "best_of": "use 'n' and choose among the outputs.",
        "eos_token_id": "use 'stop_token_ids'.",
        "forced_bos_token_id": "say in the prompt how the decoder's text begins.",
        "stop_strings": "use 'stop'.",
        "bad_words_ids": "use 'bad_words', which are text, or 'logit_bias'.",
        "logits_processors": "use 'logit_bias', 'bad_words' or 'structured_outputs'.",
        "spaces_between_special_tokens": "the tokenizer decides; see 'skip_special_tokens'.",
        "logprob_token_ids": "use 'logprobs': -1 is the whole vocabulary.",
        "prompt_logprob_token_ids": "use 'prompt_logprobs': -1 is the whole vocabulary.",
        "prompt_logprob_start": "use 'prompt_logprobs', which has all positions.",
        "flat_logprobs": "use 'logprobs', which has one form.",
        "output_kind": "call stream() for deltas, and generate() for whole outputs.",
        "stream_interval": "join the chunks of stream() as you like.",
        "use_beam_search": "use 'beam_width' with temperature 0.",
        "thinking_token_budget": "there is no such limit.",
        "repetition_detection": "there is no such end; 'frequency_penalty' makes it rare.",
        "trace_decode_token_ids": "use 'prompt_logprobs' to score a given text.",
        "watermarking": "outputs are the model's own.",
        "extra_args": "write a drafter or a rule of your own: docs/extending.md.",
        "guided_decoding": f"{_STRUCTURED}.",
        **{
            f"guided_{kind}": f"{_STRUCTURED}={{'{kind}': ...}}."
            for kind in ("json", "regex", "choice", "grammar", "json_object")
        },
    }

    temperature: Annotated[FiniteFloat, Ge(0), Le(_LARGEST)] = 1.0
    """0 is greedy; 1 is the model's own distribution. It divides the logits."""
    top_k: Annotated[int, Ge(-1)] = 0
    """Keep the k most probable tokens; 0 or -1 keeps all."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Keep the smallest set of most probable tokens with this mass."""
    min_p: Annotated[float, Ge(0), Le(1)] = 0.0
    """Drop tokens less probable than this fraction of the most probable one."""
    repetition_penalty: Annotated[FiniteFloat, Ge(_SMALLEST), Le(_LARGEST)] = 1.0
    """Penalty factor for tokens in prompt or output. It divides their positive logits and
    multiplies the negative ones. If it is not given, that of the model's generation config
    holds.
    """
    presence_penalty: Annotated[float, Ge(-2), Le(2)] = 0.0
    """Penalty for every token in the output. It is subtracted from the token's logit."""
    frequency_penalty: Annotated[float, Ge(-2), Le(2)] = 0.0
    """Penalty per occurrence in the output. It is subtracted from the token's logit."""
    logit_bias: Mapping[Annotated[int, Ge(0)], Float32] | None = None
    """Add to logits: {"token id": bias, ...}."""
    allowed_token_ids: TokenIds | None = None
    """Sample only these tokens."""
    seed: Annotated[int, Ge(0), Le(MAX_SEED)] | None = None
    """Makes sampling reproducible, whatever the drafter. Under the rule `coupled` (the default)
    the tokens are the same for any drafter, draft length and batch (invariant 7).
    """
    bad_words: Sequence[str] | None = ()
    """Keep this text out of the output. Each word is split into tokens with and without a space
    before it. For a multi-token word, only its last token is banned, right after the others.
    """
    max_tokens: Annotated[int, Ge(0)] | None = 16
    """Maximum tokens to generate. None generates up to the end of the context. 0 only reads the
    prompt, for `prompt_logprobs` or to have it in the prefix cache.
    """
    min_tokens: Annotated[int, Ge(0)] = 0
    """Minimum tokens to generate. No end-of-sequence or stop token is drawn before."""
    stop: str | Sequence[str] | None = ()
    """Stop at this text. Stop strings may cross token borders. They are not part of the text
    unless `include_stop_str_in_output` is set.
    """
    stop_token_ids: TokenIds = ()
    """Stop after these tokens. They stay in `token_ids`, and in the text, like the end of the
    sequence, only if `include_stop_str_in_output` is set.
    """
    ignore_eos: bool = False
    """Continue past the end-of-sequence token."""
    n: Annotated[int, Ge(1)] = 1
    """Number of answers. Output i uses seed + i."""
    logprobs: Annotated[int, Ge(-1)] | None = None
    """Log-probabilities of the k most likely tokens, and of each token itself. They are those
    of the model (before temperature, penalties and masks, as in vLLM). -1 is the whole
    vocabulary.
    """
    prompt_logprobs: Annotated[int, Ge(-1)] | None = None
    """The same for each token of the prompt but the first; -1 is all tokens. See
    `RequestOutput.prompt_logprobs`. Such a prompt is computed in full.
    """
    skip_reading_prefix_cache: bool | None = None
    """Compute the whole prompt, even if the prefix cache has its beginning. None does so for
    `prompt_logprobs` alone.
    """
    truncate_prompt_tokens: Annotated[int, Ge(-1)] | None = None
    """Keep only so many of the prompt's last tokens. -1 keeps as many as leave room for
    `max_tokens`.
    """
    detokenize: bool = True
    """Make text; without it, the text is empty."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    include_stop_str_in_output: bool = False
    """Keep the stop string or stop token in the text."""
    structured_outputs: Structured | None = None
    """Constrain the output: {"json": schema}, {"regex": ...}, {"choice": [...]} or others. In
    Python also `StructuredOutputsParams`. Only outputs of this form are possible, and the output
    ends where the form is complete.
    """
    beam_width: Annotated[int, Ge(1), Le(64)] = 1
    """Search for the best answer with this many beams. With 2 or more, it takes the place of
    sampling and needs temperature 0. The output is the best one found, and
    `CompletionOutput.beams` has all.
    """
    length_penalty: Annotated[float, Ge(-5), Le(5)] | None = None
    """With a beam width: above 0 favours long answers. An output's score is the sum of its
    tokens' log-probabilities, divided by their number to this power. None takes the value of
    the model's generation config, or 1.
    """
    early_stopping: bool | Literal["never"] | None = None
    """When a beam search ends (see `core.beams.BeamSettings`). None takes the value of the
    model's generation config, or False.
    """
    renormalize_logits: bool | None = None
    """Whether beam search normalises log-probabilities after masks and penalties. None takes
    the value of the model's generation config, or False.
    """

    @classmethod
    def parse(
        cls, value: Sampling, defaults: Mapping[str, Any] = MappingProxyType({})
    ) -> SamplingParams:
        """Convert what `generate` takes.

        Args:
            value: parameters are taken as they are. A mapping has some fields; None has none.
            defaults: the model's own values of fields that a mapping lacks.

        Raises:
            ConfigError: it is neither parameters nor a mapping of them.
        """
        if isinstance(value, SamplingParams):
            return value
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(
                f"sampling_params must be SamplingParams or a dict, got {type(value).__name__}."
            )
        given = dict(value or {})
        unused = _NOT_FOR_BEAMS if given.get("beam_width", 1) != 1 else ()
        own = {name: default for name, default in defaults.items() if name not in unused}
        return cls(**{**own, **given})

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

    @field_validator("stop_token_ids", mode="before")
    @classmethod
    def _none_is_no_token(cls, value: Any) -> Any:
        return () if value is None else value

    @field_validator("bad_words")
    @classmethod
    def _no_empty_word(cls, value: Sequence[str] | None) -> tuple[str, ...]:
        words = tuple(value or ())
        if not all(word.strip() for word in words):
            raise ValueError("a bad word cannot be empty")
        return words

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _something_left(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("at least one token must be left, and -1 keeps what has room")
        return value

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
        if self.stop and not self.detokenize:
            raise ValueError("stop: stop strings are found in text: leave out detokenize=False.")
        if self.prompt_logprobs is not None and self.skip_reading_prefix_cache is False:
            raise ValueError(
                "skip_reading_prefix_cache: prompt_logprobs need the whole prompt computed, and "
                "the cache has no logits: leave one of them out."
            )
        for name in ("min_tokens", "ignore_eos", "allowed_token_ids"):
            if self.structured_outputs is not None and getattr(self, name):
                raise ValueError(
                    f"{name} contradicts structured_outputs, which say what may come next and "
                    "where the output ends: remove one of them."
                )
        return self

    @model_validator(mode="after")
    def _beams_alone(self) -> Self:
        """Refuse what beam search has no use for, and options of it without it."""
        if self.beam_width == 1:
            for name in ("length_penalty", "early_stopping", "renormalize_logits"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is for beam search: set beam_width to 2 or more.")
            return self
        if not self.greedy:
            raise ValueError(
                f"beam_width={self.beam_width} searches and does not sample: set temperature=0."
            )
        if self.max_tokens == 0:
            raise ValueError("max_tokens: a beam search finds at least one token, got 0.")
        for name in _NOT_FOR_BEAMS:
            neutral = type(self).model_fields[name].default
            if getattr(self, name) not in ((neutral, -1) if name == "top_k" else (neutral,)):
                raise ValueError(f"{name} is not possible in beam search: leave it out.")
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple of strings."""
        assert isinstance(self.stop, tuple), "the validator makes it a tuple"
        return self.stop

    @property
    def form(self) -> StructuredOutputsParams | None:
        """`structured_outputs` as `StructuredOutputsParams`, or None."""
        assert not isinstance(self.structured_outputs, Mapping), "the validator converts it"
        return self.structured_outputs

    @property
    def greedy(self) -> bool:
        """Whether the temperature is 0, so that every distribution is one-hot."""
        return self.temperature < GREEDY_BELOW


Sampling: TypeAlias = SamplingParams | Mapping[str, Any] | None
"""Sampling parameters as a user may give them; see `SamplingParams.parse`."""
