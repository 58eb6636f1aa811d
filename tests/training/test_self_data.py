"""Conversations that the target writes by itself: reproducible, resumable, and really its own."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import pytest

from tests.cli.conftest import CHAT_TEMPLATE, END, ascii_tokenizer
from tests.training.world import CHAT, chat_llm, refused, short_talks
from tokenleap import LLM, CompatibilityError, SamplingParams
from tokenleap.errors import DataError
from tokenleap.training import conversations as talks
from tokenleap.training.collect import Chooser, SelfSource, Unseen, collect
from tokenleap.training.conversations import (
    Conversation,
    ConversationFile,
    Opening,
    SelfTalk,
    Talk,
    Template,
    Wanted,
    Writing,
    Written,
    answered_by,
    authors_of,
    first_opening,
    loop_start,
    next_opening,
    reads,
    topics,
    written,
)

LENGTH = 512
"""Of a conversation; a token is a character."""


@pytest.fixture(autouse=True)
def short_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    short_talks(monkeypatch, message=16)


@pytest.fixture(scope="module")
def talkative() -> LLM:
    """A target that often ends its messages by itself."""
    return chat_llm(end_bias=12, architecture="lean")


def test_a_conversation_follows_from_its_seed_in_any_batch(talkative: LLM) -> None:
    together = SelfTalk(talkative, LENGTH).write(range(20))
    talk = SelfTalk(talkative, LENGTH)
    apart = [each for part in ([0], [1, 2, 3], range(4, 20)) for each in talk.write(part)]
    assert together == apart
    assert len({each.tokens for each in together}) > 10
    assert max(len(each.answers) for each in together) > 1
    assert {reads(each.seed) for each in together} == {False, True}


def collected(
    llm: LLM, path: Path, wanted: int, *, held_out: bool = False, seed: int = 0
) -> list[Conversation]:
    chooser = Chooser(wanted, Unseen(()))
    totals = list(collect(SelfSource(llm, 2, LENGTH, seed), path, chooser, held_out=held_out))
    assert totals == sorted(totals)
    assert totals[-1] == sum(each.num_answer_tokens for each in chooser.kept) >= wanted
    return chooser.kept


def test_a_file_that_is_continued_gives_the_same_conversations(llm: LLM, tmp_path: Path) -> None:
    """Wherever the first process ended, in the middle of a line, too."""
    whole, wanted = tmp_path / "whole.jsonl", 250
    expected = collected(llm, whole, wanted)
    text = whole.read_bytes()
    lines = text.count(b"\n")
    assert lines > 10
    for end in (1, len(text) // 3, text.index(b"\n") + 1, len(text) - 1):
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
    assert {each.temperature for each in found[False]} == {0.0, 0.7, 1.0}
    assert not {each.seed for each in found[True]} & {each.seed for each in found[False]}


def test_another_seed_learns_other_text_and_holds_out_the_same(llm: LLM, tmp_path: Path) -> None:
    for held_out in (False, True):
        one, other = (
            collected(llm, tmp_path / f"{held_out} {seed}", 150, held_out=held_out, seed=seed)
            for seed in (0, 2**31 - 1)
        )
        assert (one == other) == held_out
        assert held_out or not {each.tokens for each in one} & {each.tokens for each in other}


def test_answers_are_what_the_target_writes(talkative: LLM) -> None:
    conversations = SelfTalk(talkative, LENGTH).write(range(48))
    greedy = [each for each in conversations if not each.temperature]
    assert all(each.answers[-1][1] == len(each.tokens) for each in greedy)
    assert any(len(each.answers) > 1 for each in greedy)
    answers = [(each.tokens, *part) for each in greedy for part in each.answers]
    outputs = talkative.generate(
        [list(tokens[:start]) for tokens, start, _ in answers],
        [SamplingParams(temperature=0, max_tokens=stop - start) for _, start, stop in answers],
    )
    for (tokens, start, stop), output in zip(answers, outputs, strict=True):
        assert tuple(output.token_ids) == tokens[start:stop]


def test_what_is_between_the_answers_is_the_template(talkative: LLM) -> None:
    template = Template.of(talkative.tokenizer)
    for each in SelfTalk(talkative, LENGTH).write(range(24)):
        assert each.tokens[: len(template.before)] == template.before
        for start, _ in each.answers:
            assert each.tokens[start - len(template.after) : start] == template.after
        for (_, stop), _ in zip(each.answers, each.answers[1:], strict=False):
            assert each.tokens[stop - 1 : stop - 1 + len(template.between)] == template.between


def test_texts_are_answers_of_the_same_block(talkative: LLM) -> None:
    """Whether the conversations that they come from are asked for or not."""
    assert talkative.tokenizer is not None
    decode = talkative.tokenizer.decode
    talk = SelfTalk(talkative, LENGTH)
    made = {each.seed: each for each in talk.write(range(32))}
    found = 0
    for seed in filter(reads, made):
        answers = [made[author] for author in authors_of(seed) if author in made]
        texts = [
            str(
                decode(list(each.tokens[slice(*each.answers[0])]), skip_special_tokens=True)
            ).strip()
            for each in answers
        ]
        prompt = talkative.tokenizer.decode(list(made[seed].tokens[: made[seed].answers[0][0]]))
        quoted = [text for text in texts if len(text) >= 8 and text in prompt]
        assert quoted
        found += len(quoted) > 1
    assert found
    assert talk.write([seed]) == [made[seed]]


def test_a_conversation_keeps_to_its_length(talkative: LLM) -> None:
    for length in (200, 96):
        made = SelfTalk(talkative, length).write(range(16))
        assert made
        assert max(len(each.tokens) for each in made) <= length
    context = chat_llm(context=96, end_bias=12, architecture="lean")
    assert SelfTalk(context, LENGTH).write(range(16)) == made


def test_topics_are_words_of_the_vocabulary() -> None:
    tokenizer = ascii_tokenizer(CHAT)
    words = ["\u0120volcano", "\u2581honey", "\u0120a", "\u0120x1y2z", "river", "\u0120na\u00efve"]
    tokenizer.add_tokens(words)
    assert topics(tokenizer) == ["volcano", "honey"]
    assert topics(ascii_tokenizer(CHAT)) == []


# Texts


def repeated(count: int, loop: int) -> Writing[list[Written]]:
    """Texts of a target, one after the other."""
    texts = []
    for each in range(count):
        params = SamplingParams(temperature=0, max_tokens=40 + each)
        texts.append((yield Wanted((1, 2, 3 + each), params, loop)))
    return texts


def test_a_text_that_loops_is_stopped_there() -> None:
    """A tiny target without an end soon repeats itself."""
    llm = chat_llm(architecture="lean")
    (texts,) = written(llm, [repeated(6, loop=3)])
    looped = 0
    for each, text in enumerate(texts):
        params = SamplingParams(temperature=0, max_tokens=40 + each)
        (whole,) = llm.generate([[1, 2, 3 + each]], params)
        start = loop_start(whole.token_ids, length=3)
        assert text.tokens == whole.token_ids[:start]
        assert text.finish == ("loop" if start is not None else whole.finish_reason)
        looped += start is not None
    assert looped
    assert not llm.engine.has_unfinished_requests()


def test_results_come_in_order_whatever_is_written_first(llm: LLM) -> None:
    counts = [3, 0, 1, *[1] * 40, 2]
    results = written(llm, (repeated(count, loop=3) for count in counts))
    assert [len(each) for each in results] == counts


def test_nothing_goes_on_after_an_error(llm: LLM) -> None:
    def failing() -> Writing[None]:
        yield Wanted((1, 2), SamplingParams(max_tokens=2))
        raise KeyError

    with pytest.raises(KeyError):
        written(llm, [repeated(2, loop=3), failing()])
    assert not llm.engine.has_unfinished_requests()


def test_an_answer_that_loops_is_cut(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    longer = talks._GREEDY.model_copy(update={"max_tokens": 200})
    monkeypatch.setattr(talks, "_GREEDY", longer)
    given = [Talk(seed, 0.0, [7, seed]) for seed in range(6)]
    assert answered_by(llm, given) == [talk.written() for talk in given]
    for talk in given:
        (whole,) = llm.generate([talk.tokens[:2]], longer)
        cut = loop_start(whole.token_ids)
        assert tuple(talk.tokens[2:]) == whole.token_ids[:cut]
        assert talk.answers == [(2, len(talk.tokens))]
        assert talk.finished == (cut is None and whole.finish_reason == "stop")


def test_an_answer_that_is_too_short_is_left_out(llm: LLM) -> None:
    room = [1] * (llm.max_model_len - talks.FEWEST_ANSWER_TOKENS)
    fits, full = Talk(0, 0.0, room), Talk(2, 0.0, [*room, 1])
    assert answered_by(llm, [fits, full]) == [fits.written()]
    assert full.answers == []


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


def test_openings_are_of_many_kinds() -> None:
    seeds = range(3200)
    found = [first_opening(seed) for seed in seeds]
    assert found == [first_opening(seed) for seed in seeds]
    assert [each.reads for each in found] == [reads(seed) for seed in seeds]
    assert 0.25 < sum(each.reads for each in found) / len(found) < 0.4
    assert 0.05 < sum(each == Opening() for each in found) / len(found) < 0.25
    assert len({each.words for each in found}) > 250
    for seed in filter(reads, seeds):
        assert len(authors_of(seed)) > 1
        assert not any(reads(author) for author in authors_of(seed))
        assert all(author // 16 == seed // 16 for author in authors_of(seed))
    assert len({next_opening(seed, 1).words for seed in seeds}) > 20
    assert not any(next_opening(seed, 2).reads for seed in seeds)


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
    with refused(CompatibilityError, match=message) as caught:
        Template.of(ascii_tokenizer(template))
    assert "--data" in str(caught.value)


def test_a_model_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(CompatibilityError, match="no chat template"):
        Template.of(None)


# Files


def test_a_file_keeps_conversations(tmp_path: Path) -> None:
    made = [
        Conversation((1, 2, 3), ((1, 3),), seed=4, temperature=0.7),
        Conversation((5,), ((0, 1),), seed=-1),
    ]
    file = ConversationFile(tmp_path / "some.jsonl")
    assert list(file) == []
    file.append(made[:1])
    file.append(made[1:])
    assert list(file) == made


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
