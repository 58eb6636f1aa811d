"""`Runs`: jobs from the queue to their end, for callers who wait for them or read their chunks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, TypeAlias

from tokenleap.core import clock
from tokenleap.decode import Outcome
from tokenleap.engine.jobs import Job
from tokenleap.engine.outbox import Outbox
from tokenleap.engine.scheduler import Scheduler
from tokenleap.engine.turns import Turns, Uninterrupted
from tokenleap.errors import RequestError
from tokenleap.outputs import RequestOutput, StreamChunk
from tokenleap.speculation import Speculation

__all__ = ["AfterStep", "Runs", "StepReport"]

AfterStep: TypeAlias = Callable[[Sequence[Job]], object]
"""What is called between two steps, with the jobs that have changed."""


class StepReport(NamedTuple):
    """What a step did.

    Args:
        outcomes: of the requests that it advanced.
        seconds: how long it took, prompts included.
    """

    outcomes: Sequence[Outcome]
    seconds: float


class Runs:
    """Runs jobs on one scheduler, in turns with other threads.

    Args:
        turns: the engine's.
        scheduler: advances the requests of all jobs together.
        speculation: learns between the steps.
    """

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
        """Advance all requests by one step; to be called in a turn.

        Returns:
            What the step did, or None if no request waits or runs.
        """
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
            jobs: the jobs.
            after_step: called between two steps with the jobs that have changed since the last
                call, if it is given.

        Raises:
            RequestError: a request ended with an error; `outputs` has the results of all jobs.
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
        """Queue the jobs and yield their chunks; closing the generator aborts those that run.

        Raises:
            RequestError: a request ended with an error; it comes behind the chunks of all jobs.
        """
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
    """Which of some jobs have changed and which have ended, without looking at those that wait.

    Args:
        jobs: jobs that are not queued yet.
    """

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
    """What the jobs have brought.

    Raises:
        RequestError: a request ended with an error.
    """
    results = [job.result() for job in jobs]
    for job in jobs:
        for request in job.requests:
            if request.failure is not None:
                raise RequestError(str(request.error), results) from request.failure
    return results
