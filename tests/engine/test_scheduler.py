"""The scheduler: admission, chunked prefill, memory, faults."""

from __future__ import annotations

import gc
import random
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.counting import counted
from tests.engine.serving import GREEDY, alone, assert_empty, bits, run, run_all
from tests.matrix import PROMPTS
from tests.tiny import VOCAB_SIZE, tiny_model
from tokenleap import LLM, CompletionOutput, ConfigError, PromptError, SamplingParams
from tokenleap.control import CostCurve
from tokenleap.core.config import num_bytes
from tokenleap.engine import strategies as strategies_module
from tokenleap.engine.scheduler import KVBudget
from tokenleap.errors import CompatibilityError, RequestError
from tokenleap.runtime import kv_slab as slab_module
from tokenleap.runtime.attention import KEY_BLOCK
from tokenleap.runtime.kv_slab import KVSlab
from tokenleap.runtime.passes import Rows
from tokenleap.runtime.profiling import measure_costs
from tokenleap.runtime.target import Target

NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "controller": "fixed"}
NO_MEMORY = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model(max_position_embeddings=3 * KEY_BLOCK)


@pytest.fixture(scope="module")
def cell_bytes(model: PreTrainedModel) -> int:
    return Target(model).cell_bytes


@pytest.fixture
def llm(model: PreTrainedModel) -> LLM:
    return LLM(model, speculative_config=NGRAM)


def limited(model: PreTrainedModel, blocks: int, **fields: Any) -> LLM:
    """With room for this many key blocks of KV, and without a prefix cache."""
    memory = blocks * KEY_BLOCK * Target(model).cell_bytes
    return LLM(model, kv_cache_memory=memory, **{"enable_prefix_caching": False, **fields})


def tokens_of(seed: int, length: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(VOCAB_SIZE) for _ in range(length)]


# Coming and going


def test_add_step_and_finish(llm: LLM) -> None:
    expected = [o.token_ids for o in llm.generate(PROMPTS, GREEDY)]
    ids = [llm.engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    finished = run(llm.engine)
    assert [finished[i].token_ids for i in ids] == expected
    assert len(set(ids)) == len(PROMPTS)
    assert llm.engine.step() == []
    assert_empty(llm)


def test_chunks_are_deltas_and_requests_join_while_others_run(llm: LLM) -> None:
    first = llm.engine.add_request(PROMPTS[0], GREEDY)
    seen: list[int] = []
    second = output = None
    while llm.engine.has_unfinished_requests():
        for chunk in llm.engine.step():
            assert chunk.index == 0
            if chunk.request_id == first:
                assert output is None
                assert chunk.tokens or chunk.finished
                seen += [token.token_id for token in chunk.tokens]
                output = chunk.output
                assert chunk.finished == (output is not None)
            else:
                assert chunk.request_id == second
        if second is None:
            second = llm.engine.add_request(PROMPTS[1], GREEDY)
    assert output is not None
    assert tuple(seen) == output.token_ids
    assert len(seen) == 12
    assert output.finish_reason == "length"


def test_what_others_steps_did_is_reported(llm: LLM) -> None:
    request = llm.engine.add_request(PROMPTS[0], SamplingParams(temperature=0, max_tokens=3))
    llm.generate(PROMPTS[1:], GREEDY)  # runs the request to its end
    assert llm.engine.has_unfinished_requests()
    (chunk,) = llm.engine.step()
    assert (chunk.request_id, chunk.finished, len(chunk.tokens)) == (request, True, 3)
    assert chunk.output is not None
    assert chunk.output.token_ids == tuple(token.token_id for token in chunk.tokens)
    assert not llm.engine.has_unfinished_requests()


def test_several_outputs_of_one_prompt(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=4, max_tokens=6)
    request_id = llm.engine.add_request(PROMPTS[0], params)
    outputs = run_all(llm.engine)
    (expected,) = llm.generate([PROMPTS[0]], params)
    assert {index: outputs[request_id, index].token_ids for index in range(3)} == {
        output.index: output.token_ids for output in expected.outputs
    }


def test_nothing_to_do(llm: LLM) -> None:
    assert llm.generate([]) == []
    assert llm.engine.step() == []
    assert llm.engine._scheduler.step() == []
    llm.engine.abort([])
    assert not llm.engine.has_unfinished_requests()


@pytest.mark.parametrize("state", ["waiting", "prefilling", "running", "preempted", "finished"])
def test_abort_in_every_state(model: PreTrainedModel, state: str) -> None:
    llm = limited(model, 2, max_num_seqs=2, max_num_batched_tokens=100, speculative_config=NGRAM)
    engine = llm.engine
    length = {"prefilling": 300, "preempted": KEY_BLOCK - 20}.get(state, 8)
    other = tokens_of(1, KEY_BLOCK - 20 if state == "preempted" else 8)
    kept = engine.add_request(other, SamplingParams(temperature=0, max_tokens=40))
    if state == "waiting":
        engine.add_request(tokens_of(5, 9), SamplingParams(temperature=0, max_tokens=40))
    steps = {"waiting": 1, "prefilling": 2, "running": 3, "preempted": 40, "finished": 50}[state]
    given_up = engine.add_request(
        tokens_of(2, length), GREEDY.model_copy(update={"max_tokens": 30})
    )
    (request,) = engine._added.jobs[given_up].requests
    for _ in range(steps):
        engine.step()
        if state == "preempted" and request.metrics.preemptions:
            break
    here = {
        "waiting": request in llm.engine._scheduler._waiting and not request.metrics.preemptions,
        "prefilling": request.key in llm.engine.target and not request.output_ids,
        "running": bool(request.output_ids) and request.key in llm.engine.target,
        "preempted": request in llm.engine._scheduler._waiting and request.metrics.preemptions > 0,
        "finished": request.finish_reason == "length",
    }
    assert here[state], here
    engine.abort(given_up)
    engine.abort(given_up)  # twice is once
    assert request.finish_reason == ("length" if state == "finished" else "abort")
    assert request.key not in llm.engine.target
    finished = run(engine)
    assert given_up not in finished
    if state != "finished":
        assert (
            finished[kept].token_ids
            == alone(model, other, SamplingParams(temperature=0, max_tokens=40))[0]
        )
    assert_empty(llm)


def test_aborting_what_never_was(llm: LLM) -> None:
    llm.engine.add_request(PROMPTS[0], GREEDY)
    for request_id in ("1", "-1", "", "nobody"):
        with pytest.raises(ConfigError, match="no request has the id"):
            llm.engine.abort(request_id)
    assert len(run(llm.engine)) == 1


def test_ids_named_by_the_caller(llm: LLM) -> None:
    """They are unique for ever, and those made up keep clear of them."""
    named = [llm.engine.add_request(PROMPTS[i], GREEDY, request_id=str(i)) for i in (0, 1)]
    assert named == ["0", "1"]
    made_up = llm.engine.add_request(PROMPTS[2], GREEDY)
    with pytest.raises(ConfigError, match="request_id: '1' is taken by another request"):
        llm.engine.add_request(PROMPTS[3], GREEDY, request_id="1")
    with pytest.raises(ConfigError, match=f"request_id: '{made_up}' is taken"):
        llm.engine.add_request(PROMPTS[3], GREEDY, request_id=made_up)
    finished = run(llm.engine)
    assert set(finished) == {"0", "1", made_up}
    expected = [o.token_ids for o in llm.generate(PROMPTS[:3], GREEDY)]
    assert [finished[i].token_ids for i in (*named, made_up)] == expected
    with pytest.raises(ConfigError, match="is taken"):  # also when it has ended
        llm.engine.add_request(PROMPTS[3], GREEDY, request_id="0")
    llm.engine.abort(["0", made_up])  # what has ended stays as it is
    assert_empty(llm)


def test_several_are_aborted_at_once(llm: LLM) -> None:
    ids = [llm.engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    llm.engine.step()
    llm.engine.abort(ids[1:])
    assert list(run(llm.engine)) == ids[:1]
    assert_empty(llm)


def test_chunks_of_interrupted_steps_are_kept_unless_their_request_is_aborted(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, given_up = (llm.engine.add_request(prompt, GREEDY) for prompt in PROMPTS[:2])
    verify = llm.engine.target.verify

    def interrupted(*arguments: Any, **fields: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return verify(*arguments, **fields)

    with monkeypatch.context() as patched:
        patched.setattr(llm.engine.target, "verify", interrupted)
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                llm.engine.step()
    llm.engine.abort(given_up)
    chunks = llm.engine.step()
    assert {chunk.request_id for chunk in chunks} == {kept}
    assert sum(len(chunk.tokens) for chunk in chunks) >= 3


def test_aborted_before_admission_took_no_time(model: PreTrainedModel) -> None:
    llm = LLM(model, max_num_seqs=1)
    llm.engine.add_request([1], GREEDY)
    waiting = llm.engine.add_request([2], GREEDY)
    (request,) = llm.engine._added.jobs[waiting].requests
    llm.engine.step()
    llm.engine.abort(waiting)
    assert request.output().finish_reason == "abort"
    assert request.metrics.seconds == 0
    run(llm.engine)


# Prompts in chunks


@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
def test_a_long_prompt_does_not_stall_the_others(model: PreTrainedModel, chunk: int) -> None:
    llm = LLM(model, max_num_batched_tokens=chunk, enable_prefix_caching=False)
    passes = counted(llm.engine.target)
    engine = llm.engine
    short = engine.add_request([3], SamplingParams(temperature=0, max_tokens=10_000))
    engine.step()
    long = engine.add_request(tokens_of(1, 200), GREEDY)
    (request,) = engine._added.jobs[long].requests
    steps = 0
    while not request.output_ids:
        passes.clear()
        reported = [output.request_id for output in engine.step()]
        assert short in reported
        assert sum(passes[:-1]) <= max(chunk, 4)  # a lone token rides with padding
        steps += 1
    assert steps == -(-199 // chunk)
    engine.abort([short, long])
    assert_empty(llm)


def test_prompts_are_computed_in_order_of_arrival(model: PreTrainedModel) -> None:
    llm = LLM(model, max_num_batched_tokens=100, enable_prefix_caching=False)
    ids = [llm.engine.add_request(tokens_of(i, 81), GREEDY) for i in range(3)]
    order: list[str | None] = []
    for _ in range(3):
        order += [o.request_id for o in llm.engine.step() if o.request_id not in order]
    assert order == ids
    run(llm.engine)


# Memory


def test_admission_keeps_the_slab_inside_the_budget(model: PreTrainedModel) -> None:
    llm = limited(model, 3, max_num_seqs=16)
    expected = [alone(model, prompt) for prompt in PROMPTS * 2]
    for prompt in PROMPTS * 2:
        llm.engine.add_request(prompt, GREEDY)
    most = 0
    outputs: dict[str | None, CompletionOutput] = {}
    ids = list(llm.engine._added.jobs)
    while llm.engine.has_unfinished_requests():
        for chunk in llm.engine.step():
            if chunk.output is not None:
                outputs[chunk.request_id] = chunk.output
        slab = llm.engine.target._slab
        most = max(most, len(slab.lengths))
        assert slab.cells <= 3 * KEY_BLOCK
        assert all(b.shape[0] * b.shape[2] <= 3 * KEY_BLOCK for b in slab._keys.values())
    assert most == 3
    assert [bits(outputs[i]) for i in ids] == expected
    assert_empty(llm)


def test_nobody_is_admitted_only_to_be_preempted(model: PreTrainedModel) -> None:
    llm = limited(model, 3)
    outputs = llm.generate([[1], tokens_of(1, 700), [2]], GREEDY)
    assert [output.metrics.preemptions for output in outputs] == [0, 0, 0]
    assert len(outputs[1].token_ids) == 12


def test_the_youngest_is_preempted_and_computed_again(model: PreTrainedModel) -> None:
    """Two rows fit as long as both are within one key block."""
    prompts = [tokens_of(i, KEY_BLOCK - 20) for i in range(2)]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=60, logprobs=2)
    llm = limited(model, 2, speculative_config=NGRAM)
    first, second = llm.generate(prompts, params)
    assert first.metrics.preemptions == 0
    assert second.metrics.preemptions == 1
    for output, prompt in zip((first, second), prompts, strict=True):
        assert bits(output) == alone(model, prompt, params)
        assert output.metrics.as_dict()["preemptions"] == output.metrics.preemptions
    assert_empty(llm)


def test_the_preempted_come_first_and_in_order(model: PreTrainedModel) -> None:
    llm = limited(model, 3)
    params = SamplingParams(temperature=0, max_tokens=40)
    ids = [llm.engine.add_request(tokens_of(i, KEY_BLOCK - 20), params) for i in range(4)]
    keys = [llm.engine._added.jobs[i].requests[0].key for i in ids]
    llm.engine.step()
    assert len(llm.engine._scheduler._running) == 3
    while len(llm.engine._scheduler._waiting) < 3:
        llm.engine.step()
    assert [request.key for request in llm.engine._scheduler._running] == keys[:1]
    assert [request.key for request in llm.engine._scheduler._waiting] == keys[1:]
    assert list(run(llm.engine)) == ids


def test_a_slab_that_is_long_becomes_wide_again(model: PreTrainedModel) -> None:
    llm = limited(model, 3)
    llm.generate([tokens_of(1, 1200)], GREEDY)
    assert llm.engine.target._slab._positions == 3 * KEY_BLOCK
    outputs = llm.generate([[1], [2], [3]], GREEDY)
    assert llm.engine.target._slab._rows == 3
    assert [o.token_ids for o in outputs] == [alone(model, [i])[0] for i in (1, 2, 3)]


def test_a_prompt_larger_than_the_budget(model: PreTrainedModel) -> None:
    llm = limited(model, 1)
    for add in (llm.generate, llm.engine.add_request, llm.stream):
        with pytest.raises(PromptError, match="kv_cache_memory has room for 509, output included"):
            add([5] * 600)
    with pytest.raises(PromptError, match="leaves no room in the context of 1536"):
        llm.generate([5] * 1536)
    assert_empty(llm)


@pytest.mark.parametrize("config", [None, NGRAM, {**NGRAM, "num_speculative_tokens": 40}])
def test_an_output_that_outgrows_the_budget_ends_with_an_error(
    model: PreTrainedModel, config: dict[str, Any] | None
) -> None:
    """At the same token with every drafter, also where a draft itself would not fit."""
    llm = limited(model, 1, speculative_config=config)
    assert llm.max_model_len == KEY_BLOCK - 3
    prompt, endless = [1, 2, 3] * 165, SamplingParams(temperature=0, max_tokens=None)
    told = "kv_cache_memory has room for 509 tokens, prompt included, and the output is longer"
    with pytest.raises(RequestError, match=told) as caught:
        llm.generate([prompt], endless)
    (output,) = caught.value.outputs
    assert (output.finish_reason, len(output.token_ids)) == ("error", KEY_BLOCK - 3 - len(prompt))
    free = LLM(model).generate([prompt], SamplingParams(temperature=0, max_tokens=30))[0]
    assert output.token_ids == free.token_ids[: len(output.token_ids)]
    fitting = SamplingParams(temperature=0, max_tokens=KEY_BLOCK - 3 - len(prompt))
    (same,) = llm.generate([prompt], fitting)
    assert (same.token_ids, same.finish_reason) == (output.token_ids, "length")
    longer = SamplingParams(temperature=0, max_tokens=KEY_BLOCK - 2 - len(prompt))
    with pytest.raises(PromptError, match="and the output up to 15, and kv_cache_memory has room"):
        llm.generate([prompt], longer)
    for tokens in (None, KEY_BLOCK):
        searched = SamplingParams(temperature=0, beam_width=2, max_tokens=tokens)
        with pytest.raises(PromptError, match="kv_cache_memory has room for 509 together"):
            llm.generate([prompt], searched)
    shorter = limited(model, 1, speculative_config=config, max_model_len=500)
    (cut,) = shorter.generate([prompt], endless)
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 500 - len(prompt))
    assert_empty(llm)


def test_trees_that_do_not_fit_are_left_out(model: PreTrainedModel) -> None:
    config = {"method": "lookahead", "num_speculative_tokens": 60}
    prompt = [1, 2, 3] * 160
    params = SamplingParams(temperature=0, max_tokens=KEY_BLOCK - 3 - len(prompt))
    (output,) = limited(model, 1, speculative_config=config).generate([prompt], params)
    (plain,) = limited(model, 1).generate([prompt], params)
    assert output.token_ids == plain.token_ids


def test_budgets_that_make_no_sense(model: PreTrainedModel, cell_bytes: int) -> None:
    assert cell_bytes == 2 * 2 * 2 * 32 * 4  # layers, keys and values, heads, width, float32
    with pytest.raises(ConfigError, match=r"one sequence of this model takes at least 0[.]5 MiB"):
        LLM(model, kv_cache_memory="100KiB")
    with pytest.raises(ConfigError, match="prefix_cache_memory: 64 tokens of this model take"):
        LLM(model, prefix_cache_memory=1000)
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        with pytest.raises(ConfigError, match=f"{name}: must be at least 1, got 0"):
            LLM(model, **{name: 0})  # type: ignore[arg-type]


def test_draft_models_that_are_gone_do_not_count() -> None:
    """Requests may name any number of them, one after the other."""
    budget = KVBudget(None)
    target = Rows(KVSlab(), 99)
    budget.add(target)
    for _ in range(3):
        budget.add(Rows(KVSlab(), 99))
        gc.collect()
    budget.add(target)
    assert len(budget._slabs) == len(budget.held_bytes) == 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (5, 5),
        ("12", 12),
        ("1KiB", 1024),
        ("1.5 MiB", 3 * 2**19),
        ("2gib", 2**31),
        ("3GB", 3 * 10**9),
    ],
)
def test_amounts_of_memory(value: int | str, expected: int) -> None:
    assert num_bytes("x", value) == expected


@pytest.mark.parametrize(
    "value", ["", "GiB", "two", "1.2.3MB", "5 apples", 0, -3, "0GiB", True, 1.5]
)
def test_amounts_that_are_none(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^x: "):
        num_bytes("x", value)


# Memory that the machine does not have


def failing(monkeypatch: pytest.MonkeyPatch, fails: Callable[[int], bool]) -> list[int]:
    """Growing a layer fails where `fails` says so of the how-manieth time."""
    original: Callable[..., torch.Tensor] = vars(slab_module)["_resized"]
    calls = [0]

    def resized(
        old: torch.Tensor, rows: int, positions: int, used: tuple[int, int]
    ) -> torch.Tensor:
        if (old.shape[0], old.shape[2]) != (rows, positions):
            calls[0] += 1
            if fails(calls[0]):
                raise RuntimeError(NO_MEMORY)
        return original(old, rows, positions, used)

    monkeypatch.setattr(slab_module, "_resized", resized)
    return calls


def test_out_of_memory_while_admitting_waits_for_the_others(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [alone(model, prompt) for prompt in PROMPTS]
    llm = LLM(model, enable_prefix_caching=False)
    failing(monkeypatch, lambda _: True)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert llm.engine.target._slab._rows == 1
    assert [bits(o) for o in outputs] == expected
    assert_empty(llm)


@pytest.mark.parametrize("works", range(1, 9))
def test_layers_of_different_sizes_still_serve(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, works: int
) -> None:
    """The machine is out of memory in the middle of growing, again and again."""
    prompts = [*PROMPTS, tokens_of(1, KEY_BLOCK - 5), tokens_of(2, KEY_BLOCK + 5)]
    expected = [alone(model, prompt) for prompt in prompts]
    llm = LLM(model, enable_prefix_caching=False, speculative_config=NGRAM)
    calls = failing(monkeypatch, lambda call: call % works == 0 and call < 60)
    assert [bits(o) for o in llm.generate(prompts, GREEDY)] == expected
    assert calls[0] >= works
    assert_empty(llm)


def test_out_of_memory_alone_is_an_error(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0, max_tokens=99)
    expected = [alone(model, prompt, params)[0] for prompt in (tokens_of(1, 500), [5])]
    llm = LLM(model, speculative_config=NGRAM)
    failing(monkeypatch, lambda _: True)
    with pytest.raises(RequestError, match="out of memory for the KV of a request of 600 tokens"):
        llm.generate([tokens_of(1, 600)], params)
    assert_empty(llm)
    ids = [llm.engine.add_request(prompt, params) for prompt in (tokens_of(1, 500), [5])]
    outputs = run(llm.engine)
    ended, other = (outputs[i] for i in ids)
    assert "so it was ended" in str(ended.error)
    assert "\n" not in str(ended.error)
    assert other.error is None
    assert (ended.finish_reason, other.finish_reason) == ("error", "length")
    assert 10 < len(ended.token_ids) < 20
    assert ended.token_ids == expected[0][: len(ended.token_ids)]
    assert other.token_ids == expected[1]
    assert_empty(llm)


def test_memory_that_returns(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefix cache is given up before any request is."""
    llm = LLM(model)
    llm.generate([tokens_of(3, 100)], GREEDY)
    assert len(llm.engine._scheduler._prefixes or ()) == 1
    failing(monkeypatch, lambda call: call == 1)
    (output,) = llm.generate([tokens_of(1, 600)], GREEDY)
    assert output.metrics.preemptions == 0
    assert bits(output) == alone(model, tokens_of(1, 600))


def test_an_error_that_is_not_about_memory_is_not_hidden(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(llm.engine.target, "prefill", broken)
    with pytest.raises(RequestError, match="RuntimeError: something else"):
        llm.generate([PROMPTS[0]], GREEDY)
    assert_empty(llm)


def test_requests_that_a_broken_step_ended_are_let_go(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(model)
    ended = llm.engine.add_request([1], SamplingParams(temperature=0, max_tokens=2))
    going_on = llm.engine.add_request([2], GREEDY)
    llm.engine.step()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine._speculation, "observe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.engine.step()
    monkeypatch.undo()
    assert len(llm.engine.target._keys) == 1
    outputs = run(llm.engine)
    assert outputs[ended].token_ids == alone(model, [1])[0][:2]
    assert outputs[going_on].token_ids == alone(model, [2])[0]


# A method for each request


def test_a_method_for_each_prompt(model: PreTrainedModel) -> None:
    configs: list[Any] = [
        None,
        NGRAM,
        {"method": "ngram_table"},
        {"method": "random", "controller": "fixed"},
        dict(NGRAM),
    ]
    llm = LLM(model)
    outputs = llm.generate(PROMPTS, GREEDY, speculative_config=configs)
    assert [bits(o) for o in outputs] == [alone(model, p) for p in PROMPTS]
    assert outputs[0].metrics.num_drafts == 0
    assert outputs[3].metrics.num_drafts > 0
    assert len(llm.engine.strategies._built) == 3  # one drafter for equal configurations
    llm.generate(PROMPTS[0], GREEDY, speculative_config=NGRAM)
    assert len(llm.engine.strategies._built) == 3
    assert_empty(llm)


def test_streams_and_the_engine_take_a_method(llm: LLM) -> None:
    expected = llm.generate([PROMPTS[3]], GREEDY)[0].token_ids
    config = {"method": "random", "controller": "fixed"}
    chunks = list(llm.stream(PROMPTS[3], GREEDY, speculative_config=config))
    assert tuple(token.token_id for chunk in chunks for token in chunk.tokens) == expected
    assert chunks[-1].output is not None
    assert chunks[-1].output.metrics.num_draft_tokens > 0
    llm.engine.add_request(PROMPTS[3], GREEDY, config)
    (output,) = run(llm.engine).values()
    assert output.token_ids == expected


def test_methods_that_do_not_fit(model: PreTrainedModel) -> None:
    llm = LLM(model, speculative_config={"method": "ngram", "acceptance": "block"})
    with pytest.raises(CompatibilityError, match="'block' takes chains only"):
        llm.generate(PROMPTS, GREEDY, speculative_config={"method": "lookahead"})
    for wrong in ("ngram", 3):
        with pytest.raises(ConfigError, match="speculative_config: expected one for all"):
            llm.generate(PROMPTS, GREEDY, speculative_config=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="2 given for 5 prompts"):
        llm.generate(PROMPTS, GREEDY, speculative_config=[None, NGRAM])
    with pytest.raises(ConfigError, match="unknown method 'nope'"):
        llm.engine.add_request(PROMPTS[0], GREEDY, {"method": "nope"})
    assert_empty(llm)
    for rule in ("block", "coupled"):
        config = {"method": "ngram", "acceptance": rule}
        assert len(llm.generate(PROMPTS, GREEDY, speculative_config=config)) == 5


RULES_OF_REQUESTS: list[Any] = [
    None,
    {**NGRAM, "acceptance": "rejection"},
    {"method": "ngram_table", "acceptance": "typical", "controller": "fixed"},
    {**NGRAM, "acceptance": {"rule": "lenient", "lenience": 0.1}},
    {"method": "random", "acceptance": "block", "controller": "fixed"},
]


def test_a_request_runs_under_its_own_acceptance_rule(model: PreTrainedModel) -> None:
    """In one batch, each with the bits of an LLM that has this rule."""
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=30, logprobs=1)
    llm = LLM(model, speculative_config=NGRAM)
    outputs = llm.generate(PROMPTS, params, speculative_config=RULES_OF_REQUESTS)
    for prompt, config, output in zip(PROMPTS, RULES_OF_REQUESTS, outputs, strict=True):
        (own,) = LLM(model, speculative_config=config or NGRAM).generate([prompt], params)
        assert bits(output) == bits(own)
        assert output.outputs[0].origins == own.outputs[0].origins
    assert_empty(llm)


def test_a_request_that_names_no_rule_has_that_of_the_llm(model: PreTrainedModel) -> None:
    params = SamplingParams(temperature=1.5, seed=5, max_tokens=30, logprobs=1)
    draft = tiny_model(seed=1, max_position_embeddings=3 * KEY_BLOCK)
    config = {"model": draft, "controller": "fixed"}
    under = {**config, "acceptance": "rejection"}
    (expected,) = LLM(model, speculative_config=under).generate([PROMPTS[0]], params)
    llm = LLM(model, speculative_config={"method": "none", "acceptance": "rejection"})
    (output,) = llm.generate([PROMPTS[0]], params, speculative_config=config)
    assert bits(output) == bits(expected)
    assert output.outputs[0].origins == expected.outputs[0].origins
    assert bits(output) != alone(model, PROMPTS[0], params)  # the rule shows


LONG = SamplingParams(temperature=0, max_tokens=130, logprobs=1)


def test_costs_are_measured_once_for_all_controllers(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the first controller that looks at them is made, and never more rows than there are."""
    asked: list[int] = []

    def watched(target: Target, most_rows: int) -> Any:
        asked.append(most_rows)
        return measure_costs(target, most_rows)

    monkeypatch.setattr(strategies_module, "measure_costs", watched)
    llm = LLM(model, speculative_config={"method": "ngram"}, max_num_seqs=5)
    assert asked == [5]
    assert llm.engine.strategies._costs.measured
    llm.generate(PROMPTS, LONG, speculative_config={"method": "ngram_table"})
    assert asked == [5]
    plain = LLM(model)
    assert not plain.engine.strategies._costs.measured
    plain.generate(PROMPTS, GREEDY, speculative_config={"method": "ngram"})
    plain.generate(PROMPTS, GREEDY, speculative_config={"method": "ngram_table"})
    assert asked == [5, 16]
    assert_empty(llm)
    assert_empty(plain)


def test_where_bits_depend_on_the_nodes_no_clock_chooses_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("lean")

    def name(config: dict[str, Any]) -> str:
        return LLM(model, speculative_config=config).engine._speculation.default.controller.name

    trees = {"method": "suffix", "branching": True}
    assert name({"method": "ngram"}) == "cost_model"
    assert name(trees) == "fixed"  # not on the native runtime
    assert name({**trees, "controller": "cost_model"}) == "cost_model"
    monkeypatch.setattr("tokenleap.runtime.probing._same_bits", lambda *_: False)
    assert name({"method": "ngram"}) == "fixed"


def test_costs_are_not_measured_for_those_who_do_not_look(model: PreTrainedModel) -> None:
    for config in (None, NGRAM, {"method": "ngram", "num_speculative_tokens": 0}):
        llm = LLM(model, speculative_config=config)
        llm.generate(PROMPTS, LONG)
        assert not llm.engine.strategies._costs.measured


def test_a_request_has_the_default_of_the_rule_it_runs_under(model: PreTrainedModel) -> None:
    """Seeded sampling by rejection depends on where drafts end: no clock may choose that."""
    for rule, controller in (("coupled", "cost_model"), ("rejection", "fixed")):
        llm = LLM(model, speculative_config={"method": "none", "acceptance": rule})
        llm.generate(PROMPTS[0], GREEDY, speculative_config={"method": "ngram"})
        assert llm.engine.strategies._built[0][1].controller.name == controller


def test_where_there_is_no_room_to_measure_costs_are_learnt(model: PreTrainedModel) -> None:
    llm = limited(model, 2, speculative_config={"method": "ngram", "prompt_lookup_min": 1})
    outputs = llm.generate(PROMPTS, LONG)
    assert [bits(o) for o in outputs] == [alone(model, p, LONG) for p in PROMPTS]
    assert llm.engine.strategies._costs.measured  # not tried again
    assert llm.engine.target._slab.cells <= 2 * KEY_BLOCK
    assert_empty(llm)


def test_controllers_of_requests_see_their_own_part(model: PreTrainedModel) -> None:
    cost = {**NGRAM, "controller": "cost_model"}
    llm = LLM(model)
    configs = [cost, {**cost, "num_speculative_tokens": 2}, None, {**NGRAM, "controller": "batch"}]
    outputs = llm.generate(PROMPTS[:4], GREEDY, speculative_config=configs)
    assert [bits(o) for o in outputs] == [alone(model, p) for p in PROMPTS[:4]]
    costs = [s.controller.costs for _, s in llm.engine.strategies._built[:2]]
    assert isinstance(costs[0], CostCurve)
    assert costs[0] is costs[1]  # learnt by all
    assert_empty(llm)
