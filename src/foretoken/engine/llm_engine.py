"""`LLMEngine`: continuous batching with explicit steps, under the names of vLLM's `LLMEngine`.

    engine = LLM("smollm2-135m").engine
    engine.add_request("Hello", SamplingParams(temperature=0))
    while engine.has_unfinished_requests():
        for chunk in engine.step():
            print(chunk.request_id, chunk.text, chunk.finished)

Requests may come and go while others run. The engine owns the model, the strategies and the
scheduler; `LLM` is a thin layer over it. Any number of threads may use one engine. They take turns,
and a step advances the requests of all threads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from threading import Lock

from foretoken.config import SpeculativeConfig
from foretoken.core.grammar import Grammars
from foretoken.core.log import show_log_lines
from foretoken.core.params import Sampling, SamplingParams
from foretoken.core.references import NO_REFERENCES, References
from foretoken.core.rules import DecodingRules
from foretoken.core.source import Source
from foretoken.drafters.heads.shipped import shipped_config
from foretoken.drafters.online import OnlineReport
from foretoken.engine.jobs import Job
from foretoken.engine.kv_budget import KVBudget
from foretoken.engine.prefix_cache import PrefixCache
from foretoken.engine.prompts import Prompt
from foretoken.engine.references import GivenReferences, ReferenceReader, check_quotes
from foretoken.engine.request_maker import RequestMaker
from foretoken.engine.scheduler import Scheduler
from foretoken.engine.sources import SourceReader
from foretoken.engine.strategies import Speculative, StrategyFactory
from foretoken.engine.turns import Turns, Uninterrupted
from foretoken.errors import ConfigError, RequestError
from foretoken.models.audio import AudioReader
from foretoken.models.decoder_start import decoder_start
from foretoken.models.loaded import LoadedModel
from foretoken.outputs import RequestOutput, StreamChunk
from foretoken.request import Request
from foretoken.runtime.target import Target
from foretoken.speculation import Speculation, Strategy

__all__ = ["EngineOptions", "LLMEngine"]

_log = logging.getLogger(__name__)


MAX_KNOWN_IDS = 100_000
"""Most request ids that are remembered, including those of requests that have ended."""


@dataclass(frozen=True)
class EngineOptions:
    """Limits on memory and batches, and how passes are computed; see the arguments of `LLM`."""

    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_bytes: int | None
    prefix_cache_bytes: int | None  # None caches no prefixes
    quantization: str | None
    runtime: str


class LLMEngine:
    """Continuous batching with explicit steps. `LLM` creates it as `LLM.engine`.

    Args:
        loaded: the model and its tokenizer.
        config: the default way to speculate; None takes the head that comes with the package.
        options: see `EngineOptions`.

    Attributes:
        options: as given.
        target: the model being accelerated.
        strategies: builds drafters, controllers and rules for the target.
        references: reads what drafts may quote besides the prompt.

    Raises:
        ConfigError: a parameter is out of range.
        CompatibilityError: model, drafter and rule do not fit together.
    """

    def __init__(
        self, loaded: LoadedModel, config: SpeculativeConfig | None, options: EngineOptions
    ) -> None:
        show_log_lines()
        self.tokenizer, self.options, title = loaded.tokenizer, options, loaded.title
        self._kv_budget = KVBudget(options.kv_cache_bytes)
        self.target = Target(
            loaded.module,
            options.max_model_len,
            options.quantization,
            options.runtime,
            loaded.reload,
        )
        self._kv_budget.add(self.target)
        self._chose_drafter = config is not None
        if config is None:
            config = _default_config(loaded.name, self.target)
        grammars = Grammars(self.tokenizer, self.target.vocab_size, loaded.eos_token_ids)
        self._maker = _request_maker(self.target, loaded, grammars)
        self.references = ReferenceReader(self.target, self.tokenizer)
        if config.drafter_spec.takes_model:  # heads may read the module's embedding
            loaded.forget_module()
        self.strategies = StrategyFactory(
            self.target,
            self.tokenizer,
            grammars,
            config,
            self._kv_budget,
            quantization=options.quantization,
            runtime=options.runtime,
            max_num_seqs=options.max_num_seqs,
        )
        default = self.strategies.build(config)
        loaded.forget_module()
        prefixes = options.prefix_cache_bytes
        self._speculation = Speculation(default)
        self._scheduler = Scheduler(
            self.target,
            self._speculation,
            options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            prefix_cache=None if prefixes is None else PrefixCache(self.target, prefixes),
        )
        _log.info(
            "%s runs on %s in %s, with the runtime %s, method %s and controller %s",
            title,
            self.target.device,
            self.target.dtype,
            self.target.network.name,
            config.method_name,
            default.controller.name,
        )
        self.controller = default.controller.name
        self._turns = Turns()
        self._reporting = Lock()
        self._jobs: dict[str, Job] = {}  # of `add_request`, with output left to report
        self._collected: list[StreamChunk] = []  # from these jobs, returned by the next `step`
        self._known_ids: dict[str, None] = {}  # the latest ids, in order of arrival
        self._next_id = count()

    @property
    def kv_bytes(self) -> tuple[int, int]:
        """Bytes of the KV and of what is kept of sources, of the target and of all draft models."""
        own, *others = self._kv_budget.held_bytes
        return own, sum(others)

    # Requests added by the user

    def add_request(
        self,
        prompt: Prompt,
        params: Sampling = None,
        speculative_config: Speculative = None,
        *,
        references: GivenReferences = None,
        trace: bool = False,
        request_id: str | None = None,
    ) -> str:
        """Queue a prompt. It joins the running requests in one of the next steps.

        Args:
            prompt: text, token ids or a conversation.
            params: sampling parameters; None takes the defaults.
            speculative_config: how this request speculates; None takes the `LLM`'s configuration.
                If it has no `acceptance`, the `LLM`'s rule is used.
            references: texts that drafts may quote, or lists of token ids; see `LLM.generate`.
            trace: see `LLM.generate`.
            request_id: an id that no other request has; None generates one.

        Returns:
            The request's id. `abort` takes it, and `StreamChunk.request_id` has it.

        Raises:
            PromptError: the prompt is empty, too long, or has ids outside the vocabulary.
            ConfigError: parameters or configuration are out of range, or the id is taken.
            CompatibilityError: the drafter does not fit the model or the rule, or quotes no
                references.
        """
        texts = self.references.read(references)
        job = self.job(prompt, params, speculative_config, texts, trace=trace)
        names: list[str] = []

        def add() -> None:
            if request_id is not None and request_id in self._known_ids:
                raise ConfigError(f"request_id: '{request_id}' is taken by another request.")
            names.append(self._free_id() if request_id is None else request_id)
            job.request_id = names[0]
            self._remember(names[0])
            self._jobs[names[0]] = job
            self._queue([job])

        self._turns.take(add)
        return names[0]

    def step(self) -> list[StreamChunk]:
        """Advance all requests by one step.

        If the step fails for one request, that request ends with `finish_reason` "error", and the
        others go on.

        Returns:
            A chunk for each output that has new tokens or has ended since the last call.
        """
        self._turns.take(self._step)
        with Uninterrupted(), self._reporting:  # a SIGINT must not lose chunks
            for request_id, job in list(self._jobs.items()):
                self._collected += job.take()
                if job.all_taken:
                    self._jobs.pop(request_id, None)
        with self._reporting:
            chunks, self._collected = self._collected, []
        return chunks

    def has_unfinished_requests(self) -> bool:
        """Whether another `step` has requests to advance or chunks to return."""
        return bool(self._jobs or self._collected)

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """End these requests, whether they wait or run.

        Their memory is freed, and `step` returns no more chunks of them. Requests that have already
        ended are not changed.

        Raises:
            ConfigError: no request has this id, and none had it recently.
        """
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            if request_id not in self._known_ids:
                raise ConfigError(f"request_id: no request has the id {request_id!r}.")
            with Uninterrupted():  # a job that was taken out here must also end
                with self._reporting:
                    job = self._jobs.pop(request_id, None)
                if job is not None:
                    self.end([job])

    def reset_drafter_memory(self) -> None:
        """See `LLM.reset_drafter_memory`."""
        for strategy in (self._speculation.default, *self.strategies.kept()):
            self._turns.take(strategy.forget)

    @property
    def online_report(self) -> OnlineReport | None:
        """See `LLM.online_report`."""
        learner = self._speculation.default.learner
        return None if learner is None else learner.report

    # Jobs, for `LLM`

    def job(
        self,
        prompt: Prompt,
        params: Sampling = None,
        speculative_config: Speculative = None,
        references: References = NO_REFERENCES,
        *,
        trace: bool = False,
    ) -> Job:
        """Check a prompt and make its requests; arguments and errors as in `add_request`."""
        params = SamplingParams.parse(params)
        requests = self.make_requests(prompt, params, references, trace=trace)
        job = Job(prompt, requests, None)
        beams = params.beam_width > 1

        def build() -> None:
            job.strategy = self.strategies.strategy(speculative_config)
            if beams:
                job.strategy = self._beam_strategy(job.strategy)

        if speculative_config is not None or beams:
            # Building may load a model or time passes, so no thread may run a step meanwhile.
            self._turns.take(build)
        if references:
            strategy = job.strategy or self._speculation.default
            default = self.strategies.config if self._chose_drafter or not beams else None
            named = SpeculativeConfig.parse(speculative_config or default)
            check_quotes(named.method_name, strategy.drafter)
        return job

    def _beam_strategy(self, given: Strategy | None) -> Strategy:
        """How a beam search speculates: with the drafter that the user chose, if there is one."""
        if given is None and self._chose_drafter:
            given = self._speculation.default
        return self.strategies.for_beams(given)

    def make_requests(
        self,
        prompt: Prompt,
        params: SamplingParams,
        references: References = NO_REFERENCES,
        *,
        trace: bool = False,
    ) -> list[Request]:
        """Check a prompt and make one request per output, without queueing them."""
        return self._maker.make(prompt, self.tokenizer, params, trace=trace, references=references)

    def read(self, prompt: Prompt) -> tuple[Source | None, Sequence[int]]:
        """See `RequestMaker.read`."""
        return self._maker.read(prompt, self.tokenizer)

    def encode(self, prompt: Prompt) -> list[int]:
        """See `LLM.encode`."""
        return list(self._maker.encode(prompt, self.tokenizer))

    def start(self, jobs: Sequence[Job]) -> None:
        """Queue the jobs' requests."""
        self._turns.take(lambda: self._queue(jobs))

    def end(self, jobs: Sequence[Job]) -> None:
        """Abort those of these jobs that have not ended."""
        if all(job.finished for job in jobs):
            return
        with Uninterrupted():  # even while it waits for its turn
            self._turns.take(lambda: self._scheduler.abort(r for job in jobs for r in job.requests))

    def run(self, jobs: Sequence[Job]) -> list[RequestOutput]:
        """Queue the jobs, step until they have ended, and collect their results.

        Raises:
            RequestError: a request ended with an error; `outputs` has the results of all jobs.
        """
        new = list(jobs)

        def advance() -> None:
            self._queue(new)
            new.clear()
            self._step()

        # A SIGINT is delivered only between two steps, where `end` is sure to run.
        with Uninterrupted() as uninterrupted:
            try:
                while not all(job.finished for job in jobs):
                    uninterrupted.deliver()
                    self._turns.take(
                        advance,
                        unless=lambda: uninterrupted.pending or all(job.finished for job in jobs),
                    )
            finally:
                if not new:
                    self.end(jobs)
        results = [job.result() for job in jobs]
        for job in jobs:
            for request in job.requests:
                if request.failure is not None:
                    raise RequestError(str(request.error), results) from request.failure
        return results

    def stream(self, job: Job) -> Generator[StreamChunk, None, None]:
        """Queue a job and yield its chunks; closing the generator aborts it.

        Raises:
            RequestError: a request of the job ended with an error.
        """
        try:
            self.start([job])
            while not job.all_taken:
                # Steps of other threads and streams advance it, too.
                yield from job.take()
                if not job.has_news:
                    self._turns.take(self._step, unless=lambda: job.has_news)
        finally:
            self.end([job])
        for request in job.requests:
            if request.failure is not None:
                raise RequestError(str(request.error), [job.result()]) from request.failure

    # Inside

    def _queue(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            for request in job.requests:
                self._scheduler.add(request, job.strategy)

    def _step(self) -> None:
        if self._scheduler.busy:
            began = time.perf_counter()
            self._scheduler.step()
            self._speculation.learn(time.perf_counter() - began)

    def _remember(self, request_id: str) -> None:
        """Record an id as taken. If there are too many, forget the oldest that is not in use."""
        self._known_ids[request_id] = None
        if len(self._known_ids) > MAX_KNOWN_IDS:
            oldest = next((known for known in self._known_ids if known not in self._jobs), None)
            if oldest is not None:
                del self._known_ids[oldest]

    def _free_id(self) -> str:
        return next(name for name in map(str, self._next_id) if name not in self._known_ids)


def _request_maker(target: Target, loaded: LoadedModel, grammars: Grammars) -> RequestMaker:
    """Makes the requests of a model, which may be an encoder-decoder.

    Raises:
        CompatibilityError: its decoder has no start token, or its generation config asks for
            something that is not applied here.
    """
    eos, network = loaded.eos_token_ids, target.source_network
    if network is None:
        return RequestMaker(target, eos, grammars, loaded.beam_defaults)
    audio = None
    if network.num_bins is not None:
        assert network.source_limit is not None, "audio has a fixed length"
        audio = AudioReader(loaded.path, network.num_bins, network.source_limit)
    reader = SourceReader(target, loaded.tokenizer, decoder_start(loaded.module), audio)
    rules = DecodingRules.of(loaded.module.generation_config, eos, target.vocab_size)
    return RequestMaker(target, eos, grammars, loaded.beam_defaults, reader, rules)


def _default_config(name: str | None, target: Target) -> SpeculativeConfig:
    """The `hybrid` of a model whose head comes with the package, else plain decoding.

    On a GPU, where it was not measured, and where draft lengths change the bits, it is plain
    decoding, too.
    """
    fields = None
    if target.device.type == "cpu" and target.bit_exact:
        fields = shipped_config(name, trees=target.exact_trees)
    return SpeculativeConfig.parse(fields)
