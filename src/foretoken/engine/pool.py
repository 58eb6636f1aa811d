"""`Pool`: threads that the process does not wait for when it ends.

Python joins the threads of a `ThreadPoolExecutor` at exit. One that compiles a large grammar would
outlast a server's time to shut down.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TypeVar

from foretoken.errors import ForetokenError

__all__ = ["Pool", "closed_error"]

T = TypeVar("T")


class Pool:
    """Daemon threads that run what is submitted, in order.

    Args:
        threads: how many.
        name: what their names begin with.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()  # nothing is queued behind the end
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True)
            for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, act: Callable[[], T]) -> Future[T]:
        """Queue a call.

        Raises:
            ForetokenError: the pool is closed. The future of a call that had not begun by then has
                this error, too.
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
            except BaseException as error:  # whoever waits for it decides
                future.set_exception(error)

        with self._lock:
            if self._closed:
                raise closed_error()
            self._queue.put(run)
        return future

    def close(self) -> None:
        """Refuse all that has not begun, and return without waiting for what runs."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            while (waiting := self._queue.get_nowait()) is not None:
                waiting()
        except Empty:
            pass
        for _ in self._threads:
            self._queue.put(None)

    def _run(self) -> None:
        while (act := self._queue.get()) is not None:
            act()
            del act  # and what it holds, while this waits for the next


def closed_error() -> ForetokenError:
    """What is raised for whatever comes after the end."""
    return ForetokenError("the engine was closed: make a new AsyncLLM.")
