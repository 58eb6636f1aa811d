"""One sequence being generated: its tokens, its sampler, its noise, and when it ends."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from copy import copy
from itertools import count

from transformers import PreTrainedTokenizerBase

from foretoken.core.acceptance.base import Accepted, Origin
from foretoken.core.beams import BeamDraft, Beams, BeamSettings, Hypothesis, Searched
from foretoken.core.detokenizer import Detokenizer
from foretoken.core.grammar import Grammar
from foretoken.core.noise import Noise, fresh_seed
from foretoken.core.params import SamplingParams
from foretoken.core.references import NO_REFERENCES, References
from foretoken.core.rules import DecodingRules
from foretoken.core.sampler import Sampler, TreeDistributions
from foretoken.core.source import Source
from foretoken.core.tree import Draft, chain
from foretoken.errors import ForetokenError, in_one_line
from foretoken.outputs import BeamOutput, CompletionOutput, Metrics, StreamedToken, TokenLogprobs
from foretoken.trace import StepTrace, Trace

__all__ = ["Request"]

_keys = count()


class Request:
    """State of one output from its prompt to its end.

    Args:
        prompt_ids: the prompt, at least one token. Of an encoder-decoder it is the decoder's, which
            begins with its start token.
        params: sampling parameters. The caller makes `n` requests of them.
        vocab_size: width of the target's logits.
        eos_token_ids: tokens that end the output.
        max_model_len: most tokens of prompt and output together.
        tokenizer: makes text and finds stop strings; with None the text stays empty.
        index: which of the prompt's n outputs this is, from 0.
        trace_all: record p of every drafted token, also of those that the rule did not reach.
        grammar: the compiled `params.structured_outputs`, for this request alone (it has state).
        source: what the encoder reads; None for a decoder-only model.
        rules: what an encoder-decoder's generation config does to its logits.
        references: texts that drafters may quote, besides what the request reads and writes.

    Attributes:
        beams: the state of its beam search; None without one.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        max_model_len: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
        index: int = 0,
        trace_all: bool = False,
        grammar: Grammar | None = None,
        source: Source | None = None,
        rules: DecodingRules | None = None,
        references: References = NO_REFERENCES,
    ) -> None:
        assert prompt_ids, "the caller refuses empty prompts"
        self.key = next(_keys)
        self.index = index
        self.params = params
        self.prompt_ids = tuple(prompt_ids)
        self.source = source
        self.references = references
        self.token_ids = list(prompt_ids)
        self.trace_all = trace_all
        room = max_model_len - len(prompt_ids)
        self._max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        own = None if rules is None else rules.for_output(prompt_ids, source, self._max_tokens)
        self.sampler = Sampler(params, vocab_size, prompt_ids, eos_token_ids, grammar, own)
        seed = fresh_seed() if params.seed is None else params.seed
        self.noise = Noise(seed + index)
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.failure: Exception | None = None
        self.closed = False  # the scheduler has released it; it does not change any more
        self.metrics = Metrics(
            prompt_tokens=len(prompt_ids), source_tokens=0 if source is None else len(source)
        )
        self.admitted_at = 0.0
        self._eos = frozenset(() if params.ignore_eos else eos_token_ids)
        self._detokenizer = Detokenizer(
            tokenizer,
            params.stop_strings,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
        )
        self._tokenizer = tokenizer
        self._shows_stops = params.include_stop_str_in_output
        self._fresh: deque[StreamedToken] = deque()  # one thread takes while another extends
        self._origins: list[Origin] = []
        self._texts: list[str] = []  # what each token added to the text
        self._logprobs: list[TokenLogprobs] = []
        self._trace = Trace()
        self.beams = self._new_beams() if params.beam_width > 1 else None
        self._beam_outputs: tuple[BeamOutput, ...] = ()

    def _new_beams(self) -> Beams:
        params = self.params
        settings = BeamSettings(
            params.beam_width,
            self._max_tokens,
            frozenset(self.sampler.stop_ids),
            1.0 if params.length_penalty is None else params.length_penalty,
            params.early_stopping or False,
            params.renormalize_logits or False,
        )
        return Beams(settings, chain([self.root]))

    # Read by drafters and the loop

    @property
    def input_ids(self) -> Sequence[int]:
        """What the output answers: the text that the encoder reads, or else the prompt."""
        return self.prompt_ids if self.source is None else self.source.tokens

    @property
    def output_ids(self) -> list[int]:
        """Tokens generated so far."""
        return self.token_ids[len(self.prompt_ids) :]

    @property
    def root(self) -> int:
        """The last committed token: the root of the next tree."""
        return self.token_ids[-1]

    @property
    def finished(self) -> bool:
        """Whether the output has ended."""
        return self.finish_reason is not None

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated. A useful draft is at least one token shorter."""
        return self._max_tokens - len(self._origins)

    def undrafted(self) -> Draft:
        """The draft without proposals: the root alone, or the tree of the beam search."""
        return Draft.empty(self.root) if self.beams is None else self.beams.draft

    def with_noise(self, noise: Noise) -> Request:
        """The same request with other noise, for a drafter that needs noise of its own."""
        other = copy(self)
        other.noise = noise
        return other

    def extended(self, tokens: Sequence[int], noise: Noise) -> Request:
        """The request as if these tokens were committed, for a drafter that continues them."""
        other = self.with_noise(noise)
        other.token_ids = [*self.token_ids, *tokens]
        return other

    def view(self, tokens: Sequence[int], key: int | None = None) -> Request:
        """A beam as a request of its own, for a drafter that continues it.

        Args:
            tokens: prompt and output up to the beam's last token.
            key: the key of an earlier beam whose place this one takes; None takes a new one.
        """
        other = copy(self)
        other.key = next(_keys) if key is None else key
        other.token_ids = list(tokens)
        other.beams = None
        return other

    def shadow(self, noise: Noise, max_model_len: int, key: int | None = None) -> Request:
        """A copy with the same tokens and distributions that ends only with the context.

        The middle model of a cascade generates for it.

        Args:
            noise: the shadow's noise.
            max_model_len: the middle model's context.
            key: the key of an earlier shadow that this one replaces; None takes a new one.
        """
        other = copy(self)
        other.key = next(_keys) if key is None else key
        other.noise = noise
        endless = {"stop": (), "stop_token_ids": (), "max_tokens": None, "logprobs": None}
        other.params = self.params.model_copy(update=endless)
        other.token_ids = list(self.token_ids)
        other.metrics = Metrics()
        other.failure = other.finish_reason = None
        other._eos = frozenset()
        other._max_tokens = max_model_len - len(self.token_ids)
        other.trace_all = False
        other._detokenizer = Detokenizer(None)
        other._fresh, other._logprobs = deque(), []
        other._origins, other._texts = [], []
        other._trace = Trace()
        return other

    # Called by the loop and the scheduler

    def extend(
        self, draft: Draft, p: TreeDistributions, accepted: Accepted, step: StepTrace
    ) -> list[StreamedToken]:
        """Append the accepted tokens one by one, until the output stops.

        Args:
            draft: the verified draft.
            p: the target's distributions at its nodes.
            accepted: the rule's decision.
            step: the step's trace; its `committed` is set here.

        Returns:
            The committed tokens, each with the text that became final.
        """
        parents = (0, *accepted.path)
        tokens = [*(draft.tree.tokens[node] for node in accepted.path), accepted.token]
        origins = [*(Origin.DRAFT for _ in accepted.path), accepted.origin(draft)]
        streamed: list[StreamedToken] = []
        lengths = len(self.token_ids), len(self._origins)
        try:
            for parent, token, origin in zip(parents, tokens, origins, strict=True):
                if self.params.logprobs is not None:
                    self._logprobs.append(_logprobs(p, parent, token, self.params.logprobs))
                streamed.append(self._append(token, origin))
                if self.finished:
                    break
        finally:  # after an error, drop the tokens that have no text
            num_tokens, num_generated = (length + len(streamed) for length in lengths)
            del self.token_ids[num_tokens:]
            for per_token in (self._origins, self._texts, self._logprobs):
                del per_token[num_generated:]
            step.committed = len(streamed)
            self.metrics.count(step)
            self._trace.steps.append(step)
            self._fresh.extend(streamed)
        return streamed

    def follow(self, draft: BeamDraft, searched: Searched) -> None:
        """Go on with a beam search, and append the tokens that it commits.

        Args:
            draft: the verified draft.
            searched: what the pass brought.
        """
        self.beams = searched.beams
        if searched.beams.done:
            self._beam_outputs = tuple(map(self._beam_output, searched.beams.finished))
        self._fresh.extend([self._append(token, Origin.PLAIN) for token in searched.tokens])
        assert self.finished == searched.beams.done, "a search ends where its best output ends"
        metrics = self.metrics
        metrics.generated_tokens = len(self._origins)
        metrics.target_passes += 1
        if draft.num_proposed:
            metrics.num_drafts += 1
            metrics.num_draft_tokens += draft.num_proposed
            metrics.num_accepted_tokens += searched.steps - 1

    def _beam_output(self, found: Hypothesis) -> BeamOutput:
        tokens = (*self.output_ids, *found.tokens)
        return BeamOutput(tokens, self._decoded(tokens), found.score, found.log_prob)

    @property
    def has_fresh(self) -> bool:
        """Whether `take` has tokens to give."""
        return bool(self._fresh)

    def take(self) -> tuple[StreamedToken, ...]:
        """Tokens committed since the last call, whichever thread ran the steps."""
        fresh = []
        while self._fresh:
            fresh.append(self._fresh.popleft())
        return tuple(fresh)

    def _append(self, token: int, origin: Origin) -> StreamedToken:
        self.token_ids.append(token)
        self._origins.append(origin)
        may_stop = len(self._origins) >= self.params.min_tokens
        hidden = token in self.params.stop_token_ids and not self._shows_stops
        text = "" if may_stop and hidden else self._detokenizer.add(token, may_stop=may_stop)
        if may_stop:
            self._check_stop(token)
        if not self.finished and self.remaining <= 0:
            self._finish("length", None)
        if self.finished:
            text += self._detokenizer.finish()
        self._texts.append(text)
        return StreamedToken(token, text, origin)

    def _check_stop(self, token: int) -> None:
        if token in self._eos:
            self._finish("stop", None)
        elif token in self.params.stop_token_ids:
            self._finish("stop", token)
        elif self._detokenizer.stopped_at is not None:
            self._finish("stop", self._detokenizer.stopped_at)

    def record_times(self, draft: float, verify: float, accept: float) -> None:
        """Add a step's times (seconds, of the whole batch) to the metrics and the trace."""
        self.metrics.draft_seconds += draft
        self.metrics.verify_seconds += verify
        self.metrics.accept_seconds += accept
        if self.beams is None:
            last = self._trace.steps[-1]
            last.draft_seconds, last.verify_seconds, last.accept_seconds = draft, verify, accept

    def _finish(self, reason: str, stop_reason: int | str | None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason
        if self.admitted_at:  # else it ended while it waited
            self.metrics.seconds = time.perf_counter() - self.admitted_at

    def abort(self) -> None:
        """End the output at its present length."""
        if not self.finished:
            rest = self._detokenizer.finish()
            if self._texts:
                self._texts[-1] += rest
            self._finish("abort", None)

    def fail(self, error: Exception) -> None:
        """End the output at its present length, because of an error in this request alone."""
        self.failure = error
        self._finish("error", None)

    @property
    def error(self) -> str | None:
        """What went wrong, in one line; None if nothing did."""
        if self.failure is None:
            return None
        line = in_one_line(self.failure)
        if isinstance(self.failure, ForetokenError):  # written for users: no class name
            return line.removeprefix(f"{type(self.failure).__name__}: ")
        return line

    def output(self) -> CompletionOutput:
        """The output with the tokens generated so far."""
        if self._tokenizer is not None and self.finished:
            self._trace.pieces = {token: self._piece(token) for token in self._trace.tokens()}
        self._trace.encode_seconds = self.metrics.encode_seconds
        self._trace.prefill_seconds = self.metrics.prefill_seconds
        return CompletionOutput(
            index=self.index,
            text=self._detokenizer.text,
            token_ids=tuple(self.output_ids),
            origins=tuple(self._origins),
            token_texts=tuple(self._texts),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
            logprobs=tuple(self._logprobs) if self.params.logprobs is not None else None,
            metrics=self.metrics,
            trace=self._trace,
            beams=self._beam_outputs,
        )

    def _decoded(self, tokens: Sequence[int]) -> str:
        """The text of a whole output; empty without a tokenizer."""
        if self._tokenizer is None:
            return ""
        skip = self.params.skip_special_tokens
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=skip))

    def _piece(self, token: int) -> str:
        """A token's text for the trace; empty if the tokenizer cannot decode it."""
        assert self._tokenizer is not None
        try:
            return str(self._tokenizer.decode([token]))
        except Exception:  # a rejected token must not fail the output
            return ""


def _logprobs(p: TreeDistributions, node: int, token: int, num_top: int) -> TokenLogprobs:
    log_probs = p.log_probs(node)  # [V]
    best = log_probs.topk(min(num_top, len(log_probs)))
    top = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return TokenLogprobs(token, float(log_probs[token]), tuple(top))
