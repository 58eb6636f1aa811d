"""The scheduler: admission, chunked prefill, memory, faults."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from foretoken import LLM, ConfigError, ForetokenError, PromptError, RequestOutput, SamplingParams
from foretoken.control import CostCurve
from foretoken.core.memory import num_bytes
from foretoken.engine.llm_engine import LLMEngine
from foretoken.errors import CompatibilityError
from foretoken.runtime import kv_slab as slab_module
from foretoken.runtime.attention import KEY_BLOCK
from foretoken.runtime.target import Target
from tests.counting import counted
from tests.matrix import PROMPTS
from tests.tiny import VOCAB_SIZE, tiny_model

NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "controller": "fixed"}
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=1)
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


def alone(model: PreTrainedModel, prompt: Sequence[int], params: SamplingParams = GREEDY) -> Any:
    (output,) = LLM(model, enable_prefix_caching=False).generate([prompt], params)
    return output.token_ids, output.logprobs


def run(engine: LLMEngine) -> dict[int, RequestOutput]:
    """Finished outputs by id; each is reported as finished once."""
    finished: dict[int, RequestOutput] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.request_id is not None
            assert output.request_id not in finished
            if output.finished:
                finished[output.request_id] = output
    return finished


def assert_empty(llm: LLM) -> None:
    """No row, no request, no drafter's or controller's state of a request."""
    engine = llm._engine
    assert not llm._target._keys
    assert not llm._target._slab.lengths
    assert not engine.busy
    assert not engine._drafters._assigned
    assert not engine._drafters._failed
    assert not engine._controllers._assigned
    assert not llm.engine._groups
    for owner in [llm._engine._drafter, *(s.drafter for _, s in llm._others)]:
        for name, value in vars(owner).items():
            assert not (isinstance(value, dict) and value), (owner, name)


# Coming and going


def test_add_step_and_finish(llm: LLM) -> None:
    expected = [o.token_ids for o in llm.generate(PROMPTS, GREEDY)]
    ids = [llm.engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    finished = run(llm.engine)
    assert [finished[i].token_ids for i in ids] == expected
    assert [finished[i].prompt_token_ids for i in ids] == [tuple(p) for p in PROMPTS]
    assert len(set(ids)) == len(PROMPTS)
    assert llm.engine.step() == []
    assert_empty(llm)


def test_outputs_grow_and_join_while_others_run(llm: LLM) -> None:
    first = llm.engine.add_request(PROMPTS[0], GREEDY)
    seen: list[tuple[int, ...]] = []
    second = None
    while llm.engine.has_unfinished_requests():
        for output in llm.engine.step():
            if output.request_id == first:
                seen.append(output.token_ids)
                assert output.finished == (output.finish_reason is not None)
        if second is None:
            second = llm.engine.add_request(PROMPTS[1], GREEDY)
    assert len(seen) > 1
    assert all(a == b[: len(a)] and len(a) < len(b) for a, b in pairwise(seen))
    assert len(seen[-1]) == 12


def test_what_others_steps_did_is_reported(llm: LLM) -> None:
    request = llm.engine.add_request(PROMPTS[0], SamplingParams(temperature=0, max_tokens=3))
    llm.generate(PROMPTS[1:], GREEDY)  # runs the request to its end
    assert llm.engine.has_unfinished_requests()
    (output,) = llm.engine.step()
    assert (output.request_id, output.finished, len(output.token_ids)) == (request, True, 3)
    assert not llm.engine.has_unfinished_requests()


def test_several_outputs_of_one_prompt(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=4, max_tokens=6)
    llm.engine.add_request(PROMPTS[0], params)
    (output,) = run(llm.engine).values()
    (expected,) = llm.generate([PROMPTS[0]], params)
    assert [o.token_ids for o in output.outputs] == [o.token_ids for o in expected.outputs]


def test_nothing_to_do(llm: LLM) -> None:
    assert llm.generate([]) == []
    assert llm.engine.step() == []
    assert llm._engine.step() == []
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
    (request,) = engine._groups[given_up].requests
    for _ in range(steps):
        engine.step()
        if state == "preempted" and request.metrics.preemptions:
            break
    here = {
        "waiting": request in llm._engine._waiting and not request.metrics.preemptions,
        "prefilling": request.key in llm._target and not request.output_ids,
        "running": bool(request.output_ids) and request.key in llm._target,
        "preempted": request in llm._engine._waiting and request.metrics.preemptions > 0,
        "finished": request.finish_reason == "length",
    }
    assert here[state], here
    engine.abort(given_up)
    engine.abort(given_up)  # twice is once
    assert request.finish_reason == ("length" if state == "finished" else "abort")
    assert request.key not in llm._target
    finished = run(engine)
    assert given_up not in finished
    if state != "finished":
        assert (
            finished[kept].token_ids
            == alone(model, other, SamplingParams(temperature=0, max_tokens=40))[0]
        )
    assert_empty(llm)


def test_aborting_what_never_was(llm: LLM) -> None:
    for request_id in (0, -1):
        with pytest.raises(ConfigError, match="no request has the id"):
            llm.engine.abort(request_id)


def test_aborted_before_admission_took_no_time(model: PreTrainedModel) -> None:
    llm = LLM(model, max_num_seqs=1)
    llm.engine.add_request([1], GREEDY)
    waiting = llm.engine.add_request([2], GREEDY)
    (request,) = llm.engine._groups[waiting].requests
    llm.engine.step()
    llm.engine.abort(waiting)
    assert request.output().finish_reason == "abort"
    assert request.metrics.seconds == 0
    run(llm.engine)


# Prompts in chunks


@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
def test_a_long_prompt_does_not_stall_the_others(model: PreTrainedModel, chunk: int) -> None:
    llm = LLM(model, max_num_batched_tokens=chunk, enable_prefix_caching=False)
    passes = counted(llm._target)
    engine = llm.engine
    short = engine.add_request([3], SamplingParams(temperature=0, max_tokens=10_000))
    engine.step()
    long = engine.add_request(tokens_of(1, 200), GREEDY)
    (request,) = engine._groups[long].requests
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
    order: list[int | None] = []
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
    outputs: dict[int, RequestOutput] = {}
    while llm.engine.has_unfinished_requests():
        for output in llm.engine.step():
            if output.finished and output.request_id is not None:
                outputs[output.request_id] = output
        slab = llm._target._slab
        most = max(most, len(slab.lengths))
        assert slab.cells <= 3 * KEY_BLOCK
        assert all(b.shape[0] * b.shape[2] <= 3 * KEY_BLOCK for b in slab._keys.values())
    assert most == 3
    assert [(outputs[i].token_ids, outputs[i].logprobs) for i in sorted(outputs)] == expected
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
        assert (output.token_ids, output.logprobs) == alone(model, prompt, params)
        assert output.metrics.as_dict()["preemptions"] == output.metrics.preemptions
    assert_empty(llm)


def test_the_preempted_come_first_and_in_order(model: PreTrainedModel) -> None:
    llm = limited(model, 3)
    params = SamplingParams(temperature=0, max_tokens=40)
    ids = [llm.engine.add_request(tokens_of(i, KEY_BLOCK - 20), params) for i in range(4)]
    keys = [llm.engine._groups[i].requests[0].key for i in ids]
    llm.engine.step()
    assert len(llm._engine._running) == 3
    while len(llm._engine._waiting) < 3:
        llm.engine.step()
    assert [request.key for request in llm._engine._running] == keys[:1]
    assert [request.key for request in llm._engine._waiting] == keys[1:]
    assert list(run(llm.engine)) == ids


def test_a_slab_that_is_long_becomes_wide_again(model: PreTrainedModel) -> None:
    llm = limited(model, 3)
    llm.generate([tokens_of(1, 1200)], GREEDY)
    assert llm._target._slab._positions == 3 * KEY_BLOCK
    outputs = llm.generate([[1], [2], [3]], GREEDY)
    assert llm._target._slab._rows == 3
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
def test_an_output_that_outgrows_the_budget_ends_with_it(
    model: PreTrainedModel, config: dict[str, Any] | None
) -> None:
    """At the same token with every drafter, also where a draft itself would not fit."""
    llm = limited(model, 1, speculative_config=config)
    assert llm.max_model_len == KEY_BLOCK - 3
    prompt = [1, 2, 3] * 165
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=None))
    assert len(output.token_ids) == KEY_BLOCK - 3 - len(prompt)
    assert output.finish_reason == "length"
    free = LLM(model).generate([prompt], SamplingParams(temperature=0, max_tokens=30))[0]
    assert output.token_ids == free.token_ids[: len(output.token_ids)]
    assert_empty(llm)


def test_trees_that_do_not_fit_are_left_out(model: PreTrainedModel) -> None:
    config = {"method": "lookahead", "num_speculative_tokens": 60}
    prompt = [1, 2, 3] * 160
    params = SamplingParams(temperature=0, max_tokens=None)
    (output,) = limited(model, 1, speculative_config=config).generate([prompt], params)
    (plain,) = limited(model, 1).generate([prompt], params)
    assert output.token_ids == plain.token_ids


def test_budgets_that_make_no_sense(model: PreTrainedModel, cell_bytes: int) -> None:
    assert cell_bytes == 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, width, float32
    with pytest.raises(ConfigError, match=r"one sequence of this model takes 0[.]2 MiB"):
        LLM(model, kv_cache_memory="100KiB")
    with pytest.raises(ConfigError, match="prefix_cache_memory: 64 tokens of this model take"):
        LLM(model, prefix_cache_memory=1000)
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        with pytest.raises(ConfigError, match=f"{name}: must be at least 1, got 0"):
            LLM(model, **{name: 0})  # type: ignore[arg-type]


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
    original, calls = slab_module._resized, [0]

    def resized(old: torch.Tensor, rows: int, positions: int) -> torch.Tensor:
        if (old.shape[0], old.shape[2]) != (rows, positions):
            calls[0] += 1
            if fails(calls[0]):
                raise RuntimeError(NO_MEMORY)
        return original(old, rows, positions)

    monkeypatch.setattr(slab_module, "_resized", resized)
    return calls


def test_out_of_memory_while_admitting_waits_for_the_others(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [alone(model, prompt) for prompt in PROMPTS]
    llm = LLM(model, enable_prefix_caching=False)
    failing(monkeypatch, lambda _: True)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert llm._target._slab._rows == 1
    assert [(o.token_ids, o.logprobs) for o in outputs] == expected
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
    assert [(o.token_ids, o.logprobs) for o in llm.generate(prompts, GREEDY)] == expected
    assert calls[0] >= works
    assert_empty(llm)


def test_out_of_memory_alone_is_an_error(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0, max_tokens=99)
    expected = [alone(model, prompt, params)[0] for prompt in (tokens_of(1, 500), [5])]
    llm = LLM(model, speculative_config=NGRAM)
    failing(monkeypatch, lambda _: True)
    with pytest.raises(ForetokenError, match="out of memory for the KV of a request of 600 tokens"):
        llm.generate([tokens_of(1, 600)], params)
    assert_empty(llm)
    ids = [llm.engine.add_request(prompt, params) for prompt in (tokens_of(1, 500), [5])]
    outputs, errors = {}, []
    while llm.engine.has_unfinished_requests():
        try:
            outputs.update({output.request_id: output for output in llm.engine.step()})
        except ForetokenError as error:
            errors.append(str(error))
    ended, other = (outputs[i] for i in ids)
    assert len(errors) == 1
    assert "which was ended" in errors[0]
    assert (ended.finish_reason, other.finish_reason) == ("abort", "length")
    assert 10 < len(ended.token_ids) < 20
    assert ended.token_ids == expected[0][: len(ended.token_ids)]
    assert other.token_ids == expected[1]
    assert_empty(llm)


def test_memory_that_returns(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefix cache is given up before any request is."""
    llm = LLM(model)
    llm.generate([tokens_of(3, 100)], GREEDY)
    assert len(llm._engine._prefixes or ()) == 1
    failing(monkeypatch, lambda call: call == 1)
    (output,) = llm.generate([tokens_of(1, 600)], GREEDY)
    assert output.metrics.preemptions == 0
    assert (output.token_ids, output.logprobs) == alone(model, tokens_of(1, 600))


def test_an_error_that_is_not_about_memory_is_not_hidden(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(llm._target, "prefill", broken)
    with pytest.raises(RuntimeError, match="something else"):
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

    monkeypatch.setattr(llm._engine._drafters, "observe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.engine.step()
    monkeypatch.undo()
    assert len(llm._target._keys) == 1
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
    assert [(o.token_ids, o.logprobs) for o in outputs] == [alone(model, p) for p in PROMPTS]
    assert outputs[0].metrics.num_drafts == 0
    assert outputs[3].metrics.num_drafts > 0
    assert len(llm._others) == 3  # one drafter for equal configurations
    llm.generate(PROMPTS[0], GREEDY, speculative_config=NGRAM)
    assert len(llm._others) == 3
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
    with pytest.raises(ConfigError, match="requests share the LLM's rule, 'block'"):
        llm.generate(PROMPTS, GREEDY, speculative_config={**NGRAM, "acceptance": "coupled"})
    for wrong in ("ngram", 3):
        with pytest.raises(ConfigError, match="speculative_config: expected one, or a list"):
            llm.generate(PROMPTS, GREEDY, speculative_config=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="2 given for 5 prompts"):
        llm.generate(PROMPTS, GREEDY, speculative_config=[None, NGRAM])
    with pytest.raises(ConfigError, match="unknown method 'nope'"):
        llm.engine.add_request(PROMPTS[0], GREEDY, {"method": "nope"})
    assert_empty(llm)
    same = {"method": "ngram", "acceptance": "block"}
    assert len(llm.generate(PROMPTS, GREEDY, speculative_config=same)) == 5


LONG = SamplingParams(temperature=0, max_tokens=130, logprobs=1)


def test_costs_are_measured_once_for_all_controllers(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the first controller that looks at them is made, and never more rows than there are."""
    measure, asked = Target.measure_costs, list[int]()

    def watched(self: Target, most_rows: int) -> CostCurve:
        asked.append(most_rows)
        return measure(self, most_rows)

    monkeypatch.setattr(Target, "measure_costs", watched)
    llm = LLM(model, speculative_config={"method": "ngram"}, max_num_seqs=5)
    assert asked == [5]
    assert llm._costs.measured
    llm.generate(PROMPTS, LONG, speculative_config={"method": "ngram_table"})
    assert asked == [5]
    plain = LLM(model)
    assert not plain._costs.measured
    plain.generate(PROMPTS, GREEDY, speculative_config={"method": "ngram"})
    plain.generate(PROMPTS, GREEDY, speculative_config={"method": "ngram_table"})
    assert asked == [5, 16]
    assert_empty(llm)
    assert_empty(plain)


def test_where_bits_depend_on_the_nodes_no_clock_chooses_them(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def name(config: dict[str, Any]) -> str:
        return LLM(model, speculative_config=config)._engine._controller.name

    trees = {"method": "suffix", "branching": True}
    assert name({"method": "ngram"}) == "cost_model"
    assert name(trees) == "fixed"  # not on the native runtime
    assert name({**trees, "controller": "cost_model"}) == "cost_model"
    monkeypatch.setattr(Target, "_same_bits", lambda *_: False)
    assert name({"method": "ngram"}) == "fixed"


def test_costs_are_not_measured_for_those_who_do_not_look(model: PreTrainedModel) -> None:
    for config in (None, NGRAM, {"method": "ngram", "num_speculative_tokens": 0}):
        llm = LLM(model, speculative_config=config)
        llm.generate(PROMPTS, LONG)
        assert not llm._costs.measured


def test_a_request_has_the_default_of_the_rule_it_runs_under(model: PreTrainedModel) -> None:
    """Seeded sampling by rejection depends on where drafts end: no clock may choose that."""
    for rule, controller in (("coupled", "cost_model"), ("rejection", "fixed")):
        llm = LLM(model, speculative_config={"method": "none", "acceptance": rule})
        llm.generate(PROMPTS[0], GREEDY, speculative_config={"method": "ngram"})
        assert llm._others[0][1].controller.name == controller


def test_where_there_is_no_room_to_measure_costs_are_learnt(model: PreTrainedModel) -> None:
    llm = limited(model, 2, speculative_config={"method": "ngram", "prompt_lookup_min": 1})
    outputs = llm.generate(PROMPTS, LONG)
    assert [(o.token_ids, o.logprobs) for o in outputs] == [alone(model, p, LONG) for p in PROMPTS]
    assert llm._costs.measured  # not tried again
    assert llm._target._slab.cells <= 2 * KEY_BLOCK
    assert_empty(llm)


def test_controllers_of_requests_see_their_own_part(model: PreTrainedModel) -> None:
    cost = {**NGRAM, "controller": "cost_model"}
    llm = LLM(model)
    configs = [cost, {**cost, "num_speculative_tokens": 2}, None, {**NGRAM, "controller": "batch"}]
    outputs = llm.generate(PROMPTS[:4], GREEDY, speculative_config=configs)
    assert [(o.token_ids, o.logprobs) for o in outputs] == [alone(model, p) for p in PROMPTS[:4]]
    costs = [s.controller.costs for _, s in llm._others[:2]]
    assert isinstance(costs[0], CostCurve)
    assert costs[0] is costs[1]  # learnt by all
    assert_empty(llm)
