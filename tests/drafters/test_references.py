"""Quotations from texts besides the prompt."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable

import pytest

from tests.drafting import request_of
from tests.drafting import tokens_of as draft
from tokenleap.core.references import References, Source
from tokenleap.drafters.base import Drafter
from tokenleap.drafters.copying import CopyDrafter
from tokenleap.drafters.lookups import NgramDrafter
from tokenleap.drafters.options import CopyOptions, NgramOptions, SuffixOptions
from tokenleap.drafters.suffix import SuffixDrafter
from tokenleap.request import Request

DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "copy": lambda: CopyDrafter(CopyOptions(copy_min_match=1)),
    "ngram": lambda: NgramDrafter(NgramOptions()),
    "suffix": lambda: SuffixDrafter(SuffixOptions(suffix_decoding_max_spec_factor=16)),
}
ALL = pytest.mark.parametrize("method", list(DRAFTERS))


def request(tokens: list[int], *texts: tuple[int, ...], source: Source | None = None) -> Request:
    return request_of(tokens, source=source, references=References(texts))


@ALL
def test_a_reference_is_continued(method: str) -> None:
    asked = request([1, 2, 3, 40, 41], (7, 8, 9), (30, 40, 41, 50, 51, 52))
    assert draft(DRAFTERS[method](), asked) == [50, 51, 52]


@ALL
def test_a_quote_ends_with_its_text(method: str) -> None:
    """Nothing is drafted beyond it, and the texts' ends and beginnings do not match together."""
    drafter = DRAFTERS[method]()
    assert draft(drafter, request([1, 40], (40, 50), (60, 61))) == [50]
    assert draft(drafter, request([1, 50], (40, 50), (60, 61))) == []


@ALL
def test_a_quote_goes_on_after_a_change(method: str) -> None:
    drafter, asked = DRAFTERS[method](), request([1, 40, 41], (40, 41, 50, 51, 52, 53, 54))
    assert draft(drafter, asked) == [50, 51, 52]
    asked.token_ids += [50, 90]
    assert draft(drafter, asked) == []
    asked.token_ids += [51, 52]
    assert draft(drafter, asked, 2) == [53, 54]


@pytest.mark.parametrize("method", ["copy", "ngram"])
def test_a_longer_match_in_a_reference_wins(method: str) -> None:
    asked = request([41, 60, 1, 40, 41], (40, 41, 50))
    assert draft(DRAFTERS[method](), asked, 1) == [50]


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_the_own_text_wins_a_tie(method: str) -> None:
    asked = request([40, 41, 60, 1, 40, 41], (9, 40, 41, 50))
    assert draft(DRAFTERS[method](), asked, 1) == [60]


@ALL
def test_an_encoder_decoder_quotes_them_too(method: str) -> None:
    asked = request([0, 40, 41], (40, 41, 50, 51), source=Source((20, 21, 22)))
    assert draft(DRAFTERS[method](), asked) == [50, 51]


def test_copying_a_region_still_begins_at_its_beginning() -> None:
    drafter = CopyDrafter(CopyOptions(copy_start=1))
    asked = request([1, 10, 11, 12], (10, 11, 50))
    assert draft(drafter, asked) == [10, 11, 12]


def test_the_index_is_shared_and_freed_with_the_requests() -> None:
    drafters, seen = {name: make() for name, make in DRAFTERS.items()}, []
    for method, drafter in drafters.items():
        texts = References(((40, 41, 50),))
        seen.append(weakref.ref(texts))
        asked = [request_of([40], references=texts) for _ in range(2)]
        assert [draft(drafter, each, 1) for each in asked] == [[41], [41]]
        assert len(texts._indexes) == (method != "copy")
        for each in asked:
            drafter.release(each)
    del texts, asked, each
    gc.collect()
    assert [texts() for texts in seen] == [None] * len(drafters)


def test_ngram_finds_what_the_definition_says() -> None:
    """The longest match, in the own text on a tie, and there and elsewhere the last one."""
    dice = random.Random(0)
    for _ in range(300):
        own, *texts = [
            tuple(dice.randrange(3) for _ in range(dice.randrange(1, 12))) for _ in range(4)
        ]
        asked = request(list(own), *texts)
        places: list[tuple[int, int, int, list[int]]] = []  # match, is own, place, what follows
        for number, text in enumerate((*texts, own)):
            for end in range(1, len(text)):
                match = _agreeing(text[:end], own)
                follows = [text[end + i % (len(text) - end)] for i in range(3)]
                if number < len(texts):
                    follows = list(text[end : end + 3])
                looked_up = min(match, 2)
                if match:
                    places.append((looked_up, number == len(texts), number * 100 + end, follows))
        expected: list[int] = []
        if places:
            mine = max((place for place in places if place[1]), default=None)
            other = max((place for place in places if not place[1]), default=None)
            best = [place for place in (mine, other) if place is not None]
            longest = {id(place): _whole_match(place, texts, own) for place in best}
            expected = max(best, key=lambda place: (longest[id(place)], place[1]))[3]
        options = NgramOptions(prompt_lookup_max=2)
        assert draft(NgramDrafter(options), asked) == expected


def _agreeing(text: tuple[int, ...], own: tuple[int, ...]) -> int:
    """Length of the longest common suffix."""
    pairs = zip(reversed(text), reversed(own), strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(text), len(own)))


def _whole_match(
    place: tuple[int, int, int, list[int]], texts: list[tuple[int, ...]], own: tuple[int, ...]
) -> int:
    number, end = divmod(place[2], 100)
    return _agreeing((*texts, own)[number][:end], own)
