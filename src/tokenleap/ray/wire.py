"""What goes between the front and a replica: a request as a value, and messages of ASGI."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from starlette.types import Receive, Scope

__all__ = ["LOG", "Call", "Message"]

Message: TypeAlias = MutableMapping[str, Any]

LOG = "tokenleap.log"
"""The type of a message of a replica with the fields for the log line of the request."""

_FIELDS = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string"),
    *("root_path", "headers", "client", "server"),
)


@dataclass(frozen=True)
class Call:
    """A request that has come in completely.

    Args:
        scope: what ASGI says of it, without what belongs to a process.
        body: its body.
        caller: identifies its API key; empty without keys.
    """

    scope: dict[str, Any]
    body: bytes
    caller: str = ""

    @classmethod
    def of(cls, scope: Scope, body: bytes) -> Call:
        """A request that a server has read."""
        caller = scope.get("state", {}).get("caller", "")
        return cls({name: scope[name] for name in _FIELDS if name in scope}, body, caller)

    def as_scope(self) -> Scope:
        """The scope for an app."""
        return {**self.scope, "state": {"caller": self.caller}}

    def receiver(self) -> Receive:
        """Brings an app the body, and then nothing: a client that goes away ends the call."""
        messages = [{"type": "http.request", "body": self.body, "more_body": False}]

        async def receive() -> Message:
            if not messages:
                await asyncio.Event().wait()
            return messages.pop()

        return receive
