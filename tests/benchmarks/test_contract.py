from __future__ import annotations

import pytest
from benchmarks.contract import FIXED, STEERED, Cell, broken_promises

from foretoken.bench.ratios import Interval


def cell(steered: tuple[float, float, float], fixed: tuple[float, float, float]) -> Cell:
    return Cell(4, "qa", {STEERED: Interval(*steered), FIXED: Interval(*fixed)}, 100.0, 0)


@pytest.mark.parametrize(
    ("steered", "fixed", "broken"),
    [
        ((1.0, 0.98, 1.02), (1.0, 0.9, 1.1), 0),
        ((0.95, 0.93, 0.96), (0.9, 0.8, 1.0), 1),
        ((0.96, 0.93, 0.98), (0.9, 0.8, 1.0), 0),  # the interval contains the floor
        ((0.98, 0.975, 0.99), (1.2, 1.1, 1.3), 1),  # a fixed length would have gained
        ((0.9, 0.85, 0.95), (1.2, 1.1, 1.3), 2),
    ],
)
def test_what_breaks_the_contract(
    steered: tuple[float, float, float], fixed: tuple[float, float, float], broken: int
) -> None:
    assert len(broken_promises([cell(steered, fixed)])) == broken
