"""Data of the user's own: every form is understood, and what is wrong is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import END
from tests.training.world import chat_llm
from tokenleap import LLM
from tokenleap.errors import DataError
from tokenleap.training.collect import Chooser, FileData, FileSource, Unseen, collect
from tokenleap.training.conversations import ConversationFile

LENGTH = 200


def written(folder: Path, *entries: Any, name: str = "data.jsonl") -> Path:
    path = folder / name
    lines = (each if isinstance(each, str) else json.dumps(each) for each in entries)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def prompts_of(llm: LLM, data: FileData) -> list[str]:
    assert llm.tokenizer is not None
    return [str(llm.tokenizer.decode(talk.tokens)) for talk in data.talks]


ASKED = [{"role": "user", "content": "one"}]
ASKED_AGAIN = [*ASKED, {"role": "assistant", "content": "two"}, {"role": "user", "content": "3"}]
FORMS: dict[str, tuple[dict[str, Any], list[dict[str, str]]]] = {
    "prompt": ({"prompt": "one"}, ASKED),
    "turns": ({"question_id": 1, "turns": ["one", "later"]}, ASKED),
    "messages": ({"messages": ASKED}, ASKED),
    "an answered conversation": (
        {"messages": [*ASKED, {"role": "assistant", "content": "no"}]},
        ASKED,
    ),
    "several turns": ({"messages": ASKED_AGAIN}, ASKED_AGAIN),
    "ShareGPT": (
        {
            "conversations": [
                {"from": "human", "value": "one"},
                {"from": "gpt", "value": "two"},
                {"from": "human", "value": "3"},
                {"from": "gpt", "value": "four"},
            ]
        },
        ASKED_AGAIN,
    ),
    "a system prompt": (
        {"messages": [{"role": "system", "content": "be"}, *ASKED]},
        [{"role": "system", "content": "be"}, *ASKED],
    ),
    "characters that end lines elsewhere": (
        {"prompt": "one\u2028two\x85"},
        [{"role": "user", "content": "one\u2028two\x85"}],
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_prompts(form: str, llm: LLM, tmp_path: Path) -> None:
    entry, expected = FORMS[form]
    text = json.dumps(entry, ensure_ascii=False)
    data = FileData(llm, [written(tmp_path, text, "", text)], LENGTH)
    assert [talk.tokens for talk in data.talks] == [llm.encode(expected)] * 2
    assert [talk.temperature for talk in data.talks] == [0.0, 0.7]
    assert data.texts == []


def test_text_is_learnt_in_pieces(llm: LLM, tmp_path: Path) -> None:
    assert llm.tokenizer is not None
    text = "abcdefghij" * 45
    plain = tmp_path / "some.txt"
    plain.write_text(text)
    for path in (plain, written(tmp_path, {"text": text})):
        texts = FileData(llm, [path], LENGTH).texts
        assert [len(each.tokens) for each in texts] == [200, 200, 50]
        joined = [token for each in texts for token in each.tokens]
        assert joined == llm.tokenizer.encode(text, add_special_tokens=False)
        assert all(each.answers == ((0, len(each.tokens)),) for each in texts)
        assert [each.seed for each in texts] == [-3, -2, -1]


def test_pieces_fit_the_model(tmp_path: Path) -> None:
    small = chat_llm(context=64)
    data = FileData(small, [written(tmp_path, {"text": "x" * 500})], LENGTH)
    assert max(len(each.tokens) for each in data.texts) == 63


def test_without_a_chat_template_a_prompt_is_taken_as_it_is(tmp_path: Path) -> None:
    plain = chat_llm(chat_template=None)
    data = FileData(plain, [written(tmp_path, {"prompt": "Once"})], LENGTH)
    assert prompts_of(plain, data) == ["Once"]
    with pytest.raises(DataError, match=r"line 1: .*no chat template"):
        FileData(plain, [written(tmp_path, {"messages": ASKED})], LENGTH)


FAULTS: dict[str, tuple[Any, str]] = {
    "half an object": ('{"prompt": "on', "not JSON"),
    "a list": ([1], "not a JSON object"),
    "nothing known": ({"question": "one"}, "has none of 'prompt', "),
    "a number": ({"prompt": 1}, "has none of 'prompt', "),
    "an unknown role": ({"messages": [{"role": "tool", "content": ""}]}, "the role 'tool': known"),
    "no role": ({"messages": [{"content": "one"}]}, "the role None: known are assistant, "),
    "no text": ({"messages": [{"role": "user"}]}, "no text in 'content'"),
    "parts": ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "no text in"),
    "a string": ({"messages": ["one"]}, "not a JSON object with 'role'"),
    "only answers": ({"messages": [{"role": "assistant", "content": "one"}]}, "no message of a"),
    "an empty conversation": ({"messages": []}, "has none of|no message"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named_with_their_line(fault: str, llm: LLM, tmp_path: Path) -> None:
    entry, message = FAULTS[fault]
    path = written(tmp_path, {"prompt": "good"}, "", entry)
    with pytest.raises(DataError, match=message) as caught:
        FileData(llm, [path], LENGTH)
    assert str(caught.value).startswith(f"{path}, line 3: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "nothing to learn"),
        (b"\n\n", "nothing to learn"),
        (b'{"text": ""}\n', "nothing to learn"),
        (b"\xff\xfe", "cannot be read"),
        (json.dumps({"prompt": "x" * 500}).encode(), "1 prompts are too long"),
    ],
)
def test_files_of_no_use(content: bytes, message: str, llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        FileData(llm, [path], LENGTH)


def test_a_missing_file(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl: cannot be read"):
        FileData(llm, [tmp_path / "none.jsonl"], LENGTH)


# Answers that are learnt


ANSWERED = {"messages": [*ASKED, {"role": "assistant", "content": "two"}]}


@pytest.mark.parametrize("entry", [ANSWERED, {"prompt": "one", "answer": "two"}])
def test_given_answers(entry: dict[str, Any], llm: LLM, tmp_path: Path) -> None:
    """With the token that ends them."""
    assert llm.tokenizer is not None
    data = FileData(llm, [written(tmp_path, entry, {"text": "abc"})], LENGTH, given_answers=True)
    prompt = llm.encode(ASKED)
    (talk,), (found,) = data.talks, data.answered
    assert talk.tokens == prompt
    assert found.answers == ((len(prompt), len(found.tokens)),)
    assert list(found.tokens[: len(prompt)]) == prompt
    assert llm.tokenizer.decode(list(found.tokens[len(prompt) :])) == f"two{END}"
    assert len(data.texts) == 1
    assert FileData(llm, [written(tmp_path, entry)], LENGTH).answered == []


def test_the_target_answers_only_what_is_held_out(llm: LLM, tmp_path: Path) -> None:
    entries = [{"prompt": f"{n}?", "answer": f"{n}{n}{n}"} for n in range(21)]
    data = FileData(llm, [written(tmp_path, *entries)], LENGTH, given_answers=True)
    source = FileSource(llm, data, rows=4)
    learnt = [each for batch in source.write(None, held_out=False) for each in batch]
    assert len(learnt) == 20
    assert set(learnt) < set(data.answered)
    assert [each for batch in source.write(9, held_out=False) for each in batch] == learnt[10:]
    (held_out,) = [each for batch in source.write(None, held_out=True) for each in batch]
    assert held_out.seed == 19
    assert held_out not in data.answered
    prompt = held_out.tokens[: held_out.answers[0][0]]
    assert prompt == data.answered[19].tokens[: len(prompt)]


@pytest.mark.parametrize(
    "entry",
    [
        {"prompt": "one"},
        {"prompt": "one", "answer": ""},
        {"prompt": "one", "answer": 1},
        {"messages": ASKED},
        {"messages": [*ASKED, {"role": "assistant", "content": ""}]},
    ],
)
def test_an_answer_that_is_missing(entry: dict[str, Any], llm: LLM, tmp_path: Path) -> None:
    path = written(tmp_path, ANSWERED, entry)
    with pytest.raises(DataError, match="line 2: has no answer to learn") as caught:
        FileData(llm, [path], LENGTH, given_answers=True)
    assert "\n" not in str(caught.value)
    FileData(llm, [path], LENGTH)


# As a source


def everything() -> Chooser:
    return Chooser(10**9, Unseen(()))


@pytest.mark.parametrize("entries", [2, 3, 25])
def test_every_entry_is_learnt_or_held_out(entries: int, llm: LLM, tmp_path: Path) -> None:
    given = [
        *({"prompt": f"{n}?"} for n in range(entries)),
        *({"text": f"{n} abc"} for n in range(7)),
    ]
    source = FileSource(llm, FileData(llm, [written(tmp_path, *given)], LENGTH), rows=1)
    seen: dict[bool, set[tuple[int, ...]]] = {}
    for held_out in (False, True):
        path = tmp_path / f"{held_out}.jsonl"
        list(collect(source, path, everything(), held_out=held_out))
        seen[held_out] = {each.tokens[:8] for each in ConversationFile(path)}
        assert seen[held_out]
    assert not seen[True] & seen[False]


def test_a_file_that_is_continued_holds_every_text_and_answer(llm: LLM, tmp_path: Path) -> None:
    given = [*({"text": f"{n} abc"} for n in range(9)), *({"prompt": f"{n}?"} for n in range(6))]
    source = FileSource(llm, FileData(llm, [written(tmp_path, *given)], LENGTH), rows=1)
    whole = tmp_path / "whole.jsonl"
    list(collect(source, whole, everything(), held_out=False))
    text = whole.read_bytes()
    assert text.count(b"\n") > 8
    for end in (0, len(text) // 20, len(text) // 5, len(text) // 2, len(text) - 1):
        part = tmp_path / "part.jsonl"
        part.write_bytes(text[:end])
        list(collect(source, part, everything(), held_out=False))
        assert part.read_bytes() == text
