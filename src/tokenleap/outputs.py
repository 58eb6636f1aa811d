"""Outputs and stream chunks, which users get. `as_dict` converts them for JSON."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Le
from pydantic import FiniteFloat

from tokenleap.core.acceptance.base import Origin
from tokenleap.core.config import Config
from tokenleap.core.params import GREEDY_BELOW, SamplingParams
from tokenleap.core.shown import colours_as_html, colours_as_text, shortened
from tokenleap.trace import StepTrace, Trace

if TYPE_CHECKING:
    from rich.text import Text
    from transformers import PreTrainedTokenizerBase

    from tokenleap.core.distribution import PromptLogprobs, TokenLogprobs

# `Metrics`: counts and times of one output.


@dataclass
class Metrics:
    """Counts and times of one output. Times are wall-clock seconds.

    The prompt of an encoder-decoder is the decoder's; what the encoder reads is the source.

    `num_drafts` counts the steps in which at least one token was drafted. In a batch, the full time
    of a step counts for every request that took part in it. In a beam search, `num_accepted_tokens`
    counts the steps of the search that drafts have saved a pass for.
    """

    prompt_tokens: int = 0
    source_tokens: int = 0
    """Tokens that the encoder reads, or frames of audio; 0 for a decoder-only model."""
    generated_tokens: int = 0
    target_passes: int = 0
    num_drafts: int = 0
    num_cut_drafts: int = 0
    """Steps with a draft whose last token is not part of the output, because a stop came first."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_rejected_tokens: int = 0
    accepted_prediction_tokens: int = 0
    """Drafted tokens of the request's prediction that became part of the output."""
    rejected_prediction_tokens: int = 0
    """Drafted tokens of it that were verified and did not."""
    accepted_earlier_tokens: int = 0
    """Drafted tokens that a drafter had from earlier requests and that became part of the output. A
    repeated prompt has many."""
    accepted_per_position: list[int] = field(default_factory=list)
    """How often the drafted token at each depth was accepted."""
    prefill_seconds: float = 0.0
    encode_seconds: float = 0.0
    """Time in the encoder, which is part of `prefill_seconds`."""
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    accept_seconds: float = 0.0
    seconds: float = 0.0
    """From admission to the last token, prefill included."""
    cached_prompt_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    cached_source_tokens: int = 0
    """`source_tokens` if an earlier request had read the same source, else 0."""
    preemptions: int = 0
    """How often the request lost its row to older requests and was computed again."""
    drafter_failure: str | None = None
    """Why the request continued without drafts, in one line; None if its drafter did not fail."""

    def count(self, step: StepTrace) -> None:
        """Count a step. If a stop cut it, what comes after the end of the output does not count."""
        self.generated_tokens += step.committed
        self.target_passes += 1
        if not step.drafted:
            return
        kept = len(step.kept)
        self.num_drafts += 1
        self.num_cut_drafts += step.committed <= len(step.accepted)
        self.num_draft_tokens += len(step.drafted)
        self.num_accepted_tokens += kept
        self.num_rejected_tokens += len(step.refused)
        missing = max(step.depths) - len(self.accepted_per_position)
        self.accepted_per_position.extend([0] * missing)
        for position in range(kept):
            self.accepted_per_position[position] += 1

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per target pass that had a draft: 1 + accepted / drafts, unless a stop cut one."""
        if not self.num_drafts:
            return 1.0
        return 1 + (self.num_accepted_tokens - self.num_cut_drafts) / self.num_drafts

    @property
    def acceptance_rate(self) -> float:
        """Measured alpha: accepted / (accepted + rejected), without tokens that no rule reached."""
        tried = self.num_accepted_tokens + self.num_rejected_tokens
        return self.num_accepted_tokens / tried if tried else 0.0

    @property
    def step_seconds(self) -> float:
        """Time of the request's steps; those of a batch count wholly for each of its requests."""
        return self.draft_seconds + self.verify_seconds + self.accept_seconds

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second, prefill included."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Generated tokens per second after prefill."""
        seconds = self.seconds - self.prefill_seconds
        return self.generated_tokens / seconds if seconds > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All fields and properties but `step_seconds`, for JSON."""
        return {
            **asdict(self),
            "mean_acceptance_length": self.mean_acceptance_length,
            "acceptance_rate": self.acceptance_rate,
            "tokens_per_second": self.tokens_per_second,
            "decode_tokens_per_second": self.decode_tokens_per_second,
        }


@dataclass(frozen=True)
class BeamOutput:
    """One of the outputs that a beam search has found.

    Args:
        token_ids: its tokens.
        text: their text.
        score: the sum of their log-probabilities after the length penalty.
        cumulative_logprob: the sum itself.
    """

    token_ids: tuple[int, ...]
    text: str
    score: float
    cumulative_logprob: float


@dataclass(frozen=True)
class StreamedToken:
    """A committed token; `text` is empty while a character or stop string may be incomplete.

    `logprobs` are there if `SamplingParams.logprobs` asks for them: `Logprob`s by token id.
    """

    token_id: int
    text: str
    origin: Origin
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, repr=False)
class CompletionOutput:
    """One output of one prompt. It may still be growing.

    Notebooks and Rich show its text with every token in the colour of its origin: green if it was
    drafted, blue if it is a correction. In a notebook, the line below has tokens, passes and speed.

    `finish_reason` is None until the output ends. Then it is "stop" (end-of-sequence token, stop
    token or stop string), "length" (max_tokens or the context limit), "abort" (the caller ended it)
    or "error" (`error` says what went wrong). `stop_reason` is the stop string or the id of the
    stop token; it is None for the end-of-sequence token.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    token_texts: tuple[str, ...]
    """The text that each token added. Parts of a character are added with its last token."""
    finish_reason: str | None
    stop_reason: int | str | None
    error: str | None
    logprobs: list[TokenLogprobs] | None
    """Per token, the `Logprob` of the token and of the most likely ones by token id. None without
    `SamplingParams.logprobs`."""
    metrics: Metrics
    trace: Trace
    beams: tuple[BeamOutput, ...] = ()
    """Results of a beam search, best first; empty without one, and until it has ended."""

    @property
    def tokens(self) -> tuple[StreamedToken, ...]:
        """The tokens with text and origin, as `LLM.stream` delivers them."""
        logprobs = self.logprobs or (None,) * len(self.token_ids)
        parts = zip(self.token_ids, self.token_texts, self.origins, logprobs, strict=True)
        return tuple(StreamedToken(*part) for part in parts)

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the tokens' log-probabilities; None without `SamplingParams.logprobs`."""
        if self.logprobs is None:
            return None
        pairs = zip(self.logprobs, self.token_ids, strict=True)
        return sum(found[token].logprob for found, token in pairs)

    def finished(self) -> bool:
        """Whether the output has ended."""
        return self.finish_reason is not None

    def __repr__(self) -> str:
        """The text, and what it took, in one line."""
        metrics, error = self.metrics, f", error={self.error!r}" if self.error else ""
        return (
            f"CompletionOutput(index={self.index}, text={shortened(self.text)}, "
            f"finish_reason={self.finish_reason!r}{error}, tokens={len(self.token_ids)}, "
            f"tokens_per_second={metrics.tokens_per_second:.1f}, "
            f"mean_acceptance_length={metrics.mean_acceptance_length:.2f})"
        )

    def __rich__(self) -> Text:
        """The text in colours, for Rich."""
        return colours_as_text((token.text, token.origin) for token in self.tokens)

    def _repr_html_(self) -> str:
        """The text in colours, for notebooks."""
        metrics = self.metrics
        summary = (
            f"{len(self.token_ids)} tokens in {metrics.target_passes} passes, "
            f"{metrics.tokens_per_second:.1f} tokens/s, {self.error or self.finish_reason}"
        )
        parts = zip(self.token_texts, self.origins, strict=True)
        return colours_as_html(parts, summary)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, without the trace."""
        return {
            "index": self.index,
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "error": self.error,
            "logprobs": None if self.logprobs is None else list(map(_as_dict, self.logprobs)),
            **({"beams": [asdict(beam) for beam in self.beams]} if self.beams else {}),
            "metrics": self.metrics.as_dict(),
        }


@dataclass(frozen=True, repr=False)
class RequestOutput:
    """All outputs of one prompt. `text`, `metrics` and so on are those of the first output.

    `prompt` and `prompt_token_ids` of an encoder-decoder are the decoder's.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: Sequence[CompletionOutput]
    request_id: str | None = None
    """The id that `LLMEngine.add_request` returned; None from `LLM.generate`."""
    encoder_prompt: str | None = None
    """The text that the encoder read; None if it was not given as text, or there is no encoder."""
    encoder_prompt_token_ids: tuple[int, ...] | None = None
    """The tokens that the encoder read, () of audio; None if there is no encoder."""
    prompt_logprobs: PromptLogprobs | None = None
    """Per token of the prompt, the `Logprob` of the token and of the most likely ones by token id,
    and None for the first token. None without `SamplingParams.prompt_logprobs`, or if the request
    ended before its prompt was computed."""

    def __repr__(self) -> str:
        """Prompt and outputs, in one line."""
        source = "" if self.encoder_prompt is None else shortened(self.encoder_prompt)
        of_source = f"encoder_prompt={source}, " if source else ""
        prompt = "None" if self.prompt is None else shortened(self.prompt)
        return f"RequestOutput({of_source}prompt={prompt}, outputs={list(self.outputs)})"

    def _repr_html_(self) -> str:
        """The outputs in colours, for notebooks."""
        return "<hr>".join(output._repr_html_() for output in self.outputs)

    def prompt_as_dict(self) -> dict[str, Any]:
        """The prompt's token ids, the source's if there is one, and log-probabilities, for JSON."""
        source, scores = self.encoder_prompt_token_ids, self.prompt_logprobs
        told: dict[str, Any] = {} if source is None else {"encoder_prompt_token_ids": list(source)}
        told["prompt_token_ids"] = list(self.prompt_token_ids)
        if scores is not None:
            told["prompt_logprobs"] = [None if each is None else _as_dict(each) for each in scores]
        return told

    @property
    def finished(self) -> bool:
        """Whether all outputs have ended."""
        return all(output.finished() for output in self.outputs)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt whose KV came from the prefix cache."""
        return self.metrics.cached_prompt_tokens

    @property
    def text(self) -> str:
        """Text of the first output."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the first output."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        """Why the first output ended; None until it does."""
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """Log-probabilities of the first output."""
        return self.outputs[0].logprobs

    @property
    def metrics(self) -> Metrics:
        """Metrics of the first output."""
        return self.outputs[0].metrics

    @property
    def trace(self) -> Trace:
        """Trace of the first output."""
        return self.outputs[0].trace


def _as_dict(found: TokenLogprobs) -> dict[int, Any]:
    return {token: asdict(each) for token, each in found.items()}


@dataclass(frozen=True)
class StreamChunk:
    """The tokens of one output that were committed since its last chunk.

    Args:
        tokens: the tokens in order; the last chunk may have none.
        output: the whole output if this is its last chunk, else None.
        request_id: see `LLMEngine.add_request`; None from `LLM.stream`.
        index: which of the prompt's n outputs the chunk belongs to.
        prompt_index: which of the prompts of `LLM.stream` it belongs to.
        prompt_logprobs: those of the prompt (see `RequestOutput`), in the first chunk of output 0;
            None in all others.
    """

    tokens: tuple[StreamedToken, ...]
    output: CompletionOutput | None = None
    request_id: str | None = None
    index: int = 0
    prompt_index: int = 0
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def finished(self) -> bool:
        """Whether this is the output's last chunk."""
        return self.output is not None

    @property
    def text(self) -> str:
        """Text of all tokens of the chunk."""
        return "".join(token.text for token in self.tokens)

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """Log-probabilities of the chunk's tokens, as `CompletionOutput` has them; None without."""
        return [token.logprobs for token in self.tokens if token.logprobs is not None] or None


class BeamSearchParams(Config):
    """Parameters of `LLM.beam_search`; names and meanings are vLLM's.

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
        finish_reason: "stop" after an end-of-sequence token, else "length".
    """

    tokens: tuple[int, ...]
    text: str
    cum_logprob: float
    score: float
    finish_reason: str


@dataclass(frozen=True)
class BeamSearchOutput:
    """Result of `LLM.beam_search` for one prompt: `beam_width` sequences, best first."""

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
    total = output.cumulative_logprob or 0.0
    score = total / len(output.token_ids) ** length_penalty
    return BeamOutput(output.token_ids, output.text, score, total)
