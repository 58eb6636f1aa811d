"""The rows of a stage of Ray Data, without Ray."""

from __future__ import annotations

from foretoken import SamplingParams
from foretoken.engine.lines import Line, Shape
from foretoken.errors import CompatibilityError
from foretoken.ray import offline
from tests.serve.support import tiny_llm


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
