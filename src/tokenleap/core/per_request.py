"""State per request: made when it is first read, and dropped in one place when the request ends."""

from __future__ import annotations

from collections import defaultdict
from typing import TypeVar

__all__ = ["PerRequest", "drop_request"]

_State = TypeVar("_State")


class PerRequest(defaultdict[int, _State]):
    """What is kept of each request, by `Request.key`.

    `PerRequest(History)` makes a `History` when the state of a request is first read;
    `PerRequest()` has only what was set.
    """


def drop_request(holder: object, key: int) -> None:
    """Drop the state of a request from all attributes of an object that are `PerRequest`."""
    for held in vars(holder).values():
        if isinstance(held, PerRequest):
            held.pop(key, None)
