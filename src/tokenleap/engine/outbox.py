"""`Outbox`: which jobs have new tokens or ended outputs, without looking at those that wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import partial
from itertools import count

from tokenleap.engine.jobs import Job

__all__ = ["Outbox"]


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
