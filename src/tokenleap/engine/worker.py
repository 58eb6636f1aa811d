"""`Worker`: one thread at a time owns an engine; others send it commands.

Whoever waits for something drives: its thread obeys the commands of all threads in their order, and
steps, until it has what it waits for. A command that finds nobody driving runs in its own thread.
Meanwhile other threads wait for theirs, and one of them goes on when the first is done. So a caller
that is alone steps in its own thread, without a hop. Where an `AsyncLLM` has a thread of its own,
only that one drives, because OpenMP keeps a pool of threads for each thread that computes.

Ctrl-C does not interrupt a change: a SIGINT is delivered between two steps. A process that was
forked after loading is refused, because the threads of the native runtime and of PyTorch do not
survive a fork. When Python ends, no daemon thread may be in native code: Python would unwind its
stack there, and the process would abort.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import atexit
import logging
import os
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, Generic, NamedTuple, TypeVar, cast

from tokenleap.decode import Outcome
from tokenleap.errors import TokenleapError

_log = logging.getLogger(__name__)

T = TypeVar("T")

POLL_SECONDS = 0.05
"""How often a waiting thread checks whether it was interrupted."""
LAST_STEP_SECONDS = 30.0
"""How long the end of Python waits for the step of a daemon thread."""


class StepReport(NamedTuple):
    """Report of a step."""

    outcomes: Sequence[Outcome]
    seconds: float


class Command(Generic[T]):
    """Runs once, unless it is withdrawn before.

    Attributes:
        done: whether it has run.
    """

    def __init__(self, act: Callable[[], T]) -> None:
        self.done = False
        self._act = act
        self._begun = self._withdrawn = False
        self._lock = threading.Lock()
        self._value: T | None = None
        self._error: BaseException | None = None

    def withdraw(self) -> bool:
        """Take it back if it has not begun; returns whether it is taken back."""
        with self._lock:
            self._withdrawn = not self._begun
            return self._withdrawn

    def run(self) -> None:
        """Run it. An error is for the one who reads the result; a panic is for this thread, too."""
        with self._lock:
            self._begun = not self._withdrawn
        if not self._begun:
            return
        try:
            self._value = self._act()
        except BaseException as error:
            self._error = error
            if not isinstance(error, Exception):
                raise
        finally:
            del self._act  # and what it holds: a job keeps the command that has queued it
            self.done = True

    def result(self) -> T:
        """Its result or error, once it is done."""
        if self._error is not None:
            raise self._error
        return cast(T, self._value)


class Worker:
    """Runs commands and steps, in one thread at a time.

    Args:
        step: advances all requests by one step; None if there was nothing to do.
        has_work: whether there is something to step.

    Attributes:
        observers: called with the report of each step, in the thread that drives.
        listeners: called after commands and steps, in the thread that drives.
    """

    def __init__(self, step: Callable[[], StepReport | None], has_work: Callable[[], bool]) -> None:
        self.observers: list[Callable[[StepReport], object]] = []
        self.listeners: list[Callable[[], object]] = []
        self._step, self._has_work = step, has_work
        self._inbox: deque[Command[Any]] = deque()
        self._condition = threading.Condition()
        self._driver: int | None = None  # the thread that owns the engine at the moment
        self._waiting = 0
        self._threads: set[threading.Thread] = set()  # if there are any, only these drive
        self._process = SameProcess()
        self._ended_by: int | None = None  # the thread in which Python ends
        self._observed = True  # no observer has failed so far
        _all.add(self)

    @property
    def num_waiting(self) -> int:
        """Threads that wait while another one drives."""
        return self._waiting

    @property
    def inside(self) -> bool:
        """Whether the calling thread drives, and so runs a step or a command now."""
        return self._driver == threading.get_ident()

    def post(self, act: Callable[[], T]) -> Command[T]:
        """Queue a command, which runs between two steps; returns at once."""
        self._process.check()
        command = Command(act)
        with self._condition:
            self._inbox.append(command)
            self._condition.notify_all()
        return command

    def call(self, act: Callable[[], T]) -> T:
        """Run a command between two steps; returns what it returns."""
        self._check()
        while True:
            with Uninterrupted() as uninterrupted:
                try:
                    if self._takes_over():  # then no other thread needs to know of it
                        return self._obeyed(act)
                finally:
                    self._hand_over()
                command = self.post(act)
                try:
                    self._drive(lambda: command.done or uninterrupted.pending)  # noqa: B023
                finally:
                    withdrawn = command.withdraw()
                if not withdrawn:
                    if not command.done:
                        self._drive(lambda: command.done)  # noqa: B023
                    return command.result()

    def call_inside(self, act: Callable[[], T]) -> T:
        """The same, but at once if the calling thread drives."""
        return act() if self.inside else self.call(act)

    def drive(self, done: Callable[[], bool]) -> None:
        """Obey and step until `done()`, or wait as long as another thread does; or a SIGINT came.

        The SIGINT is delivered; if its handler does not raise, the caller calls again.
        """
        self._check()
        with Uninterrupted() as uninterrupted:
            self._drive(lambda: done() or uninterrupted.pending)

    def advance(self) -> None:
        """Step, and show it to the observers; to be called in a command."""
        report = self._step()
        if report is not None:
            self._observe(report)

    # Threads that do nothing but drive

    def enter(self, thread: threading.Thread) -> None:
        """Let a thread drive, and of the others only those that have entered, too."""
        self._process.check()
        with self._condition:
            self._threads.add(thread)

    def leave(self, thread: threading.Thread) -> None:
        """Let the others drive again, if no other thread has entered."""
        with self._condition:
            self._threads.discard(thread)
            self._condition.notify_all()

    def serve(self, closed: Callable[[], bool]) -> None:
        """Wait for work, and drive as long as there is some; a command changes `closed`."""
        with self._condition:
            while not (self._inbox or self._has_work() or closed()):
                self._condition.wait()
        self._drive(lambda: not self._inbox and (closed() or not self._has_work()))

    # Driving

    def _check(self) -> None:
        self._process.check()
        if self._ended_by == threading.get_ident():
            raise TokenleapError("Python is ending: generate before its exit handlers run.")
        if self.inside:
            raise TokenleapError(
                "the engine was called from inside one of its own steps: a drafter, rule or "
                "callback may not generate with the model that is calling it."
            )

    def _obeyed(self, act: Callable[[], T]) -> T:
        """Run this command after those that are there."""
        self._obey()
        try:
            return act()
        finally:
            self._tell_others()

    def _drive(self, done: Callable[[], bool]) -> None:
        try:
            while self._take_over(done) and not self._go_on(done):
                self._hand_over()
        finally:
            self._hand_over()

    def _go_on(self, done: Callable[[], bool]) -> bool:
        """Obey and step until `done()`; False if Python ends before."""
        over = False
        while not over and self._ended_by is None:
            if self._inbox:
                self._obey()
                over = done()
            if not over and self._has_work():
                self.advance()
            self._tell_others()
            over = over or done()
        return over

    def _take_over(self, done: Callable[[], bool]) -> bool:
        """Wait until no other thread drives; False if `done` came first."""
        with self._condition:
            self._waiting += 1
            try:
                while not done():
                    if self._takes_over():
                        return True
                    self._condition.wait(POLL_SECONDS)
                return False
            finally:
                self._waiting -= 1

    def _takes_over(self) -> bool:
        """Take over if no other thread drives."""
        with self._condition:
            free = self._driver is None and self._ended_by is None
            if free and (not self._threads or threading.current_thread() in self._threads):
                self._driver = threading.get_ident()
                return True
            return False

    def _hand_over(self) -> None:
        if self.inside:
            with self._condition:
                self._driver = None
                self._condition.notify_all()

    def _tell_others(self) -> None:
        """Call the listeners, and let waiting threads look whether they have what they wait for."""
        for listener in tuple(self.listeners):
            listener()
        if self._waiting or len(self._threads) > 1:  # one of them may be closed by a command
            with self._condition:
                self._condition.notify_all()

    def _obey(self) -> None:
        """Run the commands that are there; those that come meanwhile wait for the next step."""
        for _ in range(len(self._inbox)):
            self._inbox.popleft().run()

    def _observe(self, report: StepReport) -> None:
        for observer in tuple(self.observers):
            try:
                observer(report)
            except Exception:  # what counts the steps does not end the requests
                if self._observed:
                    self._observed = False
                    _log.exception("a step could not be counted; later failures are not logged")

    def end(self) -> None:
        """Wait for the step that runs, and begin no other: daemon threads wait until the end."""
        if not self._process.here:  # the threads were lost, and what they held is still held
            return
        own, limit = threading.get_ident(), time.monotonic() + LAST_STEP_SECONDS
        with self._condition:
            self._ended_by = own
            while self._driver not in (None, own) and time.monotonic() < limit:
                self._condition.wait(POLL_SECONDS)


_all: weakref.WeakSet[Worker] = weakref.WeakSet()


@atexit.register
def _end() -> None:
    """Called when only daemon threads are left."""
    for worker in list(_all):
        worker.end()


class SameProcess:
    """Refuses to go on in a process that was forked after this was made."""

    def __init__(self) -> None:
        self._process = os.getpid()

    @property
    def here(self) -> bool:
        """Whether this is that process."""
        return os.getpid() == self._process

    def check(self) -> None:
        """Refuse another process."""
        if not self.here:
            raise TokenleapError(
                "this model was loaded before the process was forked, and its threads were lost: "
                "start processes with the 'spawn' method."
            )


class Uninterrupted:
    """A context that holds SIGINT back until it ends. Only the main thread receives signals.

    It uses `_signal`, because the functions of `signal` look for an enum's value: 7 us a call.
    """

    def __init__(self) -> None:
        self.pending = False
        self._previous: Callable[[int, FrameType | None], Any] | None = None
        self._frame: FrameType | None = None

    def __enter__(self) -> Uninterrupted:
        if threading.current_thread() is threading.main_thread():
            handler = _signal.getsignal(_signal.SIGINT)
            if callable(handler):
                self._previous = handler
                _signal.signal(_signal.SIGINT, self._defer)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Call the handler of a SIGINT that was held back; it usually raises KeyboardInterrupt."""
        if self._previous is None:
            return
        _signal.signal(_signal.SIGINT, self._previous)
        if self.pending:
            frame, self.pending, self._frame = self._frame, False, None
            try:
                self._previous(signal.SIGINT, frame)
            finally:
                del frame  # a traceback would keep what it holds

    def _defer(self, _: int, frame: FrameType | None) -> None:
        self.pending, self._frame = True, frame
