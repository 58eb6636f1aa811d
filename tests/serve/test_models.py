"""Several models in one server: loaded for requests, one at a time, within a budget of memory."""

from __future__ import annotations

import gc
import logging
import math
import re
import signal
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from tests.cli.conftest import Run, error_of, save_tiny
from tests.serve.processes import process
from tests.serve.support import Served, serving, tiny_llm, until
from tokenleap import LLM, AsyncLLM, ModelError
from tokenleap.serve import models
from tokenleap.serve.body import APIError
from tokenleap.serve.models import Models, used_bytes
from tokenleap.serve.settings import Settings

GIB = 2**30
LEARNS = '{"model": "no-such-draft-model", "online": {}}'
ALL: Mapping[str, str] = {"a": "/models/a", "b": "/models/b", "c": "/models/c"}


class Loader:
    """Loads tiny models that count as 1 GiB each, as long as they are in memory.

    Attributes:
        loads: how often each path was loaded.
        gates: a path is loaded when its gate is open.
    """

    def __init__(self) -> None:
        self.loads = Counter[str]()
        self.gates: dict[str, threading.Event] = {}
        self.broken: set[str] = set()
        self.engines: weakref.WeakSet[LLM] = weakref.WeakSet()

    def __call__(self, path: str) -> AsyncLLM:
        self.loads[path] += 1
        if path in self.gates:
            assert self.gates[path].wait(60)
        if path in self.broken:
            raise ModelError(f"cannot read {path}/config.json: no such file")
        llm = tiny_llm()
        self.engines.add(llm)
        return AsyncLLM(llm)

    def used(self) -> dict[str, int]:
        return {"cpu": GIB * len(self.engines), "cuda": 0}


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Loader:
    made = Loader()
    monkeypatch.setattr(models, "used_bytes", made.used)
    return made


@contextmanager
def several(loader: Loader, fit: float, **settings: Any) -> Iterator[Served]:
    """A server of three models, so many of which fit into memory together."""
    chosen = Settings(served_model_names=tuple(ALL), models_memory=int(fit * GIB), **settings)
    with serving(Models(ALL, loader, chosen), chosen) as running:
        yield running
    assert all(not each.state.runs for each in running.state._in_memory)  # type: ignore[attr-defined]


def text_of(running: Served, model: str, **body: Any) -> str:
    return str(running.complete(model=model, **body)["choices"][0]["text"])


def status_of(running: Served) -> dict[str, str]:
    listed = running.http.get("/v1/models").json()["data"]
    return {each["id"]: each["status"]["value"] for each in listed}


def test_models_are_loaded_on_demand_and_the_one_used_longest_ago_makes_way(loader: Loader) -> None:
    (expected,) = tiny_llm().generate(["hello"], {"temperature": 0, "max_tokens": 8})
    with several(loader, 2.5) as running:
        assert set(status_of(running).values()) == {"unloaded"}
        for model in ("a", "b", "a", "c"):
            assert text_of(running, model) == expected.outputs[0].text
        assert status_of(running) == {"a": "loaded", "b": "unloaded", "c": "loaded"}
        until(lambda: len(loader.engines) == 2)  # nothing keeps the other one
        assert loader.loads == dict.fromkeys(ALL.values(), 1)
        made = running.http.get("/v1/models/b").json()
        assert (made["root"], made["max_model_len"]) == ("b", 1024)
        ended = samples_of(running, "vllm:request_success_total")
        assert ended == {"a": 2, "b": 1, "c": 1}
        assert samples_of(running, "tokenleap:model_loads_total") == {"a": 1, "b": 1, "c": 1}
        memory = samples_of(running, "tokenleap:model_memory_bytes")
        assert memory["b"] == 0
        assert GIB <= memory["a"] < 1.1 * GIB
        assert text_of(running, "b") == expected.outputs[0].text
        assert status_of(running)["a"] == "unloaded"
        assert samples_of(running, "vllm:request_success_total")["b"] == 2  # it goes on counting


def samples_of(running: Served, name: str) -> dict[str, float]:
    """The values of a metric by model; every family is there once."""
    text = running.http.get("/metrics").text
    helped = re.findall(r"^# HELP (\S+)", text, re.M)
    assert len(helped) == len(set(helped))
    found = [each for family in text_string_to_metric_families(text) for each in family.samples]
    return {each.labels["model_name"]: each.value for each in found if each.name == name}


def test_requests_for_one_model_load_it_once_while_others_answer(loader: Loader) -> None:
    loader.gates[ALL["b"]] = gate = threading.Event()
    with several(loader, 3.5) as running, ThreadPoolExecutor(4) as threads:
        text = text_of(running, "a")
        waiting = [threads.submit(text_of, running, "b") for _ in range(3)]
        until(lambda: loader.loads[ALL["b"]] == 1)
        assert status_of(running)["b"] == "loading"
        assert text_of(running, "a") == text
        assert not any(each.done() for each in waiting)
        gate.set()
        assert [each.result() for each in waiting] == [text] * 3
        assert loader.loads[ALL["b"]] == 1


def test_a_model_with_requests_stays_until_they_have_ended(loader: Loader) -> None:
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 600, "ignore_eos": True}
    with several(loader, 1.5) as running, ThreadPoolExecutor(4) as threads:
        whole = text_of(running, "a", **body)
        sent = {"model": "a", "prompt": "hello", "stream": True, **body}
        with running.http.stream("POST", "/v1/completions", json=sent) as response:
            pieces = response.iter_text()
            first = next(pieces)
            other: Future[str] = threads.submit(text_of, running, "b")
            until(lambda: status_of(running)["a"] == "unloaded")  # for new requests
            again = threads.submit(text_of, running, "a")  # waits, or b would never have its turn
            text = first + "".join(pieces)
        assert text.endswith("data: [DONE]\n\n")
        assert text.count('"finish_reason":"length"') == 1
        assert other.result() == again.result() == whole[:8]
        assert loader.loads == {ALL["a"]: 2, ALL["b"]: 1}
        assert len(loader.engines) == 1


def test_a_model_that_cannot_be_loaded_harms_no_other(
    loader: Loader, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader.broken.add(ALL["b"])
    with several(loader, 2.5) as running:
        text = text_of(running, "a")
        with caplog.at_level(logging.WARNING):
            for _ in range(2):  # the second is refused without another try
                error = running.refused("/v1/completions", 503, model="b", prompt="x")
                assert error["message"].startswith("the model 'b' could not be loaded")
                assert "/models" not in error["message"]
        told = [each for each in caplog.records if each.name == "tokenleap.serve.models"]
        assert [record.getMessage() for record in told] == [
            "the model b could not be loaded: cannot read /models/b/config.json: no such file"
        ]
        assert loader.loads[ALL["b"]] == 1
        assert text_of(running, "a") == text
        assert running.http.get("/health").status_code == 200
        loader.broken.clear()
        monkeypatch.setattr(running.state._models["b"], "refused_until", 0.0)  # type: ignore[attr-defined]
        assert text_of(running, "b") == text


def test_a_model_that_cannot_be_closed_harms_no_other(
    loader: Loader, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with several(loader, 1.5) as running:
        text = text_of(running, "a")
        llm = running.state._models["a"].loaded.state.llm  # type: ignore[attr-defined]
        close = llm.close

        def failing(timeout: float | None = None) -> bool:
            close(timeout)
            raise OSError("no")

        monkeypatch.setattr(llm, "close", failing)
        assert text_of(running, "b") == text
        assert "the model a did not end properly: OSError: no" in caplog.messages
        assert text_of(running, "a") == text
        until(lambda: len(running.state._in_memory) == 1)  # type: ignore[attr-defined]


def test_a_model_that_is_too_large_is_unloaded_and_refused(loader: Loader) -> None:
    with several(loader, 0.5) as running:
        for _ in range(2):
            error = running.refused("/v1/completions", 503, model="a", prompt="x")
            assert "the model 'a' takes 1.00 GiB, and this server has less" in error["message"]
        assert loader.loads == {ALL["a"]: 1}
        assert not loader.engines


def test_memory_of_requests_does_not_refuse_a_model_for_ever(
    loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They count while a model is measured: so it is tried again, less and less often."""
    bodies = iter([0, 4 * GIB])
    monkeypatch.setattr(
        models, "used_bytes", lambda: {"cpu": loader.used()["cpu"] + next(bodies, 0), "cuda": 0}
    )
    with several(loader, 2.5) as running:
        error = running.refused("/v1/completions", 503, model="a", prompt="x")
        assert "takes 5.00 GiB" in error["message"]
        model = running.state._models["a"]  # type: ignore[attr-defined]
        assert model.refused_until < math.inf
        monkeypatch.setattr(model, "refused_until", 0.0)
        assert text_of(running, "a")
        assert loader.loads == {ALL["a"]: 2}


class Unread:
    """A run that has ended, and whose client reads it ever so slowly."""

    ended = True

    def __init__(self, runs: set[Any]) -> None:
        self.runs = runs
        runs.add(self)

    def cut_off(self, error: APIError) -> None:
        self.told = error.message
        self.runs.discard(self)


def test_a_client_that_reads_slowly_does_not_keep_a_model_in_memory(loader: Loader) -> None:
    with several(loader, 1.5, write_timeout=0.01) as running:
        text = text_of(running, "b")
        assert text_of(running, "a") == text
        unread = Unread(running.state._models["a"].loaded.state.runs)  # type: ignore[attr-defined]
        assert text_of(running, "b") == text
        assert unread.told == "the answer was read too slowly."


def test_a_model_is_not_loaded_when_all_who_wanted_it_have_gone(loader: Loader) -> None:
    loader.gates[ALL["a"]] = gate = threading.Event()
    with several(loader, 2.5) as running, ThreadPoolExecutor(1) as threads:
        first = threads.submit(text_of, running, "a")
        until(lambda: loader.loads[ALL["a"]] == 1)
        body = {"model": "b", "prompt": "x"}
        with pytest.raises(httpx2.ReadTimeout):
            httpx2.post(f"{running.url}/v1/completions", json=body, timeout=0.2)
        model = running.state._models["b"]  # type: ignore[attr-defined]
        until(lambda: model.waiting == 0)
        gate.set()
        assert first.result()
        until(lambda: model.bringing is None)
        assert loader.loads == {ALL["a"]: 1}
        assert text_of(running, "b") == first.result()


def test_clients_that_wait_may_go_and_are_told_of_the_end(loader: Loader) -> None:
    loader.gates[ALL["a"]] = gate = threading.Event()
    with several(loader, 2.5, max_waiting=1) as running, ThreadPoolExecutor(4) as threads:
        model = running.state._models["a"]  # type: ignore[attr-defined]
        body = {"model": "a", "prompt": "x"}
        with pytest.raises(httpx2.ReadTimeout):
            httpx2.post(f"{running.url}/v1/completions", json=body, timeout=0.2)
        until(lambda: model.waiting == 0)
        waiting = [
            threads.submit(running.post, "/v1/completions", model="a", prompt="x") for _ in range(2)
        ]
        until(lambda: model.waiting == 2)
        error = running.refused("/v1/completions", 429, model="a", prompt="x")
        assert error["code"] == "queue_full"
        running.state.stopping = True
        assert running.http.get("/health").status_code == 503
        loop = running.server.servers[0].get_loop()
        loop.call_soon_threadsafe(running.state.cut_off)
        for each in waiting:
            assert each.result().status_code == 503
            assert "shutting down" in each.result().json()["error"]["message"]
        gate.set()


def test_only_names_are_known(loader: Loader) -> None:
    with several(loader, 2.5) as running:
        for wrong in ("d", "/models/a", "../a", ""):
            error = running.refused("/v1/completions", 404, model=wrong, prompt="x")
            assert "there is 'a', 'b', 'c'" in error["message"]
        assert running.http.get("/v1/models/d").status_code == 404
        response = running.http.post("/tokenize", json={"prompt": "x"})
        assert response.status_code == 400
        assert "choose one of a, b, c" in response.json()["error"]["message"]
        assert not loader.loads
        tokens = running.http.post("/tokenize", json={"prompt": "x", "model": "c"}).json()
        assert tokens["count"] == 1
        schemas = running.http.get("/openapi.json").json()["components"]["schemas"]
        assert schemas["ChatBody"]["properties"]["model"]["anyOf"][0]["enum"] == list(ALL)


def test_an_engine_that_has_failed_is_loaded_again(loader: Loader) -> None:
    with several(loader, 2.5) as running:
        text = text_of(running, "a")
        running.state._models["a"].loaded.state.llm.thread.close()  # type: ignore[attr-defined]
        assert text_of(running, "a") == text
        assert loader.loads == {ALL["a"]: 2}


def test_memory_is_measured() -> None:
    gc.collect()  # else other tests' memory might be freed in between
    before = used_bytes()["cpu"]
    kept = torch.ones(2**26)
    assert used_bytes()["cpu"] - before > 0.9 * kept.nbytes


def test_the_command_serves_several(tmp_path: Path) -> None:
    folders = [f"--model={name}={save_tiny(tmp_path / name, seed=ord(name))}" for name in "ab"]
    with process(*folders, "--models-memory", "4GiB", "--no-log-requests") as (program, url):
        bodies = [{"model": name, "prompt": "x", "max_tokens": 4} for name in "aba"]
        with httpx2.Client(base_url=url, timeout=120) as client:
            assert all(client.post("/v1/completions", json=b).status_code == 200 for b in bodies)
            assert client.get("/metrics").text.count("# HELP vllm:prompt_tokens_total") == 1
            listed = client.get("/v1/models").json()["data"]
        assert [each["status"]["value"] for each in listed] == ["loaded", "loaded"]
        program.send_signal(signal.SIGTERM)
        assert program.wait() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "a"], "--model: expected NAME=PATH, got a"),
        (["--model=a=qwen3-4b", "--model=b=no-such-model"], "there is no model 'no-such-model'"),
        (["--model=a=smollm2-135m", "--model=a=smollm2-135m"], "two models with the name a"),
        (["smollm2-135m", "--model=a=smollm2-135m"], "argument MODEL and --model NAME=PATH"),
        (["--model=a=smollm2-135m", "--replicas=2"], "--replicas and --model NAME=PATH"),
        (["--model=a=smollm2-135m", "--served-model-name=b"], "--served-model-name and --model"),
        (
            ["--model=a=smollm2-135m", "--share-drafts", "--speculative-config", LEARNS],
            "a drafter learns for one model",
        ),
        (["--models-memory=1GiB"], "add --model NAME=PATH"),
        (["--model=a=smollm2-135m", "--models-memory=some"], "models_memory"),
    ],
)
def test_options_that_contradict_each_other(run: Run, arguments: list[str], message: str) -> None:
    result = run("serve", *arguments)
    assert result.exit_code in (1, 2)
    assert message in error_of(result)
