"""Measures what passes of a target cost. `costs.py` says how the curve is used."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from tokenleap.core import clock
from tokenleap.core.tree import chain
from tokenleap.runtime.costs import CostCurve
from tokenleap.runtime.passes import INTERNAL_KEY
from tokenleap.runtime.target import Target

SIZES = (1, 2, 4, 6, 8, 12, 16, 32, 64)
"""Nodes of the passes over one row. The native kernels read a weight once for up to 6 or 12 nodes,
so costs rise steeply above these numbers."""

ROWS = (4, 16)  # rows of the passes over several rows, with one node each

CONTEXT = 64  # committed tokens of each row

STEEP, LONG = 2.0, 16
"""Where a pass over `LONG` nodes costs `STEEP` times one, larger ones are left out: nobody drafts
so much there, and they cost about as much per node."""

ROUNDS = 5
MAX_SECONDS = 0.8  # no pass is started after this time, unless its size was not timed yet


@torch.inference_mode()
def measure_costs(target: Target, most_rows: int = max(ROWS)) -> CostCurve:
    """Time passes of several sizes; the curve takes the median of each size over a few rounds.

    Each round times all sizes in turn, because a shared machine may be twice as fast in the next
    second. Sizes that do not fit into `MAX_SECONDS` are left out: the curve extrapolates to them.
    """
    keys = [INTERNAL_KEY - row for row in range(max(ROWS))]
    others = target.num_rows
    target.add(keys[0])
    try:
        target.prefill(keys[0], [0] * min(CONTEXT, target.max_model_len // 2))
        cached = target.cached(keys[0])
        fitting = [(1, size) for size in SIZES if size < target.max_model_len - cached]
        sizes = [size for size in fitting if size[1] <= LONG]
        for rows in ROWS:
            if rows <= most_rows and target.has_room(others + rows, cached + 1):
                for key in keys[1:rows]:
                    if key not in target:
                        target.fork(keys[0], key)
                sizes.append((rows, rows))
        sizes += [size for size in fitting if size[1] > LONG]  # these are the first to leave out
        seconds = _seconds(target, keys, sizes)
    finally:
        for key in keys:
            if key in target:
                target.remove(key)
        target.shrink()
    return CostCurve(seconds, target.peers, pads_rows=target.network.pads_rows)


def _seconds(
    target: Target, keys: Sequence[int], sizes: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], float]:
    """Median seconds by (rows, nodes), of sizes that half of `MAX_SECONDS` could warm up."""

    def now() -> float:
        return target.peers.agreed(clock.now())

    began = now()

    def run(rows: int, nodes: int) -> float:
        start = now()
        target.verify(keys[:rows], [chain([0] * (nodes // rows))] * rows)
        return now() - start

    first: dict[tuple[int, int], float] = {}
    for size in sizes:
        if size[1] > LONG and first.get((1, LONG), 0.0) > STEEP * first[1, 1]:
            continue
        if not first or now() - began < MAX_SECONDS / 2:
            first[size] = run(*size)
    times: dict[tuple[int, int], list[float]] = {size: [] for size in first}
    for _ in range(ROUNDS):
        before = 0
        for size, taken in times.items():
            if taken and now() - began >= MAX_SECONDS:
                continue
            if size[0] != before:  # the first pass over other rows is slower
                run(size[0], size[0])
                before = size[0]
            taken.append(run(*size))
    return {size: statistics.median(taken) for size, taken in times.items()}
