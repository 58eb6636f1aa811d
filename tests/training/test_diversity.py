"""Conversations that are used: each prompt once, none that must stay unseen."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tokenleap.errors import DataError
from tokenleap.training.collect import Chooser, Unseen, collect, diversity
from tokenleap.training.conversations import Conversation

NOTHING = Unseen(())


def talk(prompt: list[int], answer: list[int], **fields: float) -> Conversation:
    stop = len(prompt) + len(answer)
    return Conversation((*prompt, *answer), ((len(prompt), stop),), **fields)  # type: ignore[arg-type]


def test_diversity_counts_answers_alone() -> None:
    turns = Conversation((9, 1, 1, 9, 9, 2, 3), ((1, 3), (5, 7)), temperature=0.7)
    found = diversity([turns, talk([9, 9, 9], [1, 2])])
    assert (found.conversations, found.answer_tokens, found.turns) == (2, 6, 1.5)
    assert found.prompt_tokens == (1 + 5 + 3) / 3
    assert found.greedy == 0.5
    assert list(found.distinct) == [3 / 6, 3 / 3, 0]  # of 1 1, 2 3 and 1 2; there are no 3-grams
    assert diversity([]).conversations == 0


def choose(
    given: list[Conversation], tokens: int, unseen: Unseen = NOTHING, others: Any = ()
) -> Chooser:
    chooser = Chooser(tokens, unseen, others)
    for each in given:  # in any parts
        chooser.add([each])
    whole = Chooser(tokens, unseen, others)
    whole.add(given)
    assert vars(whole) == vars(chooser)
    return chooser


def test_the_first_conversations_with_enough_tokens() -> None:
    given = [talk([n], [0] * 10) for n in range(9)]
    assert choose(given, 25).kept == given[:3]
    assert choose(given, 30).kept == given[:3]
    assert choose(given, 30).full
    assert choose(given, 1000).kept == given
    assert not choose(given, 1000).full


def test_a_prompt_is_used_once() -> None:
    first, same, other = talk([1, 2], [3, 4]), talk([1, 2], [5, 6]), talk([1, 3], [3, 4])
    chosen = choose([first, same, other], 100)
    assert (chosen.kept, chosen.twice, chosen.overlapping) == ([first, other], 1, 0)
    assert choose([first, other], 100, NOTHING, [same]).kept == [other]
    text = Conversation((1, 2, 3), ((0, 3),))
    assert choose([text, text], 100).kept == [text]


def test_prompts_that_must_stay_unseen() -> None:
    secret = list(range(20, 40))
    unseen = Unseen([secret, [1, 2, 3]])
    whole, part, short, answer = (
        talk([0, *secret], [1]),
        talk([0, *secret[5:13], 0], [1]),
        talk([0, *secret[5:12], 0], [1]),
        talk([0], secret),
    )
    later = Conversation((0, 1, *secret), ((1, 2), (21, 22)))
    text = Conversation(tuple(secret), ((0, 20),))
    assert [unseen.overlaps(each) for each in (whole, part, later, text)] == [True] * 4
    assert [unseen.overlaps(each) for each in (short, answer)] == [False] * 2
    chosen = choose([whole, short], 100, unseen)
    assert (chosen.kept, chosen.overlapping) == ([short], 1)


class Repeated:
    """Writes the same conversation for ever."""

    def write(self, after: int | None, *, held_out: bool) -> Iterator[list[Conversation]]:
        for seed in count(0 if after is None else after + 1):
            yield [talk(list(range(9)), [1, 2], seed=seed)]


def test_a_source_that_has_nothing_new_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    chooser = Chooser(100, NOTHING)
    with pytest.raises(DataError, match="50 conversations begin like another one"):
        list(collect(Repeated(), path, chooser, held_out=False))
    unseen = Chooser(100, Unseen([range(9)]))
    with pytest.raises(DataError, match="with a prompt that must stay unseen"):
        list(collect(Repeated(), path, unseen, held_out=False))
    enough = Chooser(2, NOTHING)
    assert list(collect(Repeated(), path, enough, held_out=False)) == [2]


def test_a_source_that_ends_with_nothing(tmp_path: Path) -> None:
    class Empty:
        def write(self, after: int | None, *, held_out: bool) -> Iterator[list[Conversation]]:
            yield []

    with pytest.raises(DataError, match="not enough to learn from"):
        list(collect(Empty(), tmp_path / "some.jsonl", Chooser(1, NOTHING), held_out=False))
