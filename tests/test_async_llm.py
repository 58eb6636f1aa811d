"""`AsyncLLM`: the outputs of `LLM`, many at once, and nothing left of those that were given up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from functools import cache, partial
from queue import SimpleQueue
from threading import Event, current_thread
from threading import enumerate as threads
from typing import Any

import pytest
from transformers import PreTrainedModel

from tests.engine.serving import assert_empty, bits
from tests.tiny import tiny_model, tiny_tokenizer
from tokenleap import (
    LLM,
    AsyncLLM,
    ConfigError,
    RequestError,
    SamplingParams,
    StreamChunk,
    TokenleapError,
)
from tokenleap.async_llm import Pool, WorkerThread
from tokenleap.engine.jobs import Job, JobSpec

GREEDY = SamplingParams(temperature=0, max_tokens=20, logprobs=1)
SEVERAL = SamplingParams(n=3, seed=1, max_tokens=9, logprobs=2)
ENDLESS = SamplingParams(temperature=0, max_tokens=None)
PROMPTS = ["one", "two and three", "four"]


@cache
def model() -> PreTrainedModel:
    return tiny_model()


def llm_of(**fields: Any) -> LLM:
    config = {"method": "ngram", "prompt_lookup_min": 1, "controller": "fixed"}
    return LLM(model(), tokenizer=tiny_tokenizer(), speculative_config=config, **fields)


def run(llm: LLM, work: Any) -> Any:
    """Run a coroutine function with an `AsyncLLM`, which leaves nothing behind."""

    async def main() -> Any:
        async with AsyncLLM(llm) as asynchronous:
            found = await asyncio.wait_for(work(asynchronous), 120)
            await asyncio.to_thread(
                llm.engine.worker.call, lambda: None
            )  # what was aborted before is gone now
            assert_empty(llm)
            return found

    return asyncio.run(main())


async def collected(llm: AsyncLLM, prompt: Any, params: Any, **fields: Any) -> list[StreamChunk]:
    return [chunk async for chunk in llm.generate(prompt, params, **fields)]


def test_the_outputs_are_those_of_generate() -> None:
    llm = llm_of(max_num_seqs=2)
    expected = llm.generate(PROMPTS, [GREEDY, SEVERAL, GREEDY])

    async def all_at_once(asynchronous: AsyncLLM) -> list[list[StreamChunk]]:
        pairs = zip(PROMPTS, [GREEDY, SEVERAL, GREEDY], strict=True)
        return await asyncio.gather(*(collected(asynchronous, *pair) for pair in pairs))

    for chunks, result in zip(run(llm, all_at_once), expected, strict=True):
        ends = {chunk.index: chunk.output for chunk in chunks if chunk.output}
        assert {i: bits(each) for i, each in ends.items()} == {
            each.index: bits(each) for each in result.outputs
        }
        for index, output in ends.items():
            pieces = [chunk for chunk in chunks if chunk.index == index]
            assert tuple(t for piece in pieces for t in piece.tokens) == output.tokens


def test_leaving_the_loop_frees_the_request() -> None:
    llm = llm_of()

    async def leave(asynchronous: AsyncLLM) -> None:
        generator = asynchronous.generate("one", ENDLESS)
        async for _ in generator:
            break
        await generator.aclose()

    run(llm, leave)


def test_cancelling_the_task_frees_the_request() -> None:
    llm = llm_of()

    async def cancel(asynchronous: AsyncLLM) -> None:
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in asynchronous.generate("one", ENDLESS):
                begun.set()

        task = asyncio.create_task(read())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(llm, cancel)


def test_a_request_ends_with_its_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read no more; it would run to the end of the context."""
    llm, closed = llm_of(), Event()
    asynchronous, advance, steps = AsyncLLM(llm), llm.engine.advance, list[None]()

    def second_waits() -> Any:
        steps.append(None)
        assert len(steps) == 1 or closed.wait(60)
        return advance()

    monkeypatch.setattr(llm.engine, "advance", second_waits)

    async def begun() -> Any:
        (request,) = await asynchronous.submit([JobSpec("one", ENDLESS)])
        await anext(request)
        return request.job

    job = asyncio.run(begun())
    closed.set()
    while not job.finished:
        time.sleep(0.001)
    assert job.requests[0].finish_reason == "abort"
    assert asynchronous.close()
    assert_empty(llm)


def test_a_request_that_waits_can_be_aborted() -> None:
    llm = llm_of(max_num_seqs=1)

    async def abort(asynchronous: AsyncLLM) -> list[StreamChunk]:
        first, second = await asynchronous.submit([JobSpec("one", GREEDY), JobSpec("two", GREEDY)])
        second.abort()
        assert [chunk async for chunk in second] == []
        return [chunk async for chunk in first]

    chunks = run(llm, abort)
    assert bits(chunks[-1].output) == bits(llm.generate("one", GREEDY)[0])


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        ("", GREEDY, "empty"),
        ("one", {"temperature": -1}, "temperature"),
        ([1, 1000], GREEDY, "outside the vocabulary"),
    ],
)
def test_errors_come_before_the_first_chunk(prompt: Any, params: Any, error: str) -> None:
    async def refused(asynchronous: AsyncLLM) -> None:
        with pytest.raises(TokenleapError, match=error):
            await collected(asynchronous, prompt, params)

    run(llm_of(), refused)


def test_arguments_that_belong_elsewhere() -> None:
    async def refused(asynchronous: AsyncLLM) -> None:
        with pytest.raises(ConfigError, match=r"generate\(\) takes max_tokens"):
            await collected(asynchronous, "one", None, max_tokens=3)

    run(llm_of(), refused)
    with pytest.raises(TokenleapError, match="max_num_seqs: give it to the LLM"):
        AsyncLLM(llm_of(), max_num_seqs=3)


def test_a_configuration_of_its_own() -> None:
    llm = llm_of()
    (expected,) = llm.generate("one", GREEDY)

    async def plain(asynchronous: AsyncLLM) -> list[StreamChunk]:
        return await collected(asynchronous, "one", GREEDY, speculative_config={"method": "none"})

    output = run(llm, plain)[-1].output
    assert bits(output) == bits(expected)
    assert output.metrics.num_drafts == 0


def test_a_failed_request_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of()
    (expected,) = llm.generate("two", GREEDY)
    rule = llm.engine._speculation.default.rule
    accept = type(rule).accept

    def failing(self: Any, draft: Any, p: Any, noise: Any) -> Any:
        if p._sampler.params.seed == 13:
            raise RuntimeError("made to fail")
        return accept(self, draft, p, noise)

    monkeypatch.setattr(type(rule), "accept", failing)

    async def both(asynchronous: AsyncLLM) -> Any:
        bad = collected(asynchronous, "one", GREEDY.model_copy(update={"seed": 13}))
        good = collected(asynchronous, "two", GREEDY)
        return await asyncio.gather(bad, good, return_exceptions=True)

    bad, good = run(llm, both)
    assert isinstance(bad, RequestError)
    assert "made to fail" in str(bad)
    assert bad.outputs[0].finish_reason == "error"
    assert bits(good[-1].output) == bits(expected)


def test_a_failed_step_ends_its_requests_and_not_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    llm = llm_of()
    advance, calls = llm.engine.advance, list[None]()

    def once() -> Any:
        calls.append(None)
        if len(calls) == 3:
            raise AssertionError("made to fail")
        return advance()

    monkeypatch.setattr(llm.engine, "advance", once)

    async def again(asynchronous: AsyncLLM) -> list[StreamChunk]:
        with pytest.raises(RequestError, match="made to fail"):
            await collected(asynchronous, "one", ENDLESS)
        return await collected(asynchronous, "one", GREEDY)

    chunks = run(llm, again)
    assert bits(chunks[-1].output) == bits(llm.generate("one", GREEDY)[0])
    assert "a step failed" in caplog.text


def test_the_event_loop_goes_on_while_a_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step waits for the loop: if the loop waited for the step, neither would go on."""
    llm, loop_ran = llm_of(), Event()
    advance = llm.engine.advance

    def waiting() -> Any:
        assert loop_ran.wait(60)
        return advance()

    monkeypatch.setattr(llm.engine, "advance", waiting)

    async def work(asynchronous: AsyncLLM) -> Any:
        (request,) = await asynchronous.submit([JobSpec("one", GREEDY)])
        await asyncio.sleep(0)
        loop_ran.set()
        return [chunk async for chunk in request]

    assert run(llm, work)


def test_closing_ends_what_runs() -> None:
    llm = llm_of()

    async def main() -> None:
        asynchronous = AsyncLLM(llm)
        (request,) = await asynchronous.submit([JobSpec("one", ENDLESS)])
        await request.__anext__()
        await asyncio.to_thread(asynchronous.close)
        with pytest.raises(RequestError, match="closed"):
            async for _ in request:
                pass
        with pytest.raises(TokenleapError, match="closed"):
            await asynchronous.submit([JobSpec("one", ENDLESS)])
        asynchronous.close()
        request.abort()

    asyncio.run(main())
    assert_empty(llm)


def test_other_threads_may_use_the_same_llm() -> None:
    llm = llm_of()
    (expected,) = llm.generate("one", GREEDY)

    async def both(asynchronous: AsyncLLM) -> Any:
        other: Coroutine[Any, Any, Any] = asyncio.to_thread(llm.generate, "one", GREEDY)
        return await asyncio.gather(collected(asynchronous, "one", GREEDY), other)

    chunks, (result,) = run(llm, both)
    assert bits(chunks[-1].output) == bits(result) == bits(expected)


@pytest.mark.parametrize("known", [False, True])
def test_prompts_with_strategies_of_their_own_wait_once(
    monkeypatch: pytest.MonkeyPatch, *, known: bool
) -> None:
    """Each command waits for a step of those that run. Building is for the engine's thread."""
    llm, config = llm_of(), {"method": "suffix"}
    specs = [
        JobSpec("one", GREEDY, config),
        JobSpec("two", GREEDY, config, prediction="three"),
        JobSpec("three", GREEDY, prediction="three"),
        JobSpec("four", {"beam_width": 2, "temperature": 0, "max_tokens": 4}),
    ]
    if known:
        llm.engine.jobs(specs)
    ran_in, call = list[str](), llm.engine.worker.call

    def calling(build: Any) -> Any:
        def noted() -> Any:
            ran_in.append(current_thread().name)
            return build()

        return call(noted)

    monkeypatch.setattr(llm.engine.worker, "call", calling)

    async def ended(asynchronous: AsyncLLM) -> list[list[StreamChunk]]:
        requests = await asynchronous.submit(specs)
        assert ran_in == ["tokenleap-engine"]
        return [[chunk async for chunk in request] for request in requests]

    chunks = run(llm, ended)
    assert all(each[-1].finished for each in chunks)
    assert [each[-1].prompt_index for each in chunks] == [0, 1, 2, 3]


def test_a_request_that_cannot_be_queued_ends_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    llm = llm_of()
    add = llm.engine._scheduler.add

    def failing(request: Any, strategy: Any) -> None:
        if request.params.seed == 13:
            raise RuntimeError("made to fail")
        add(request, strategy)

    monkeypatch.setattr(llm.engine._scheduler, "add", failing)

    async def both(asynchronous: AsyncLLM) -> Any:
        bad = collected(asynchronous, "one", GREEDY.model_copy(update={"seed": 13}))
        good = collected(asynchronous, "one", GREEDY)
        return await asyncio.gather(good, bad, return_exceptions=True)

    good, bad = run(llm, both)
    assert isinstance(bad, RequestError)
    assert "made to fail" in str(bad)
    assert good[-1].output.finish_reason == "length"
    assert "could not be queued" in caplog.text


def test_an_observer_that_fails_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def observe(_: Any) -> None:
        raise RuntimeError("made to fail")

    llm = llm_of()

    async def observed(asynchronous: AsyncLLM) -> list[StreamChunk]:
        llm.engine.worker.observers.append(observe)
        return await collected(asynchronous, "one", GREEDY)

    assert run(llm, observed)[-1].finished
    assert len([record for record in caplog.records if "counted" in record.getMessage()]) == 1


def test_a_request_that_is_stopped_gives_its_end() -> None:
    async def stopped(asynchronous: AsyncLLM) -> list[StreamChunk]:
        (request,) = await asynchronous.submit(
            [JobSpec("one", SEVERAL.model_copy(update={"max_tokens": None}))]
        )
        chunks = [await anext(request)]
        request.stop()
        return [*chunks, *[chunk async for chunk in request]]

    chunks = run(llm_of(), stopped)
    ends = [chunk.output for chunk in chunks if chunk.output]
    assert [each.finish_reason for each in ends] == ["abort"] * 3
    for end in ends:
        tokens = [t for chunk in chunks if chunk.index == end.index for t in chunk.tokens]
        assert tuple(token.token_id for token in tokens) == end.token_ids
        assert sum(step.committed for step in end.trace.steps) == len(tokens)


def test_closing_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, go_on, begun = llm_of(), Event(), Event()
    advance = llm.engine.advance

    def slow() -> Any:
        begun.set()
        assert go_on.wait(60)
        return advance()

    monkeypatch.setattr(llm.engine, "advance", slow)

    async def main() -> None:
        asynchronous = AsyncLLM(llm)
        (request,) = await asynchronous.submit([JobSpec("one", GREEDY)])
        await asyncio.to_thread(begun.wait, 60)
        assert not asynchronous.close(timeout=0.01)
        go_on.set()
        with pytest.raises(RequestError, match="closed"):
            async for _ in request:
                pass
        assert asynchronous.close()

    asyncio.run(main())
    assert_empty(llm)


# The engine's thread when the engine fails


class Panic(BaseException):
    """As PyO3 raises for a panic of Rust."""


def panics(*_: Any) -> Any:
    raise Panic("as the test wants it")


def job_of(llm: LLM) -> Job:
    return llm.engine.job(JobSpec("one", GREEDY))


def test_a_panic_in_a_call_is_an_error_of_the_call_too() -> None:
    llm = llm_of()
    thread = WorkerThread(llm.engine)
    with pytest.raises(Panic):
        llm.engine.worker.call(panics)
    thread.close()
    assert not thread.alive


def test_a_second_panic_at_the_end_leaves_no_one_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that cannot be decoded may panic again where its request is ended."""
    llm = llm_of()
    thread, told, late = WorkerThread(llm.engine), SimpleQueue[Any](), SimpleQueue[Any]()
    done = []

    def advance() -> Any:
        thread.start(job_of(llm), lambda *given: late.put(given))
        done.append(llm.engine.worker.post(lambda: "done"))
        panics()

    monkeypatch.setattr(llm.engine, "advance", advance)
    monkeypatch.setattr(llm.engine, "give_up", panics)
    thread.start(job_of(llm), lambda *given: told.put(given))
    for each in (told, late):
        assert "the engine failed" in str(each.get(timeout=60)[1])
    assert thread.close()
    assert done[0].result() == "done"


def test_a_panic_after_an_error_closes_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of()
    thread, told = WorkerThread(llm.engine), SimpleQueue[Any]()

    def fails() -> Any:
        raise RuntimeError("made to fail")

    monkeypatch.setattr(llm.engine, "advance", fails)
    monkeypatch.setattr(llm.engine, "give_up", panics)
    thread.start(job_of(llm), lambda *given: told.put(given))
    assert "the engine failed" in str(told.get(timeout=60)[1])
    assert thread.close()
    with pytest.raises(TokenleapError, match="closed"):
        thread.start(job_of(llm), lambda *given: told.put(given))


def test_a_failed_step_ends_the_requests_of_other_threads_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = llm_of()

    def fails() -> Any:
        if llm.engine.load.waiting < 2:  # the other one is still to come
            return None
        raise RuntimeError("made to fail")

    async def generating(asynchronous: AsyncLLM) -> None:
        other = asyncio.create_task(asyncio.to_thread(llm.generate, "one", GREEDY))
        (request,) = await asynchronous.submit([JobSpec("two", GREEDY)])
        (chunk,) = [chunk async for chunk in request]
        assert chunk.output is not None
        assert chunk.output.finish_reason == "error"
        with pytest.raises(RequestError, match="made to fail"):
            await other
        monkeypatch.undo()

    monkeypatch.setattr(llm.engine, "advance", fails)
    run(llm, generating)


# Threads that a process does not wait for


def test_what_is_submitted_runs_and_errors_reach_who_waits() -> None:
    pool = Pool(2, "test")
    assert [pool.submit(partial(pow, n, 2)).result(60) for n in range(5)] == [0, 1, 4, 9, 16]
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 / 0).result(60)
    pool.close()


def test_closing_waits_for_nothing_and_refuses_the_rest() -> None:
    pool, begun, gate = Pool(1, "test"), Event(), Event()

    def slow() -> str:
        begun.set()
        gate.wait(60)
        return "done"

    runs, waits = pool.submit(slow), pool.submit(lambda: "never")
    assert begun.wait(60)
    pool.close()
    with pytest.raises(TokenleapError, match="closed"):
        waits.result(60)
    with pytest.raises(TokenleapError, match="closed"):
        pool.submit(lambda: "never")
    assert not runs.done()
    gate.set()
    assert runs.result(60) == "done"
    assert all(each.daemon for each in threads() if each.name.startswith("test-"))


def test_clients_take_turns() -> None:
    pool, gate, ran = Pool(1, "test"), Event(), list[str]()
    pool.submit(lambda: gate.wait(60))
    waits = [
        pool.submit(partial(ran.append, f"{client}{n}"), client)
        for client, calls in (("a", 3), ("b", 2), (None, 1))
        for n in range(calls)
    ]
    gate.set()
    for each in waits:
        each.result(60)
    assert ran == ["a0", "b0", "None0", "a1", "b1", "a2"]
    pool.close()
