"""A soak: clients that leave, malformed bodies and faults leave nothing behind, and no answer is
other than that of the request alone.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable

import pytest

from foretoken.runtime.attention import KEY_BLOCK
from tests.serve.soak import ACTIONS, COMPLETIONS, MALFORMED, Soak, faults, live_objects
from tests.serve.support import Served, served, tiny_llm

CLIENTS = 12
HELD = 10
"""Objects of a kind that threads and tasks may hold of what they did last."""
KEPT_PER_REQUEST = 0.1
"""Objects per request that may be kept: caches have limits, and a leak has one object or more."""


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that has to come; the time limit of tests ends it otherwise."""
    while not condition():
        time.sleep(0.005)


def settled(server: Served) -> None:
    """Wait until nothing runs and all connections are closed."""
    until(lambda: server.state.open_sequences == 0)
    until(lambda: not server.llm.engine._scheduler.busy)
    until(lambda: not server.server.server_state.connections)
    until(lambda: not server.server.server_state.tasks)


def grown(before: Counter[str], after: Counter[str], least: int) -> dict[str, int]:
    """By how many objects each kind has grown, if by so many; a memory of drafters may."""
    more = {name: count - before[name] for name, count in after.items()}
    return {
        name: count for name, count in more.items() if count >= least and "suffix_trie" not in name
    }


def soaked(first: int, second: int) -> int:
    """Two soaks of so many requests; returns how many objects the second one has left."""
    llm = tiny_llm(max_num_seqs=5, kv_cache_memory=f"{KV_CELLS * cell_bytes()}")
    with served(llm, max_waiting=6, log_requests=False) as server:
        soak = Soak(server, first, CLIENTS)
        server.http.close()
        with faults(server):
            soak.run(first)
            settled(server)
            kinds, objects, files = live_objects()
            soak.run(second)
            settled(server)
            found, now, open_files = live_objects()
        assert set(soak.done) >= set(ACTIONS)
        assert soak.done["refused"]
        counted = server.state.metrics.exposition()[0].decode()
        for name in ("vllm:num_preemptions_total", "foretoken:drafter_failures_total"):
            assert not re.search(rf"^{name}.* 0\.0$", counted, re.MULTILINE), name
        assert grown(kinds, found, HELD) == {}
        assert open_files <= files
    return now - objects


KV_CELLS = 3 * KEY_BLOCK
"""Tokens that fit into the KV memory: of three requests, or of one that is longer than a block."""


def cell_bytes() -> int:
    """Bytes of the KV of one token."""
    return tiny_llm().engine.target.cell_bytes


@pytest.mark.parametrize("content", MALFORMED, ids=range(len(MALFORMED)))
def test_what_is_refused_is_not_kept(server: Served, content: bytes) -> None:
    """An error's traceback has the request; cycles through pydantic's errors would be for ever."""
    before, _, _ = live_objects()
    for _ in range(HELD):
        assert server.http.post(COMPLETIONS, content=content).status_code >= 400
    after, _, _ = live_objects()
    assert grown(before, after, HELD - 2) == {}


def test_a_hundred_requests() -> None:
    soaked(60, 40)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_five_thousand_requests() -> None:
    assert soaked(1000, 4000) < 4000 * KEPT_PER_REQUEST
