"""A soak: clients that leave, malformed bodies and faults leave nothing behind, and no answer is
other than that of the request alone.
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from pathlib import Path

import httpx2
import psutil
import pytest

from tests.serve.processes import process
from tests.serve.soak import ACTIONS, COMPLETIONS, MALFORMED, Soak, faults, live_objects
from tests.serve.support import MODEL, Served, served, tiny_llm, tiny_parts, until
from tokenleap.runtime.attention import KEY_BLOCK

CLIENTS = 12
MOST_GROWTH = 32 * 2**20
"""Bytes by which the memory of a process may grow in the second soak: by half of that at once, when
several threads hold long texts for the first time. A hostile request has up to 7 MB, and comes 400
times."""
MOST_SECONDS = 2.0
"""Seconds that an answer of a few tokens may take beside all the others."""
HELD = 10
"""Objects of a kind that threads and tasks may hold of what they did last."""
KEPT_PER_REQUEST = 0.1
"""Objects per request that may be kept: caches have limits, and a leak has one object or more."""


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


PREEMPTED = "vllm:num_preemptions_total"


def never(server: Served, name: str) -> bool:
    """Whether a counter is still 0."""
    counted = server.state.metrics.exposition()[0].decode()
    return re.search(rf"^{name}.* 0\.0$", counted, re.MULTILINE) is not None


def soaked(first: int, second: int, caplog: pytest.LogCaptureFixture) -> int:
    """Two soaks of so many requests; returns how many objects the second one has left."""
    llm = tiny_llm(max_num_seqs=5, kv_cache_memory=f"{KV_CELLS * cell_bytes()}")
    with served(llm, max_waiting=6, log_requests=False) as server:
        soak = Soak(server, first, CLIENTS)
        server.http.close()
        with faults(server):
            for _ in range(5):  # until requests met that do not fit into memory together
                soak.run(first)
                settled(server)
                if not never(server, PREEMPTED):
                    break
            caplog.clear()  # pytest keeps what is logged
            kinds, objects, files = live_objects()
            soak.run(second)
            settled(server)
            caplog.clear()
            found, now, open_files = live_objects()
        assert set(soak.done) >= set(ACTIONS)
        assert soak.done["refused"]
        for name in (PREEMPTED, "tokenleap:drafter_failures_total"):
            assert not never(server, name), name
        assert grown(kinds, found, HELD) == {}
        assert open_files <= files
    return now - objects


KV_CELLS = 3 * KEY_BLOCK
"""Tokens that fit into the KV memory: of three requests, or of one that is longer than a block."""


def cell_bytes() -> int:
    """Bytes of the KV of one token."""
    return tiny_llm().engine.target.cell_bytes


def test_what_is_refused_is_not_kept(server: Served) -> None:
    """An error's traceback has the request; cycles through pydantic's errors would be for ever."""
    before, _, _ = live_objects()
    for content in MALFORMED:
        for _ in range(HELD):
            assert server.http.post(COMPLETIONS, content=content).status_code >= 400
    after, _, _ = live_objects()
    assert grown(before, after, HELD - 2) == {}


def test_some_requests(caplog: pytest.LogCaptureFixture) -> None:
    soaked(40, 30, caplog)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_five_thousand_requests(caplog: pytest.LogCaptureFixture) -> None:
    assert soaked(1000, 4000, caplog) < 4000 * KEPT_PER_REQUEST


# A server as a process


class Remote:
    """`tokenleap serve` in a process of its own, and what it holds."""

    def __init__(self, pid: int, url: str) -> None:
        self.url, self.port = url, int(url.rpartition(":")[2])
        self.http = httpx2.Client(base_url=url, timeout=240)
        self._process = psutil.Process(pid)

    def settled(self) -> tuple[int, int]:
        """Bytes of memory and open files, when nothing runs and no client is connected."""
        self.http.close()
        until(lambda: not self._connected())
        with httpx2.Client(base_url=self.url, timeout=240) as client:
            until(lambda: self._outputs(client) == 0)
        until(lambda: not self._connected())
        return self._process.memory_info().rss, self._process.num_fds()

    def _connected(self) -> int:
        found = self._process.net_connections("tcp")
        return sum(each.status == psutil.CONN_ESTABLISHED for each in found)

    def _outputs(self, client: httpx2.Client) -> float:
        found = client.get("/metrics").text
        values = re.findall(r"^vllm:num_requests_(?:running|waiting).* (\S+)$", found, re.MULTILINE)
        assert len(values) == 2
        return sum(map(float, values))


def soaked_process(folder: Path, first: int, second: int) -> tuple[int, int, list[float]]:
    """Two soaks of a process.

    Returns:
        By how many bytes and files it has grown in the second one, and the seconds of its answers.
    """
    model, tokenizer = tiny_parts()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    limits = ("--max-num-seqs", 5, "--max-waiting", 6)
    more = ("--served-model-name", MODEL, "--no-log-requests", "--kv-cache-memory", "2MiB")
    actions = {name: weight for name, weight in ACTIONS.items() if name != "fault"}
    with process(folder, *limits, *more) as (program, url):
        server = Remote(program.pid, url)
        soak = Soak(server, first, CLIENTS, actions)
        soak.run(first)
        memory_before, files_before = server.settled()
        soak.seconds.clear()
        soak.run(second)
        memory_after, files_after = server.settled()
        assert set(soak.done) >= set(actions)
        assert soak.drafted
        with httpx2.Client(base_url=url, timeout=240) as client:  # every place is free
            body = {"model": MODEL, "prompt": ["a"] * 11, "max_tokens": 2}
            assert client.post(COMPLETIONS, json=body).status_code == 200
        program.send_signal(signal.SIGTERM)
        assert program.wait() == 0
        assert program.stderr is not None
        assert b"Traceback" not in program.stderr.read()
    return memory_after - memory_before, files_after - files_before, sorted(soak.seconds)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_process(tmp_path: Path) -> None:
    """Ten thousand requests: no neighbour of a hostile one is wrong, late or out of memory."""
    grown, files, seconds = soaked_process(tmp_path, 500, 9500)
    median, slowest = seconds[len(seconds) // 2], seconds[-1]
    print(f"\nThe process has grown by {grown / 2**20:.1f} MiB and {files} files.")
    print(f"{len(seconds)} answers took {median:.3f} s in the median, {slowest:.2f} s at most.")
    assert files <= 0
    assert grown < MOST_GROWTH
    assert slowest < MOST_SECONDS
