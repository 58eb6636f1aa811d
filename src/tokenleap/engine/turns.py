"""One thread at a time uses the engine, and Ctrl-C does not interrupt a change.

Threads take turns in the order in which they ask, so a thread waits only for the turns of
those before it. A SIGINT that arrives during a turn is delivered at its end, so that no change is
left half done. A process that was forked after loading is refused, because the threads of the
native runtime and of PyTorch do not survive a fork. When Python ends, no daemon thread may be in
native code: Python would unwind its stack there, and the process would abort.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from tokenleap.errors import TokenleapError

__all__ = ["SameProcess", "Turns", "Uninterrupted"]

POLL_SECONDS = 0.05
"""How often a waiting thread checks whether it was interrupted."""
LAST_TURN_SECONDS = 30.0
"""How long the end of Python waits for the turn of a daemon thread."""


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
    """A context that holds SIGINT back until it ends. Only the main thread receives signals."""

    def __init__(self) -> None:
        self.pending = False
        self._previous: Callable[[int, FrameType | None], Any] | None = None
        self._frame: FrameType | None = None

    def __enter__(self) -> Uninterrupted:
        """Hold SIGINT back."""
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._previous = handler
                signal.signal(signal.SIGINT, self._defer)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Deliver a SIGINT that was held back."""
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self.deliver()

    def deliver(self) -> None:
        """Call the handler of a SIGINT that was held back; it usually raises KeyboardInterrupt."""
        if self.pending and self._previous is not None:
            frame, self.pending, self._frame = self._frame, False, None
            self._previous(signal.SIGINT, frame)

    def _defer(self, _: int, frame: FrameType | None) -> None:
        self.pending, self._frame = True, frame


class Turns:
    """A fair lock. A waiting thread can leave it without having had its turn."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._queue: deque[object] = deque()
        self._owner: int | None = None
        self._process = SameProcess()
        self._ended_by: int | None = None  # the thread in which Python ends
        _all.add(self)

    def take(self, act: Callable[[], object], unless: Callable[[], bool] = lambda: False) -> None:
        """Run `act` when it is this thread's turn; return without it if `unless` becomes true."""
        self._process.check()
        if self._ended_by == threading.get_ident():
            raise TokenleapError("Python is ending: generate before its exit handlers run.")
        if self._owner == threading.get_ident():
            raise TokenleapError(
                "the engine was called from inside one of its own steps: a drafter, rule or "
                "callback may not generate with the model that is calling it."
            )
        with Uninterrupted() as uninterrupted:
            while not self._wait(unless, uninterrupted):
                if unless():
                    return
                uninterrupted.deliver()  # if the handler does not raise, go on waiting
            try:
                act()
            finally:
                with self._condition:
                    self._owner = None
                    self._condition.notify_all()

    def take_or_go_on(self, act: Callable[[], object]) -> None:
        """Run `act` when it is this thread's turn, or at once if it is that already."""
        if self._owner == threading.get_ident():
            act()
        else:
            self.take(act)

    def end(self) -> None:
        """Wait for the turn that runs, and give no other: daemon threads wait until the end."""
        if not self._process.here:  # the threads were lost, and what they held is still held
            return
        own, limit = threading.get_ident(), time.monotonic() + LAST_TURN_SECONDS
        with self._condition:
            self._ended_by = own
            while self._owner not in (None, own) and time.monotonic() < limit:
                self._condition.wait(POLL_SECONDS)

    def _wait(self, unless: Callable[[], bool], uninterrupted: Uninterrupted) -> bool:
        """Wait for this thread's turn; False if `unless` became true or a SIGINT came first."""
        ticket = object()
        with self._condition:
            self._queue.append(ticket)
            try:
                while not unless() and not uninterrupted.pending:
                    free = self._owner is None and self._ended_by is None
                    if free and self._queue[0] is ticket:
                        self._owner = threading.get_ident()
                        return True
                    self._condition.wait(POLL_SECONDS)
                return False
            finally:  # another signal may raise here: a ticket that stayed would stop all others
                self._queue.remove(ticket)
                self._condition.notify_all()


_all: weakref.WeakSet[Turns] = weakref.WeakSet()


@atexit.register
def _end() -> None:
    """Called when only daemon threads are left."""
    for turns in list(_all):
        turns.end()
