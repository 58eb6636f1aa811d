"""An `LLM` that is dropped is gone: at once, with its threads, also while its results are kept."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.matrix import PROMPTS, SPECULATIVE, tiny_llm
from tests.programs import Program
from tests.tiny import tiny_model
from tokenleap import LLM, AsyncLLM, RequestError, RequestOutput, SamplingParams, StreamChunk
from tokenleap.engine.jobs import JobSpec
from tokenleap.runtime.target import Target

PARAMS = SamplingParams(temperature=0, max_tokens=12, logprobs=1)
NGRAM = {"method": "ngram", "prompt_lookup_min": 1}


@pytest.fixture
def without_collector() -> Iterator[None]:
    """A notebook would have to wait for it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def parts_of(llm: LLM) -> dict[str, weakref.ref[Any]]:
    engine, drafter = llm.engine, llm.engine.strategies.default.drafter
    parts = {
        "engine": engine,
        "target": engine.target,
        "network": engine.target.network,
        "KV": engine.target.slab,
        "drafter": drafter,
        "draft model": getattr(drafter, "_scorer", drafter),
    }
    return {name: weakref.ref(part) for name, part in parts.items()}


def alive(parts: dict[str, weakref.ref[Any]]) -> list[str]:
    return [name for name, part in parts.items() if part() is not None]


@pytest.mark.parametrize(
    ("method", "architecture"),
    [*((method, "llama") for method in SPECULATIVE), ("ngram", "lean"), ("ngram", "gpt2")],
)
@pytest.mark.usefixtures("without_collector")
def test_it_is_freed_without_the_collector(method: str, architecture: str) -> None:
    llm = tiny_llm(tiny_model(architecture), method)
    results = llm.generate(PROMPTS, PARAMS, trace=True)
    results += llm.generate(PROMPTS, PARAMS, speculative_config=NGRAM)
    chunks = list(llm.stream(PROMPTS, PARAMS))
    parts = parts_of(llm)
    del llm
    assert alive(parts) == []
    assert all(result.outputs[0]._repr_html_() for result in results)
    assert chunks[-1].output is not None


def test_results_of_a_failed_call_do_not_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm(tiny_model(), "ngram")

    def broken(*_: Any) -> None:
        raise OSError("no disk")

    results: Sequence[RequestOutput] = ()
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.target, "prefill", broken)
        try:
            llm.generate(PROMPTS, PARAMS)
        except RequestError as error:
            results = error.outputs
    parts = parts_of(llm)
    del llm
    gc.collect()
    assert alive(parts) == []
    assert results[0].outputs[0].error == "OSError: no disk"


@pytest.mark.parametrize("interrupted", [False, True], ids=["failed", "interrupted"])
def test_closing_frees_what_the_last_error_holds(
    interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """IPython keeps the error of the last cell, with all frames of its traceback."""
    llm, prefill = tiny_llm(tiny_model(), "ngram"), Target.prefill

    def broken(self: Target, *args: Any, **fields: Any) -> Any:
        if not interrupted:
            raise OSError("no disk")
        signal.raise_signal(signal.SIGINT)
        return prefill(self, *args, **fields)

    with monkeypatch.context() as patch:
        patch.setattr(Target, "prefill", broken)
        with pytest.raises((RequestError, KeyboardInterrupt)) as raised:
            llm.generate(PROMPTS, PARAMS)
    monkeypatch.setattr(sys, "last_value", raised.value, raising=False)
    parts = parts_of(llm)
    llm.close()
    assert alive(parts) == []


async def generated(llm: AsyncLLM) -> list[StreamChunk]:
    return [chunk async for chunk in llm.generate([1, 2, 3], PARAMS)]


def test_closing_frees_it_while_an_async_llm_is_kept() -> None:
    server = AsyncLLM(tiny_llm(tiny_model(), "ngram"))
    chunks = asyncio.run(generated(server))
    parts = parts_of(server.llm)
    server.close()
    server.llm.close()
    assert alive(parts) == []
    assert chunks[-1].output is not None


def test_an_async_llm_ends_after_its_model() -> None:
    server = AsyncLLM(tiny_llm(tiny_model(), "ngram"))
    engine, parts = server.llm.engine, parts_of(server.llm)
    server.llm.close()
    with pytest.raises(RequestError, match="the LLM was closed"):
        engine.run(engine.jobs([JobSpec([1, 2, 3])]))
    del engine
    gc.collect()
    assert server.close()
    assert alive(parts) == []


def test_an_async_llm_that_nobody_closed_ends_its_threads() -> None:
    before = set(threading.enumerate())
    llm = AsyncLLM(tiny_llm(tiny_model(), "ngram"))

    chunks = asyncio.run(generated(llm))
    parts, threads = parts_of(llm.llm), set(threading.enumerate()) - before
    assert any(thread.name == "tokenleap-engine" for thread in threads)
    del llm
    gc.collect()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), thread
    del thread, threads
    gc.collect()
    assert alive(parts) == []
    assert chunks[-1].output is not None


MIB_OF_WEIGHTS = 96
_RSS = f"""
import gc
import psutil
from tests.tiny import tiny_model
from tokenleap import LLM, SamplingParams

def generated(layers):
    llm = LLM(tiny_model(num_hidden_layers=layers, hidden_size=512, intermediate_size=1536))
    before = psutil.Process().memory_info().rss
    (result,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4))
    return before, result

generated(1)  # loads what stays
gc.collect()
empty = psutil.Process().memory_info().rss
full, result = generated({MIB_OF_WEIGHTS // 10})
gc.collect()
print(full - empty, psutil.Process().memory_info().rss - empty)
"""


def test_memory_goes_back_to_the_system() -> None:
    with Program(_RSS) as program:
        out, err = program.communicate()
    assert program.returncode == 0, err
    held, left = (int(number) / 2**20 for number in out.split())
    assert held > MIB_OF_WEIGHTS / 2
    assert left < held / 5


_UNUSED = """
import psutil
import torch
from tokenleap.runtime.kv_slab import KVSlab

def rss():
    return psutil.Process().memory_info().rss

slab = KVSlab()
slab.add_row()
slab.begin(0, [0], [8], 8)
slab.reserve(range(4), torch.zeros(2, 64))
for layer in range(4):
    slab.write(torch.ones(8, 2, 64), torch.ones(8, 2, 64), layer)
slab.commit(0, range(8))
before = rss()
for _ in range(15):
    slab.copy_row(0, slab.add_row())
slab.begin(15, [8], [4096], 4096)
print(slab.held_bytes, rss() - before)
"""


def test_positions_that_are_not_used_take_no_memory() -> None:
    with Program(_UNUSED) as program:
        out, err = program.communicate()
    assert program.returncode == 0, err
    held, taken = map(int, out.split())
    assert held > 250 * 2**20
    assert taken < held / 10
