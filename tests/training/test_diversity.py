"""What is used of the conversations: each prompt once, none that must stay unseen."""

from __future__ import annotations

import pytest

from foretoken.errors import DataError
from foretoken.training.collect import choose
from foretoken.training.conversations import Conversation
from foretoken.training.diversity import Unseen, diversity

NOTHING = Unseen(())


def talk(prompt: list[int], answer: list[int], **fields: float) -> Conversation:
    stop = len(prompt) + len(answer)
    return Conversation((*prompt, *answer), ((len(prompt), stop),), **fields)  # type: ignore[arg-type]


def test_diversity_counts_answers_alone() -> None:
    turns = Conversation((9, 1, 1, 9, 9, 2, 3), ((1, 3), (5, 7)), temperature=0.7)
    found = diversity([turns, talk([9, 9, 9], [1, 2])])
    assert (found.conversations, found.answer_tokens, found.turns) == (2, 6, 1.5)
    assert found.greedy == 0.5
    assert found.distinct == (3 / 6, 3 / 3, 0)  # of 1 1, 2 3 and 1 2; there are no 3-grams
    assert diversity([]).conversations == 0


def test_the_first_conversations_with_enough_tokens() -> None:
    given = [talk([n], [0] * 10) for n in range(9)]
    assert choose(given, 25, NOTHING).conversations == given[:3]
    assert choose(given, 30, NOTHING).conversations == given[:3]
    assert choose(given, 1000, NOTHING).conversations == given


def test_a_prompt_is_used_once() -> None:
    first, same, other = talk([1, 2], [3, 4]), talk([1, 2], [5, 6]), talk([1, 3], [3, 4])
    chosen = choose([first, same, other], 100, NOTHING)
    assert (chosen.conversations, chosen.twice, chosen.overlapping) == ([first, other], 1, 0)
    assert choose([first, other], 100, NOTHING, [same]).conversations == [other]
    text = Conversation((1, 2, 3), ((0, 3),))
    assert choose([text, text], 100, NOTHING).conversations == [text]


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
    assert (chosen.conversations, chosen.overlapping) == ([short], 1)


def test_nothing_left_is_an_error() -> None:
    with pytest.raises(DataError, match="no conversations to learn from"):
        choose([], 10, NOTHING)
    with pytest.raises(DataError, match="1 a prompt that must stay unseen"):
        choose([talk(list(range(9)), [1])], 10, Unseen([range(9)]))
