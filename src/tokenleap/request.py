"""One sequence being generated: what is appended to it, when it ends, and what its user gets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from tokenleap.core import clock
from tokenleap.core.acceptance.base import Accepted, Origin
from tokenleap.core.beams import BeamDraft, Beams, BeamSettings, Hypothesis, Searched
from tokenleap.core.detokenizer import Detokenizer, Pieces
from tokenleap.core.distribution import PromptLogprobs, TokenLogprobs, token_logprobs
from tokenleap.core.grammar import Grammar
from tokenleap.core.noise import Noise, fresh_seed
from tokenleap.core.params import SamplingParams
from tokenleap.core.references import NO_REFERENCES, References, Source
from tokenleap.core.rules import DecodingRules
from tokenleap.core.sampler import BadWords, Sampler, TreeDistributions
from tokenleap.core.sequence import SHARED, Scope, SequenceState, new_key
from tokenleap.core.tree import Draft, chain
from tokenleap.errors import RequestError, told
from tokenleap.models.pooling import Pooled
from tokenleap.outputs import BeamOutput, CompletionOutput, Metrics, StreamedToken
from tokenleap.runtime.costs import CostCurve
from tokenleap.trace import PASS_SIZES, StepTrace, Trace

MAX_TRACED = 2**16
_BEHIND = 6  # last tokens of a prompt that decide how the text after it begins


class Request(SequenceState):
    """State of one output from its prompt to its end.

    Args:
        prompt_ids: the prompt, at least one token. Of an encoder-decoder it is the decoder's, which
            begins with its start token.
        params: sampling parameters. The caller makes `n` requests of them.
        vocab_size: width of the target's logits.
        eos_token_ids: tokens that end the output.
        max_model_len: most tokens of prompt and output together.
        most_kept: the same, as far as `kv_cache_memory` allows. An output that needs more ends with
            an error there; None is no limit.
        tokenizer: makes text and finds stop strings; with None the text stays empty.
        pieces: the texts of its tokens, which all requests may share; None makes them.
        index: which of the prompt's n outputs this is, from 0.
        trace_all: record p of every drafted token, also of those that the rule did not reach;
            until there are `MAX_TRACED` of them.
        grammar: the compiled `params.structured_outputs`, for this request alone (it has state).
        source: what the encoder reads; None for a decoder-only model.
        rules: what an encoder-decoder's generation config does to its logits.
        references: texts that drafters may quote, besides what the request reads and writes.
        prediction: the text that its output is expected to repeat, as the only one of these
            references; none if nothing is expected.
        bad_words: the tokens of `params.bad_words`; None if there are none.
        scope: what it shares with other requests.
        pooled: takes the hidden states of the whole prompt; None if nobody reads them.
        new_seed: draws the seed if `params` have none.

    Attributes:
        prompt_scores: the log-probabilities of the prompt's tokens but the first, as far as they
            are computed; None if they are not needed.
        pass_costs: what passes cost, for the trace; None if they are not recorded.
        on_news: called after tokens were committed and when the request is closed, in the thread
            that runs the step; None if it was not asked for.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        max_model_len: int,
        most_kept: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        pieces: Pieces | None = None,
        index: int = 0,
        trace_all: bool = False,
        grammar: Grammar | None = None,
        source: Source | None = None,
        rules: DecodingRules | None = None,
        references: References = NO_REFERENCES,
        prediction: References = NO_REFERENCES,
        bad_words: BadWords | None = None,
        scope: Scope = SHARED,
        pooled: Pooled | None = None,
        new_seed: Callable[[], int] = fresh_seed,
    ) -> None:
        assert prompt_ids, "the caller refuses empty prompts"
        room = max_model_len - len(prompt_ids)
        wanted = room if params.max_tokens is None else min(params.max_tokens, room)
        own = None if rules is None else rules.for_output(prompt_ids, source, wanted)
        kept = wanted if most_kept is None else most_kept - len(prompt_ids)
        self._max_tokens, self._too_long = min(wanted, kept), wanted > kept
        sampler = Sampler(params, vocab_size, prompt_ids, eos_token_ids, grammar, own, bad_words)
        seed = new_seed() if params.seed is None else params.seed
        super().__init__(prompt_ids, params, sampler, Noise(seed + index), source)
        self.references, self.prediction, self.scope = references, prediction, scope
        self.pooled = pooled
        if params.beam_width > 1:
            settings = BeamSettings.of(params, self._max_tokens, sampler.stop_ids)
            self.beams = Beams(settings, chain([self.root]))
        self.index = index
        self._trace_all, self._traced = trace_all, 0  # nodes
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.failure: Exception | None = None
        self.closed = False  # the scheduler has released it; it does not change any more
        self.metrics = Metrics(
            prompt_tokens=len(prompt_ids), source_tokens=0 if source is None else len(source)
        )
        self.admitted_at = 0.0
        self._eos = frozenset(() if params.ignore_eos else eos_token_ids)
        self._pieces = pieces or Pieces(tokenizer)
        behind = prompt_ids[-_BEHIND:] if source is None else ()
        self._written = Written(params, tokenizer, self._pieces, self._eos, behind)
        self._fresh: deque[StreamedToken] = deque()  # one thread takes while another publishes
        # All outputs of a prompt would have the same.
        scored = params.prompt_logprobs is not None and index == 0
        self.prompt_scores: list[TokenLogprobs] | None = [] if scored else None
        self.pass_costs: CostCurve | None = None
        self.on_news: Callable[[], None] | None = None
        self._beam_outputs: tuple[BeamOutput, ...] = ()

    # Read by drafters and the loop

    @property
    def finished(self) -> bool:
        """Whether the output has ended."""
        return self.finish_reason is not None

    @property
    def trace_all(self) -> bool:
        """Whether to record p of every drafted token in this step."""
        return self._trace_all and self._traced < MAX_TRACED

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated. A useful draft is at least one token shorter."""
        return self._max_tokens - len(self._written)

    def shadow(self, noise: Noise, max_model_len: int, key: int | None = None) -> Request:
        """A copy with the same tokens and distributions that ends only with the context.

        The middle model of a cascade generates for it.

        Args:
            noise: the shadow's noise.
            max_model_len: the middle model's context.
            key: the key of an earlier shadow that this one replaces; None takes a new one.
        """
        other = copy(self)
        other.key = new_key() if key is None else key
        other.noise = noise
        endless = {"stop": (), "stop_token_ids": (), "max_tokens": None, "logprobs": None}
        other.on_news = None
        other.params = self.params.model_copy(update=endless)
        other.token_ids = list(self.token_ids)
        other.metrics = Metrics()
        other.failure = other.finish_reason = None
        other._eos = frozenset()
        other._max_tokens, other._too_long = max_model_len - len(self.token_ids), False
        other._trace_all = False
        other._written, other._fresh = Written(other.params, None, self._pieces), deque()
        return other

    # The prompt

    @property
    def num_unscored(self) -> int:
        """Tokens of the prompt whose log-probabilities are still to be computed."""
        if self.prompt_scores is None:
            return 0
        return len(self.prompt_ids) - 1 - len(self.prompt_scores)

    @property
    def reads_prefixes(self) -> bool:
        """Whether KV from the prefix cache may take the place of computing the prompt."""
        skip = self.params.skip_reading_prefix_cache
        needed = self.num_unscored or self.pooled is not None
        return not (needed if skip is None else skip)

    def end_unwritten(self) -> None:
        """End an output that was to have no tokens; its prompt is computed."""
        assert not self.remaining
        assert not self._written.tokens
        self._finish("length", None)

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
        try:
            for parent, token, origin in zip(parents, tokens, origins, strict=True):
                streamed.append(self._append(token, origin, self._logprobs(p, parent, token)))
                if self.finished:
                    break
        finally:  # after an error, without the token that has no text
            step.committed = len(streamed)
            self._traced += len(draft.tree)
            self.metrics.count(step)
            self._written.trace.steps.append(step)
            self._publish(streamed)
        return streamed

    def _logprobs(self, p: TreeDistributions, node: int, token: int) -> TokenLogprobs | None:
        """Log-probabilities of a token that follows a node, if the user wants them."""
        top = self.params.logprobs
        return None if top is None else token_logprobs(p.log_probs(node), token, top, self.piece)

    def piece(self, token: int) -> str | None:
        """A token's own text; None if the output is no text."""
        return self._written.piece(token)

    def _publish(self, tokens: Sequence[StreamedToken]) -> None:
        self._fresh.extend(tokens)
        if self.on_news is not None:
            self.on_news()

    def follow(self, draft: BeamDraft, searched: Searched) -> None:
        """Go on with a beam search, and append the tokens that it commits.

        Args:
            draft: the verified draft.
            searched: what the pass brought.
        """
        self.beams = searched.beams
        if searched.beams.done:
            self._beam_outputs = tuple(map(self._beam_output, searched.beams.finished))
        self._publish([self._append(token, Origin.PLAIN) for token in searched.tokens])
        assert self.finished == searched.beams.done, "a search ends where its best output ends"
        metrics = self.metrics
        metrics.generated_tokens = len(self._written)
        metrics.target_passes += 1
        if draft.num_proposed:
            metrics.num_drafts += 1
            metrics.num_draft_tokens += draft.num_proposed
            metrics.num_accepted_tokens += searched.steps - 1

    def _beam_output(self, found: Hypothesis) -> BeamOutput:
        tokens = (*self.output_ids, *found.tokens)
        return BeamOutput(tokens, self._written.decoded(tokens), found.score, found.log_prob)

    def take(self) -> tuple[StreamedToken, ...]:
        """Tokens committed since the last call, whichever thread ran the steps."""
        fresh = []
        while self._fresh:
            fresh.append(self._fresh.popleft())
        return tuple(fresh)

    def close(self) -> None:
        """Mark that the request does not change any more."""
        self.closed = True
        tell, self.on_news = self.on_news, None  # nothing keeps the request in memory from here on
        if tell is not None:
            tell()

    def _append(
        self, token: int, origin: Origin, logprobs: TokenLogprobs | None = None
    ) -> StreamedToken:
        length = len(self._written) + 1
        may_stop = length >= self.params.min_tokens
        text = self._written.text_of(token, may_stop=may_stop)
        if may_stop:
            self._check_stop(token)
        if not self.finished and length >= self._max_tokens:
            self._end_at_limit()
        if self.finished:
            text += self._written.rest()
        streamed = StreamedToken(token, text, origin, logprobs)
        self.token_ids.append(token)
        self._written.add(streamed)
        return streamed

    def _end_at_limit(self) -> None:
        if not self._too_long:
            self._finish("length", None)
            return
        most = len(self.token_ids) + 1
        self.fail(
            RequestError(
                f"kv_cache_memory has room for {most} tokens, prompt included, and the output is "
                f"longer: raise kv_cache_memory, or set max_model_len to {most} or less, or "
                "max_tokens.",
                by_parameters=True,
            )
        )

    def _check_stop(self, token: int) -> None:
        if token in self._eos:
            self._finish("stop", None)
        elif token in self.params.stop_token_ids:
            self._finish("stop", token)
        elif self._written.stopped_at is not None:
            self._finish("stop", self._written.stopped_at)

    def record_times(self, draft: float, verify: float, accept: float) -> None:
        """Add a step's times (seconds, of the whole batch) to the metrics and the trace."""
        self.metrics.draft_seconds += draft
        self.metrics.verify_seconds += verify
        self.metrics.accept_seconds += accept
        if self.beams is None:
            last = self.last_step
            last.draft_seconds, last.verify_seconds = draft, verify
            last.accept_seconds = max(0.0, accept - last.recording_seconds)

    @property
    def last_step(self) -> StepTrace:
        """The step that committed the last tokens."""
        return self._written.trace.steps[-1]

    def _finish(self, reason: str, stop_reason: int | str | None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason
        if self.admitted_at:  # else it ended while it waited
            self.metrics.seconds = clock.now() - self.admitted_at

    def abort(self) -> None:
        """End the output at its present length."""
        if not self.finished:
            self._written.break_off()
            self._finish("abort", None)

    def fail(self, error: Exception) -> None:
        """End the output at its present length, because of an error in this request alone."""
        self.failure = error
        self._finish("error", None)

    @property
    def failed(self) -> bool:
        """Whether it or its drafter failed: what a draft model computed for it may be NaN."""
        return self.failure is not None or self.metrics.drafter_failure is not None

    def fail_with(self, other: Request) -> None:
        """Take over the failures of the request that this one was made for."""
        self.failure = other.failure
        self.metrics.drafter_failure = other.metrics.drafter_failure

    @property
    def error(self) -> str | None:
        """The error in one line; None if there is none."""
        return None if self.failure is None else told(self.failure)

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Log-probabilities of the prompt, if they were asked for and are complete."""
        if self.prompt_scores is None or self.num_unscored:
            return None
        return [None, *self.prompt_scores]

    def output(self) -> CompletionOutput:
        """The output with the tokens generated so far."""
        written, metrics = self._written, self.metrics
        if self.finished:
            written.name_tokens()
            if self.pass_costs:
                written.trace.pass_seconds = {n: self.pass_costs(n) for n in PASS_SIZES}
        written.trace.encode_seconds = metrics.encode_seconds
        written.trace.prefill_seconds = metrics.prefill_seconds
        tokens, wanted = tuple(written.tokens), self.params.logprobs is not None
        return CompletionOutput(
            index=self.index,
            text=written.text,
            token_ids=tuple(token.token_id for token in tokens),
            origins=tuple(token.origin for token in tokens),
            token_texts=tuple(token.text for token in tokens),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
            logprobs=[t.logprobs for t in tokens if t.logprobs] if wanted else None,
            metrics=metrics,
            trace=written.trace,
            beams=self._beam_outputs,
        )


# `Written`: what a request has generated so far, as text and as what users get back.


class Written:
    """The generated tokens of one output, with their texts, origins and log-probabilities.

    Args:
        params: its sampling parameters.
        tokenizer: makes text and finds stop strings; with None the text stays empty.
        eos: tokens that end it; like `stop_token_ids`, they are no text of it.
        behind: the last tokens of the text before it (see `Detokenizer`).

    Attributes:
        tokens: the tokens so far.
        trace: what every step did.
    """

    def __init__(
        self,
        params: SamplingParams,
        tokenizer: PreTrainedTokenizerBase | None,
        pieces: Pieces,
        eos: Collection[int] = (),
        behind: Sequence[int] = (),
    ) -> None:
        self._behind = behind
        shown = params.include_stop_str_in_output
        self._hidden = frozenset(() if shown else (*eos, *params.stop_token_ids))
        self.tokens: list[StreamedToken] = []
        self.trace = Trace()
        self._params, self._pieces = params, pieces
        self._tokenizer = tokenizer if params.detokenize else None
        self._detokenizer = Detokenizer(
            self._tokenizer,
            params.stop_strings,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            behind=behind,
        )

    def __len__(self) -> int:
        return len(self.tokens)

    # Text

    @property
    def text(self) -> str:
        """The text so far, including the part that is held back."""
        return self._detokenizer.text

    @property
    def stopped_at(self) -> str | None:
        """The stop string that was met, or None."""
        return self._detokenizer.stopped_at

    def text_of(self, token: int, *, may_stop: bool) -> str:
        """The text that becomes final with the next token.

        Args:
            token: the token; `add` is called with it.
            may_stop: whether it may end the output.
        """
        if may_stop and token in self._hidden:
            return ""
        return self._detokenizer.add(token, may_stop=may_stop)

    def rest(self) -> str:
        """The text that was held back, of an output that has ended."""
        return self._detokenizer.finish()

    def add(self, token: StreamedToken) -> None:
        """Append a token."""
        self.tokens.append(token)

    def break_off(self) -> None:
        """Add the text that was held back to the last token."""
        rest = self.rest()
        if self.tokens:
            last = self.tokens[-1]
            self.tokens[-1] = replace(last, text=last.text + rest)

    def decoded(self, tokens: Sequence[int]) -> str:
        """The text of a whole output; empty without a tokenizer."""
        if self._tokenizer is None:
            return ""
        shown = tokens[:-1] if tokens and tokens[-1] in self._hidden else tokens
        skip = self._params.skip_special_tokens
        detokenizer = Detokenizer(self._tokenizer, skip_special_tokens=skip, behind=self._behind)
        return "".join(map(detokenizer.add, shown)) + detokenizer.finish()

    def piece(self, token: int) -> str | None:
        """A token's own text; None without a tokenizer."""
        return None if self._tokenizer is None else self._pieces.of(token)

    def name_tokens(self) -> None:
        """Give the trace the texts of its tokens."""
        if self._tokenizer is not None:
            self.trace.pieces = {token: self.piece(token) or "" for token in self.trace.tokens()}
