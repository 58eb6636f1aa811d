"""The examples of docs/serve.md run against a server."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.serve.support import Served, served, tiny_llm
from tests.test_docs import ROOT, blocks, code_spans
from tokenleap import AsyncLLM
from tokenleap.serve.fields import ChatBody, CompletionBody
from tokenleap.serve.metrics import ServerMetrics

DOCUMENT = ROOT / "docs/serve.md"
EXAMPLES = blocks(DOCUMENT)


@pytest.fixture(scope="module")
def named() -> Iterator[Served]:
    with served(served_model_names=("smollm2-135m",)) as running:
        yield running


def test_the_examples_with_openais_client(
    named: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, object] = {}
    run = 0
    for language, _, content in EXAMPLES:
        if language == "python" and "AsyncLLM" not in content:
            code = content.replace("http://127.0.0.1:8000", named.url)
            exec(compile(code, str(DOCUMENT), "exec", dont_inherit=True), names)
            run += 1
    assert run == 4
    printed = capsys.readouterr().out
    assert "name=" in printed
    assert '"place"' in printed


def test_the_example_with_asyncio(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = tiny_llm()
    monkeypatch.setattr("tokenleap.AsyncLLM", lambda *_, **__: AsyncLLM(llm))
    (code,) = [content for _, _, content in EXAMPLES if "AsyncLLM" in content]
    exec(code, {})
    assert capsys.readouterr().out


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_example_with_curl(named: Served) -> None:
    (code,) = [content for language, _, content in EXAMPLES if language == "bash"]
    code = code.replace("http://127.0.0.1:8000", named.url)
    done = subprocess.run(["sh", "-c", code], capture_output=True, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_all_fields_and_metrics_of_ours_are_described(named: Served) -> None:
    spans = set(code_spans(DOCUMENT))
    openais = {
        *("model", "messages", "prompt", "stream", "stream_options", "n", "temperature", "top_p"),
        *("frequency_penalty", "presence_penalty", "seed", "stop", "logit_bias", "max_tokens"),
        *("max_completion_tokens", "logprobs", "top_logprobs", "response_format", "tools"),
        *("parallel_tool_calls", "best_of", "speculative_config", "tokenleap", "prediction"),
    }
    fields = set(ChatBody.model_fields) | set(CompletionBody.model_fields)
    assert fields - openais <= spans
    assert isinstance(named.state.metrics, ServerMetrics)
    found = named.http.get("/metrics").text
    for line in found.splitlines():
        if line.startswith("tokenleap:") and "_created" not in line:
            assert line.partition("{")[0] in spans
