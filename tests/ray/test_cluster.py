"""Two replicas of a tiny model on a Ray cluster of this machine: slow, and only with Ray.

pip install -c constraints.txt -e '.[ray]'; pytest -m slow tests/ray
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cli.conftest import save_tiny
from tests.cli.terminal import environment
from tokenleap import LLM, SamplingParams

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(
        find_spec("ray") is None, reason="Ray is not installed: see this file's head"
    ),
]

PATIENCE = 600.0
"""Seconds after which something hangs: Ray starts a dozen processes."""
BODY: dict[str, Any] = {"model": "tiny", "temperature": 0}
ENDLESS = BODY | {"prompt": "x", "max_tokens": 7000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return LLM(tiny)


@dataclass
class Cluster:
    """A running `tokenleap serve --replicas`."""

    process: subprocess.Popen[str]
    url: str

    def replicas(self) -> list[psutil.Process]:
        """The processes with an engine."""
        found = []
        for each in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if "ServeReplica" in " ".join(each.cmdline()):
                    found.append(each)
            except psutil.Error:  # it has just ended
                continue
        return found

    def metric(self, name: str) -> dict[str, float]:
        """The values of a metric, by replica."""
        found: dict[str, float] = defaultdict(float)
        text = httpx2.get(f"{self.url}/metrics", timeout=PATIENCE).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name:
                    found[sample.labels["engine"]] += sample.value
        return dict(found)

    def running(self) -> float:
        """Outputs that are generated now."""
        return sum(self.metric("vllm:num_requests_running").values())


@contextmanager
def serving(tiny: Path, *options: object) -> Iterator[Cluster]:
    arguments = ["serve", tiny, "--served-model-name", "tiny", "--port", 0, "--replicas", 2]
    command = [sys.executable, "-m", "tokenleap", *map(str, [*arguments, *options])]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        try:
            assert process.stderr is not None
            read = ""
            while (found := re.search(r"at (http://\S+)/v1; Ctrl-C", read)) is None:
                line = process.stderr.readline()
                assert line, read
                read += line
            yield Cluster(process, found[1])
        finally:
            process.kill()


@pytest.fixture(scope="module")
def cluster(tiny: Path) -> Iterator[Cluster]:
    with serving(tiny, "--max-model-len", 8000, "--no-log-requests") as running:
        yield running


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not true():
            await asyncio.sleep(0.1)


def test_a_stream_passes_through_and_a_client_that_goes_away_frees_its_request(
    cluster: Cluster,
) -> None:
    with (
        httpx2.Client(base_url=cluster.url, timeout=PATIENCE) as client,
        client.stream("POST", "/v1/completions", json=ENDLESS) as response,
    ):
        lines = response.iter_lines()  # kept: without it, the response would be closed
        first = next(lines)
        assert json.loads(first.removeprefix("data: "))["choices"][0]["text"]
        asyncio.run(until(lambda: cluster.running() == 1))
    asyncio.run(until(lambda: not cluster.running()))
    assert sum(cluster.metric("vllm:generation_tokens_total").values()) < 7000


def test_a_stream_is_stopped_where_it_is_generated(cluster: Cluster) -> None:
    with (
        httpx2.Client(base_url=cluster.url, timeout=PATIENCE) as client,
        client.stream("POST", "/v1/completions", json=ENDLESS) as response,
    ):
        lines = response.iter_lines()
        name = json.loads(next(lines).removeprefix("data: "))["id"]
        with httpx2.Client(base_url=cluster.url, timeout=PATIENCE) as other:
            paths = [f"/v1/completions/{each}/cancel" for each in ("nothing", name)]
            assert [other.post(path).status_code for path in paths] == [404, 204]
        *_, last, end = [line for line in lines if line]
        assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"
        assert end == "data: [DONE]"


def test_prompts_with_the_same_beginning_go_to_the_same_replica(cluster: Cluster) -> None:
    def completed(prompt: str) -> str:
        before = cluster.metric("vllm:request_success_total")
        body = BODY | {"prompt": prompt, "max_tokens": 2}
        answer = httpx2.post(f"{cluster.url}/v1/completions", json=body, timeout=PATIENCE)
        assert answer.status_code == 200
        after = cluster.metric("vllm:request_success_total")
        (grown,) = [name for name, value in after.items() if value > before.get(name, 0)]
        return grown

    manual = "the manual of a machine " * 8
    assert len({completed(manual + end) for end in ("a", "b", "c", "d")}) == 1
    # Each of the others goes to one of two by chance: with 20, all to one in 2 of a million runs.
    assert len({completed(f"{number} is a number") for number in range(20)}) == 2


def test_a_wrong_request_is_answered_as_without_replicas(cluster: Cluster) -> None:
    answer = httpx2.post(f"{cluster.url}/v1/completions", json=BODY | {"prompt": "x", "top_q": 1})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "top_q"
    unknown = httpx2.get(f"{cluster.url}/v1/models/other", timeout=PATIENCE)
    assert unknown.json()["error"]["code"] == "model_not_found"


def test_kill_9_of_a_replica_while_100_requests_run(cluster: Cluster, llm: LLM) -> None:
    """Whole answers are made again. Streams end as they should, or with an error."""
    prompts = [f"number {number} of a hundred" for number in range(100)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    expected = [output.text for output in llm.generate(list(prompts), params)]

    async def asked(client: httpx2.AsyncClient, number: int, done: list[int]) -> tuple[str, str]:
        """The text of the answer, and how it ended."""
        body = BODY | {"prompt": prompts[number], "max_tokens": 40, "ignore_eos": True}
        if number % 2:
            answer = await client.post("/v1/completions", json=body)
            done.append(number)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["text"], "whole"
        text = ""
        sent = body | {"stream": True}
        async with client.stream("POST", "/v1/completions", json=sent) as response:
            async for line in response.aiter_lines():
                piece = line.removeprefix("data: ")
                if piece == "[DONE]":
                    done.append(number)
                    return text, "whole"
                if piece:
                    event = json.loads(piece)
                    if "error" in event:
                        return text, event["error"]["code"]
                    text += event["choices"][0]["text"]
        return text, "nothing"

    async def all_of_them() -> list[tuple[str, str]]:
        limits = httpx2.Limits(max_connections=100)
        async with httpx2.AsyncClient(
            base_url=cluster.url, timeout=PATIENCE, limits=limits
        ) as client:
            done: list[int] = []
            tasks = [asyncio.ensure_future(asked(client, n, done)) for n in range(100)]
            await until(lambda: len(done) >= 5)
            victim, *_ = cluster.replicas()
            victim.kill()
            return await asyncio.gather(*tasks)

    found = asyncio.run(all_of_them())
    for (text, end), right in zip(found, expected, strict=True):
        assert end in ("whole", "replica_lost")
        assert text == right if end == "whole" else right.startswith(text)
    assert all(end == "whole" for _, end in found[1::2])
    asyncio.run(until(lambda: len(cluster.metric("vllm:num_requests_running")) == 2))  # replaced
    assert httpx2.get(f"{cluster.url}/health", timeout=PATIENCE).status_code == 200


def test_sigterm_lets_running_requests_end(tiny: Path) -> None:
    options = ("--max-model-len", 8000, "--shutdown-timeout", 300, "--log-format", "json")
    with serving(tiny, *options, "--api-key", "k") as running:
        assert httpx2.post(f"{running.url}/v1/completions", json=BODY).status_code == 401
        key = {"Authorization": "Bearer k"}
        body = ENDLESS | {"max_tokens": 1000}
        with (
            httpx2.Client(base_url=running.url, headers=key, timeout=PATIENCE) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            pieces = response.iter_text()
            text = next(pieces)
            running.process.send_signal(signal.SIGTERM)
            text += "".join(pieces)
        assert text.count('"finish_reason":"length"') == 1
        assert text.endswith("data: [DONE]\n\n")
        assert running.process.wait(PATIENCE) == 0
        assert running.process.stderr is not None
        lines = [line for line in running.process.stderr.read().splitlines() if line[0] == "{"]
        assert [json.loads(line)["status"] for line in lines] == [401, 200]
        assert json.loads(lines[1])["completion_tokens"] == 1000


def test_sigterm_cuts_off_what_takes_longer(tiny: Path) -> None:
    options = ("--max-model-len", 8000, "--shutdown-timeout", 0.5, "--no-log-requests")
    with serving(tiny, *options) as running:
        with (
            httpx2.Client(base_url=running.url, timeout=PATIENCE) as client,
            client.stream("POST", "/v1/completions", json=ENDLESS) as response,
        ):
            pieces = response.iter_text()
            text = next(pieces)
            running.process.send_signal(signal.SIGTERM)
            text += "".join(pieces)
        assert "shutting down" in text
        assert running.process.wait(PATIENCE) == 0


def tokenleap(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tokenleap", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment(), timeout=PATIENCE
    )


def test_what_replicas_cannot_load_is_told_in_a_line(tiny: Path) -> None:
    few = ("--port", 0, "--replicas", 1, "--kv-cache-memory", "1KiB")
    done = tokenleap("serve", tiny, *few)
    assert done.returncode in (1, 2)
    assert "--kv-cache-memory" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_more_replicas_than_cores(tiny: Path) -> None:
    done = tokenleap("serve", tiny, "--port", 0, "--replicas", 5000)
    assert done.returncode == 2
    assert "--replicas: 5000 need a core each" in done.stderr.splitlines()[-1]


# Many prompts


def without_times(file: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [{name: each for name, each in line.items() if name != "metrics"} for line in lines]


def test_generate_writes_what_it_writes_without_replicas(tiny: Path, tmp_path: Path) -> None:
    """In the same order, also if a run was interrupted."""
    prompts, alone, both = (tmp_path / name for name in ("in.jsonl", "alone.jsonl", "both.jsonl"))
    lines = [{"prompt": f"line {n}", "max_tokens": 3 + n % 5, "id": n} for n in range(30)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ("generate", "-m", tiny, "--prompts-file", prompts, "--output")
    assert tokenleap(*command, alone).returncode == 0
    written = alone.read_text().splitlines(keepends=True)
    both.write_text("".join(written[:11]) + written[11][:9])  # as a kill may leave it
    done = tokenleap(*command, both, "--resume", "--replicas", 2)
    assert done.returncode == 0, done.stderr
    assert without_times(both) == without_times(alone)
    refused = tokenleap(*command, both, "--resume", "--replicas", 2, "--no-chat")
    assert refused.returncode == 1
    assert "of another prompt, or of other options" in refused.stderr


STAGE = """
import json, os, signal, sys
from functools import partial
from pathlib import Path
import ray
import tokenleap.ray
from tokenleap.core.params import SamplingParams
from tokenleap.lines import Shape
from tokenleap.ray import offline
from tokenleap.ray.cluster import cluster, share
from tokenleap.ray.cluster import Replicas

tiny, marker, out = sys.argv[1:]
params = SamplingParams(temperature=0, max_tokens=4)

def read(marker, row):
    "The process is lost at the first row 7."
    if row["id"] == 7 and not Path(marker).exists():
        Path(marker).write_text("lost")
        os.kill(os.getpid(), signal.SIGKILL)
    return offline._row(params, row)

with cluster(None):
    rows = [{"prompt": f"row {n}", "id": n, "max_tokens": 2 if n == 3 else None} for n in range(24)]
    rows[5] = {"prompt": "", "id": 5, "max_tokens": None}
    two = Replicas.parse(2)
    of_each = share({"model": tiny}, two, None)
    dataset = ray.data.from_items(rows, override_num_blocks=6)
    reads = partial(read, marker)
    made = offline._Stage({"model": tiny}, Shape(), two, of_each, of_each.cores)
    lost = made.on(dataset, reads, None).take_all()
    done = tokenleap.ray.generate(
        ray.data.from_items(rows, override_num_blocks=6), tiny, params, replicas=2, batch_size=4
    ).take_all()
    columns = ("id", "text", "token_ids", "finish_reason", "error")
    rows = [[[row[name] for name in columns] for row in each] for each in (lost, done)]
    Path(out).write_text(json.dumps(rows))  # Ray prints more
"""


def test_a_block_whose_process_is_lost_is_made_again(tiny: Path, llm: LLM, tmp_path: Path) -> None:
    marker, out = tmp_path / "marker", tmp_path / "out.json"
    command = [sys.executable, "-c", STAGE, str(tiny), str(marker), str(out)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=dict(os.environ), timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert marker.exists()
    for found in json.loads(out.read_text()):
        assert [row[0] for row in found] == list(range(24))
        for number, text, token_ids, reason, error in found:
            if number == 5:
                assert text is None
                assert error == "prompt must be a text that is not empty"
                continue
            params = SamplingParams(temperature=0, max_tokens=2 if number == 3 else 4)
            (result,) = llm.chat([{"role": "user", "content": f"row {number}"}], params)
            assert (text, token_ids) == (result.text, list(result.token_ids))
            assert (reason, error) == (result.outputs[0].finish_reason, None)


DEADLY = """
import os, signal, sys
from tokenleap.core.params import SamplingParams
from tokenleap.lines import Shape, line_of
from tokenleap.errors import TokenleapError
from tokenleap.ray import offline
from tokenleap.ray.cluster import cluster
from tokenleap.ray.cluster import Replicas

tiny, marker = sys.argv[1:]
unpickled = offline._unpickled

def read(row):
    "Line 8 ends its process each time."
    line = unpickled(row)
    if line.number == 8:
        with open(marker, "a") as file:
            file.write("lost ")
        os.kill(os.getpid(), signal.SIGKILL)
    return line

offline._unpickled = read
params = SamplingParams(temperature=0, max_tokens=4)
lines = [line_of(number, {"prompt": f"row {number}"}, params) for number in range(1, 25)]
with cluster(None):
    try:
        list(offline.Offline({"model": tiny}, Shape(), Replicas.parse(1)).records(lines))
    except TokenleapError as error:
        sys.exit(str(error))
"""


def test_a_line_that_ends_its_process_each_time_ends_the_run(tiny: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    done = subprocess.run(
        [sys.executable, "-c", DEADLY, str(tiny), str(marker)],
        capture_output=True,
        text=True,
        env=dict(os.environ),
        timeout=PATIENCE,
    )
    assert marker.read_text() == "lost " * 3
    assert done.returncode == 1
    assert "the run was given up: 3 processes were lost with the same lines" in done.stderr
    assert "Traceback" not in done.stderr
