"""The engine's thread when the engine fails: no caller waits for what never comes."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

import pytest

from tests.tiny import tiny_model
from tokenleap import LLM, TokenleapError
from tokenleap.engine.jobs import Job, JobSpec
from tokenleap.engine.worker import Worker

PATIENCE = 60.0


class Panic(BaseException):
    """As PyO3 raises for a panic of Rust."""


def panics(*_: Any) -> Any:
    raise Panic("as the test wants it")


@pytest.fixture
def llm() -> LLM:
    return LLM(tiny_model())


def job_of(llm: LLM) -> Job:
    return llm.engine.job(JobSpec([1, 2], {"temperature": 0, "max_tokens": 9}))


def test_a_panic_in_a_call_is_an_error_of_the_call_too(llm: LLM) -> None:
    worker = Worker(llm.engine)
    with pytest.raises(Panic):
        worker.call(panics).result(PATIENCE)
    worker.close()
    assert not worker.alive


def test_a_second_panic_at_the_end_leaves_nobody_waiting(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that cannot be decoded may panic again where its request is ended."""
    worker, told, late = Worker(llm.engine), SimpleQueue[Any](), SimpleQueue[Any]()
    done = []

    def advance() -> Any:
        worker.start(job_of(llm), lambda *given: late.put(given))
        done.append(worker.call(lambda: "done"))
        panics()

    monkeypatch.setattr(llm.engine, "advance", advance)
    monkeypatch.setattr(llm.engine, "end", panics)
    worker.start(job_of(llm), lambda *given: told.put(given))
    assert "the engine failed" in str(told.get(timeout=PATIENCE)[1])
    assert "closed" in str(late.get(timeout=PATIENCE)[1])
    assert done[0].result(PATIENCE) == "done"
    worker.close()
    assert not worker.alive


def test_a_panic_after_an_error_closes_the_worker(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, told = Worker(llm.engine), SimpleQueue[Any]()

    def fails() -> Any:
        raise RuntimeError("made to fail")

    monkeypatch.setattr(llm.engine, "advance", fails)
    monkeypatch.setattr(llm.engine, "end", panics)
    worker.start(job_of(llm), lambda *given: told.put(given))
    assert "made to fail" in str(told.get(timeout=PATIENCE)[1])
    worker._thread.join(PATIENCE)
    with pytest.raises(TokenleapError, match="closed"):
        worker.start(job_of(llm), lambda *given: told.put(given))
