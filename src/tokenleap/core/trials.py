"""Asks a process of its own whether a grammar can be used (`trial.py` is its program).

llguidance recurses where a grammar does: enough rules that lead to one another overflow its stack,
which ends the process. So a grammar is compiled here only after a trial there, under limits of
time, memory and stack.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from tokenleap.core import trial
from tokenleap.errors import ConfigError

__all__ = ["what_is_wrong"]

_PROCESSES = 2
"""Most trials at a time. One is enough for ordinary forms, and a slow one does not hold them up."""
_PATIENCE = 20.0
"""Seconds after which a trial ends even where it got too little CPU to reach its own limit."""
_NO_TRIAL = "the process that tries out forms did not start"


@lru_cache(maxsize=128)
def what_is_wrong(grammar: str) -> str | None:
    """Why a grammar cannot be used, in one line; None if it can. Answers are kept.

    Args:
        grammar: in llguidance's own format.

    Raises:
        ConfigError: the trial did not come about.
    """
    if not sys.executable or getattr(sys, "frozen", False):  # no Python to start
        return trial.wrong(grammar)
    return _trials.ask(grammar)


class _Process:
    """A process that tries out one grammar after the other."""

    def __init__(self) -> None:
        self._late = False
        path = os.pathsep.join(each for each in sys.path if each)
        # An arena for each thread would not fit into the limit of memory, and be tried in vain.
        self._popen = subprocess.Popen(
            [sys.executable, "-P", str(Path(trial.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "MALLOC_ARENA_MAX": "1"},
            start_new_session=True,
        )
        if self._answer() is None:
            self.end()
            raise ConfigError(f"{_NO_TRIAL}: try again.")

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def ask(self, grammar: str) -> str | None:
        """As `what_is_wrong`; the process may be dead afterwards."""
        assert self._popen.stdin is not None
        with suppress(OSError):  # it has ended; then there is no answer
            self._popen.stdin.write(json.dumps(grammar).encode() + b"\n")
            self._popen.stdin.flush()
        answer = self._answer()
        if answer is not None:
            found: str | None = json.loads(answer)
            return found
        code = self._popen.wait()
        self.end()
        if code == -getattr(signal, "SIGXCPU", 0):
            return f"too complex: {trial.TOO_LONG}"
        if self._late:  # perhaps only because the machine is busy
            raise ConfigError(f"too complex: it took more than {_PATIENCE:g} s to try it out.")
        return (
            "too complex: llguidance overflows its stack, or needs more than "
            f"{trial.MAX_MEGABYTES} MB: nest and chain less"
        )

    def _answer(self) -> bytes | None:
        """The next line; None if there is none."""
        assert self._popen.stdout is not None
        killer = threading.Timer(_PATIENCE, self._kill)
        killer.daemon = True
        killer.start()
        line = self._popen.stdout.readline()
        killer.cancel()
        return line if line.endswith(b"\n") else None

    def _kill(self) -> None:
        self._late = True
        self._popen.kill()

    def end(self) -> None:
        """End it; nothing happens if it has ended."""
        self._popen.kill()
        self._popen.wait()
        self.forget()

    def forget(self) -> None:
        """Close the pipes: a process without input ends by itself."""
        for pipe in (self._popen.stdin, self._popen.stdout):
            assert pipe is not None
            with suppress(OSError):  # what was written and not read
                pipe.close()
        self._popen.returncode = self._popen.returncode or 0  # no warning that it still runs


class _Trials:
    """The processes that are there; more are started when they are needed."""

    def __init__(self) -> None:
        self._places = threading.Semaphore(_PROCESSES)
        self._idle: list[_Process] = []

    def ask(self, grammar: str) -> str | None:
        with self._places:
            process = self._taken()
            try:
                answer = process.ask(grammar)
            except BaseException:  # its answer may still come
                process.end()
                raise
            if process.alive:
                self._idle.append(process)
            return answer

    def _taken(self) -> _Process:
        while self._idle:
            process = self._idle.pop()
            if process.alive:
                return process
            process.forget()
        return _Process()

    def end(self) -> None:
        while self._idle:
            self._idle.pop().end()

    def forget(self) -> None:
        """In a fork: the processes are the parent's."""
        while self._idle:
            self._idle.pop().forget()


_trials = _Trials()
atexit.register(lambda: _trials.end())


def _forked() -> None:
    global _trials
    _trials.forget()
    _trials = _Trials()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
