"""`Job`: a prompt in the engine, from what a user asks for (`JobSpec`) to its chunks of output.

`JobMaker` makes jobs of specs. An `Outbox` knows which jobs of a caller have unread output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, count
from random import Random
from threading import Lock
from typing import Any, NamedTuple, TypedDict

from torch import Tensor

from tokenleap.config import SpeculativeConfig
from tokenleap.core.detokenizer import Pieces
from tokenleap.core.distribution import PromptLogprobs
from tokenleap.core.grammar import Grammar, Grammars
from tokenleap.core.noise import fresh_seed
from tokenleap.core.params import MAX_SEED, Sampling, SamplingParams
from tokenleap.core.references import References
from tokenleap.core.rules import DecodingRules
from tokenleap.core.sampler import BadWords, check_token_ids
from tokenleap.core.sequence import SHARED, Scope
from tokenleap.drafters.heads.shipped import with_shipped
from tokenleap.engine.prompts import (
    GivenPrediction,
    GivenReferences,
    Opening,
    Prompt,
    ReferenceReader,
    SourceReader,
    as_list,
    cache_salt,
    check_prompt,
    check_quotes,
    check_room,
    checked_text,
    one_per_prompt,
    per_prompt,
    predictions_per_prompt,
    read_prompt,
    tokens_of,
)
from tokenleap.engine.strategies import Speculative, StrategyFactory
from tokenleap.engine.worker import Command, Worker
from tokenleap.errors import CompatibilityError, ConfigError
from tokenleap.models.loaded import LoadedModel
from tokenleap.models.pooling import Pooler, Pooling
from tokenleap.outputs import RequestOutput, StreamChunk
from tokenleap.request import Request
from tokenleap.runtime.target import Target
from tokenleap.speculation import Strategy


@dataclass
class Job:
    """A prompt and its requests, one per output.

    Args:
        request_id: the id of a prompt that came through `LLMEngine.add_request`, else None.
        queued: the command that queues the requests; None before it is sent.
    """

    opening: Opening
    requests: list[Request]
    strategy: Strategy | None
    request_id: str | None = None
    prompt_index: int = 0
    queued: Command[None] | None = None
    _told_prompt: bool = False
    _reported: set[int] = field(default_factory=set)  # indices of outputs taken to the end

    @property
    def finished(self) -> bool:
        """Whether all outputs have ended and will not change any more."""
        return all(request.closed for request in self.requests)

    @property
    def failed(self) -> Request | None:
        """The first output that ended with an error."""
        return next((r for r in self.requests if r.failure is not None), None)

    @property
    def embedding(self) -> Tensor:
        """The prompt's embedding, if it was asked for; see `LLMEngine.embed`."""
        pooled = self.requests[0].pooled
        assert pooled is not None
        return pooled.vector()

    def withdraw(self) -> bool:
        """Take the job back if it is not queued yet; returns whether that was so."""
        return self.queued is not None and self.queued.withdraw()

    @property
    def all_taken(self) -> bool:
        """Whether the last chunk of every output was taken."""
        return not self._unreported()

    def take(self) -> list[StreamChunk]:
        """The new tokens of each output since the last call.

        Another thread may run a step at the same time.
        """
        chunks = []
        for request in self._unreported():
            # Read first: if it is True, no tokens follow those that are taken now.
            closed = request.closed
            tokens = request.take()
            if not tokens and not closed:
                continue
            output = request.output() if closed else None
            chunks.append(
                StreamChunk(
                    tokens,
                    output,
                    self.request_id,
                    request.index,
                    self.prompt_index,
                    self._prompt_logprobs(request),
                )
            )
            if closed:
                self._reported.add(request.index)
        return chunks

    def _prompt_logprobs(self, request: Request) -> PromptLogprobs | None:
        """Those of the prompt, for the first chunk of the request that has them."""
        if request.prompt_scores is None or self._told_prompt:
            return None
        self._told_prompt = True
        return request.prompt_logprobs

    def result(self) -> RequestOutput:
        """All outputs with the tokens generated so far."""
        request, source = self.requests[0], self.opening.source
        return RequestOutput(
            self.opening.text,
            request.prompt_ids,
            [request.output() for request in self.requests],
            self.request_id,
            encoder_prompt=self.opening.source_text,
            encoder_prompt_token_ids=None if source is None else source.tokens,
            prompt_logprobs=request.prompt_logprobs,
        )

    def _unreported(self) -> list[Request]:
        return [r for r in self.requests if r.index not in self._reported]


class Outbox:
    """Some jobs: which have unread output, and how many requests are still open.

    Any thread may run the steps; one thread takes. Jobs that wait cost nothing.
    """

    def __init__(self, jobs: Sequence[Job] = ()) -> None:
        self.open = 0
        self._marked: deque[tuple[int, Job]] = deque()  # appending and taking are atomic
        self._numbers = count()
        self.watch(jobs)

    def watch(self, jobs: Sequence[Job]) -> None:
        """Report these jobs from now on; call it before they are queued."""
        for job in jobs:
            number = next(self._numbers)
            for request in job.requests:
                self.open += 1
                request.on_news = partial(self._mark, number, job, request)

    def __bool__(self) -> bool:
        """Whether there is unread output."""
        return bool(self._marked)

    def take(self) -> list[Job]:
        """The jobs that have changed since the last call, in the order in which they came."""
        found: dict[int, Job] = {}
        while self._marked:
            number, job = self._marked.popleft()
            found[number] = job
        return [found[number] for number in sorted(found)]

    def _mark(self, number: int, job: Job, request: Request) -> None:
        self.open -= request.closed
        self._marked.append((number, job))


MAX_KNOWN_IDS = 100_000
"""Most request ids that are remembered, including those of requests that have ended."""


class AddedJobs:
    """Jobs that a user has added one by one, and whose chunks `LLMEngine.step` returns.

    `add` and `collect` are called in a turn of the engine, the others by any thread.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self._outbox = Outbox()
        self._collecting = Lock()
        self._collected: list[StreamChunk] = []  # none of a job that was aborted
        self._known_ids: dict[str, None] = {}  # the latest ids, in order of arrival
        self._next_id = count()

    def __bool__(self) -> bool:
        """Whether any of them has output left to report."""
        return bool(self.jobs or self._collected)

    def add(self, job: Job, request_id: str | None) -> str:
        """Give a job its id and report it from now on."""
        if request_id is not None and request_id in self._known_ids:
            raise ConfigError(f"request_id: '{request_id}' is taken by another request.")
        job.request_id = name = self._free_id() if request_id is None else request_id
        self._remember(name)
        self.jobs[name] = job
        self._outbox.watch([job])
        return name

    def collect(self) -> None:
        """Make a chunk for each output that has new tokens or has ended since the last call."""
        failed: Exception | None = None
        for job in self._outbox.take():
            request_id = job.request_id or ""
            if self.jobs.get(request_id) is not job:  # it was aborted
                continue
            try:
                chunks = job.take()
                with self._collecting:
                    self._collected += chunks if request_id in self.jobs else ()
                ended = job.all_taken
            except Exception as error:
                failed, ended = failed or error, True
            if ended:
                self.jobs.pop(request_id, None)
        if failed is not None:
            raise failed

    def take(self) -> list[StreamChunk]:
        """The chunks that were collected since the last call."""
        with self._collecting:
            taken, self._collected = self._collected, []
        return taken

    def forget(self, request_id: str) -> Job | None:
        """Report no more of a job, which the caller ends; None if it has ended."""
        if request_id not in self._known_ids:
            raise ConfigError(f"request_id: no request has the id {request_id!r}.")
        with self._collecting:
            self._collected = [each for each in self._collected if each.request_id != request_id]
            return self.jobs.pop(request_id, None)

    def _remember(self, request_id: str) -> None:
        """Record an id as taken. If there are too many, forget the oldest that is not in use."""
        self._known_ids[request_id] = None
        if len(self._known_ids) > MAX_KNOWN_IDS:
            oldest = next((known for known in self._known_ids if known not in self.jobs), None)
            if oldest is not None:
                del self._known_ids[oldest]

    def _free_id(self) -> str:
        return next(name for name in map(str, self._next_id) if name not in self._known_ids)


# `JobSpec`: what a user asks for one prompt. A new option of requests is a field of it.


@dataclass(frozen=True)
class JobSpec:
    """One prompt with all that belongs to it, as the user gave it; nothing is checked yet.

    Args:
        references: what drafts may quote; texts that were read already are taken as they are.
        scope: what its requests share with others; a prompt's `cache_salt` replaces the salt.
        pools: whether its embedding is wanted, and no output; see `embeds`.
    """

    prompt: Prompt
    params: Sampling = None
    speculative_config: Speculative = None
    references: GivenReferences | References = None
    prediction: GivenPrediction | References = None
    trace: bool = False
    scope: Scope = SHARED
    pools: bool = False

    @staticmethod
    def embeds(prompt: Prompt) -> JobSpec:
        """One whose request has a prompt's embedding (`Job.embedding`)."""
        nothing = SamplingParams(temperature=0, max_tokens=0, seed=0)
        return JobSpec(prompt, nothing, {"method": "none"}, pools=True)


class RequestOptions(TypedDict, total=False):
    """How one prompt is generated for; see `LLM.generate`."""

    speculative_config: Speculative
    references: GivenReferences
    prediction: GivenPrediction
    trace: bool


class CallOptions(TypedDict, total=False):
    """The same, one for all prompts of a call or one per prompt."""

    speculative_config: Speculative | Sequence[Speculative]
    references: GivenReferences | Sequence[GivenReferences]
    prediction: GivenPrediction | Sequence[GivenPrediction]
    trace: bool


def specs_of(
    prompts: Any,
    params: Any = None,
    *,
    speculative_config: Any = None,
    references: Any = None,
    prediction: Any = None,
    trace: bool = False,
) -> list[JobSpec]:
    """The prompts of one call of `LLM.generate`; arguments as there."""
    listed = as_list(prompts)
    columns = (
        listed,
        one_per_prompt("sampling_params", listed, params),
        one_per_prompt("speculative_config", listed, speculative_config),
        per_prompt(len(listed), references),
        predictions_per_prompt(len(listed), prediction),
    )
    return [JobSpec(*each, trace=trace) for each in zip(*columns, strict=True)]


class _Read(NamedTuple):
    """A `JobSpec` whose parameters are checked and whose texts are tokens."""

    given: JobSpec
    params: SamplingParams
    config: SpeculativeConfig | None
    bad_words: BadWords | None
    references: References
    prediction: References

    @property
    def searches_beams(self) -> bool:
        return self.params.beam_width > 1

    @property
    def needs_strategy(self) -> bool:
        """Whether its requests may speculate in another way than by default."""
        return self.config is not None or self.searches_beams or bool(self.prediction)


class JobMaker:
    """Makes the jobs and requests of one engine.

    Args:
        chose_drafter: whether the default was chosen by the user, so that it is for beams, too.
        seed: of the seeds of requests that have none; None draws them.
    """

    def __init__(
        self,
        target: Target,
        loaded: LoadedModel,
        grammars: Grammars,
        strategies: StrategyFactory,
        worker: Worker,
        *,
        chose_drafter: bool,
        seed: int | None = None,
    ) -> None:
        self.tokenizer = loaded.tokenizer
        self.sampling_defaults, self._name = loaded.sampling_defaults, loaded.name
        self.pieces = Pieces(loaded.tokenizer)
        self.references = ReferenceReader(target, loaded.tokenizer)
        self._target, self._grammars = target, grammars
        self._strategies, self._worker = strategies, worker
        self._chose_drafter = chose_drafter
        self._beam_defaults = loaded.beam_defaults
        self._eos_token_ids = eos = loaded.eos_token_ids
        self._reader = SourceReader.of(target, loaded, worker.call_inside)
        self._rules = DecodingRules.of(loaded.obeyed_settings, eos, target.vocab_size)
        seeds = fresh_seed if seed is None else partial(Random(seed).randrange, MAX_SEED + 1)
        self._new_seed = partial(target.peers.from_first, seeds)
        self._folder = loaded.path

    def jobs(self, specs: Sequence[JobSpec]) -> list[Job]:
        """The jobs of some prompts; errors are those of `LLM.generate`.

        Tokens and grammars, which may take long, are made while the engine goes on. However many
        prompts there are, they wait once at most for the end of a step.
        """
        read = self._read(specs)
        # First: what rows keep of a source, and so whether a request fits, depends on drafters.
        pairs = zip(read, self._strategies_of(read), strict=True)
        return [self._job(each, strategy, index) for index, (each, strategy) in enumerate(pairs)]

    def requests(self, spec: JobSpec) -> list[Request]:
        """The requests of a prompt alone, one per output."""
        (read,) = self._read([spec])
        return self._requests(read, self.read(spec.prompt))

    def _read(self, specs: Sequence[JobSpec]) -> list[_Read]:
        """Check parameters and read texts; what several prompts share is read once."""
        references = self.references.read_all([spec.references for spec in specs])
        predictions = self.references.predictions([spec.prediction for spec in specs])
        given = {id(spec.params): spec.params for spec in specs}
        parsed = {
            key: SamplingParams.parse(params, self.sampling_defaults)
            for key, params in given.items()
        }
        banned = {key: self._bad_words(params) for key, params in parsed.items()}
        found = [
            _Read(
                spec,
                parsed[id(spec.params)],
                self._config(spec.speculative_config),
                banned[id(spec.params)],
                *texts,
            )
            for spec, *texts in zip(specs, references, predictions, strict=True)
        ]
        if any(read.searches_beams and read.prediction for read in found):
            raise CompatibilityError(
                "prediction: a beam search follows none: give the text as `references`."
            )
        return found

    # How requests speculate

    def _config(self, given: Speculative) -> SpeculativeConfig | None:
        """A configuration; a method of heads without one takes the `LLM`'s, or the model's own."""
        own = self._strategies.config
        if isinstance(given, Mapping):
            if own.takes_head and given == {"method": own.method_name}:
                return own
            given = with_shipped(given, self._name, trees=self._target.exact_trees)
        return None if given is None else SpeculativeConfig.parse(given)

    def _strategies_of(self, specs: Sequence[_Read]) -> list[Strategy | None]:
        """How the requests of each prompt speculate; None is the default.

        Building may load a model or time passes, so no thread may run a step meanwhile.
        """
        if not any(spec.needs_strategy for spec in specs):
            return [None] * len(specs)
        configs: list[SpeculativeConfig] = []
        for spec in specs:
            if spec.config is not None and spec.config not in configs:
                configs.append(spec.config)
        # Outside the command: it waits for other engines.
        lent = [pair for config in configs for pair in self._strategies.lent_to(config)]

        def build() -> list[Strategy | None]:
            named = [self._strategies.strategy(config, lent) for config in configs]
            own = (
                None if spec.config is None else named[configs.index(spec.config)] for spec in specs
            )
            return [self._strategy(*each) for each in zip(specs, own, strict=True)]

        return self._worker.call(build)

    def _strategy(self, spec: _Read, strategy: Strategy | None) -> Strategy | None:
        """A strategy that also follows the prediction, or searches beams."""
        if spec.prediction:
            own = strategy or self._strategies.default
            strategy = self._strategies.for_prediction(spec.config, own)
        if not spec.searches_beams:
            return strategy
        if strategy is None and self._chose_drafter:
            strategy = self._strategies.default
        return self._strategies.for_beams(strategy)

    def _job(self, spec: _Read, strategy: Strategy | None, index: int) -> Job:
        rule = (strategy or self._strategies.default).rule
        if rule.by_chance and spec.params.structured_outputs is not None:
            raise ConfigError(f"structured_outputs: acceptance '{rule.name}' keeps to no form.")
        opening = self.read(spec.given.prompt)
        requests = self._requests(spec, opening)
        if spec.given.trace:
            for request in requests:
                request.pass_costs = self._strategies.costs
        if spec.references:
            own = self._strategies.config
            default = own if self._chose_drafter or not spec.searches_beams else None
            method = SpeculativeConfig.parse(spec.config or default).method_name
            check_quotes(method, (strategy or self._strategies.default).drafter)
        return Job(opening, requests, strategy, prompt_index=index)

    # Requests

    def _requests(self, spec: _Read, opening: Opening) -> list[Request]:
        params, trace = spec.params, spec.given.trace
        if params.stop_strings and self.tokenizer is None:
            raise ConfigError("stop: stop strings need a tokenizer, and this model has none.")
        if spec.searches_beams:
            params = self._for_beams(params, trace=trace)
        source, ids = opening.source, opening.ids
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
        pooler = self.pooler if spec.given.pools else None
        if pooler is not None:
            pooler.pooling.check_length(len(ids))
        check_prompt(ids, self._target, most)
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
                pieces=self.pieces,
                index=index,
                trace_all=trace,
                grammar=self._grammar(params),
                source=source,
                rules=rules,
                references=spec.references,
                prediction=spec.prediction,
                bad_words=spec.bad_words,
                scope=scope,
                pooled=None if pooler is None else pooler.begin(),
                new_seed=self._new_seed,
            )
            for index in range(params.n)
        ]

    @cached_property
    def pooler(self) -> Pooler:
        """Makes embeddings; its files are read at the first use.

        Raises:
            CompatibilityError: the model makes none.
        """
        if self._target.reads_source:
            raise CompatibilityError(
                "an encoder-decoder makes no embeddings: choose another model."
            )
        pooling, norm = Pooling.of(self._folder), self._target.final_norm
        if norm is None:
            raise CompatibilityError("this model makes no embeddings: its final norm is not known.")
        return Pooler(pooling, norm, self._target.hidden_size)

    def read(self, prompt: Prompt) -> Opening:
        """The source, if the model reads one, and the prompt that it continues."""
        if self._reader is None:
            return read_prompt(prompt, self.tokenizer)
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
    """The last tokens of a prompt, as many as `params.truncate_prompt_tokens` keeps."""
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
