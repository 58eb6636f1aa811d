"""`LLMEngine`: continuous batching with explicit steps, under the names of vLLM's `LLMEngine`.

    engine = LLM("smollm2-135m").engine
    engine.add_request("Hello", SamplingParams(temperature=0))
    while engine.has_unfinished_requests():
        for chunk in engine.step():
            print(chunk.request_id, chunk.text, chunk.finished)

Requests may come and go while others run. The engine owns the model, the strategies and the
scheduler; `LLM` is a thin layer over it. Any number of threads may use one engine: a step advances
the requests of all threads (`worker.py`).
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

from torch import Tensor

from tokenleap.config import SpeculativeConfig
from tokenleap.core import clock
from tokenleap.core.grammar import Grammars
from tokenleap.core.params import Sampling
from tokenleap.drafters.heads.shipped import shipped_config
from tokenleap.drafters.online import OnlineReport
from tokenleap.engine.jobs import AddedJobs, Job, JobMaker, JobSpec, Outbox
from tokenleap.engine.prefix_cache import PrefixCache
from tokenleap.engine.prompts import GivenPrediction, GivenReferences, Opening, Prompt
from tokenleap.engine.scheduler import KVBudget, Scheduler
from tokenleap.engine.strategies import Speculative, StrategyFactory
from tokenleap.engine.worker import StepReport, Uninterrupted, Worker
from tokenleap.errors import ConfigError, RequestError
from tokenleap.models.loaded import LoadedModel
from tokenleap.models.pooling import Pooler
from tokenleap.outputs import RequestOutput, StreamChunk
from tokenleap.request import Request
from tokenleap.runtime.passes import Bucket
from tokenleap.runtime.target import Target
from tokenleap.speculation import Speculation

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tokenleap.runtime.packed import PackedModel

VARIABLE = "TOKENLEAP_LOG"
"""An environment variable: the least level of the lines that are written to standard error."""

_LEVELS = ("debug", "info", "warning", "error")


def show_log_lines() -> None:
    """Write log lines to standard error, from the level that `TOKENLEAP_LOG` names."""
    name = os.environ.get(VARIABLE, "").lower()
    if not name:
        return
    if name not in _LEVELS:
        raise ConfigError(f"{VARIABLE}: must be one of {', '.join(_LEVELS)}, got '{name}'.")
    ours = logging.getLogger("tokenleap")
    ours.setLevel(name.upper())
    if not ours.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        ours.addHandler(handler)


_log = logging.getLogger(__name__)


AfterStep: TypeAlias = Callable[[Sequence[Job]], object]
"""Called between two steps, with the jobs that have changed."""


class EngineLoad(NamedTuple):
    """How busy an engine is.

    Args:
        waiting: requests without a row of the KV memory.
        running: requests with one.
        kv_usage: tokens in the target's KV memory, as a share of what fits. Without
            `kv_cache_memory`, that is what `max_num_seqs` sequences of full length take.
    """

    waiting: int
    running: int
    kv_usage: float


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
        pieces: the texts of single tokens.

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
            cast("PreTrainedModel | PackedModel", loaded.model),
            options.max_model_len,
            options.quantization,
            options.runtime,
            loaded.reload,
            bucket=Bucket.of(options.max_num_seqs) if options.batch_invariant else None,
        )
        self._kv_budget.add(self.target)
        chose_drafter = config is not None
        if config is None:
            config = default_config(loaded.name, self.target)
        grammars = Grammars(
            self.tokenizer, self.target.vocab_size, loaded.eos_token_ids, self.target.peers
        )
        self._closed = False
        own = weakref.proxy(self)  # without a cycle, memory is free as soon as the `LLM` is dropped
        self.worker = Worker(lambda: own.advance(), lambda: own._scheduler.busy)
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
        self._maker = JobMaker(
            self.target,
            loaded,
            grammars,
            self.strategies,
            self.worker,
            chose_drafter=chose_drafter,
            seed=options.seed,
        )
        self.references, self.pieces = self._maker.references, self._maker.pieces
        if config.drafter_spec.takes_model:  # heads may read the module's embedding
            loaded.forget_model()
        default = self.strategies.default = self.strategies.build(config)
        loaded.forget_model()
        prefixes = options.prefix_cache_bytes
        self._prefixes = None if prefixes is None else PrefixCache(self.target, prefixes)
        self._speculation = Speculation(default)
        self._scheduler = Scheduler(
            self.target,
            self._speculation,
            options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            prefix_cache=self._prefixes,
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
        self._added = AddedJobs()

    @property
    def kv_bytes(self) -> tuple[int, int]:
        """Bytes of the KV and of what is kept of sources, of the target and of all draft models."""
        own, *others = self._kv_budget.held_bytes
        return own, sum(others)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV, of what is kept of sources, and of the prefix cache."""
        return sum(self.kv_bytes) + (0 if self._prefixes is None else self._prefixes.num_bytes)

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """The model's own values of sampling parameters, for those that are not given."""
        return self._maker.sampling_defaults

    @property
    def pooler(self) -> Pooler:
        """Makes embeddings; a CompatibilityError if this model makes none."""
        return self._maker.pooler

    @property
    def load(self) -> EngineLoad:
        """Requests that wait and run, and how full the KV memory is; any thread may ask."""
        slab, options = self.target.slab, self.options
        most = slab.limit or options.max_num_seqs * self.target.max_model_len
        return EngineLoad(
            self._scheduler.num_waiting, self._scheduler.num_running, sum(slab.lengths) / most
        )

    # Requests added by the user

    def add_request(
        self,
        prompt: Prompt,
        params: Sampling = None,
        speculative_config: Speculative = None,
        *,
        references: GivenReferences = None,
        prediction: GivenPrediction = None,
        trace: bool = False,
        request_id: str | None = None,
    ) -> str:
        """Queue a prompt. It joins the running requests in one of the next steps.

        Args:
            prompt: text, token ids or a conversation.
            params: sampling parameters; None takes the model's own.
            speculative_config: how this request speculates; None takes the `LLM`'s configuration.
                If it has no `acceptance`, the `LLM`'s rule is used.
            references: texts that drafts may quote, or lists of token ids; see `LLM.generate`.
            prediction: what the output is expected to repeat; see `LLM.generate`.
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
        job = self.job(JobSpec(prompt, params, speculative_config, references, prediction, trace))

        def add() -> str:
            name = self._added.add(job, request_id)
            self._queue([job])
            return name

        return self.worker.call(add)

    def step(self) -> list[StreamChunk]:
        """Advance all requests by one step.

        If the step fails for one request, that request ends with `finish_reason` "error", and the
        others go on.

        Returns:
            A chunk for each output that has new tokens or has ended since the last call.
        """
        self.worker.call(self._step)
        return self._added.take()

    def _step(self) -> None:
        self.worker.advance()
        self._added.collect()

    def has_unfinished_requests(self) -> bool:
        """Whether another `step` has requests to advance or chunks to return."""
        return bool(self._added)

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """End these requests, whether they wait or run.

        Their memory is freed, and `step` returns no more chunks of them. Requests that have already
        ended are not changed.

        Raises:
            ConfigError: no request has this id, and none had it recently.
        """
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            with Uninterrupted():  # a job that was taken out here must also end
                job = self._added.forget(request_id)
                if job is not None:
                    self.end([job])

    def close(self) -> None:
        """End all requests with an error, and those that still come."""
        self._closed = True
        self.worker.call(self._end_if_closed)

    def reset_prefix_cache(self) -> None:
        if self._prefixes is not None:
            self.worker.call(self._prefixes.clear)

    def reset_drafter_memory(self) -> None:
        def forget() -> None:
            for strategy in (self._speculation.default, *self.strategies.kept()):
                strategy.forget()

        self.worker.call(forget)

    @property
    def online_report(self) -> OnlineReport | None:
        learner = self._speculation.default.learner
        return None if learner is None else learner.report

    # Jobs, for `LLM` and `AsyncLLM`

    def jobs(self, specs: Sequence[JobSpec]) -> list[Job]:
        """See `JobMaker.jobs`."""
        return self._maker.jobs(specs)

    def job(self, spec: JobSpec) -> Job:
        """The job of one prompt; see `JobMaker.jobs`."""
        (job,) = self.jobs([spec])
        return job

    def make_requests(self, spec: JobSpec) -> list[Request]:
        """Check a prompt and make one request per output, without queueing them."""
        return self._maker.requests(spec)

    def start(self, jobs: Sequence[Job]) -> None:
        """Let the jobs' requests be queued before the next step; returns at once."""
        with Uninterrupted():  # what was sent can be withdrawn
            queued = self.worker.post(partial(self._queue, jobs))
            for job in jobs:
                job.queued = queued

    def end(self, jobs: Sequence[Job], *, wait: bool = True) -> None:
        """Abort those of these jobs that have not ended; without `wait`, after the next step."""
        left = [job for job in jobs if not job.finished and not job.withdraw()]
        if left and wait and not self.worker.inside:
            with Uninterrupted():
                self.worker.call(partial(self._abort, left))
        elif left:
            self.stop(left)

    def stop(self, jobs: Sequence[Job]) -> None:
        """End the outputs of jobs after the next step; their last chunks still come."""
        self.worker.post(partial(self._abort, jobs))

    def _abort(self, jobs: Sequence[Job]) -> None:
        self._scheduler.abort(request for job in jobs for request in job.requests)

    def news(
        self, jobs: Sequence[Job], *, every_step: bool = True
    ) -> Generator[list[Job], None, None]:
        """Run jobs to their ends; yield those that have changed, after each step or at the end.

        Closing the generator aborts those that run.
        """
        outbox = Outbox(jobs)
        try:
            self.start(jobs)
            while outbox.open or outbox:
                self.worker.drive(lambda: not outbox.open or (every_step and bool(outbox)))
                if outbox:
                    yield outbox.take()
        finally:
            self.end(jobs)

    def run(self, jobs: Sequence[Job], after_step: AfterStep | None = None) -> list[RequestOutput]:
        """Run jobs to their ends; returns their results, or raises why one of them failed."""
        with closing(self.news(jobs, every_step=after_step is not None)) as news:
            for changed in news:
                if after_step is not None:
                    after_step(changed)
        return _results(jobs)

    def stream(self, jobs: Sequence[Job]) -> Generator[StreamChunk, None, None]:
        """Run jobs to their ends; yield their chunks."""
        for changed in self.news(jobs):
            for job in changed:
                yield from job.take()
        _results(jobs)

    def advance(self) -> StepReport | None:
        """Advance all requests by one step; called by the worker."""
        if not self._scheduler.busy:
            return None
        began = clock.now()
        outcomes = self._scheduler.step()
        seconds = clock.now() - began
        self._speculation.learn(seconds)
        return StepReport(outcomes, seconds)

    def give_up(self, error: Exception) -> None:
        """End all requests because of an error that is not of one of them."""
        self._scheduler.give_up(error)

    def _queue(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            for request in job.requests:
                try:
                    self._scheduler.add(request, job.strategy)
                except Exception as error:
                    _log.exception("a request could not be queued")
                    request.fail(error)
                    request.close()
        self._end_if_closed()

    def _end_if_closed(self) -> None:
        if self._closed:
            self.give_up(RequestError("the LLM was closed."))

    # The model

    def lend(self) -> Target:
        """The model over rows of its own, for another engine.

        It is made between two steps: a pass of another thread may have hooks on the module that is
        copied.
        """
        return self.worker.call_inside(self.target.with_own_rows)

    def read(self, prompt: Prompt) -> Opening:
        return self._maker.read(prompt)

    def encode(self, prompt: Prompt) -> list[int]:
        read = self.read(prompt)
        return list(read.ids if read.source is None else read.source.tokens)

    def embed(self, prompts: Sequence[Prompt]) -> list[Tensor]:
        """The embeddings [size] of some texts or token ids, in float32 on the CPU.

        They are made of the last hidden states as `modules.json` in the model's folder says
        (sentence-transformers'). The prompts take part in steps like all others.

        Raises:
            CompatibilityError: the model makes no embeddings.
            PromptError: a prompt is empty, too long, or has ids outside the vocabulary.
            RequestError: a prompt failed while it was computed.
        """
        jobs = self.jobs([JobSpec.embeds(prompt) for prompt in prompts])
        self.run(jobs)
        return [job.embedding for job in jobs]

    def measure_costs(self) -> None:
        """Time passes now, and not at the first request whose controller decides by their costs.

        Where draft lengths change the bits, no controller does so by default, and nothing is timed.
        """
        if self.target.bit_exact:
            self.worker.call(self.strategies.measure_costs)


def _results(jobs: Sequence[Job]) -> list[RequestOutput]:
    results = [job.result() for job in jobs]
    for failed in filter(None, (job.failed for job in jobs)):
        raise RequestError(str(failed.error), results) from failed.failure
    return results


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
    batch_invariant: bool = False
    seed: int | None = None  # None draws the seeds of requests without one


def default_config(name: str | None, target: Target) -> SpeculativeConfig:
    """The `hybrid` of a model whose head comes with the package, else plain decoding.

    On a GPU, where it was not measured, and where draft lengths change the bits, it is plain
    decoding, too.
    """
    fields = None
    if target.device.type == "cpu" and target.bit_exact:
        fields = shipped_config(name, trees=target.exact_trees)
    return SpeculativeConfig.parse(fields)
