"""The planner, compared with readable ones that try every number of offers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.control.worlds import cheap, cpu, flat, measured, stairs, steep
from tokenleap.control import CostCurve
from tokenleap.control.estimates import Decayed, moved
from tokenleap.control.features import path_probs
from tokenleap.control.planner import Chances, Expected, Offer, best_plan, levels_of_one
from tokenleap.core.tree import Draft, TokenTree

CURVES = [measured(seconds) for seconds in (flat, cpu, cheap, stairs, steep)]
CURVES += [measured(seconds, pads_rows=True) for seconds in (cpu, steep)]
SHARE = st.floats(0.01, 1)


@st.composite
def some_chances(draw: st.DrawFn) -> Chances:
    levels, rows = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    of_levels = st.lists(SHARE, min_size=levels, max_size=levels)
    passed = [sorted(draw(of_levels), reverse=True) for _ in range(rows)]
    nodes = draw(st.lists(st.floats(0.01, 8), min_size=levels, max_size=levels))
    drafts = draw(st.lists(SHARE, min_size=rows, max_size=rows))
    return Chances(drafts, passed, nodes, draw(of_levels))


def slow_rate(
    depths: Sequence[int], chances: Chances, beside: Expected, costs: CostCurve, per_level: float
) -> float:
    """Tokens a second if each request drafts so deep."""
    rows = range(len(depths))
    taken = [(row, level) for row in rows for level in range(depths[row])]
    tokens = beside.tokens + sum(chances.drafts[r] * chances.passed[r][j] for r, j in taken)
    nodes = [chances.drafts[row] * sum(chances.nodes[: depths[row]]) for row in rows]
    times = [sum(chances.times[:depth]) for depth in depths]
    likely = max(chances.drafts[row] for row in rows if depths[row])
    drafting = per_level * likely * levels_of_one(max(times), sum(times))
    positions = beside.positions + sum(nodes)
    return tokens / (drafting + costs(positions, len(rows), 1 + max(nodes)))


def slow_depths(chances: Chances) -> list[list[int]]:
    """All that a planner may choose: so many of the levels of most tokens per node."""
    rows, levels = range(len(chances.drafts)), range(len(chances.nodes))

    def worth(row: int, level: int) -> float:
        return min(chances.passed[row][i] / chances.nodes[i] for i in range(level + 1))

    order = sorted(((r, j) for r in rows for j in levels), key=lambda pair: -worth(*pair))
    counts = range(1, len(order) + 1)
    return [[sum(row == r for r, _ in order[:count]) for row in rows] for count in counts]


@given(
    chances=some_chances(),
    curve=st.sampled_from(CURVES),
    lookups=st.integers(0, 6),
    per_level=st.sampled_from([0.0, 0.0005, 0.004]),
)
def test_levels_are_those_of_the_slow_planner(
    chances: Chances, curve: CostCurve, lookups: int, per_level: float
) -> None:
    rows = len(chances.drafts)
    beside = Expected(rows + 0.6 * lookups, rows + lookups)
    plan = best_plan(chances.offers(), beside, curve, rows, per_level=per_level)
    rates = [
        slow_rate(depths, chances, beside, curve, per_level) for depths in slow_depths(chances)
    ]
    assert plan.rate == pytest.approx(max(rates))
    assert slow_rate(plan.depths(rows), chances, beside, curve, per_level) == pytest.approx(
        plan.rate
    )
    assert plan.depths(rows) in slow_depths(chances)
    assert plan.expected.rate(curve, rows) == pytest.approx(plan.rate)


@st.composite
def some_lookups(draw: st.DrawFn) -> list[Draft]:
    drafts = []
    for _ in range(draw(st.integers(1, 4))):
        size = draw(st.integers(0, 6))
        parents = [draw(st.integers(0, node)) for node in range(size)]
        features = tuple(draw(st.integers(1, 9)) for _ in range(size))
        drafts.append(Draft.deterministic(TokenTree((0,) * (size + 1), (-1, *parents)), features))
    return drafts


def slow_nodes(
    probs: Sequence[Sequence[float]], beside: Expected, costs: CostCurve, rows: int
) -> tuple[int, float]:
    """How many of the most probable tokens give the most tokens a second; 0 for the step alone."""
    nodes = [(p, row) for row, of_row in enumerate(probs) for p in of_row]
    ranked = sorted(nodes, key=lambda node: -node[0])

    def rate(count: int) -> float:
        longest = 1 + max(sum(row == r for _, row in ranked[:count]) for r in range(rows))
        seconds = beside.seconds + costs(beside.positions + count, rows, longest)
        return (beside.tokens + sum(p for p, _ in ranked[:count])) / seconds

    best = max(range(len(ranked) + 1), key=rate)
    return best, rate(best)


@given(
    drafts=some_lookups(),
    curve=st.sampled_from(CURVES),
    drafting=st.sampled_from([0.0, 0.003]),
)
def test_lookups_and_grafts_are_cut_as_by_the_slow_planner(
    drafts: list[Draft], curve: CostCurve, drafting: float
) -> None:
    rows = len(drafts)
    beside = Expected(1.2 * rows, rows + 1, drafting)
    probs = [path_probs(draft, lambda feature: feature / 10) for draft in drafts]
    offers = [
        Offer(p, p, 1, row, node)
        for row, of_row in enumerate(probs)
        for node, p in enumerate(of_row, 1)
    ]
    least = beside.rate(curve, rows)
    plan = best_plan(offers, beside, curve, rows, least=least)
    count, rate = slow_nodes(probs, beside, curve, rows)
    assert plan.rate == pytest.approx(rate)
    assert len(plan.taken) == count or plan.rate == pytest.approx(least)
    taken = {(offer.row, offer.place) for offer in plan.taken}
    for row, node in taken:  # no node without its parent
        parent = drafts[row].tree.parents[node]
        assert not parent or (row, parent) in taken


def test_equally_good_offers_are_taken_in_their_order() -> None:
    """And of equal rates, that of fewer offers is taken."""
    offers = [Offer(0.5, 0.5, 1, row, 0) for row in range(4)]
    plan = best_plan(offers, Expected.plain(4), lambda n, _, __: 1.0 if n <= 6 else 2.0, 4)
    assert [offer.row for offer in plan.taken] == [0, 1]
    free = [Offer(0.0, 0.0, 1, row, 0) for row in range(4)]
    assert not best_plan(free, Expected.plain(4), lambda *_: 1.0, 4, least=4.0).taken


def test_a_decayed_mean() -> None:
    mean = Decayed(memory=0.5, prior_weight=2)
    assert mean.given(0.25) == 0.25
    mean.add(1)
    mean.add(0)
    assert mean.given(0.25) == (0.5 + 2 * 0.25) / (1.5 + 2)
    assert Decayed(memory=0.5).mean == float("inf")
    assert mean.mean == 0.5 / 1.5
    assert moved(1.0, 3.0, share=0.5) == 2.0
