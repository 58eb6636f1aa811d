"""Which replica has a prompt's beginning in its caches: the routing, without Ray."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

__all__ = ["PrefixMemory", "prompt_keys"]

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

    Args:
        path: the endpoint.
        body: the request's body.
        caller: identifies its API key; empty without keys.

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

        Args:
            keys: of `prompt_keys`.
            loads: the replicas, with their running requests.
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
