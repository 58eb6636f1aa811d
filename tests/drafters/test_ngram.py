"""Lookups of `ngram`."""

from __future__ import annotations

import random

import pytest

from tests.drafting import draft_of, request_of, tokens_of
from tokenleap import ConfigError
from tokenleap.control.features import LONGEST_MATCH
from tokenleap.drafters.lookups import NgramDrafter, copy_from
from tokenleap.drafters.options import NgramOptions


def draft(tokens: list[int], length: int = 4, longest: int = 3, shortest: int = 1) -> list[int]:
    options = NgramOptions(prompt_lookup_max=longest, prompt_lookup_min=shortest)
    return tokens_of(NgramDrafter(options), request_of(tokens), length)


def test_longest_match_wins() -> None:
    assert draft([1, 2, 3, 50, 2, 3, 60, 3, 70, 1, 2, 3], length=1) == [50]


def test_most_recent_match_wins() -> None:
    assert draft([1, 2, 50, 1, 2, 60, 1, 2], length=1) == [60]


def test_shorter_suffixes_are_tried_down_to_the_minimum() -> None:
    tokens = [3, 50, 9, 8, 3]
    assert draft(tokens, length=1, shortest=1) == [50]
    assert draft(tokens, length=1, shortest=2) == []


def test_output_is_searched_too() -> None:
    drafter = NgramDrafter(NgramOptions(prompt_lookup_min=2))
    request = request_of([1, 2, 3])
    assert tokens_of(drafter, request, 2) == []
    request.token_ids += [7, 8, 9, 7, 8]
    assert tokens_of(drafter, request, 2) == [9, 7]


def test_a_repetition_is_continued_for_the_whole_draft() -> None:
    assert draft([5, 6, 5, 6], length=5) == [5, 6, 5, 6, 5]
    assert draft([4, 4], length=3) == [4, 4, 4]
    assert copy_from([1, 2, 3], 1, 5) == [2, 3, 2, 3, 2]


def brute_force(tokens: list[int], length: int, longest: int, shortest: int) -> list[int]:
    """The definition, read aloud."""
    for order in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        suffix = tokens[-order:]
        for end in range(len(tokens) - 1, order - 1, -1):
            if tokens[end - order : end] == suffix:
                return copy_from(tokens, end, length)
    return []


def longest_match(tokens: list[int], longest: int, shortest: int) -> int:
    """How many tokens are the same before the end of the text and where `brute_force` copies."""
    for order in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for end in range(len(tokens) - 1, order - 1, -1):
            if tokens[end - order : end] == tokens[-order:]:
                before, last = tokens[:end][::-1], tokens[::-1]
                alike = [a == b for a, b in zip(before, last, strict=False)]
                return min([*alike, False].index(False), LONGEST_MATCH)
    return 0


@pytest.mark.parametrize("seed", range(30))
def test_against_brute_force(seed: int) -> None:
    dice = random.Random(seed)
    options = NgramOptions(prompt_lookup_max=4, prompt_lookup_min=2)
    drafter = NgramDrafter(options)
    kinds = dice.choice((2, 5))  # of two kinds matches are long
    tokens = [dice.randrange(kinds) for _ in range(dice.randrange(1, 9))]
    request = request_of(tokens)
    for _ in range(40):  # one drafter all along: the index is kept up to date
        proposal = draft_of(drafter, request, 4)
        expected = brute_force(request.token_ids, 4, 4, 2)
        assert list(proposal.tree.tokens[1:]) == expected
        if expected:
            assert proposal.features[0] == longest_match(request.token_ids, 4, 2)
        request.token_ids += [dice.randrange(kinds) for _ in range(dice.randrange(1, 4))]


@pytest.mark.parametrize("fields", [{"prompt_lookup_max": 0}, {"prompt_lookup_min": 0}])
def test_orders_start_at_1(fields: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="greater than or equal to 1"):
        NgramOptions(**fields)
