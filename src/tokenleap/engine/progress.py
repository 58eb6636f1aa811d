"""The progress bar of `LLM.generate`, as vLLM's: prompts done, and tokens per second."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from tokenleap.engine.jobs import Job
from tokenleap.engine.runs import AfterStep

__all__ = ["UseTqdm", "progress_of"]

UseTqdm: TypeAlias = bool | Callable[..., Any] | None
"""Whether there is a bar, or what makes it (a class with tqdm's interface); see `LLM.generate`."""

AFTER_SECONDS = 1.0
"""A bar that nobody asked for comes so late, so that short calls show none."""

EVERY_SECONDS = 0.1
"""Between two updates."""


@contextmanager
def progress_of(jobs: Sequence[Job], wanted: UseTqdm) -> Iterator[AfterStep | None]:
    """Show the progress of jobs on stderr."""
    if wanted is None:
        shown = sum(len(job.requests) for job in jobs) > 1 and _somebody_looks()
    else:
        shown = wanted is not False and bool(jobs)
    if not shown:
        yield None
        return
    bar = _Bar(jobs, wanted if callable(wanted) else None, 0 if wanted else AFTER_SECONDS)
    try:
        yield bar.update
    finally:
        bar.close()


@dataclass(frozen=True)
class _Tally:
    """Tokens of prompts that have been read, tokens of outputs, and jobs that have ended."""

    read: int = 0
    written: int = 0
    done: int = 0

    @staticmethod
    def of(job: Job) -> _Tally:
        """Those of one job."""
        begun = [r for r in job.requests if r.metrics.generated_tokens or r.finished]
        read = sum(len(request.input_ids) for request in begun)
        written = sum(request.metrics.generated_tokens for request in begun)
        return _Tally(read, written, int(job.finished))

    def __add__(self, other: _Tally) -> _Tally:
        return _Tally(self.read + other.read, self.written + other.written, self.done + other.done)

    def __sub__(self, other: _Tally) -> _Tally:
        return self + _Tally(-other.read, -other.written, -other.done)


class _Bar:
    """A bar over the jobs of one call.

    Args:
        make: makes the bar; None takes tqdm's own, for terminals or notebooks.
    """

    def __init__(self, jobs: Sequence[Job], make: Callable[..., Any] | None, delay: float) -> None:
        self._total = len(jobs)
        self._make = make
        self._bar: Any = None
        self._changed: dict[int, Job] = {}  # since the last look at them
        self._known: dict[int, _Tally] = {}  # of each job that has begun
        self._sum = _Tally()
        self._done = 0
        self._began = time.perf_counter()
        self._next = self._began + delay
        if not delay:
            self._bar = self._made()

    def update(self, changed: Sequence[Job]) -> None:
        """Show where the jobs are, unless that was shown just now."""
        self._changed.update((id(job), job) for job in changed)
        if time.perf_counter() >= self._next:
            self._show()
            self._next = time.perf_counter() + EVERY_SECONDS

    def close(self) -> None:
        """Show the end, and leave the bar where it is."""
        if self._bar is not None:
            self._show()
            self._bar.close()

    def _show(self) -> None:
        if self._bar is None:
            self._bar = self._made()
        self._count()
        self._bar.set_postfix_str(self._speeds(), refresh=False)
        self._bar.update(self._sum.done - self._done)
        self._bar.refresh()
        self._done = self._sum.done

    def _count(self) -> None:
        """Bring the sum over all jobs up to date; those that have not changed cost nothing."""
        for key, job in self._changed.items():
            before, now = self._known.get(key, _Tally()), _Tally.of(job)
            self._known[key] = now
            self._sum += now - before
        self._changed = {}

    def _made(self) -> Any:
        if self._make is None:
            from tqdm.auto import tqdm

            self._make = tqdm
        return self._make(
            total=self._total,
            desc="Processed prompts",
            unit=" prompts",
            dynamic_ncols=True,
            mininterval=math.inf,  # drawn by `refresh` alone
        )

    def _speeds(self) -> str:
        """Tokens of prompts that have been read, and of outputs, per second."""
        seconds = max(time.perf_counter() - self._began, 1e-9)
        read, written = self._sum.read / seconds, self._sum.written / seconds
        return f"input: {read:.1f} tokens/s, output: {written:.1f} tokens/s"


def _somebody_looks() -> bool:
    """Whether stderr is a terminal, or Python runs in a notebook."""
    interactive = sys.modules.get("IPython")
    shell = None if interactive is None else interactive.get_ipython()
    if type(shell).__name__ == "ZMQInteractiveShell":
        return True
    return sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()
