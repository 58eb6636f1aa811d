from __future__ import annotations

import pytest
import typer
from benchmarks.step_cost import Filled, main, overhead, pass_seconds
from benchmarks.tree_cost import tiny
from typer.testing import CliRunner

from foretoken import LLM, SamplingParams
from foretoken.control import Budget
from foretoken.request import Request
from foretoken.runtime.target import Target
from tests.tiny import VOCAB_SIZE

app = typer.Typer()
app.command()(main)


def test_passes_of_every_size_leave_nothing_behind() -> None:
    target = Target(tiny("float32", "cpu"))
    sizes = [(8, 1), (40, 4), (40, 1)]
    seconds = pass_seconds(target, sizes, rounds=2)
    assert list(seconds) == sizes
    assert min(seconds.values()) > 0
    assert not any(row in target for row in range(3))


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
    llm = LLM(tiny("float32", "cpu"))
    found = overhead(llm, 1, 5, context=10, steps=12)
    assert 0 < found.forward < found.step
    assert not llm.engine.has_unfinished_requests()


def test_on_the_command_line() -> None:
    result = CliRunner().invoke(app, ["--model", "tiny", "--rounds", "1", "--steps", "4"])
    assert result.exit_code == 0, result.output
    assert "a tree of 32" in result.output
    refused = CliRunner().invoke(app, ["--model", "tiny", "--context", "1024"])
    assert refused.exit_code != 0
    assert "--context must be at most 992" in refused.output
