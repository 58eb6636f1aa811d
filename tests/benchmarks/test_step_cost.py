from __future__ import annotations

import pytest
from benchmarks.harness import TINY, load
from benchmarks.step_cost import Filled, hidden_layers, hidden_ratios, main, overhead, pass_seconds

from tests.benchmarks.program import run
from tests.tiny import VOCAB_SIZE
from tokenleap import LLM, SamplingParams
from tokenleap.control import Budget
from tokenleap.request import Request
from tokenleap.runtime.target import Target


def test_passes_of_every_size_leave_nothing_behind() -> None:
    target = Target(load(TINY, "float32", "cpu").module)
    sizes = [(8, 1), (40, 4), (40, 1)]
    seconds = pass_seconds(target, sizes, rounds=2)
    assert list(seconds) == sizes
    assert min(seconds.values()) > 0
    assert not any(row in target for row in range(3))


def test_passes_with_hidden_states_are_compared_with_those_without() -> None:
    target = Target(load(TINY, "float32", "cpu").module)
    assert hidden_layers(target) == (0, 1, 2)  # it has two layers
    ratios = hidden_ratios(target, 8, (1, 4), rounds=2)
    assert list(ratios) == [1, 4]
    assert all(ratio.low is not None and ratio.low > 0 for ratio in ratios.values())
    assert 0 not in target


@pytest.mark.parametrize(("paths", "length"), [(1, 5), (4, 8)])
def test_every_draft_has_the_shape(paths: int, length: int) -> None:
    drafter = Filled(paths, length)
    prompt = [1, 2, 3, 1, 2, 3, 1]
    request = Request(prompt, SamplingParams(), vocab_size=VOCAB_SIZE, max_model_len=64)
    (draft,) = drafter.propose([request], [Budget(paths * length, length)])
    assert draft.tree.num_drafted == paths * length
    assert max(draft.tree.depths) == length
    assert draft.tree.tokens[:4] == (1, 2, 3, 1)
    assert draft.tree.is_chain == (paths == 1)


def test_the_pass_is_a_part_of_the_step() -> None:
    llm = LLM(load(TINY, "float32", "cpu").module)
    found = overhead(llm, 1, 5, context=10, steps=12)
    assert 0 < found.forward < found.step
    assert llm.runtime == "lean"  # and not the network that was timed
    assert not llm.engine.has_unfinished_requests()


def test_on_the_command_line() -> None:
    result = run(main, ["--model", "tiny", "--rounds", "1", "--steps", "4"])
    assert result.exit_code == 0, result.output
    assert "a tree of 32" in result.output
    assert "with hidden states of layers 0, 1, 2 over without" in result.output
    refused = run(main, ["--model", "tiny", "--context", "1024"])
    assert refused.exit_code != 0
    assert "--context must be at most 992" in refused.output
