"""`tokenleap serve` as a process: its address, its end by signals, and what it refuses at once."""

from __future__ import annotations

import json
import re
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.cli.conftest import Run, error_of, save_tiny
from tests.programs import MAIN, Program
from tests.serve.processes import process


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


BODY: dict[str, Any] = {"model": "mine", "prompt": "hello", "ignore_eos": True}


def stream_around(sig: signal.Signals, program: Program, url: str, max_tokens: int) -> str:
    """A stream, after whose first piece the server gets a signal."""
    body, headers = BODY | {"stream": True, "max_tokens": max_tokens}, {"Authorization": "Bearer k"}
    with (
        httpx2.Client(base_url=url, headers=headers, timeout=120) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        pieces = response.iter_text()
        text = next(pieces)
        program.send_signal(sig)
        return text + "".join(pieces)


def errors_of(program: Program) -> list[bytes]:
    assert program.stderr is not None
    return program.stderr.read().splitlines()


def test_sigterm_lets_running_requests_end(tiny_folder: Path) -> None:
    options = ("--served-model-name", "mine", "--api-key", "k", "--max-prompts", 1)
    with process(tiny_folder, *options, "--log-format", "json") as (program, url):
        rebound = {"Host": "evil.example"}  # a page whose name leads here
        assert httpx2.get(f"{url}/health", headers=rebound).status_code == 403
        assert httpx2.post(f"{url}/v1/completions", json=BODY).status_code == 401
        assert "<title>" in httpx2.get(url).text  # the page
        two, key = BODY | {"prompt": ["a", "b"]}, {"Authorization": "Bearer k"}
        refused = httpx2.post(f"{url}/v1/completions", json=two, headers=key)
        assert "1 to 1 prompts" in refused.json()["error"]["message"]
        text = stream_around(signal.SIGTERM, program, url, 300)
        assert text.count('"finish_reason":"length"') == 1
        assert text.endswith("data: [DONE]\n\n")
        assert program.wait() == 0
        lines = [json.loads(line) for line in errors_of(program)]
        assert [line["status"] for line in lines] == [403, 401, 400, 200]
        assert not any("Traceback" in str(line) for line in lines)


def test_ctrl_c_and_the_grace_period(tiny_folder: Path) -> None:
    """An output without an end is cut off when its time is over."""
    limits = ("--shutdown-timeout", 0, "--max-model-len", 8000)
    with process(tiny_folder, *limits, "--served-model-name", "mine") as (program, url):
        text = stream_around(signal.SIGINT, program, url, 7000)
        assert "the server is shutting down" in text
        assert program.wait() == 130
        *_, line, last = errors_of(program)
        assert last == b"interrupted"
        assert re.match(rb"[\d-]{10} [\d:,]{12} 127.0.0.1 POST /v1/completions 200 ", line), line


STUCK = """
import time
from tokenleap.engine.llm_engine import LLMEngine
from tokenleap.serve import run
run.LAST_STEP = 0.1
advance, steps = LLMEngine.advance, iter(range(3))
LLMEngine.advance = lambda self: time.sleep(10**6) if next(steps, None) is None else advance(self)
"""
"""The engine's fourth step has no end."""


@pytest.mark.slow
def test_a_step_without_an_end_does_not_hold_up_the_end(tiny_folder: Path) -> None:
    options = ("--shutdown-timeout", 0, "--no-log-requests", "--served-model-name", "mine")
    with process(tiny_folder, *options, code=STUCK + MAIN) as (program, url):
        text = stream_around(signal.SIGTERM, program, url, 300)
        assert "the server is shutting down" in text
        assert "[DONE]" not in text
        assert program.wait() == 0
        assert any(b"the process ends without it" in line for line in errors_of(program))


def test_a_port_in_use(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = run("serve", "no-such-model", "--port", port)  # the port is tried first
    assert result.exit_code == 1
    assert f"127.0.0.1:{port}: Address already in use: choose another --port" in error_of(result)


def test_a_model_that_is_missing(run: Run) -> None:
    result = run("serve", "no-such-model", "--port", 0)
    assert result.exit_code == 2
    assert "no-such-model" in error_of(result)


@pytest.mark.parametrize("name", ["fastapi", "fastapi_offline", "uvicorn", "prometheus_client"])
def test_an_extra_that_is_missing(run: Run, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    result = run("serve", "no-such-model", "--port", 0)
    assert result.exit_code == 2
    assert f"the server needs {name}: pip install 'fastapi<" in error_of(result)


LEARNS = '{"model": "no-such-draft-model", "online": {}}'


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "70000"], "--port"),
        (["--api-key", ""], "--api-key"),
        (["--rpm-limit", "5"], "rpm_limit limits each API key"),
        (["--tpm-limit", "0", "--api-key", "k"], "--tpm-limit"),
        (["--log-format", "xml"], "--log-format"),
        (["--no-log-requests", "--log-format", "json"], "leave out --log-format"),
        (["--max-body-size", "much"], "--max-body-size"),
        (["--host", "256.1.1.1"], "256.1.1.1"),
        (["--speculative-config", "{"], "--speculative-config"),
        (["--method", "nogram"], "did you mean 'ngram'?"),
        (["--speculative-config", LEARNS], "serve with --share-drafts"),
        (
            ["--speculative-config", LEARNS, "--share-drafts", "--api-key=a", "--api-key=b"],
            "there are 2 API keys",
        ),
    ],
)
def test_wrong_options(run: Run, arguments: list[str], message: str) -> None:
    result = run("serve", "no-such-model", *arguments)
    assert result.exit_code in (1, 2)
    assert message in error_of(result)
