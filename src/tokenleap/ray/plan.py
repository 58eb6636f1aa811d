"""How many replicas there are, and how many cores each has: without Ray."""

from __future__ import annotations

import asyncio
import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeAlias

from starlette.types import Receive, Scope

from tokenleap.errors import ConfigError

__all__ = [
    "LOG",
    "Call",
    "Message",
    "PrefixMemory",
    "Replicas",
    "Share",
    "beside",
    "joined",
    "prompt_keys",
    "share_of",
]


@dataclass(frozen=True)
class Replicas:
    """How many replicas: a number, or a range in which load decides."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str | int) -> Replicas:
        """`"2"`, or `"1:4"`."""
        found = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", str(text).strip(), re.ASCII)
        if found is None:
            raise ConfigError(f"replicas: must be a number, or MIN:MAX such as 1:4, got {text}")
        least = int(found[1])
        most = int(found[2] or least)
        if least < 1:
            raise ConfigError(f"replicas: there must be at least 1, got {text}")
        if most < least:
            raise ConfigError(f"replicas: MIN is above MAX in {text}")
        return cls(least, most)

    def __str__(self) -> str:
        if self.scales:
            return f"{self.least} to {self.most} replicas"
        return "1 replica" if self.most == 1 else f"{self.most} replicas"

    @property
    def scales(self) -> bool:
        """Whether load decides."""
        return self.least < self.most


@dataclass(frozen=True)
class Share:
    """What Ray sets aside for a replica."""

    cores: int
    gpus: int = 0


def share_of(
    cores: Sequence[float],
    gpus: Sequence[float],
    replicas: Replicas,
    *,
    device: str,
    threads: int | None,
) -> Share:
    """An equal share of the cluster for each replica, of which none is spread over machines."""
    wanted = 1 if device.startswith("cuda") or (device == "auto" and sum(gpus) >= 1) else 0
    if wanted and sum(int(each) for each in gpus) < replicas.most:
        raise ConfigError(
            f"replicas: {replicas.most} need a GPU each, and there are "
            f"{sum(int(each) for each in gpus)}: take fewer replicas, or device cpu"
        )
    most = threads or max((int(each) for each in cores), default=0)
    for count in range(most, 0 if threads is None else threads - 1, -1):
        if sum(int(each // count) for each in cores) >= replicas.most:
            return Share(count, wanted)
    total = sum(int(each) for each in cores)
    need = "a core each" if threads is None else f"{threads} cores each"
    raise ConfigError(
        f"replicas: {replicas.most} need {need}, and there are {total}: take fewer"
        + ("" if threads is None else ", or fewer threads")
    )


def beside(share: Share, cores: Sequence[float]) -> float:
    """Cores that Ray sets aside for a replica, so that some machine has one for other work.

    A replica has as many threads as its share has cores all the same. They wait for nobody, but a
    task that reads a file would wait forever for a core of its own.
    """
    if share.cores > 1:
        return share.cores - 1
    return 0.5 if max(cores, default=0) >= 2 else 0


# Which replica has a prompt's beginning in its caches: the routing, without Ray.


BLOCK = 64
"""Characters of a block, whose hash covers all blocks before it, too."""
MOST_BLOCKS = 128
"""Blocks of a prompt that are looked at."""
MOST_KEYS = 65536
"""Keys that are remembered; the ones that were used last stay."""

_PARTS = {
    "/v1/chat/completions": ("tools", "messages"),
    "/v1/completions": ("prompt",),
    "/v1/responses": ("tools", "instructions", "input"),
}
"""The fields with the prompt, in the order in which the model reads them."""


def prompt_keys(path: str, body: bytes, caller: str = "") -> list[int]:
    """Hashes of the beginnings of a request's prompt, from the shortest to the whole prompt.

    Prompts that begin with the same blocks of characters have the same first keys, if caches share
    them: the requests have the same API key and the same salt.

    Returns:
        No keys where there is no prompt, and for bodies that the endpoint will refuse.
    """
    parts = _PARTS.get(path)
    if parts is None:
        return []
    try:
        fields = json.loads(body)
        if not isinstance(fields, dict):
            return []
        text = "".join(_text(fields[part]) for part in parts if fields.get(part))
        salt = f"{caller} {fields.get('cache_salt') or ''}"
    except (ValueError, RecursionError):  # writing may go deeper than reading
        return []
    text = text[: BLOCK * MOST_BLOCKS]
    keys, before = list[int](), blake2b(salt.encode(errors="replace"), digest_size=8).digest()
    for start in range(0, len(text), BLOCK):
        piece = text[start : start + BLOCK].encode(errors="replace")
        before = blake2b(before + piece, digest_size=8).digest()
        keys.append(int.from_bytes(before))
    return keys


def _text(value: Any) -> str:
    """Without the closing bracket of a list: a conversation that goes on begins the same."""
    return value if isinstance(value, str) else json.dumps(value)[:-1]


class PrefixMemory:
    """Which replicas have seen which beginnings of prompts."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, set[str]] = OrderedDict()

    def ranked(self, keys: Sequence[int], loads: Mapping[str, int]) -> list[str]:
        """The replicas for a prompt, the best one first.

        That is the one that has seen most of the prompt, unless it is busy: it has more than twice
        as many requests as the one with the fewest, and two more. Replicas that have seen equally
        much are in the order of their loads, and then of a hash, so that all who route alike
        choose alike.
        """
        known = dict.fromkeys(loads, 0)
        left = set(loads)
        for key in keys:
            left &= self._seen.get(key, set())
            if not left:
                break
            for replica in left:
                known[replica] += 1
        first = keys[0] if keys else 0
        busy = 2 * min(loads.values(), default=0) + 2

        def place(replica: str) -> tuple[bool, int, int, bytes]:
            tie = blake2b(f"{first} {replica}".encode(), digest_size=8).digest()
            return loads[replica] > busy, -known[replica], loads[replica], tie

        return sorted(loads, key=place)

    def saw(self, keys: Sequence[int], replica: str) -> None:
        """Remember that this replica has computed a prompt."""
        for key in keys:
            self._seen.setdefault(key, set()).add(replica)
            self._seen.move_to_end(key)
        while len(self._seen) > MOST_KEYS:
            self._seen.popitem(last=False)

    def keep(self, replicas: set[str]) -> None:
        """Forget all other replicas."""
        for key in [key for key, seen in self._seen.items() if seen - replicas]:
            self._seen[key] &= replicas
            if not self._seen[key]:
                del self._seen[key]


# What goes between the front and a replica: a request as a value, and messages of ASGI.


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


# One page of metrics of several replicas.


def joined(pages: Iterable[str]) -> str:
    """Pages in Prometheus' text format as one: each metric once, with the samples of all pages.

    Samples have a label that tells the pages apart, so nothing is added up.
    """
    heads: dict[str, str] = {}  # by the name of the metric
    samples: dict[str, list[str]] = {}
    for page in pages:
        for metric in page.split("# HELP ")[1:]:
            lines = metric.splitlines(keepends=True)  # HELP, TYPE, samples
            name = metric.split(" ", 1)[0]
            heads[name] = "# HELP " + "".join(lines[:2])
            samples.setdefault(name, []).extend(lines[2:])
    return "".join(heads[name] + "".join(samples[name]) for name in heads)
