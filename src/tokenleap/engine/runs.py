"""`Runs`: jobs from the queue to their end, for callers who wait for them or read their chunks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from itertools import count
from threading import Lock
from typing import NamedTuple, TypeAlias

from tokenleap.core import clock
from tokenleap.decode import Outcome
from tokenleap.engine.jobs import Job
from tokenleap.engine.scheduler import Scheduler
from tokenleap.engine.turns import Turns, Uninterrupted
from tokenleap.errors import ConfigError, RequestError
from tokenleap.outputs import RequestOutput, StreamChunk
from tokenleap.speculation import Speculation

__all__ = ["MAX_KNOWN_IDS", "AddedJobs", "AfterStep", "Outbox", "Runs", "StepReport"]


AfterStep: TypeAlias = Callable[[Sequence[Job]], object]
"""Called between two steps, with the jobs that have changed."""


class StepReport(NamedTuple):
    """Report of a step."""

    outcomes: Sequence[Outcome]
    seconds: float


class Runs:
    """Runs jobs on one scheduler, in turns with other threads."""

    def __init__(self, turns: Turns, scheduler: Scheduler, speculation: Speculation) -> None:
        self._turns = turns
        self._scheduler = scheduler
        self._speculation = speculation

    def queue(self, jobs: Sequence[Job]) -> None:
        """Queue the jobs' requests; to be called in a turn."""
        for job in jobs:
            for request in job.requests:
                self._scheduler.add(request, job.strategy)

    def step(self) -> StepReport | None:
        """Advance all requests by one step; to be called in a turn."""
        if not self._scheduler.busy:
            return None
        began = clock.now()
        outcomes = self._scheduler.step()
        seconds = clock.now() - began
        self._speculation.learn(seconds)
        return StepReport(outcomes, seconds)

    def advance(self) -> StepReport | None:
        """Take a turn with one step in it; see `step`."""
        reports: list[StepReport | None] = []
        self._turns.take(lambda: reports.append(self.step()))
        return reports[0]

    def start(self, jobs: Sequence[Job]) -> None:
        """Queue the jobs' requests."""
        self._turns.take(lambda: self.queue(jobs))

    def end(self, jobs: Sequence[Job]) -> None:
        """Abort those of these jobs that have not ended."""
        if all(job.finished for job in jobs):
            return
        with Uninterrupted():  # even while it waits for its turn
            self._turns.take(lambda: self._scheduler.abort(r for job in jobs for r in job.requests))

    def run(self, jobs: Sequence[Job], after_step: AfterStep | None = None) -> list[RequestOutput]:
        """Queue the jobs, step until they have ended, and collect their results.

        Args:
            after_step: called between two steps with the jobs that have changed since the last
                call, if it is given.
        """
        new, open_jobs = list(jobs), _OpenJobs(jobs)

        def advance() -> None:
            self.queue(new)
            new.clear()
            self.step()

        # A SIGINT is delivered only between two steps, where `end` is sure to run.
        with Uninterrupted() as uninterrupted:
            try:
                while open_jobs:
                    uninterrupted.deliver()
                    self._turns.take(advance, unless=lambda: uninterrupted.pending or not open_jobs)
                    changed = open_jobs.changed()
                    if after_step is not None:
                        after_step(changed)
            finally:
                if not new:
                    self.end(jobs)
        return _results(jobs)

    def stream(self, jobs: Sequence[Job]) -> Generator[StreamChunk, None, None]:
        """Queue the jobs and yield their chunks; closing the generator aborts those that run."""
        outbox = Outbox()
        outbox.watch(jobs)
        open_outputs = sum(len(job.requests) for job in jobs)
        try:
            self.start(jobs)
            while open_outputs:
                for job in outbox.take():
                    for chunk in job.take():
                        open_outputs -= chunk.finished
                        yield chunk
                if open_outputs and not outbox:  # steps of other threads bring news, too
                    self._turns.take(self.step, unless=lambda: bool(outbox))
        finally:
            self.end(jobs)
        _results(jobs)


class _OpenJobs:
    """Which of some jobs have changed and which have ended, without looking at those that wait."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._outbox = Outbox()
        self._outbox.watch(jobs)
        self._open = {id(job) for job in jobs}
        self._changed: dict[int, Job] = {}

    def __bool__(self) -> bool:
        """Whether any job has not ended; steps of other threads end jobs, too."""
        self._look()
        return bool(self._open)

    def changed(self) -> list[Job]:
        """The jobs that have changed since the last call."""
        self._look()
        changed, self._changed = list(self._changed.values()), {}
        return changed

    def _look(self) -> None:
        for job in self._outbox.take():
            self._changed[id(job)] = job
            if job.finished:
                self._open.discard(id(job))


def _results(jobs: Sequence[Job]) -> list[RequestOutput]:
    """Results of the jobs."""
    results = [job.result() for job in jobs]
    for job in jobs:
        for request in job.requests:
            if request.failure is not None:
                raise RequestError(str(request.error), results) from request.failure
    return results


# `AddedJobs`: the jobs of `LLMEngine.add_request`, by their ids, and the chunks of their steps.


MAX_KNOWN_IDS = 100_000
"""Most request ids that are remembered, including those of requests that have ended."""


class AddedJobs:
    """Jobs that a user has added one by one, and whose chunks `LLMEngine.step` returns.

    Any thread may ask. None of them runs a step here.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self._reporting = Lock()
        self._outbox = Outbox()
        self._collected: list[StreamChunk] = []  # returned by the next `take`
        self._known_ids: dict[str, None] = {}  # the latest ids, in order of arrival
        self._next_id = count()

    def __bool__(self) -> bool:
        """Whether any of them has output left to report."""
        return bool(self.jobs or self._collected)

    def add(self, job: Job, request_id: str | None) -> str:
        """Give a job its id and report it from now on; to be called in a turn of the engine."""
        if request_id is not None and request_id in self._known_ids:
            raise ConfigError(f"request_id: '{request_id}' is taken by another request.")
        job.request_id = name = self._free_id() if request_id is None else request_id
        self._remember(name)
        self.jobs[name] = job
        self._outbox.watch([job])
        return name

    def take(self) -> list[StreamChunk]:
        """A chunk for each output that has new tokens or has ended since the last call."""
        failed: Exception | None = None
        with Uninterrupted(), self._reporting:  # a SIGINT must not lose chunks
            for job in self._outbox.take():
                request_id = job.request_id or ""
                if self.jobs.get(request_id) is job:  # else it was aborted
                    try:
                        self._collected += job.take()
                    except Exception as error:
                        failed = failed or error
                        del self.jobs[request_id]
                        continue
                    if job.all_taken:
                        del self.jobs[request_id]
        if failed is not None:
            raise failed
        with self._reporting:
            chunks, self._collected = self._collected, []
        return chunks

    def forget(self, request_id: str) -> Job | None:
        """Report no more of a job, which the caller ends; None if it has ended."""
        if request_id not in self._known_ids:
            raise ConfigError(f"request_id: no request has the id {request_id!r}.")
        with self._reporting:
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


# `Outbox`: which jobs have new tokens or ended outputs, without looking at those that wait.


class Outbox:
    """The jobs with news. Any thread may run the steps that bring them; one thread takes them."""

    def __init__(self) -> None:
        self._marked: deque[tuple[int, Job]] = deque()  # appending and taking are atomic
        self._numbers = count()

    def watch(self, jobs: Iterable[Job]) -> None:
        """Report these jobs from now on; call it before they are queued."""
        for job in jobs:
            mark = partial(self._marked.append, (next(self._numbers), job))
            for request in job.requests:
                request.on_news = mark

    def __bool__(self) -> bool:
        """Whether there is news."""
        return bool(self._marked)

    def take(self) -> list[Job]:
        """The jobs with news since the last call, in the order in which they were watched."""
        found: dict[int, Job] = {}
        while self._marked:
            number, job = self._marked.popleft()
            found[number] = job
        return [found[number] for number in sorted(found)]
