"""The tables of `ngram_table`: orders, back-off, window, distribution."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.drafting import draft_of, request_of, tokens_of
from tokenleap import SamplingParams
from tokenleap.core.tree import Draft
from tokenleap.drafters.lookups import ORDERS, NgramTable, NgramTableDrafter, distribution_of_counts
from tokenleap.drafters.options import NgramTableOptions


def table_of(tokens: list[int], window: int | None = None) -> NgramTable:
    table = NgramTable(window)
    table.catch_up(tokens)
    return table


def counted(tokens: list[int], context: list[int]) -> Counter[int]:
    """Successors of a context in a text, counted afresh."""
    size = len(context)
    return Counter(
        tokens[i + size] for i in range(len(tokens) - size) if tokens[i : i + size] == context
    )


def test_the_longest_known_context_is_used() -> None:
    table = table_of([1, 2, 3, 9, 2, 3, 8, 3, 7])
    assert table.successors([1, 2, 3]) == {9: 1}
    assert table.successors([5, 2, 3]) == {9: 1, 8: 1}
    assert table.successors([5, 6, 3]) == {9: 1, 8: 1, 7: 1}
    assert table.successors([5, 6, 4]) == {}
    assert table.successors([3]) == {9: 1, 8: 1, 7: 1}


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    window=st.integers(2, 12),
    chunks=st.lists(st.integers(1, 7)),
)
def test_the_window_slides(tokens: list[int], window: int, chunks: list[int]) -> None:
    """After any updates the counts are those of the last `window` tokens, counted afresh."""
    table = NgramTable(window)
    seen = 0
    for size in [*chunks, len(tokens)]:
        seen = min(seen + min(size, window), len(tokens))
        table.catch_up(tokens[:seen])
    while seen < len(tokens):
        seen = min(seen + window, len(tokens))
        table.catch_up(tokens[:seen])
    recent = tokens[-window:]
    expected = {}
    for order in ORDERS:
        for start in range(len(recent) - order + 1):
            context = recent[start : start + order - 1]
            expected[tuple(context)] = dict(counted(recent, context))
    assert table._counts == expected


def test_more_new_tokens_than_the_window_holds() -> None:
    """Tokens on both sides of a gap are not neighbours."""
    table = NgramTable(3)
    table.catch_up([1, 2])
    table.catch_up([1, 2, 7, 7, 7, 4, 5, 6])
    assert table.successors([4]) == {5: 1}
    assert table.successors([2]) == {}


class Akunu:
    """The source's predictor, written to be read.

    Exact contexts take the place of their FNV hashes, which could collide. The source says nothing
    about ties: whichever successor its hash table has first wins. Here it is the latest.

    Args:
        window: latest tokens of the history that contexts are read from.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._tables: dict[int, dict[tuple[int, ...], list[int]]] = {2: {}, 3: {}, 4: {}}
        self._text: list[int] = []

    def update(self, token: int) -> None:
        """Enter a token into the tables; nothing ever leaves them."""
        self._text.append(token)
        for order, table in self._tables.items():
            if len(self._text) >= order:
                context = tuple(self._text[-order:-1])
                table.setdefault(context, []).append(token)

    def draft(self, length: int) -> list[int]:
        """Predict token after token, each from the history and the predictions before it."""
        history = self._text[-self._window :]
        drafted: list[int] = []
        while len(drafted) < length:
            token = self._predict([*history, *drafted])
            if token is None:
                break
            drafted.append(token)
        return drafted

    def _predict(self, history: list[int]) -> int | None:
        for order in (4, 3, 2):
            if len(history) >= order - 1:
                seen = self._tables[order].get(tuple(history[1 - order :]), [])
                if seen:
                    last = {token: at for at, token in enumerate(seen)}
                    return max(last, key=lambda token: (seen.count(token), last[token]))
        return None


@given(
    text=st.lists(st.integers(0, 4), min_size=1, max_size=60),
    prompt=st.integers(1, 60),
    chunks=st.lists(st.integers(1, 6), max_size=20),
    window=st.integers(3, 20),
    length=st.integers(1, 6),
)
def test_drafts_are_those_of_the_source(
    text: list[int], prompt: int, chunks: list[int], window: int, length: int
) -> None:
    """Nothing is pruned, the prompt is counted whole, and the source's window has no effect."""
    source, seen = Akunu(window), 0
    drafter = NgramTableDrafter(NgramTableOptions(), coupled=False)
    params = SamplingParams(temperature=0)
    request = request_of(text[:prompt], params, 5)
    for size in (prompt, *chunks):
        for token in text[seen : seen + size]:
            source.update(token)
        seen = min(len(text), seen + size)
        request.token_ids = text[:seen]
        assert tokens_of(drafter, request, length) == source.draft(length)


def propose(tokens: list[int], params: SamplingParams, **options: Any) -> Draft:
    drafter = NgramTableDrafter(NgramTableOptions(**options), coupled=False)
    return draft_of(drafter, request_of(tokens, params), 4)


def test_greedy_takes_the_most_frequent_and_the_latest_on_a_tie() -> None:
    assert distribution_of_counts({5: 1, 6: 2, 7: 2}, 0).certain == 7
    assert distribution_of_counts({5: 3, 6: 2, 7: 2}, 0).certain == 5
    assert propose([9, 1, 9, 2, 9], SamplingParams(temperature=0)).tree.tokens[1] == 2


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_q_comes_from_the_counts(temperature: float) -> None:
    distribution = distribution_of_counts({8: 3, 5: 1}, temperature)
    weight = 3 ** (1 / temperature)
    assert distribution.prob(8) == pytest.approx(weight / (weight + 1))
    assert distribution.prob(5) == pytest.approx(1 / (weight + 1))
    assert distribution.tokens.tolist() == [5, 8]


def test_sampled_requests_draw_unless_told_otherwise() -> None:
    tokens = [9, 1, 9, 1, 9, 2, 9]
    sampled = propose(tokens, SamplingParams(seed=1))
    assert sampled.q_of(1).prob(1) == pytest.approx(2 / 3)
    pinned = propose(tokens, SamplingParams(seed=1), draft_temperature=0)
    assert pinned.q_of(1).certain == 1
