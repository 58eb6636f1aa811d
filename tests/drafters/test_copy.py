"""`copy`: follows the input, stops where the output leaves it, and finds back."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.drafting import draft_of, request_of, tokens_of
from tokenleap import ConfigError
from tokenleap.core.references import Source
from tokenleap.core.rules import DecodingRules
from tokenleap.drafters.copying import CopyDrafter
from tokenleap.drafters.options import LONGEST_ALIGNED, CopyOptions

INPUT = [10, 11, 12, 13, 14, 15, 16]


class Text:
    """A request and the drafter that follows it."""

    def __init__(self, prompt: list[int], **options: Any) -> None:
        self.request = request_of(prompt)
        self.drafter = CopyDrafter(CopyOptions(**options))

    def draft(self, length: int = 3) -> list[int]:
        return tokens_of(self.drafter, self.request, length)

    def then(self, *tokens: int) -> Text:
        self.request.token_ids += tokens
        return self


START, END, ENGLISH, GERMAN = 0, 1, 2, 3
SPECIAL = (START, END, ENGLISH, GERMAN)


class Translation(Text):
    """A request of an encoder-decoder."""

    def __init__(
        self,
        source: list[int],
        prompt: tuple[int, ...] = (START,),
        special: tuple[int, ...] = SPECIAL,
        rules: DecodingRules | None = None,
        **options: Any,
    ) -> None:
        self.request = request_of(prompt, source=Source(tuple(source)), rules=rules)
        self.drafter = CopyDrafter(CopyOptions(**options), special)


def test_a_region_is_copied_from_its_beginning() -> None:
    text = Text([1, 2, *INPUT, 3], copy_start=2, copy_end=-1)
    assert text.draft() == [10, 11, 12]
    assert text.then(10, 11).draft() == [12, 13, 14]
    assert text.then(12, 13, 14).draft() == [15, 16]
    assert text.then(15, 16).draft() == []


def test_a_whole_prompt_is_copied_from_where_its_end_stood_before() -> None:
    assert Text([1, 2, 30, 31, 32, 33, 1, 2]).draft() == [30, 31, 32]
    assert Text([1, 2, 3, 4]).draft() == []


def test_a_draft_says_how_many_tokens_it_follows() -> None:
    text = Text([1, 2, 30, 31, 32, 33, 1, 2])
    assert draft_of(text.drafter, text.request, 2).features == (2, 3)
    assert draft_of(text.then(30).drafter, text.request, 2).features == (3, 4)


def test_after_a_divergence_a_suffix_aligns_again() -> None:
    text = Text(INPUT, copy_start=0)
    assert text.then(10, 90).draft() == []  # replaced: 11 became 90
    assert text.then(12).draft() == []  # one token is less than copy_min_match
    assert text.then(13).draft() == [14, 15, 16]


def test_an_insertion_and_a_deletion() -> None:
    text = Text(INPUT, copy_start=0, copy_min_match=1)
    assert text.then(10, 90, 10).draft() == [11, 12, 13]
    assert text.then(13).draft() == [14, 15, 16]


def test_marks_that_are_only_inserted() -> None:
    """Copying goes on where it stopped, up to four inserted tokens; it may align elsewhere."""
    text = Text(INPUT, copy_start=0, copy_insertions=True)
    assert text.then(10, 11, 90).draft() == [12, 13, 14]
    assert text.then(12, 91, 92, 93, 94).draft() == [13, 14, 15]
    assert text.then(95).draft() == []
    assert text.then(13).draft() == []  # as without the option: one token is less than two
    assert text.then(14).draft() == [15, 16]
    jumped = Text(INPUT, copy_start=0, copy_insertions=True, copy_min_match=1)
    assert jumped.then(10, 14).draft() == [15, 16]


def test_the_longest_suffix_wins() -> None:
    text = Text([1, 2, 3, 40, 2, 3, 50, 9, 3, 60], copy_start=0, copy_min_match=1)
    assert text.then(99, 1, 2, 3).draft(1) == [40]
    text = Text([1, 2, 3, 40, 2, 3, 50, 9, 3, 60], copy_start=0, copy_min_match=1)
    assert text.then(99, 9, 3).draft(1) == [60]


def test_of_equal_matches_the_next_one_after_the_last_alignment() -> None:
    prompt = [7, 8, 20, 7, 8, 21, 30, 7, 8, 22]
    text = Text(prompt, copy_start=0)
    assert text.then(99, 7, 8).draft(1) == [20]
    assert text.then(99, 7, 8).draft(1) == [20]  # nothing was copied in between
    assert text.then(20, 99, 7, 8).draft(1) == [21]
    assert text.then(21, 99, 7, 8).draft(1) == [22]
    assert text.then(22, 99, 7, 8).draft(1) == [22]  # none is left: the nearest before


def test_inputs_that_repeat_themselves() -> None:
    text = Text([5] * 500, copy_start=0)
    assert text.draft(4) == [5] * 4
    assert text.then(6, *[5] * 80).draft(4) == [5] * 4


@pytest.mark.parametrize("region", [(9, None), (0, 0), (-1, 1), (None, -7)])
def test_a_prompt_without_the_region(region: tuple[int | None, int | None]) -> None:
    text = Text(INPUT, copy_start=region[0], copy_end=region[1])
    assert text.draft() == []
    assert text.then(10, 11, 12).draft() == []


def brute_force(source: list[int], tokens: list[int], shortest: int, start: int) -> list[int]:
    """The definition, read aloud: the rest of the input after the last committed token."""
    last, position = 0, 0
    for end in range(start + 1, len(tokens) + 1):
        if position is not None and source[position : position + 1] == tokens[end - 1 : end]:
            position = last = position + 1
            continue
        ends: list[int] = []
        for length in range(min(LONGEST_ALIGNED, end), shortest - 1, -1):
            suffix = tokens[end - length : end]
            ends = [e for e in range(length, len(source)) if source[e - length : e] == suffix]
            if ends:
                break
        position = next((e for e in ends if e >= last), ends[-1] if ends else None)  # type: ignore[assignment]
        last = last if position is None else position
    return [] if position is None else source[position : position + 3]


@pytest.mark.parametrize("seed", range(12))
def test_against_brute_force(seed: int) -> None:
    dice = random.Random(seed)
    prompt = [dice.randrange(4) for _ in range(dice.randrange(1, 40))]
    shortest = dice.randrange(1, 4)
    text = Text(prompt, copy_start=0, copy_min_match=shortest)
    for _ in range(40):  # one drafter all along
        expected = brute_force(prompt, text.request.token_ids, shortest, len(prompt))
        assert text.draft() == expected
        text.then(*expected[: dice.randrange(4)], *(dice.choices(range(5), k=dice.randrange(3))))


def test_a_source_is_copied_from_its_beginning() -> None:
    """Input-guided aggressive decoding: the first draft is the whole input, its end included."""
    text = Translation([*INPUT, END])
    assert text.draft(25) == [*INPUT, END]
    assert text.then(*INPUT[:3]).draft(25) == [*INPUT[3:], END]
    assert text.then(90).draft(25) == []  # replaced
    assert text.then(14, 15).draft(25) == [16, END]


def test_one_token_aligns_a_source_again() -> None:
    """Unless tokens may be inserted: a mark that the source has, too, is no place in it."""
    changed = (*INPUT[:2], 90, INPUT[4])
    assert Translation([*INPUT, END]).then(*changed).draft(25) == [*INPUT[5:], END]
    inserted = Translation([*INPUT, END], copy_insertions=True).then(*changed)
    assert inserted.draft(25) == [*INPUT[2:], END]
    assert Text(INPUT, copy_start=0).then(*changed).draft() == []


def test_a_source_behind_its_language() -> None:
    """The language of the source is left out if that of the output is given."""
    source = [ENGLISH, *INPUT, END]
    assert Translation(source, (START, GERMAN)).draft() == [10, 11, 12]
    assert Translation(source, (START, GERMAN, 10, 11)).draft() == [12, 13, 14]
    assert Translation(source, (START,)).draft() == [ENGLISH, 10, 11]  # the model chooses


def test_a_token_that_comes_first_by_the_models_rules() -> None:
    """It leads the first draft, and the source follows it."""
    source, rules = [ENGLISH, *INPUT, END], DecodingRules(forced_bos_token_id=GERMAN)
    text = Translation(source, rules=rules)
    assert text.draft() == [GERMAN, 10, 11]
    assert text.draft(1) == [GERMAN]
    assert text.draft(0) == []
    assert text.then(GERMAN).draft() == [10, 11, 12]
    assert text.then(10, 11).draft() == [12, 13, 14]
    given = Translation(source, (START, GERMAN), rules=rules)  # the rule has no place then
    assert given.draft() == [10, 11, 12]
    bart = DecodingRules(forced_bos_token_id=START)
    unknown = Translation([START, *INPUT], (END,), special=(), rules=bart)  # without a tokenizer
    assert unknown.draft() == [START, 10, 11]
    assert unknown.then(START, 10).draft() == [11, 12, 13]


def test_a_region_of_a_source() -> None:
    text = Translation([7, 7, *INPUT, END], copy_start=2, copy_end=-1)
    assert text.draft(25) == INPUT
    assert text.then(10, 7).draft(25) == []  # outside the region
    assert Translation([7], copy_start=2).draft() == []


@pytest.mark.parametrize("seed", range(6))
def test_a_source_against_brute_force(seed: int) -> None:
    dice = random.Random(seed)
    source = [dice.randrange(4, 8) for _ in range(dice.randrange(1, 40))]
    text = Translation(source, copy_min_match=1 + seed % 3)
    for _ in range(30):
        expected = brute_force(source, text.request.token_ids, 1 + seed % 3, 1)
        assert text.draft() == expected
        text.then(*expected[: dice.randrange(4)], *(dice.choices(range(4, 9), k=dice.randrange(3))))


@pytest.mark.parametrize("shortest", [0, LONGEST_ALIGNED + 1])
def test_wrong_options(shortest: int) -> None:
    with pytest.raises(ConfigError, match="copy_min_match"):
        CopyOptions(copy_min_match=shortest)
