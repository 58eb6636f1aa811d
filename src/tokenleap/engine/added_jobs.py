"""`AddedJobs`: the jobs of `LLMEngine.add_request`, by their ids, and the chunks of their steps."""

from __future__ import annotations

from itertools import count
from threading import Lock

from tokenleap.engine.jobs import Job
from tokenleap.engine.outbox import Outbox
from tokenleap.engine.turns import Uninterrupted
from tokenleap.errors import ConfigError
from tokenleap.outputs import StreamChunk

__all__ = ["MAX_KNOWN_IDS", "AddedJobs"]

MAX_KNOWN_IDS = 100_000
"""Most request ids that are remembered, including those of requests that have ended."""


class AddedJobs:
    """Jobs that a user has added one by one, and whose chunks `LLMEngine.step` returns.

    Any thread may ask. None of them runs a step here.

    Attributes:
        jobs: those with output left to report, by their ids.
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
        """Give a job its id and report it from now on; to be called in a turn of the engine.

        Args:
            job: the job, before it is queued.
            request_id: the id that the user wants; None takes a free one.

        Raises:
            ConfigError: the id is taken.
        """
        if request_id is not None and request_id in self._known_ids:
            raise ConfigError(f"request_id: '{request_id}' is taken by another request.")
        job.request_id = name = self._free_id() if request_id is None else request_id
        self._remember(name)
        self.jobs[name] = job
        self._outbox.watch([job])
        return name

    def take(self) -> list[StreamChunk]:
        """A chunk for each output that has new tokens or has ended since the last call.

        Raises:
            Exception: an output's text or trace could not be made. Its job is forgotten, and the
                next call has the chunks of the others.
        """
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
        """Report no more of a job, which the caller ends; None if it has ended.

        Raises:
            ConfigError: no job has this id, and none had it recently.
        """
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
