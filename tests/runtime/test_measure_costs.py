"""The costs of passes are measured in rounds, within their time, and never by a first pass."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.measurements import USUAL, measure_with
from tests.tiny import tiny_model
from tokenleap.core.tree import TokenTree
from tokenleap.runtime.network import PassOutput
from tokenleap.runtime.profiling import SIZES, measure_costs
from tokenleap.runtime.target import Target


class Clock:
    """Passes take what is written down; nothing else takes time. The first of a size takes more."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, seconds: float, first: float, power: float = 0.3
    ) -> None:
        self._now, self._seconds, self._first = 0.0, seconds, first
        self.passes: list[tuple[int, int]] = []
        verify = Target.verify

        def timed(
            target: Target, keys: Sequence[int], trees: Sequence[TokenTree]
        ) -> list[PassOutput]:
            size = (len(keys), sum(map(len, trees)))
            self._now += self._seconds * size[1] ** power + (
                self._first * (size not in self.passes)
            )
            self.passes.append(size)
            return verify(target, keys, trees)

        monkeypatch.setattr(Target, "verify", timed)
        monkeypatch.setattr("tokenleap.core.clock.now", lambda: self._now)
        measure_with(monkeypatch, USUAL)

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return self._now


@pytest.mark.parametrize(
    ("seconds", "first", "sizes"),
    [(0.001, 0.01, 11), (0.01, 0.05, 7), (0.1, 0.2, 2), (3.0, 0.0, 1), (0.001, 5.0, 1)],
)
def test_first_passes_do_not_count(
    monkeypatch: pytest.MonkeyPatch, seconds: float, first: float, sizes: int
) -> None:
    target = Target(tiny_model())
    clock = Clock(monkeypatch, seconds, first)
    costs = measure_costs(target)
    assert len(set(clock.passes)) == sizes
    measured = [nodes for rows, nodes in set(clock.passes) if rows == 1]
    expected = [seconds * n**0.3 for n in measured]
    assert [costs(n) for n in measured] == pytest.approx(expected, rel=0.05)
    for rows in (4, 16):
        if (rows, rows) in clock.passes:
            assert costs(rows, rows) == pytest.approx(seconds * rows**0.3, rel=0.1)
    assert clock.now < max(0.8 + 8 * seconds, 2 * (seconds + first) + 1e-9)
    assert not target._keys


@pytest.mark.parametrize("runtime", ["module", "lean", "native"])
def test_uneven_drafts_cost_more_on_pytorch(runtime: str) -> None:
    target = Target(tiny_model(dtype=torch.bfloat16), runtime=runtime)
    costs = measure_costs(target, most_rows=1)
    uneven, even = costs(8, 4, 5), costs(8, 4, 2)
    assert uneven == even if runtime == "native" else uneven > even


def test_rounds_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine changes while it is measured: all sizes see the same of it."""
    target = Target(tiny_model())
    clock = Clock(monkeypatch, 0.001, 0.0, power=0.2)
    measure_costs(target, most_rows=1)
    sizes = clock.passes[: len(SIZES)]
    assert sizes == [(1, size) for size in SIZES]
    # A pass over as many rows as the last one is not the first of its kind: that one is not timed.
    assert clock.passes == sizes + [(1, 1), *sizes] * 5


def test_where_nodes_are_dear_long_passes_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny_model())
    clock = Clock(monkeypatch, 0.001, 0.0, power=0.7)
    costs = measure_costs(target)
    assert max(nodes for rows, nodes in clock.passes if rows == 1) == 16
    assert (16, 16) in clock.passes
    assert costs(64) == pytest.approx(4 * 0.001 * 16**0.7, rel=0.05)
