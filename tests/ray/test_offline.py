"""The rows of a stage of Ray Data, without Ray."""

from __future__ import annotations

import pytest

from tests.serve.support import tiny_llm
from tests.tiny import tiny_model
from tokenleap import LLM, SamplingParams
from tokenleap.errors import CompatibilityError, PromptError
from tokenleap.lines import Line, Shape, jobs_of, records
from tokenleap.ray import offline


def test_rows_have_no_number_of_a_line_and_all_refusals_are_theirs() -> None:
    """A row's place in its block is no line of a file."""
    stage = object.__new__(offline.Generator)
    params = SamplingParams(temperature=0, max_tokens=2)

    def read(row: dict[str, object]) -> Line:
        if row["id"] == 2:
            raise CompatibilityError("these two do not go together")
        return offline._row(params, row)

    stage._llm, stage._shape, stage._read = tiny_llm(), Shape(chat=False), read
    rows = [
        {"id": 0, "prompt": "hello", "max_tokens": None},
        {"id": 1, "prompt_token_ids": [10**6]},
        {"id": 2, "prompt": "hello"},
    ]
    made, foreign, apart = stage._records(rows)
    assert made["id"] == 0
    assert made["text"]
    assert "line" not in made
    assert foreign.keys() == {"error"}
    assert "1000000" in foreign["error"]
    assert not foreign["error"].startswith("line")
    assert apart == {"error": "these two do not go together"}


def test_an_error_about_references_names_its_line() -> None:
    llm = LLM(tiny_model())  # without a tokenizer
    params = SamplingParams(max_tokens=1)
    lines = [
        Line(1, "prompt_token_ids", [1, 2], params),
        Line(2, "prompt_token_ids", [1, 2], params, references=["a text"]),
    ]
    with pytest.raises(PromptError, match="line 2: this model has no tokenizer"):
        jobs_of(llm, lines, Shape())


def test_lines_take_no_chunks_of_other_requests() -> None:
    llm = LLM(tiny_model())
    other = llm.engine.add_request([1, 2], {"temperature": 0, "max_tokens": 3})
    lines = [Line(1, "prompt_token_ids", [3, 4], SamplingParams(temperature=0, max_tokens=6))]
    (record,) = records(llm, lines, jobs_of(llm, lines, Shape()))
    assert len(record["token_ids"]) == 6
    (chunk,) = llm.engine.step()
    assert chunk.request_id == other
    assert len(chunk.tokens) == 3
