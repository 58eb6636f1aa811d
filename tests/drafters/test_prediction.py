"""`prediction`: follows the text, finds back after edits, and expects edits made before."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.drafting import request_of
from tests.drafting import tokens_of as draft
from tokenleap import SamplingParams
from tokenleap.control.features import EDITED, by_guess, by_match, by_prediction, prior_rate
from tokenleap.core.references import References, Source
from tokenleap.core.rules import DecodingRules
from tokenleap.drafters.copying import (
    FIRST_LENGTH,
    GUESS_LENGTH,
    LONGEST_EDIT,
    MOST_EDITS,
    Follower,
    PredictedText,
    PredictionDrafter,
)
from tokenleap.request import Request

TEXT = list(range(10, 60))


def follower(text: list[int], *output: int) -> Follower:
    made = Follower(PredictedText(text), 1)
    made.catch_up([0, *output])
    return made


def expected(text: list[int], *output: int, length: int = 3) -> list[int]:
    return follower(text, *output).expected(length)[0]


def passes(text: list[int], output: list[int], gamma: int = 16) -> int:
    """Passes of a target that writes this output."""
    made, done, count = Follower(PredictedText(text), 0), 0, 0
    while done < len(output):
        made.catch_up(output[:done])
        drafted, features = made.expected(gamma)
        assert len(drafted) == len(features) <= gamma
        pairs = zip(drafted, output[done:], strict=False)
        kept = next((n for n, pair in enumerate(pairs) if pair[0] != pair[1]), None)
        done += 1 + (min(len(drafted), len(output) - done) if kept is None else kept)
        count += 1
    return count


def test_the_text_is_drafted_from_its_beginning_to_its_end() -> None:
    tokens, features = follower(TEXT).expected(99)
    assert tokens == TEXT[:FIRST_LENGTH]
    assert features == [by_prediction(depth) for depth in range(FIRST_LENGTH)]
    assert expected(TEXT, 10, 11) == [12, 13, 14]
    assert expected(TEXT, *TEXT[:-1]) == [59]
    assert expected(TEXT, *TEXT) == []
    assert expected(TEXT, *TEXT, 7) == []
    assert passes(TEXT, TEXT) == 4  # 8, 16, 16 drafted tokens, and the rest


@pytest.mark.parametrize(
    ("output", "then"),
    [
        ([10, 11, 90, 13], [14, 15, 16]),  # replaced
        ([10, 11, 14], [15, 16, 17]),  # deleted
        ([10, 11, 90, 12], [13, 14, 15]),  # inserted
        ([90, 91, 92, 93, 94, 95, 10], [11, 12, 13]),  # before the text
        ([10, 11, 90, 91, 92, 93, 94, 40], [41, 42, 43]),  # 40 is near
        ([10, 11, 90, 91, 92, 93, 94, 50], []),  # 50 may be there by chance
        ([10, 11, 90, 91, 92, 93, 94, 50, 51], [52, 53, 54]),
        ([*TEXT[:9], 90, 10, 11], [20, 21, 22]),  # back: two tokens may be there by chance
        ([*TEXT[:9], 90, 10, 11, 12], [13, 14, 15]),
    ],
)
def test_it_is_found_again(output: list[int], then: list[int]) -> None:
    assert expected(TEXT, *output) == then


def test_behind_a_divergence_it_is_guessed_for_a_few_tokens() -> None:
    made = follower(TEXT, 10, 11, 90)
    tokens, features = made.expected(99)
    assert tokens == [13, 14, 15, 16][:GUESS_LENGTH]
    assert features[:2] == [by_guess(1), by_prediction(1)]
    assert follower(TEXT, 10, 11, 90, 91).expected(9)[1][0] == by_guess(2)
    assert follower(TEXT, 10, 11, 90, 91, 92, 93, 94).expected(9) == ([], [])
    assert expected(TEXT, 90) == [10, 11, 12]  # what precedes the text is new
    assert expected([10, 11], 10, 99) == []
    assert follower(TEXT, 10).expected(0) == ([], [])
    assert follower(TEXT, 90).expected(0) == ([], [])


def test_a_name_is_changed_wherever_it_comes() -> None:
    name, new = [70, 71], [80, 81, 82]
    text = [1, 2, *name, 3, 4, 5, *name, 6, 7, *name, 8, 9]
    output = [1, 2, *new, 3, 4, 5, *new, 6, 7, *new, 8, 9]
    made = follower(text, *output[:7])
    tokens, features = made.expected(99)
    assert tokens[:10] == [5, *new, 6, 7, *new, 8][: len(tokens)]
    assert features[1] == EDITED
    assert expected(text, *output[:9], length=4) == [81, 82, 6, 7]  # within an edit
    assert expected(text, *output[:14]) == [81, 82, 8]


def test_an_edit_that_fails_is_given_up_until_it_comes_again() -> None:
    text = [1, 2, 70, 3, 4, 70, 5, 6, 70, 7, 8, 70, 9, 10]
    after_one = [1, 2, 80, 3, 4]
    assert expected(text, *after_one) == [80, 5, 6]
    failed = [*after_one, 70, 5]
    assert expected(text, *failed) == [6, 70, 7]
    again = [*failed, 6, 80, 7, 8]
    assert expected(text, *again) == [80, 9, 10]
    another = [*failed, 6, 90, 7, 8]  # the latest is the one that counts
    assert expected(text, *another) == [90, 9, 10]


def test_deletions_and_insertions_are_edits_with_the_tokens_beside_them() -> None:
    text = [1, 70, 2, 3, 4, 70, 2, 5, 6, 70, 9]
    assert expected(text, 1, 2, 3, 4) == [2, 5, 6]  # 70 is gone before 2
    text = [1, 2, 3, 4, 5, 2, 3, 6]
    assert expected(text, 1, 2, 90, 3, 4, 5) == [2, 90, 3]  # 90 between 2 and 3
    assert expected(text, 90, 1, 2) == [3, 4, 5]  # nothing is beside the beginning


def test_long_edits_are_not_learnt_and_the_oldest_are_forgotten() -> None:
    new = list(range(200, 201 + LONGEST_EDIT))
    text = [1, 2, 70, 3, 4, 70, 5]
    assert expected(text, 1, 2, *new[:-1], 3, 4)[0] == new[0]
    assert expected(text, 1, 2, *new, 3, 4) == [70, 5]
    text, output = [], []
    for name in range(1000, 1001 + MOST_EDITS):
        text += [name, 2 * name, 3 * name]
        output += [name, 5 * name, 3 * name]
    text += [6, 2000, 7, 2002, 8]
    output.append(6)
    assert expected(text, *output) == [2000, 7, 5 * 1001]  # the first edit, and the second one


def test_a_chance_match_does_not_hide_where_the_output_left() -> None:
    """A single near token is aligned at once, and given up as soon as the next one differs."""
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert expected(text, 1, 2, 90, 7) == [8, 9, 10]
    assert expected(text, 1, 2, 90, 7, 91, 4) == [5, 6, 7]


def test_a_useless_prediction_is_hardly_drafted() -> None:
    dice = random.Random(0)
    text, output = ([dice.randrange(40) for _ in range(400)] for _ in range(2))
    made, drafted = Follower(PredictedText(text), 0), 0
    for done in range(1, len(output)):
        made.catch_up(output[:done])
        tokens, features = made.expected(16)
        drafted += len(tokens)
        if done > 40:
            assert all(prior_rate(feature) <= prior_rate(by_match(9, 1)[0]) for feature in features)
    assert drafted < 0.6 * len(output)


def test_trust_comes_back() -> None:
    """Drafts are as long as the match that they continue, until it is trusted again."""
    made = follower(TEXT, *[99] * 60)
    lengths = []
    for end in range(12):
        made.catch_up([0, *[99] * 60, *TEXT[:end]])
        lengths.append(len(made.expected(99)[0]))
    assert lengths[:6] == [0, 0, 2, 3, 4, 5]
    assert lengths[-1] > 20


@pytest.mark.parametrize("changes", range(6))
def test_random_edits(changes: int) -> None:
    """Whatever is changed, drafts save passes: of three edits, each costs at most five."""
    dice = random.Random(changes)
    text = [dice.randrange(50) for _ in range(600)]
    output = list(text)
    for _ in range(3 * changes):
        at = dice.randrange(len(output))
        output[at : at + dice.randrange(6)] = [dice.randrange(60) for _ in range(dice.randrange(6))]
    assert passes(text, output) <= 38 + 15 * changes


# The drafter

GREEDY = SamplingParams(temperature=0)


def request(prompt: list[int], *texts: tuple[int, ...], **more: Any) -> Request:
    return request_of(prompt, GREEDY, prediction=References(texts), **more)


def test_requests_follow_their_own_predictions() -> None:
    drafter = PredictionDrafter()
    first, second, without = request([1], (5, 6, 7)), request([1, 2], (8, 9)), request([3])
    assert [draft(drafter, each) for each in (first, second, without)] == [[5, 6, 7], [8, 9], []]
    second.token_ids.append(8)
    assert draft(drafter, second) == [9]
    assert draft(drafter, first) == [5, 6, 7]
    drafter.release(second)
    assert draft(drafter, second) == [9]  # made again from the committed tokens
    assert draft(drafter, first, 0) == []
    assert len(first.prediction._indexes) == 1


def test_what_rules_force_is_no_part_of_the_output() -> None:
    rules = DecodingRules(forced_bos_token_id=4)
    asked = request([2], (5, 6, 7), source=Source((9,)), rules=rules)
    drafter = PredictionDrafter()
    assert draft(drafter, asked) == []
    asked.token_ids.append(4)
    assert draft(drafter, asked) == [5, 6, 7]
