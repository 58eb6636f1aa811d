"""Who may touch the engine: threads, forked processes, drafters, and Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import pytest
from transformers import PreTrainedModel

from tests.engine.serving import alone, assert_empty, bits
from tests.matrix import PROMPTS
from tests.programs import Program
from tests.tiny import tiny_model
from tokenleap import LLM, AsyncLLM, ConfigError, SamplingParams, StreamChunk, TokenleapError
from tokenleap.control import Budget
from tokenleap.core.acceptance import AcceptanceRule, Accepted
from tokenleap.core.acceptance.base import TargetDistributions
from tokenleap.core.noise import StepNoise
from tokenleap.core.tree import Draft
from tokenleap.drafters.base import Drafter
from tokenleap.engine.worker import Worker
from tokenleap.errors import RequestError
from tokenleap.request import Request

T = TypeVar("T")
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "controller": "fixed"}
TIMEOUT = 240.0
"""Seconds after which a thread counts as hanging."""


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """With heads that the native runtime takes."""
    return tiny_model(num_attention_heads=2, num_key_value_heads=2, head_dim=32)


def loaded(model: PreTrainedModel, runtime: str) -> LLM:
    llm = LLM(model, speculative_config=NGRAM, runtime=runtime)
    assert llm.bit_exact
    return llm


@pytest.fixture
def llm(model: PreTrainedModel) -> LLM:
    return loaded(model, "native")


@pytest.fixture(params=["native", "torch"])
def on_each(model: PreTrainedModel, request: pytest.FixtureRequest) -> LLM:
    """On the threads of each runtime."""
    return loaded(model, request.param)


def params_of(index: int, max_tokens: int = 60) -> SamplingParams:
    """Greedy and sampled ones in turns."""
    temperature = 0.9 if index % 2 else 0.0
    return SamplingParams(temperature=temperature, seed=index, max_tokens=max_tokens, logprobs=1)


# Threads


def in_threads(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Results of the calls, in order; none may hang or fail."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(index: int, call: Callable[[], T]) -> None:
        try:
            results[index] = call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(calls)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + TIMEOUT
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    assert not errors, errors
    return [results[index] for index in range(len(calls))]


def idle() -> Worker:
    """A worker without an engine."""
    return Worker(lambda: None, lambda: False)


def start_together(llm: LLM, count: int) -> Callable[[], None]:
    """A call that keeps the engine busy until so many other threads wait for it."""

    def wait() -> None:
        deadline = time.monotonic() + TIMEOUT
        while llm.engine.worker.num_waiting < count and time.monotonic() < deadline:
            time.sleep(0.001)

    return lambda: llm.engine.worker.call(wait)


def test_threads_that_generate_get_what_they_get_alone_and_share_passes(on_each: LLM) -> None:
    def generate(index: int) -> Any:
        prompts = [PROMPTS[index], PROMPTS[(index + 1) % len(PROMPTS)]]
        params = [params_of(index), params_of(index + 1)]
        return [bits(output) for output in on_each.generate(prompts, params)]

    expected, passes = [], 0
    for index in range(4):
        before = on_each.engine.target.num_passes
        expected.append(generate(index))
        passes += on_each.engine.target.num_passes - before
    before = on_each.engine.target.num_passes
    calls = [partial(generate, index) for index in range(4)]
    results: list[Any] = in_threads([start_together(on_each, 4), *calls])
    assert results[1:] == expected
    assert on_each.engine.target.num_passes - before < 0.6 * passes
    assert_empty(on_each)


def test_threads_that_stream_lose_no_token(llm: LLM) -> None:
    def stream(index: int) -> Any:
        chunks = list(llm.stream(PROMPTS[index], params_of(index)))
        assert [chunk.finished for chunk in chunks] == [*[False] * (len(chunks) - 1), True]
        output = chunks[-1].output
        assert output is not None
        tokens = tuple(token.token_id for chunk in chunks for token in chunk.tokens)
        assert tokens == output.token_ids
        return bits(output)

    expected = [stream(index) for index in range(len(PROMPTS))]
    calls: list[Callable[[], Any]] = [
        lambda index=index: stream(index)  # type: ignore[misc]
        for index in range(len(PROMPTS))
    ]
    for _ in range(3):
        results = in_threads([*calls, lambda: llm.generate(PROMPTS, params_of(0))])
        assert results[:-1] == expected
    assert_empty(llm)


def test_threads_that_step_by_hand_get_every_chunk_once(llm: LLM) -> None:
    expected = [bits(llm.generate([p], params_of(i))[0]) for i, p in enumerate(PROMPTS)]
    ids = [llm.engine.add_request(p, params_of(i)) for i, p in enumerate(PROMPTS)]

    def step() -> list[StreamChunk]:
        chunks = []
        while llm.engine.has_unfinished_requests():
            chunks += llm.engine.step()
        return chunks

    calls: list[Callable[[], Any]] = [step, step, lambda: llm.generate(PROMPTS, params_of(3))]
    own, others, _ = in_threads(calls)
    tokens: dict[str | None, list[int]] = {i: [] for i in ids}
    outputs: dict[str | None, Any] = {}
    for chunk in own + others:
        tokens[chunk.request_id] += [token.token_id for token in chunk.tokens]
        if chunk.output is not None:
            assert chunk.request_id not in outputs
            outputs[chunk.request_id] = chunk.output
    assert [bits(outputs[i]) for i in ids] == expected
    # Chunks of two threads may overtake each other.
    assert [sorted(tokens[i]) for i in ids] == [sorted(ended) for ended, _ in expected]
    assert_empty(llm)


def test_ids_are_unique_however_many_threads_add(llm: LLM) -> None:
    def add() -> list[str]:
        return [llm.engine.add_request([1], params_of(0, 1)) for _ in range(20)]

    ids = [i for added in in_threads([add] * 4) for i in added]
    assert len(set(ids)) == 80
    llm.engine.abort(ids)
    taken = []

    def add_named() -> None:
        try:
            llm.engine.add_request([1], params_of(0, 1), request_id="mine")
        except ConfigError:
            taken.append(1)

    in_threads([add_named] * 4)
    assert len(taken) == 3
    llm.engine.abort("mine")
    assert_empty(llm)


def test_generating_in_an_event_loop(llm: LLM) -> None:
    expected = [bits(llm.generate([p], params_of(i))[0]) for i, p in enumerate(PROMPTS)]

    async def generate() -> list[Any]:
        calls = [
            asyncio.to_thread(llm.generate, [prompt], params_of(index))
            for index, prompt in enumerate(PROMPTS)
        ]
        return await asyncio.wait_for(asyncio.gather(*calls), TIMEOUT)

    assert [bits(output) for (output,) in asyncio.run(generate())] == expected
    assert_empty(llm)


def test_an_error_in_one_thread_is_not_raised_in_another(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [bits(llm.generate([p], params_of(i))[0]) for i, p in enumerate(PROMPTS)]
    original = Request.extend

    def failing(self: Request, *args: Any) -> Any:
        if self.prompt_ids == (7, 7) and len(self.output_ids) == 5:
            raise OSError("no disk")
        return original(self, *args)

    monkeypatch.setattr(Request, "extend", failing)

    def bad() -> None:
        with pytest.raises(RequestError, match="OSError: no disk"):
            llm.generate([[7, 7]], params_of(0))

    calls: list[Callable[[], Any]] = [
        lambda index=index: bits(llm.generate([PROMPTS[index]], params_of(index))[0])  # type: ignore[misc]
        for index in range(len(PROMPTS))
    ]
    results = in_threads([start_together(llm, len(PROMPTS) + 1), bad, *calls])
    assert results[2:] == expected
    assert_empty(llm)


def test_a_signal_that_raises_while_a_thread_waits_stops_no_other() -> None:
    worker, begun, go_on = idle(), threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert go_on.wait(TIMEOUT)

    def terminate() -> bool:
        signal.raise_signal(signal.SIGTERM)
        return False

    def leave(*_: object) -> None:
        raise SystemExit

    before = signal.signal(signal.SIGTERM, leave)
    holder = threading.Thread(target=worker.call, args=(hold,))
    holder.start()
    try:
        assert begun.wait(TIMEOUT)
        with pytest.raises(SystemExit):
            worker.drive(terminate)
    finally:
        signal.signal(signal.SIGTERM, before)
        go_on.set()
        holder.join()
    in_threads([partial(worker.call, lambda: None)] * 2)


# Processes


def exit_code(child: Callable[[], None]) -> int:
    """Of a forked process that runs this; it is killed if it hangs."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            child()
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_is_told_to_spawn(on_each: LLM) -> None:
    expected = bits(on_each.generate([PROMPTS[0]], params_of(1))[0])

    def refused() -> None:
        uses: list[Callable[[], object]] = [
            lambda: on_each.generate(PROMPTS, params_of(0)),
            lambda: list(on_each.stream(PROMPTS[0], params_of(0))),
            lambda: on_each.engine.add_request(PROMPTS[0]),
            lambda: on_each.engine.step(),
            lambda: on_each.reset_drafter_memory(),
        ]
        for use in uses:
            with pytest.raises(TokenleapError, match="'spawn'"):
                use()

    assert exit_code(refused) == 0
    # Also while a thread of the parent has its turn.
    codes: list[int] = []
    on_each.engine.worker.call(lambda: codes.append(exit_code(refused)))
    assert codes == [0]
    assert bits(on_each.generate([PROMPTS[0]], params_of(1))[0]) == expected
    assert_empty(on_each)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_an_async_llm_in_a_forked_process_is_told_to_spawn(llm: LLM) -> None:
    """Its threads are not there, and what is queued for them would wait for ever."""
    parents = AsyncLLM(llm)

    async def streamed(asynchronous: AsyncLLM) -> None:
        async for _ in asynchronous.generate(PROMPTS[0], params_of(0)):
            pass

    def refused() -> None:
        for use in (
            lambda: asyncio.run(streamed(parents)),
            lambda: asyncio.run(parents.encode(PROMPTS[0])),
            parents.measure_costs,
            lambda: asyncio.run(streamed(AsyncLLM(llm))),
        ):
            with pytest.raises(TokenleapError, match="'spawn'"):
                use()
        assert parents.close()

    assert exit_code(refused) == 0
    asyncio.run(streamed(parents))
    assert parents.close()
    assert_empty(llm)


EXIT = """
import ctypes, sys, threading, time
import torch
from tokenleap import LLM, AsyncLLM, SamplingParams
from tests.tiny import tiny_model

llm, begun = LLM(tiny_model()), threading.Event()
verify = llm.engine.target.verify

def slow(*arguments, **options):
    begun.set()
    numbers, end = torch.ones(300, 300), time.monotonic() + 0.5
    while time.monotonic() < end:  # in and out of C++, as all steps are
        numbers = (numbers @ numbers).tanh()
    return verify(*arguments, **options)

def generate():
    prompt, params = [1, 2, 3], SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    if sys.argv[1] == "thread":
        llm.generate([prompt], params)
    else:
        import asyncio
        async def read():
            async for _ in AsyncLLM(llm).generate(prompt, params):
                pass
        asyncio.run(read())

llm.engine.target.verify = slow
threading.Thread(target=generate, daemon=True).start()
assert begun.wait(60), "no step"
print("end", flush=True)
ctypes.pythonapi.Py_Exit(3)  # Python's own end; a program of `fork_server` would have none
"""


@pytest.mark.parametrize("way", ["thread", "async"])
def test_python_ends_while_a_daemon_thread_generates(way: str) -> None:
    """A thread that comes back to Python from C++ then would abort the process."""
    with Program(EXIT, way) as program:
        out, err = program.communicate()
    assert (program.returncode, out, err) == (3, "end\n", "")


def test_nothing_is_generated_when_python_ends() -> None:
    worker, seen = idle(), list[str]()
    worker.end()
    with pytest.raises(TokenleapError, match="Python is ending"):
        worker.call(lambda: seen.append("in the thread that ends"))
    worker.post(lambda: seen.append("in a daemon thread"))
    given_up = threading.Event()
    daemon = threading.Thread(target=worker.drive, args=(given_up.is_set,), daemon=True)
    daemon.start()
    daemon.join(0.1)
    assert daemon.is_alive()
    given_up.set()
    daemon.join()
    assert not seen


# Calls from inside a step


def uses_of(llm: LLM) -> dict[str, Callable[[], object]]:
    return {
        "generate": lambda: llm.generate([[1]], params_of(0)),
        "stream": lambda: list(llm.stream([1], params_of(0))),
        "add_request": lambda: llm.engine.add_request([1]),
        "step": lambda: llm.engine.step(),
        "reset_drafter_memory": lambda: llm.reset_drafter_memory(),
    }


class Calling(Drafter):
    """Calls the model it drafts for."""

    use: Callable[[], object]

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        self.use()
        return [Draft.empty(request.root) for request in batch]


class CallingRule(AcceptanceRule):
    """Calls the model whose tokens it accepts."""

    name = "calling"
    lossless = True
    takes_trees = True
    use: Callable[[], object]

    def accept(self, draft: Draft, p: TargetDistributions, noise: StepNoise) -> Accepted:
        self.use()
        return Accepted((), noise.draw(p[0], 0))


@pytest.mark.parametrize(
    "use", ["generate", "stream", "add_request", "step", "reset_drafter_memory"]
)
def test_a_drafter_cannot_call_the_engine_that_asks_it(model: PreTrainedModel, use: str) -> None:
    drafter = Calling()
    llm = LLM(model)
    drafter.use = uses_of(llm)[use]
    configs = [{"method": drafter}, None]
    (outputs,) = in_threads(
        [lambda: llm.generate(PROMPTS[:2], params_of(0), speculative_config=configs)]
    )
    assert [bits(output) for output in outputs] == [
        alone(model, prompt, params_of(0)) for prompt in PROMPTS[:2]
    ]
    failures = [output.metrics.drafter_failure for output in outputs]
    assert failures[1] is None
    assert failures[0] is not None
    assert failures[0].startswith("TokenleapError: the engine was called from inside")
    assert_empty(llm)


def test_a_rule_cannot_call_the_engine_that_asks_it(model: PreTrainedModel) -> None:
    rule = CallingRule()
    llm = LLM(model)
    rule.use = uses_of(llm)["generate"]

    def generate() -> list[Any]:
        with pytest.raises(RequestError, match="the engine was called from inside") as caught:
            llm.generate(PROMPTS[:2], params_of(0), speculative_config=[{"acceptance": rule}, None])
        return list(caught.value.outputs)

    ((bad, good),) = in_threads([generate])
    assert bad.finish_reason == "error"
    assert bits(good) == alone(model, PROMPTS[1], params_of(0))
    assert_empty(llm)


# Ctrl-C


@pytest.fixture
def handler() -> Iterator[Callable[[Any], None]]:
    """Sets what happens at SIGINT, until the test is over."""
    before = signal.getsignal(signal.SIGINT)

    def handle(function: Any) -> None:
        signal.signal(signal.SIGINT, function)

    yield handle
    signal.signal(signal.SIGINT, before)


def busy_for(llm: LLM, until: threading.Event) -> threading.Thread:
    """A thread that has its turn until the event."""
    began = threading.Event()

    def hold() -> None:
        began.set()
        until.wait(TIMEOUT)

    thread = threading.Thread(target=lambda: llm.engine.worker.call(hold), daemon=True)
    thread.start()
    assert began.wait(TIMEOUT)
    return thread


def interrupt_who_waits(llm: LLM) -> threading.Thread:
    """Once somebody does."""

    def shoot() -> None:
        while not llm.engine.worker.num_waiting:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=shoot, daemon=True)
    thread.start()
    return thread


def test_an_interrupt_does_not_wait_for_other_threads(
    model: PreTrainedModel, handler: Callable[[Any], None]
) -> None:
    handler(signal.default_int_handler)
    llm, over = LLM(model), threading.Event()
    threads = [busy_for(llm, over), interrupt_who_waits(llm)]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, params_of(0))
    assert threads[0].is_alive()  # and has its turn
    over.set()
    for thread in threads:
        thread.join(TIMEOUT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_empty(llm)


def test_a_handler_that_does_not_raise_lets_the_call_go_on(
    model: PreTrainedModel, handler: Callable[[Any], None]
) -> None:
    """As that of `asyncio.run`, or of a program that ends when it has the time."""
    seen: list[int] = []
    handler(lambda number, _: seen.append(number))
    llm, over = LLM(model), threading.Event()

    def interrupt_then_release() -> None:
        interrupt_who_waits(llm).join(TIMEOUT)
        ends = time.monotonic() + TIMEOUT
        while not seen and time.monotonic() < ends:
            time.sleep(0.001)
        over.set()

    busy_for(llm, over)
    threading.Thread(target=interrupt_then_release, daemon=True).start()
    (output,) = llm.generate([PROMPTS[0]], params_of(0))
    assert seen == [signal.SIGINT]
    assert bits(output) == alone(model, PROMPTS[0], params_of(0))
    assert_empty(llm)


def test_a_handler_is_called_once_and_between_steps(
    model: PreTrainedModel, handler: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    handler(lambda *_: events.append("interrupt"))
    llm = LLM(model)
    original = llm.engine._scheduler.step

    def step() -> Any:
        events.append("begin")
        if len(events) == 5:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        outcomes = original()
        events.append("end")
        return outcomes

    monkeypatch.setattr(llm.engine._scheduler, "step", step)
    llm.generate([PROMPTS[0]], params_of(0, 5))
    place = events.index("interrupt")
    assert events.count("interrupt") == 1
    assert (events[place - 1], events[place + 1]) == ("end", "begin")


INTERRUPTS = """
import os, random, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in the background
import torch
torch.set_num_threads(1)
from tokenleap import LLM, SamplingParams
from tests.matrix import PROMPTS
from tests.tiny import tiny_model

model = tiny_model(num_attention_heads=2, num_key_value_heads=2, head_dim=32)
config = {"method": "ngram", "prompt_lookup_min": 1, "controller": "fixed"}
llm = LLM(model, speculative_config=config)
params = SamplingParams(temperature=0, max_tokens=12)


def generate():
    return [output.token_ids for output in llm.generate(PROMPTS, params)]


def stream():
    chunks = list(llm.stream(PROMPTS[0], params))
    return [tuple(token.token_id for chunk in chunks for token in chunk.tokens)]


def step():
    ids = [llm.engine.add_request(prompt, params) for prompt in PROMPTS]
    while llm.engine.has_unfinished_requests():
        llm.engine.step()


def shoot(delay):
    time.sleep(delay)
    os.kill(os.getpid(), signal.SIGINT)


class Later:  # interrupts after some seconds
    def __init__(self, use):
        began = time.perf_counter()
        use()
        self.seconds = time.perf_counter() - began

    def arm(self):
        delay = dice.random() ** 2 * self.seconds
        self.thread = threading.Thread(target=shoot, args=(delay,))
        self.thread.start()

    def disarm(self):
        self.thread.join()


# Interrupts where Python looks for signals: at the beginning of a function or after a call into C.
# Where it does so does not depend on the clock.
class AtACall:
    def __init__(self, use):
        self.count = 0
        sys.setprofile(self.watch)
        use()
        sys.setprofile(None)
        self.calls = self.count

    def watch(self, frame, event, argument):
        if event in ("call", "c_return"):
            self.count -= 1
            if self.count == 0:
                sys.setprofile(None)
                os.kill(os.getpid(), signal.SIGINT)

    def arm(self):
        self.count = dice.randrange(1, abs(self.calls))
        sys.setprofile(self.watch)

    def disarm(self):
        sys.setprofile(None)
        if self.count > 0:  # the call has not come
            self.count = 0
            os.kill(os.getpid(), signal.SIGINT)


def interrupted(use, interrupts):
    inside = False
    try:
        interrupts.arm()
        inside = True
        use()
        inside = False
        interrupts.disarm()
        time.sleep(1)
    except KeyboardInterrupt:
        interrupts.disarm()
        return inside
    raise AssertionError("the interrupt got lost")


def assert_clean():
    assert not llm.engine.target._keys, llm.engine.target._keys
    assert not llm.engine.target._slab.lengths
    assert not llm.engine._scheduler.busy
    assert not llm.engine._speculation._assigned and not llm.engine._speculation._guard.failed
    assert not llm.engine.worker.num_waiting and llm.engine.worker._driver is None
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


expected = generate()
dice = random.Random(0)
kind, times = {"calls": AtACall, "clock": Later}[sys.argv[1]], int(sys.argv[2])
uses = [(use, kind(use)) for use in (generate, stream, step)]
hits = 0
for count in range(times):
    use, interrupts = uses[(0, 0, 0, 1, 0, 2)[count % 6]]
    hits += interrupted(use, interrupts)
    while use is step and llm.engine.has_unfinished_requests():
        llm.engine.step()
    assert_clean()
    assert generate() == expected, count
    if count % 6 == 3:
        assert stream() == expected[:1], count
    assert_clean()
print(hits)
# Seconds go by the clock: on a busy machine more interrupts come too late.
assert hits > times * (0.9 if kind is AtACall else 0.25), hits
"""


@pytest.mark.parametrize(
    ("moments", "times"), [("calls", 60), pytest.param("clock", 240, marks=pytest.mark.slow)]
)
def test_an_interrupt_at_any_moment_leaves_the_model_usable(moments: str, times: int) -> None:
    with Program(INTERRUPTS, moments, times) as program:
        shown, errors = program.communicate()
        assert program.wait() == 0, shown + errors
