"""The tables of `ngram_table`: orders, back-off, window, distribution."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken import SamplingParams
from foretoken.control import Budget
from foretoken.drafters.ngram_table import (
    ORDERS,
    NgramTable,
    NgramTableDrafter,
    NgramTableOptions,
    distribution_of_counts,
)
from foretoken.request import Request


def table_of(tokens: list[int], window: int = 512) -> NgramTable:
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


def propose(tokens: list[int], params: SamplingParams, **options: Any) -> Request:
    drafter = NgramTableDrafter(NgramTableOptions(**options), coupled=False)
    request = Request(tokens, params, vocab_size=50, max_model_len=999)
    (draft,) = drafter.propose([request], [Budget(4, 4)])
    request.draft = draft  # type: ignore[attr-defined]
    return request


def test_a_draft_chains_on_its_own_predictions() -> None:
    request = propose([1, 2, 3, 4, 5, 1], SamplingParams(temperature=0))
    assert request.draft.tree.tokens == (1, 2, 3, 4, 5)  # type: ignore[attr-defined]


def test_greedy_takes_the_most_frequent_and_the_latest_on_a_tie() -> None:
    assert distribution_of_counts({5: 1, 6: 2, 7: 2}, 0).certain == 7
    assert distribution_of_counts({5: 3, 6: 2, 7: 2}, 0).certain == 5
    request = propose([9, 1, 9, 2, 9], SamplingParams(temperature=0))
    assert request.draft.tree.tokens[1] == 2  # type: ignore[attr-defined]


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
    assert sampled.draft.q_of(1).prob(1) == pytest.approx(2 / 3)  # type: ignore[attr-defined]
    pinned = propose(tokens, SamplingParams(seed=1), draft_temperature=0)
    assert pinned.draft.q_of(1).certain == 1  # type: ignore[attr-defined]
