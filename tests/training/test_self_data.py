"""Conversations that the target writes by itself: reproducible, resumable, and really its own."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM, CompatibilityError, SamplingParams
from foretoken.errors import DataError
from foretoken.training import self_data, talks
from foretoken.training.collect import Chooser, SelfSource, collect
from foretoken.training.conversations import Conversation, ConversationFile, loop_start
from foretoken.training.diversity import Unseen
from foretoken.training.openings import opening
from foretoken.training.self_data import SelfTalk, Template
from foretoken.training.talks import Answerer, Talk
from tests.cli.conftest import CHAT_TEMPLATE, END, ascii_tokenizer
from tests.training.world import CHAT, chat_llm


@pytest.fixture(autouse=True)
def short_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, most in (("_MOST_USER_TOKENS", 16), ("_MOST_TEXT_TOKENS", 24)):
        monkeypatch.setattr(self_data, name, most)
    for name in ("_GREEDY", "_SAMPLED"):
        shorter = getattr(talks, name).model_copy(update={"max_tokens": 24})
        monkeypatch.setattr(talks, name, shorter)


@pytest.fixture(scope="module")
def talkative() -> LLM:
    """A target that often ends its messages by itself."""
    return chat_llm(end_bias=12)


def test_a_conversation_follows_from_its_seed_in_any_batch(talkative: LLM) -> None:
    seeds = range(40)
    together = SelfTalk(talkative).write(seeds)
    talk = SelfTalk(talkative)
    apart = [
        each for part in ([0], [1, 2, 3], range(4, 17), range(17, 40)) for each in talk.write(part)
    ]
    assert together == apart
    assert len({each.tokens for each in together}) > 20
    assert max(len(each.answers) for each in together) > 1


def collected(llm: LLM, path: Path, wanted: int, *, held_out: bool = False) -> list[Conversation]:
    chooser = Chooser(wanted, Unseen(()))
    totals = list(collect(SelfSource(llm, 1), path, chooser, held_out=held_out))
    assert totals == sorted(totals)
    assert totals[-1] == sum(each.num_answer_tokens for each in chooser.kept) >= wanted
    return chooser.kept


def test_a_file_that_is_continued_gives_the_same_conversations(llm: LLM, tmp_path: Path) -> None:
    """Wherever the first process ended, in the middle of a line, too."""
    whole, wanted = tmp_path / "whole.jsonl", 500
    expected = collected(llm, whole, wanted)
    text = whole.read_bytes()
    lines = text.count(b"\n")
    assert lines > 10
    for end in (0, 1, len(text) // 3, text.index(b"\n") + 1, len(text) - 1):
        part = tmp_path / "part.jsonl"
        part.write_bytes(text[:end])
        assert collected(llm, part, wanted) == expected
        some = min(lines, part.read_bytes().count(b"\n"))
        assert list(ConversationFile(part))[:some] == list(ConversationFile(whole))[:some]
    assert collected(llm, whole, wanted) == expected
    assert whole.read_bytes() == text


def test_held_out_conversations_are_greedy_and_others(llm: LLM, tmp_path: Path) -> None:
    found = {}
    for held_out in (False, True):
        found[held_out] = collected(llm, tmp_path / f"{held_out}.jsonl", 150, held_out=held_out)
    assert {each.temperature for each in found[True]} == {0.0}
    assert {each.temperature for each in found[False]} == {0.0, 0.7}
    assert not {each.seed for each in found[True]} & {each.seed for each in found[False]}


def test_answers_are_what_the_target_writes(talkative: LLM) -> None:
    conversations = SelfTalk(talkative).write(range(0, 48, 2))  # greedy ones
    several = 0
    for each in conversations:
        assert each.temperature == 0
        assert each.answers[-1][1] == len(each.tokens)
        several += len(each.answers) > 1
        for start, stop in each.answers:
            params = SamplingParams(temperature=0, max_tokens=stop - start)
            (output,) = talkative.generate([list(each.tokens[:start])], params)
            assert tuple(output.token_ids) == each.tokens[start:stop]
    assert several


def test_what_is_between_the_answers_is_the_template(talkative: LLM) -> None:
    template = Template.of(talkative.tokenizer)
    for each in SelfTalk(talkative).write(range(24)):
        assert each.tokens[: len(template.before)] == template.before
        for start, _ in each.answers:
            assert each.tokens[start - len(template.after) : start] == template.after
        for (_, stop), _ in zip(each.answers, each.answers[1:], strict=False):
            assert each.tokens[stop - 1 : stop - 1 + len(template.between)] == template.between


def test_no_room_for_an_answer_leaves_a_conversation_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_data, "_MOST_USER_TOKENS", 60)
    monkeypatch.setattr(self_data, "_MOST_TEXT_TOKENS", 60)
    written = SelfTalk(chat_llm(context=64)).write(range(40))
    assert 0 < len(written) < len(SelfTalk(chat_llm(context=256)).write(range(40)))
    assert all(len(each.tokens) <= 64 for each in written)


class Scripted:
    """Stands for a model: writes what it is told to."""

    def __init__(self, *texts: list[int]) -> None:
        self._texts = iter(texts)

    def generate(self, prompts: list[Any], params: list[Any]) -> list[Any]:
        return [
            type("Output", (), {"token_ids": next(self._texts), "finish_reason": "stop"})
            for _ in prompts
        ]


def test_an_answer_that_loops_is_cut() -> None:
    loop = [*range(20), *[1, 2, 3] * 20]
    answerer = Answerer(Scripted(loop, [5] * 3, list(range(30))))  # type: ignore[arg-type]
    talks_ = [Talk(seed, True, [7, 7]) for seed in range(3)]
    answered = answerer.answer(talks_)
    assert answered == [talks_[0], talks_[2]]
    cut = len(talks_[0].tokens) - 2
    assert talks_[0].answers == [(2, 2 + cut)]
    assert 20 < cut < len(loop)
    assert not talks_[0].finished
    assert loop_start(talks_[0].tokens) is None
    assert talks_[2].finished


def test_where_a_loop_starts() -> None:
    assert loop_start(range(100)) is None
    assert loop_start([1, 2] * 3, length=2) == 4
    assert loop_start([1] * 5, length=2) == 2
    for length in range(1, 5):
        text = [1, 2, 3] * 9
        start = loop_start(text, length=length)
        assert start is not None
        assert loop_start(text[: start + length - 1], length=length) is None
        assert loop_start(text[: start + length], length=length) is not None


def test_half_of_the_users_begin_with_given_words() -> None:
    words = [opening(seed) for seed in range(400)]
    assert sum(text == "" for text, _ in words) == 200
    assert all(words[seed] == words[seed + 1] for seed in range(0, 400, 2))
    assert any(long for _, long in words)
    assert not any(long for text, long in words if not text)


# Templates

SYSTEM = "{{ 'system: be brief\n' }}" + CHAT_TEMPLATE
LLAMA = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}" + END + "{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [CHAT, CHAT_TEMPLATE, SYSTEM, LLAMA])
def test_the_parts_of_a_template_make_its_conversations(template: str) -> None:
    tokenizer = ascii_tokenizer(template)
    parts = Template.of(tokenizer)

    def tokens(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    messages = [
        {"role": role, "content": content}
        for role, content in (("user", "one"), ("assistant", "two"), ("user", "three"))
    ]
    whole = tokens(str(tokenizer.apply_chat_template(messages, tokenize=False)))
    built = (
        *(*parts.before, *tokens("one"), *parts.after, *tokens("two")),
        *(*parts.between, *tokens("three")),
    )
    assert whole[: len(built)] == built


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        ("{% for m in messages %}<{{ m.content | length }}>{% endfor %}", "as they are"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "something in front"),
        ("{{ raise_exception('no roles') }}", "no roles"),
    ],
)
def test_templates_that_cannot_be_used(template: str | None, message: str) -> None:
    with pytest.raises(CompatibilityError, match=message) as caught:
        Template.of(ascii_tokenizer(template))
    assert "\n" not in str(caught.value)
    assert "--data" in str(caught.value)


def test_a_model_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(CompatibilityError, match="no chat template"):
        Template.of(None)


# Files


def test_a_file_keeps_conversations(tmp_path: Path) -> None:
    written = [
        Conversation((1, 2, 3), ((1, 3),), seed=4, temperature=0.7),
        Conversation((5,), ((0, 1),), seed=-1),
    ]
    file = ConversationFile(tmp_path / "some.jsonl")
    assert list(file) == []
    file.append(written[:1])
    file.append(written[1:])
    assert list(file) == written


@pytest.mark.parametrize("line", ["{}", "[1]", "not JSON", '{"tokens": 1, "answers": []}'])
def test_a_foreign_line_is_named(line: str, tmp_path: Path) -> None:
    file = ConversationFile(tmp_path / "some.jsonl")
    file.append([Conversation((1, 2), ((0, 2),))])
    with file.path.open("a") as end:
        end.write(line + "\n")
    with pytest.raises(DataError, match=r"some\.jsonl, line 2"):
        list(file)


def test_half_a_line_is_cut(tmp_path: Path) -> None:
    file = ConversationFile(tmp_path / "some.jsonl")
    file.mend()
    assert not file.path.exists()
    file.append([Conversation((1, 2), ((0, 2),), seed=each) for each in range(3)])
    text = file.path.read_text()
    for end in range(len(text)):
        file.path.write_text(text[:end])
        whole = text[:end].count("\n")
        assert len(list(file)) == whole
        file.mend()
        assert file.path.read_text().count("\n") == whole
        assert all(
            json.loads(line)["seed"] == n
            for line, n in zip(file.path.read_text().splitlines(), count())
        )
