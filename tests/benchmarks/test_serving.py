from __future__ import annotations

import asyncio

import pytest
from benchmarks.serving import CONTESTANTS, LLAMA, NONE, REPLICAS, _contestants, send

from benchmarks import BenchmarkError
from tests.serve.support import served
from tokenleap.bench.prompts_file import Prompt


def test_clients_read_streams() -> None:
    prompts = [Prompt(str(number), "any", f"text {number}") for number in range(5)]
    with served(served_model_names=("m",)) as server:
        burst = asyncio.run(send(str(server.http.base_url), prompts, 2, 6, 0.0))
        assert [answer.prompt for answer in burst.answers] == list("01234")
        for answer in burst.answers:
            assert answer.error is None
            assert answer.text
            assert 0 < answer.first <= answer.last <= burst.seconds
        server.state.stopping = True
        refused = asyncio.run(send(str(server.http.base_url), prompts[:1], 1, 6, 0.0))
        assert "503" in str(refused.answers[0].error)


def test_contestants_need_their_files() -> None:
    commands: dict[str, list[str]] = {NONE: [], REPLICAS: []}
    assert _contestants(None, commands) == (NONE,)
    assert _contestants([NONE, REPLICAS, NONE], commands) == (NONE, REPLICAS)
    with pytest.raises(BenchmarkError, match="needs --llama-server"):
        _contestants([NONE, LLAMA], commands)
    with pytest.raises(BenchmarkError, match=f"choose of {', '.join(CONTESTANTS)}"):
        _contestants(["vllm"], commands)
    with pytest.raises(BenchmarkError, match="counts the tokens"):
        _contestants([LLAMA], {LLAMA: []})
