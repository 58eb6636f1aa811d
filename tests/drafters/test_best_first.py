"""Greedy expansion gives the most probable nodes, parents first, within the budget."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenleap.control import Budget
from tokenleap.drafters.growth import best_first_nodes

Path = tuple[int, ...]
ROOT: Path = ()


def distribution(path: Path) -> list[float]:
    """Shares of three successors that depend on the path."""
    weights = [1 + (sum(path) * 7 + len(path) * 3 + token * 5) % 11 for token in range(3)]
    return [weight / sum(weights) for weight in weights]


def successors(path: Path) -> Iterator[tuple[int, float, Path]]:
    for token, share in enumerate(distribution(path)):
        yield token, share, (*path, token)


def probability(path: Path) -> float:
    product = 1.0
    for depth, token in enumerate(path):
        product *= distribution(path[:depth])[token]
    return product


def everything(depth: int) -> list[Path]:
    level = [ROOT]
    found: list[Path] = []
    for _ in range(depth):
        level = [(*path, token) for path in level for token in range(3)]
        found += level
    return found


@given(nodes=st.integers(0, 30), depth=st.integers(1, 4), least=st.sampled_from([0.0, 0.05, 0.4]))
def test_the_most_probable_nodes(nodes: int, depth: int, least: float) -> None:
    grown = list(best_first_nodes(ROOT, successors, nodes, Budget(nodes, depth), least))
    values = sorted((p for p in map(probability, everything(depth)) if p >= least), reverse=True)
    assert [path for _, _, path, _ in grown] == pytest.approx(values[:nodes])
    for node, (parent, token, path, place) in enumerate(grown):
        assert parent < node
        assert place == (*(grown[parent][3] if parent >= 0 else ROOT), token)
        assert path == pytest.approx(probability(place))
    assert len({place for *_, place in grown}) == len(grown)


@pytest.mark.parametrize("budget", [Budget(99, 3, 0.4), Budget(99, 3, 0.0, 0.2)])
def test_nothing_below_what_the_budget_stops_at(budget: Budget) -> None:
    drafted = {place for *_, place in best_first_nodes(ROOT, successors, 99, budget)}

    def stops(path: Path) -> bool:
        return budget.stops_below(distribution(path[:-1])[path[-1]], probability(path))

    expected = {
        path
        for path in everything(3)
        if not any(stops(path[:length]) for length in range(1, len(path)))
    }
    assert drafted == expected
    assert 3 < len(drafted) < len(everything(3))
