from __future__ import annotations

import asyncio
from collections.abc import Sequence
from unittest.mock import Mock

import pytest
from benchmarks.serving import CONTESTANTS, LLAMA, NONE, REPLICAS, _contestants, send

from benchmarks import BenchmarkError, serving
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


def test_no_prompt_of_the_warm_up_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers have it in their caches."""
    server = serving.Server(NONE, "url", Mock(), Mock())
    monkeypatch.setattr(serving.Server, "wait", lambda self: None)
    monkeypatch.setattr(serving, "_counted", lambda bursts, counter: bursts)
    texts = [Prompt(str(number), "any", "text") for number in range(20)]
    sent = list[list[str]]()

    def send_to(url: str, prompts: Sequence[Prompt], clients: int) -> serving.Burst:
        sent.append([prompt.id for prompt in prompts])
        return serving.Burst([], 1.0)

    serving._measured({NONE: server}, texts, {1: 3, 2: 4}, 2, send_to)
    warm_up, *measured = sent
    assert len(warm_up) == 4
    assert [len(ids) for ids in measured] == [3, 4, 3, 4]
    assert not set(warm_up) & {each for ids in measured for each in ids}
