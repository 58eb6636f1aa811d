"""State per request: made when it is first read, and dropped in one place when the request ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

_State = TypeVar("_State")


class PerRequest(defaultdict[int, _State]):
    """What is kept of each request, by `Request.key`.

    `PerRequest(History)` makes a `History` when the state of a request is first read;
    `PerRequest()` has only what was set.
    """

    def made(self, key: int, make: Callable[[], _State]) -> _State:
        """The state of a request, made like this if it has none."""
        if key not in self:
            self[key] = make()
        return self[key]


def drop_request(holder: object, key: int) -> None:
    """Drop the state of a request from all attributes of an object that are `PerRequest`."""
    for held in vars(holder).values():
        if isinstance(held, PerRequest):
            held.pop(key, None)
