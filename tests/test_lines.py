"""Lines of many prompts: what a line may say of an encoder-decoder's source."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tiny import tiny_model
from tests.tiny_seq2seq import tiny_seq2seq
from tokenleap import LLM, SamplingParams
from tokenleap.errors import PromptError
from tokenleap.lines import Shape, jobs_of, line_of, records

GREEDY = SamplingParams(temperature=0, max_tokens=5)
SOURCE = [20, 21, 22, 23]


def results(llm: LLM, *lines: dict[str, Any], **shape: Any) -> list[dict[str, Any]]:
    made = [line_of(number, fields, GREEDY) for number, fields in enumerate(lines, 1)]
    return list(records(llm, made, jobs_of(llm, made, Shape(**shape))))


def test_a_source_and_how_its_output_begins() -> None:
    llm = LLM(tiny_seq2seq("marian"))
    lines: list[dict[str, Any]] = [
        {"encoder_prompt": SOURCE},
        {"prompt_token_ids": SOURCE},
        {"prompt_token_ids": SOURCE, "decoder_prompt": [30, 31]},
    ]
    found = results(llm, *lines)
    expected = [list(output.token_ids) for output in llm.generate(lines, GREEDY)]
    assert [each["token_ids"] for each in found] == expected
    assert found[0]["token_ids"] == found[1]["token_ids"] != found[2]["token_ids"]
    assert found[2]["decoder_prompt"] == [30, 31]
    assert found[0]["encoder_prompt"] == SOURCE


def test_a_lines_languages_come_before_those_of_all() -> None:
    shape = Shape(source_language="en_XX", target_language="de_DE")
    line = line_of(1, {"prompt_token_ids": SOURCE, "target_language": "fr_XX"}, GREEDY)
    assert shape.of_line(LLM(tiny_model()), line) == {
        "encoder_prompt": SOURCE,
        "source_language": "en_XX",
        "target_language": "fr_XX",
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"encoder_prompt": []}, "encoder_prompt must be a text or a list of whole numbers, and"),
        ({"encoder_prompt": "a", "prompt": "b"}, "got prompt and encoder_prompt"),
        ({"prompt": "a", "decoder_prompt": 3}, "decoder_prompt must be a text or a list"),
        ({"prompt": "a", "target_language": ["de"]}, "target_language must be a text"),
    ],
)
def test_wrong_fields(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PromptError, match=message):
        line_of(1, fields, GREEDY)


def test_a_decoder_only_model_has_no_source() -> None:
    with pytest.raises(PromptError, match=r"^line 1: .*encoder"):
        results(LLM(tiny_model()), {"encoder_prompt": SOURCE})
