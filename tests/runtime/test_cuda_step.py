"""Steps on the device give what `decode.step` gives: tokens, origins and counts."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from foretoken import LLM, RequestOutput, SamplingParams
from foretoken.acceptance.coupled import Coupled
from foretoken.control import Fixed
from foretoken.drafters.ngram import NgramDrafter, NgramOptions
from foretoken.engine import Engine
from foretoken.request import Request
from foretoken.runtime.attention import KEY_BLOCK
from foretoken.runtime.cuda import cuda_network, slab_for
from foretoken.runtime.cuda.graphs import Uncaptured
from foretoken.runtime.cuda.rows import DeviceRows
from foretoken.runtime.cuda.slab import StaticSlab
from foretoken.runtime.cuda.step import DeviceStep, obstacle, step_for
from foretoken.target import Target
from foretoken.trace import StepTrace
from tests.runtime.on_device import use_cuda_runtime
from tests.tiny import CONTEXT, VOCAB_SIZE, tiny_model, tiny_tokenizer

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "controller": "fixed"}


def on_device(
    monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, config: dict[str, Any], **options: Any
) -> tuple[LLM, DeviceStep]:
    """An `LLM` whose engine runs device steps, on the stand-in for graphs."""
    use_cuda_runtime(monkeypatch, rows=1, positions=KEY_BLOCK)
    llm = LLM(model, speculative_config=config, **options)
    device_step = DeviceStep(llm._target)
    llm._engine._step = device_step
    return llm, device_step


def prompts_and_params(seed: int, count: int = 6) -> tuple[list[list[int]], list[SamplingParams]]:
    dice = random.Random(seed)
    prompts = [
        [dice.randrange(VOCAB_SIZE) for _ in range(dice.randrange(1, 6))] * dice.randrange(1, 4)
        for _ in range(count)
    ]
    params = [
        SamplingParams(
            temperature=dice.choice([0, 0, 0.1, 0.3, 1.0]),
            seed=dice.randrange(2**63),
            max_tokens=dice.randrange(1, 30),
            ignore_eos=True,
        )
        for _ in prompts
    ]
    return prompts, params


COUNTS = (
    "target_passes",
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_rejected_tokens",
    "accepted_per_position",
)


def told(output: RequestOutput) -> tuple[Any, ...]:
    """Everything about an output but times."""
    only = output.outputs[0]
    counts = [getattr(only.metrics, name) for name in COUNTS]
    return only.token_ids, only.origins, only.finish_reason, only.text, counts


def moves(output: RequestOutput) -> list[tuple[Any, ...]]:
    """The trace without times, and without p."""

    def fields(step: StepTrace) -> tuple[Any, ...]:
        drafted = (step.parents, step.drafted, step.q, step.accepted, step.rejected)
        return *drafted, step.reason, step.token, step.origin, step.committed

    return [fields(step) for step in output.trace]


@pytest.mark.parametrize("seed", [1, 3])
@pytest.mark.parametrize("length", [0, 1, 5])
def test_outputs_and_counts_are_the_hosts(
    monkeypatch: pytest.MonkeyPatch, seed: int, length: int
) -> None:
    model = tiny_model()
    config = {**NGRAM, "num_speculative_tokens": length}
    prompts, params = prompts_and_params(seed)
    expected = LLM(model, speculative_config=config, max_num_seqs=3).generate(prompts, params)
    llm, device_step = on_device(monkeypatch, model, config, max_num_seqs=3)
    before = llm._target.num_passes
    found = llm.generate(prompts, params)
    assert [told(output) for output in found] == [told(output) for output in expected]
    assert [moves(output) for output in found] == [moves(output) for output in expected]
    passes = llm._target.num_passes - before
    assert device_step.num_steps == passes - prefill_passes(prompts)
    if length > 1:
        assert sum(output.metrics.num_accepted_tokens for output in found) > 0


def prefill_passes(prompts: list[list[int]]) -> int:
    return sum(len(prompt) > 1 for prompt in prompts)


@pytest.mark.parametrize("architecture", ["gpt2", "qwen3"])
def test_other_architectures(monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    model = tiny_model(architecture)
    prompts, params = prompts_and_params(9)
    expected = LLM(model, speculative_config=NGRAM).generate(prompts, params)
    llm, device_step = on_device(monkeypatch, model, NGRAM)
    assert [told(o) for o in llm.generate(prompts, params)] == [told(o) for o in expected]
    assert device_step.num_steps > 0


def test_plain_decoding_runs_on_the_device_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    prompts, params = prompts_and_params(2)
    expected = LLM(model).generate(prompts, params)
    llm, device_step = on_device(monkeypatch, model, {"method": "none"})
    assert [told(o) for o in llm.generate(prompts, params)] == [told(o) for o in expected]
    assert device_step.num_steps > 0


def test_controllers_set_the_length_of_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    config = {**NGRAM, "controller": "heuristic", "num_speculative_tokens": 4}
    prompts, params = prompts_and_params(3)
    expected = LLM(model, speculative_config=config, max_num_seqs=3).generate(prompts, params)
    llm, _ = on_device(monkeypatch, model, config, max_num_seqs=3)
    found = llm.generate(prompts, params)
    assert [told(o) for o in found] == [told(o) for o in expected]
    assert [moves(o) for o in found] == [moves(o) for o in expected]


def test_stops_are_found_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    prompts = [[1, 2, 3] * 4, [5, 6] * 3, [7]]
    free = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    texts = LLM(model, tokenizer=tokenizer).generate(prompts, free)
    params = [
        SamplingParams(temperature=0, max_tokens=30, stop=texts[0].text[9:11]),
        SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[texts[1].token_ids[7]]),
        SamplingParams(temperature=0, max_tokens=30, n=1),
    ]
    expected = LLM(model, tokenizer=tokenizer, speculative_config=NGRAM).generate(prompts, params)
    llm, device_step = on_device(monkeypatch, model, NGRAM, tokenizer=tokenizer)
    found = llm.generate(prompts, params)
    assert [told(o) for o in found] == [told(o) for o in expected]
    assert [o.finish_reason for o in found] == ["stop", "stop", "length"]
    assert device_step.num_steps > 0


def test_rows_past_the_first_block_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slab moves in the middle of an output, and with it the graphs and the table of texts."""
    model = tiny_model(max_position_embeddings=3 * KEY_BLOCK)
    prompts = [[i % 7 for i in range(KEY_BLOCK - 12)], [1, 2, 3]]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    expected = LLM(model, speculative_config=NGRAM).generate(prompts, params)
    llm, device_step = on_device(monkeypatch, model, NGRAM)
    assert [told(o) for o in llm.generate(prompts, params)] == [told(o) for o in expected]
    assert device_step.num_steps > 0


def test_a_request_that_joins_moves_the_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it has left, the shape of the steps is that of the graphs from before."""
    model = tiny_model()
    prompts = [[1, 2, 3, 1, 2], [4, 5, 4]]
    params = [
        SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in (30, 4)
    ]
    expected = LLM(model, speculative_config=NGRAM).generate(prompts, params)
    llm, device_step = on_device(monkeypatch, model, NGRAM)
    ids = [llm.engine.add_request(prompts[0], params[0])]
    for _ in range(5):
        llm.engine.step()
    before = device_step.num_steps
    ids.append(llm.engine.add_request(prompts[1], params[1]))
    finished: dict[int | None, RequestOutput] = {}
    while llm.engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in llm.engine.step() if output.finished}
    assert [finished[i].token_ids for i in ids] == [output.token_ids for output in expected]
    assert device_step.num_steps > before > 0


def test_a_row_that_has_been_left_may_be_longer_than_the_span(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The long request ends in the first row, and a short one goes on in the second."""
    model = tiny_model(max_position_embeddings=3 * KEY_BLOCK)
    long, short = [i % 7 for i in range(KEY_BLOCK + 50)], [1, 2, 3]
    params = [
        SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in (3, 12)
    ]
    expected = LLM(model, speculative_config=NGRAM).generate(
        [long, short, short], [*params, params[1]]
    )
    llm, device_step = on_device(monkeypatch, model, NGRAM, max_num_seqs=2)
    found = llm.generate([long, short, short], [*params, params[1]])
    assert [told(o) for o in found] == [told(o) for o in expected]
    assert device_step.num_steps > 0


def test_without_room_for_drafts_requests_are_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(max_position_embeddings=3 * KEY_BLOCK)
    prompts = [[i % 7 for i in range(KEY_BLOCK - 20)], [i % 5 for i in range(KEY_BLOCK - 25)]]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    expected = LLM(model).generate(prompts, params)
    llm, device_step = on_device(
        monkeypatch, model, NGRAM, kv_cache_memory=3 * KEY_BLOCK * 2 * 2 * 2 * 16 * 4
    )
    found = llm.generate(prompts, params)
    assert [o.token_ids for o in found] == [o.token_ids for o in expected]
    assert sum(o.metrics.preemptions for o in found) > 0
    assert device_step.num_steps > 0


def test_a_batch_changes_paths_with_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a request is there that the device does not do, all take the general path."""
    model = tiny_model()
    prompts, params = prompts_and_params(5, count=5)
    params[1] = SamplingParams(temperature=0.7, seed=1, top_k=3, max_tokens=4, ignore_eos=True)
    params[4] = SamplingParams(temperature=0, logprobs=1, max_tokens=3, ignore_eos=True)
    expected = LLM(model, speculative_config=NGRAM, max_num_seqs=2).generate(prompts, params)
    llm, device_step = on_device(monkeypatch, model, NGRAM, max_num_seqs=2)
    before = llm._target.num_passes
    found = llm.generate(prompts, params)
    assert [told(o) for o in found] == [told(o) for o in expected]
    passes = llm._target.num_passes - before
    assert 0 < device_step.num_steps < passes - prefill_passes(prompts)


def test_an_interrupted_step_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has advanced, the host has not: the row is sent again."""
    model = tiny_model()
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = LLM(model).generate([[1, 2, 3, 1, 2]], params)
    llm, device_step = on_device(monkeypatch, model, NGRAM)
    request = llm.engine.add_request([1, 2, 3, 1, 2], params)
    report, calls = device_step._outcome, []

    def interrupted(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return report(*args)

    monkeypatch.setattr(device_step, "_outcome", interrupted)
    outputs: list[RequestOutput] = []
    while llm.engine.has_unfinished_requests():
        try:
            outputs += llm.engine.step()
        except KeyboardInterrupt:
            continue
    assert outputs[-1].request_id == request
    assert outputs[-1].token_ids == expected[0].token_ids


def test_laws_are_there_for_who_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """An outcome's logits and p are the target's, although the step did not need them."""
    model = tiny_model()
    prompts = [[1, 2, 3, 1, 2], [4, 5, 4, 5, 4]]
    params = [
        SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
        SamplingParams(temperature=0.2, seed=3, max_tokens=9, ignore_eos=True),
    ]
    llm, device_step = on_device(monkeypatch, model, NGRAM)
    for prompt, one in zip(prompts, params, strict=True):
        llm.engine.add_request(prompt, one)
    llm.engine.step()
    outcomes = llm._engine.step()
    assert device_step.num_steps == 2
    for outcome in outcomes:
        assert len(outcome.logits) == len(outcome.draft.tree)
        for node, token in enumerate([t.token_id for t in outcome.committed]):
            law = outcome.p[node]
            noise = outcome.request.noise.at(len(outcome.request.token_ids))
            depth = node - len(outcome.committed)
            assert noise.draw(law, depth) == token


def test_rows_are_extended_up_to_their_last_place() -> None:
    rows = DeviceRows(3, 4, torch.device("cpu"))
    texts = ([1, 2, 3], [5, 6, 7, 8, 9])  # the second one has all the tokens there is room for
    requests = [
        Request(text, SamplingParams(seed=2**63 - 1), vocab_size=10, max_model_len=9, index=1)
        for text in texts
    ]
    rows.show({0: (requests[0], 2), 1: (requests[1], 0)})
    assert rows.limits(3).tolist() == [2, 0, -1]
    assert rows.seeds(2).tolist() == [-(2**63)] * 2
    rows.extend(torch.tensor([[4, 9], [9, 9], [9, 9]]), torch.tensor([1, 0, 0]))
    assert rows.lengths(3).tolist() == [4, 5, 0]
    assert rows.tokens(1, 4).tolist() == [[1, 2, 3, 4]]
    assert rows.tokens(2, 5)[1].tolist() == texts[1]


REFUSED: dict[str, dict[str, Any]] = {
    "top_k, top_p or min_p": {"top_p": 0.9},
    "penalties": {"presence_penalty": 0.5},
    "logit_bias or allowed_token_ids": {"allowed_token_ids": [1, 2, 3]},
    "min_tokens": {"min_tokens": 2},
    "logprobs": {"logprobs": 0},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_the_device_does_not_do(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    model = tiny_model()
    params = SamplingParams(temperature=0.5, seed=3, max_tokens=6, **REFUSED[reason])
    expected = LLM(model, speculative_config=NGRAM).generate([[1, 2, 1]], params)
    llm, device_step = on_device(monkeypatch, model, NGRAM)
    request = Request([1, 2, 1], params, vocab_size=VOCAB_SIZE, max_model_len=CONTEXT)
    assert obstacle(request) == reason
    assert [told(o) for o in llm.generate([[1, 2, 1]], params)] == [told(o) for o in expected]
    assert device_step.num_steps == 0


def test_a_trace_of_all_p_takes_the_general_path(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, device_step = on_device(monkeypatch, tiny_model(), NGRAM)
    (output,) = llm.generate([[1, 2, 1]], SamplingParams(temperature=0, max_tokens=6), trace=True)
    assert all(p is not None for step in output.trace for p in step.p)
    assert device_step.num_steps == 0


@pytest.mark.parametrize(
    "config",
    [{"method": "suffix"}, {**NGRAM, "acceptance": "rejection"}, {"method": "ngram_table"}],
)
def test_other_methods_and_rules_take_the_general_path(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> None:
    llm, device_step = on_device(monkeypatch, tiny_model(), config)
    llm.generate([[1, 2, 1]], SamplingParams(temperature=0, max_tokens=6))
    assert device_step.num_steps == 0


def test_a_request_with_a_method_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two methods in a batch are not one step on the device; one is, whosever it is."""
    model = tiny_model()
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [[1, 2, 1, 2], [3, 4, 3]]
    expected = LLM(model).generate(prompts, params)
    llm, device_step = on_device(monkeypatch, model, {"method": "suffix"})
    mixed = llm.generate(prompts, params, speculative_config=[NGRAM, None])
    assert [o.token_ids for o in mixed] == [o.token_ids for o in expected]
    before = device_step.num_steps
    alike = llm.generate(prompts, params, speculative_config=NGRAM)
    assert [o.token_ids for o in alike] == [o.token_ids for o in expected]
    assert device_step.num_steps > before


def test_torch_compile_takes_a_step_whole() -> None:
    """With a backend that only traces; a break in the graph would raise."""
    model = tiny_model()
    target = Target(model, runtime="torch").with_network(
        cuda_network(model, Uncaptured(), compiler="eager")
    )
    target._slab = StaticSlab()
    device_step = DeviceStep(target)
    drafter = NgramDrafter(NgramOptions(prompt_lookup_min=1))
    engine = Engine(target, drafter, Coupled(), Fixed(3), step=device_step)
    params = SamplingParams(temperature=0.5, seed=1, max_tokens=5, ignore_eos=True)
    prompt = [1, 2, 1, 2, 1]
    request = Request(prompt, params, vocab_size=VOCAB_SIZE, max_model_len=CONTEXT)
    engine.add(request)
    engine.step()
    assert device_step.num_steps == 1
    assert request.output_ids
    (expected,) = LLM(model).generate([prompt], params)
    assert tuple(request.output_ids) == expected.token_ids[: len(request.output_ids)]


def test_targets_on_graphs_have_steps_and_slabs_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = LLM(tiny_model())._target
    assert step_for(plain) is None
    assert not isinstance(slab_for(plain.network, CONTEXT), StaticSlab)
    llm, _ = on_device(monkeypatch, tiny_model(), NGRAM)
    assert isinstance(step_for(llm._target), DeviceStep)
    for most, positions in ((600, 2 * KEY_BLOCK), (10**6, 4 * KEY_BLOCK)):
        slab = slab_for(llm._target.network, most)
        assert isinstance(slab, StaticSlab)
        assert slab.positions == positions
