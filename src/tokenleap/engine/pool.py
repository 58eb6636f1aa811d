"""`Pool`: threads that the process does not wait for when it ends.

Python joins the threads of a `ThreadPoolExecutor` at exit. One that compiles a large grammar would
outlast a server's time to shut down.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import TypeVar

from tokenleap.engine.turns import SameProcess
from tokenleap.errors import TokenleapError

__all__ = ["Pool", "closed_error"]

T = TypeVar("T")


class Pool:
    """Daemon threads that run what is submitted: one call of each client in turn.

    Args:
        threads: how many.
        name: what their names begin with.
    """

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
            act: the call.
            client: whose it is. The calls of a client run in order, and do not wait for all those
                of another one.

        Raises:
            TokenleapError: the pool belongs to another process, or is closed. The future of a call
                that had not begun by then has this error, too.
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
    """What is raised for whatever comes after the end."""
    return TokenleapError("the engine was closed: make a new AsyncLLM.")
