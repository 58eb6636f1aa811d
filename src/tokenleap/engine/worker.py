"""`Worker`: one thread that owns the steps of an engine; jobs come in by a queue, chunks go out.

Other threads may still use the engine, in turns (`turns.py`). The worker's jobs then advance with
theirs. All steps of a server are in one thread because OpenMP keeps a pool of threads for each
thread that computes.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeAlias, TypeVar

from tokenleap.engine.jobs import Job
from tokenleap.engine.llm_engine import LLMEngine
from tokenleap.engine.runs import Outbox, StepReport
from tokenleap.engine.turns import SameProcess
from tokenleap.errors import TokenleapError, in_one_line
from tokenleap.outputs import StreamChunk

__all__ = ["Deliver", "Pool", "Worker", "closed_error"]


_log = logging.getLogger(__name__)

T = TypeVar("T")

Deliver: TypeAlias = Callable[[Sequence[StreamChunk], Exception | None], object]
"""Takes the chunks of a job after a step, in the worker's thread; with an error there are no more.

It must return at once and not raise.
"""


class Worker:
    """Runs an engine's jobs in a thread of its own.

    Attributes:
        observe: called with the report of each step, in the worker's thread; None for no call.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self.observe: Callable[[StepReport], object] | None = None
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._outbox = Outbox()
        self._jobs: dict[int, tuple[Job, Deliver]] = {}  # by the job's id
        self._lock = threading.Lock()  # nothing enters the inbox after the command that closes it
        self._process = SameProcess()
        self._closed = False
        self._running = True
        self._observes = True  # and nothing was wrong with it so far
        self._thread = threading.Thread(target=self._run, name="tokenleap-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it takes jobs."""
        return self._thread.is_alive() and not self._closed

    def start(self, job: Job, deliver: Deliver) -> None:
        """Queue a job."""
        self._send(lambda: self._start(job, deliver))

    def end(self, job: Job) -> None:
        """Abort a job and deliver no more of it, if it has not ended; returns at once."""
        with suppress(TokenleapError):  # closing has ended it
            self._send(lambda: self._end(job))

    def stop(self, job: Job) -> None:
        """End the outputs of a job where they are; their last chunks still come."""
        with suppress(TokenleapError):  # closing has ended it
            self._send(lambda: self._stop_early(job))

    def call(self, act: Callable[[], T]) -> Future[T]:
        """Let the thread run this between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(act())
            except BaseException as error:
                future.set_exception(error)
                if not isinstance(error, Exception):
                    raise

        self._send(run)
        return future

    def close(self, timeout: float | None = None) -> bool:
        """End all jobs and the thread."""
        self._close()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._inbox.put(self._stop)

    # In the thread

    def _run(self) -> None:
        while self._running:
            try:
                self._go_on()
            except BaseException as error:  # a panic of native code: nothing is certain any more
                _log.critical("the engine failed and was closed", exc_info=True)
                self._close()
                jobs = self._tell_all(TokenleapError(f"the engine failed: {in_one_line(error)}"))
                for job in jobs:
                    # It may panic again, and what waits in the inbox must be told, too.
                    with suppress(BaseException):
                        self._free(job)

    def _go_on(self) -> None:
        """Do what came in, and run a step if there are jobs."""
        try:
            self._obey()
            if self._jobs:
                self._advance()
        except Exception as error:  # our own mistake: it ends the jobs, and not the worker
            _log.exception("a step failed, and its requests were ended")
            self._give_up(error)

    def _obey(self) -> None:
        """Do what came in; wait for it if there is nothing else to do."""
        wait = not self._jobs
        while self._running:
            try:
                command = self._inbox.get(block=wait)
            except Empty:
                return
            command()
            wait = False

    def _advance(self) -> None:
        report = self._engine.advance()
        if report is not None:
            self._observe(report)  # first: who has read an answer finds it in the metrics
        for job in self._outbox.take():
            self._report(job)

    def _observe(self, report: StepReport) -> None:
        if self.observe is None:
            return
        try:
            self.observe(report)
        except Exception:  # what counts the steps does not end the requests
            if self._observes:
                self._observes = False
                _log.exception("a step could not be counted; later failures are not logged")

    def _report(self, job: Job) -> None:
        _, deliver = self._jobs.get(id(job), (job, None))
        if deliver is None:  # it was aborted
            return
        try:
            chunks = job.take()
        except Exception as error:  # its text or trace cannot be made
            self._fail(job, error)
            return
        if job.all_taken:
            del self._jobs[id(job)]
        deliver(chunks, None)

    def _start(self, job: Job, deliver: Deliver) -> None:
        self._jobs[id(job)] = job, deliver
        self._outbox.watch([job])
        try:
            self._engine.start([job])
        except Exception as error:
            _log.exception("a request could not be queued")
            self._fail(job, error)

    def _end(self, job: Job) -> None:
        if self._jobs.pop(id(job), None) is not None:
            self._free(job)

    def _stop_early(self, job: Job) -> None:
        if id(job) in self._jobs:
            self._free(job)

    def _fail(self, job: Job, error: Exception) -> None:
        """End one job because of an error that is its own."""
        _, deliver = self._jobs.pop(id(job))
        deliver((), error)
        self._free(job)

    def _free(self, job: Job) -> None:
        """Let the engine end a job. If it cannot, that is no reason to end others."""
        try:
            self._engine.end([job])
        except Exception:
            _log.exception("a request could not be ended")

    def _give_up(self, error: Exception) -> None:
        """End all jobs because of an error that is not of one of them."""
        for job in self._tell_all(error):
            self._free(job)

    def _tell_all(self, error: Exception) -> list[Job]:
        """Deliver an error to all jobs, and forget them; they are still in the engine."""
        jobs, self._jobs = list(self._jobs.values()), {}
        for _, deliver in jobs:
            deliver((), error)
        return [job for job, _ in jobs]

    def _stop(self) -> None:
        self._running = False
        self._give_up(TokenleapError("the engine was closed."))

    # In other threads

    def _send(self, command: Callable[[], None]) -> None:
        self._process.check()
        with self._lock:
            if self._closed:
                raise closed_error()
            self._inbox.put(command)


# `Pool`: threads that the process does not wait for when it ends.
#
# Python joins the threads of a `ThreadPoolExecutor` at exit. One that compiles a large grammar
# would outlast a server's time to shut down.


class Pool:
    """Daemon threads that run what is submitted: one call of each client in turn."""

    def __init__(self, threads: int, name: str) -> None:
        self._waiting: dict[Hashable, deque[Callable[[], None]]] = {}  # the next client first
        self._news = threading.Condition()
        self._process = SameProcess()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True)
            for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, act: Callable[[], T], client: Hashable = None) -> Future[T]:
        """Queue a call.

        Args:
            client: whose it is. The calls of a client run in order, and do not wait for all those
                of another one.
        """
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            if self._closed:
                future.set_exception(closed_error())
                return
            try:
                future.set_result(act())
            except BaseException as error:  # the caller that waits for it decides
                future.set_exception(error)

        self._process.check()
        with self._news:
            if self._closed:
                raise closed_error()
            self._waiting.setdefault(client, deque()).append(run)
            self._news.notify()
        return future

    def close(self) -> None:
        """Refuse all that has not begun, and return without waiting for what runs."""
        with self._news:
            self._closed = True
            waiting = [run for queue in self._waiting.values() for run in queue]
            self._waiting.clear()
            self._news.notify_all()
        for run in waiting:
            run()

    def _run(self) -> None:
        while (act := self._next()) is not None:
            act()
            del act  # and what it holds, while this waits for the next

    def _next(self) -> Callable[[], None] | None:
        """The next client's first call; None after the end."""
        with self._news:
            while not self._waiting:
                if self._closed:
                    return None
                self._news.wait()
            client = next(iter(self._waiting))
            queue = self._waiting.pop(client)
            act = queue.popleft()
            if queue:
                self._waiting[client] = queue  # after the others
            return act


def closed_error() -> TokenleapError:
    """The error for calls after the end."""
    return TokenleapError("the engine was closed: make a new AsyncLLM.")
