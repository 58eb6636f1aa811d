"""Verification of k drafts in one pass: as a token tree, and as one batch row per path.

The drafts are k paths of d tokens that share their first s tokens. As a tree (`Target.verify`) the
shared tokens are computed once. As rows (`RowsVerifier`) every path has its own KV: the shared
tokens are computed for each row, and the context's KV is copied to all rows but the first. Passes
of both forms alternate in one process. Seconds are medians; those of rows include the copies.

    python -m benchmarks.tree_cost --model tiny

Prints a Markdown table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Annotated

import typer

from benchmarks import BenchmarkError, flags
from benchmarks.loading import load
from benchmarks.report import command_line, machine, markdown_table, one_line_errors, progress_bar
from tokenleap.analysis.measure import RowsVerifier
from tokenleap.bench.run import order
from tokenleap.core.tree import TokenTree
from tokenleap.runtime.target import Target

__all__ = ["Case", "Cost", "main", "measure"]

FORMS = ("tree", "rows")
_KEY = 0


@dataclass(frozen=True)
class Case:
    """A tree of k paths.

    Args:
        paths: k.
        depth: d, drafted tokens of each path.
        shared: s, tokens that all paths begin with; less than d.
    """

    paths: int
    depth: int
    shared: int

    def tree(self, vocab_size: int) -> TokenTree:
        """A chain of s tokens below the root, and below that k chains of d - s tokens."""
        parents = list(range(-1, self.shared))
        for _ in range(self.paths):
            first = len(parents)
            parents += [self.shared, *range(first, first + self.depth - self.shared - 1)]
        return TokenTree(tuple(node % vocab_size for node in range(len(parents))), tuple(parents))


@dataclass(frozen=True)
class Cost:
    """The cost of one form for one tree.

    Args:
        positions: computed in a pass, root included.
        written: positions whose KV was written, copies included.
        seconds: of a pass, the median over rounds.
    """

    positions: int
    written: int
    seconds: float


def main(
    model: flags.TinyModel = "smollm2-135m",
    paths: Annotated[list[int] | None, typer.Option(min=1, help="k (repeatable).")] = None,
    depth: Annotated[int, typer.Option(min=1, help="d, tokens of a path.")] = 6,
    shared: Annotated[
        list[int] | None, typer.Option(min=0, help="s, less than d (repeatable).")
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens before the tree.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="Passes of each form and tree.")] = 20,
    dtype: flags.Dtype = "auto",
    device: flags.Device = "auto",
) -> None:
    """Measure verification of k drafts as a token tree against k batch rows."""
    with one_line_errors():
        cases = _cases(paths or [1, 2, 4, 8], depth, shared or [0, depth // 2])
        target = Target(load(model, dtype, device).module)
        costs = measure(target, cases, context, rounds)
    print(f"{command_line('benchmarks.tree_cost')}\n\n{_markdown(costs, target.cell_bytes)}\n")
    facts = machine(target.device, target.dtype)
    print("\n".join(f"- {name}: {value}" for name, value in facts.items()))


def _cases(paths: list[int], depth: int, shared: list[int]) -> list[Case]:
    if max(shared) >= depth:
        raise BenchmarkError(f"--shared must be less than --depth {depth}, got {max(shared)}.")
    # A single path shares nothing, whatever s is: count it once.
    kept = {Case(k, depth, 0 if k == 1 else s) for s, k in product(shared, paths)}
    return sorted(kept, key=lambda case: (case.shared, case.paths))


def measure(
    target: Target, cases: list[Case], context: int, rounds: int
) -> dict[Case, dict[str, Cost]]:
    """Measure both forms of every tree after the same context, alternating.

    Raises:
        BenchmarkError: context and tree are longer than the model allows.
    """
    deepest = max(1 + case.depth for case in cases)
    if context + deepest > target.max_model_len:
        raise BenchmarkError(
            f"--context must be at most {target.max_model_len - deepest} for this model and "
            f"depth, got {context}."
        )
    target.add(_KEY)
    target.prefill(_KEY, [token % target.vocab_size for token in range(context)])
    with progress_bar() as bar:
        return {
            case: _measure_case(target, case, rounds)
            for case in bar.track(cases, description="trees")
        }


def _measure_case(target: Target, case: Case, rounds: int) -> dict[str, Cost]:
    tree, rows = case.tree(target.vocab_size), RowsVerifier(target)
    forms: dict[str, Callable[[], object]] = {
        "tree": lambda: target.verify([_KEY], [tree]),
        "rows": lambda: rows.verify([_KEY], [tree]),
    }
    seconds: dict[str, list[float]] = {form: [] for form in forms}
    forms["rows"]()  # so that the slab has its final size
    positions, copied = rows.num_positions, rows.num_copied
    for index in range(rounds + 1):  # the first one warms up
        for form in order(FORMS, index):
            began = time.perf_counter()
            forms[form]()
            seconds[form].append(time.perf_counter() - began)
    rows.close()
    nodes = len(tree)
    return {
        "tree": Cost(nodes, nodes, median(seconds["tree"][1:])),
        "rows": Cost(positions, positions + copied, median(seconds["rows"][1:])),
    }


def _markdown(costs: Mapping[Case, Mapping[str, Cost]], position_bytes: int) -> str:
    header = ["paths x depth", "shared"]
    header += [f"{form} {what}" for what in ("positions", "KV kB", "ms") for form in FORMS]
    header += ["rows / tree"]
    return markdown_table(
        header,
        [
            [
                f"{case.paths} x {case.depth}",
                str(case.shared),
                *(str(cost.positions) for cost in pair),
                *(f"{cost.written * position_bytes / 1000:,.1f}" for cost in pair),
                *(f"{cost.seconds * 1000:.2f}" for cost in pair),
                f"{pair[1].seconds / pair[0].seconds:.2f}x",
            ]
            for case, by_form in costs.items()
            for pair in [[by_form[form] for form in FORMS]]
        ],
    )


if __name__ == "__main__":
    typer.run(main)
