"""Verification of k drafts in one pass: as a token tree, and as one batch row per path.

The drafts are k paths of d tokens that share their first s tokens. As a tree (`Target.verify`) the
shared tokens are computed once. As rows (`Rows`) every path has its own KV: the shared
tokens are computed for each row, and the context's KV is copied to all rows but the first. Passes
of both forms alternate in one process. Seconds are medians; those of rows include the copies.

    python -m benchmarks.tree_cost --model tiny

Prints a Markdown table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, islice, product
from statistics import median
from typing import Annotated

import torch
import typer
from torch import Tensor

from benchmarks import BenchmarkError, harness
from benchmarks.harness import in_turn, load, machine, one_line_errors, report, table, timed
from tokenleap.core.tree import TokenTree, chain
from tokenleap.runtime.passes import INTERNAL_KEY
from tokenleap.runtime.target import Target

FORMS = ("tree", "rows")
_KEY = 0


@dataclass(frozen=True)
class Case:
    """A tree of k paths of d drafted tokens, which share their first s < d tokens."""

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
    """The cost of one form: positions computed and written (copies included), and seconds."""

    positions: int
    written: int
    seconds: float


@one_line_errors()
def main(
    model: harness.TinyModel = "smollm2-135m",
    paths: Annotated[list[int] | None, typer.Option(min=1, help="k (repeatable).")] = None,
    depth: Annotated[int, typer.Option(min=1, help="d, tokens of a path.")] = 6,
    shared: Annotated[
        list[int] | None, typer.Option(min=0, help="s, less than d (repeatable).")
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens before the tree.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="Passes of each form and tree.")] = 20,
    dtype: harness.Dtype = "auto",
    device: harness.Device = "auto",
) -> None:
    """Measure verification of k drafts as a token tree against k batch rows."""
    cases = _cases(paths or [1, 2, 4, 8], depth, shared or [0, depth // 2])
    target = Target(load(model, dtype, device).module)
    costs = measure(target, cases, context, rounds)
    size = target.cell_bytes / 1000
    rows = [(case, costs[case]["tree"], costs[case]["rows"]) for case in cases]
    found = table(
        rows,
        {
            "paths x depth": lambda row: f"{row[0].paths} x {row[0].depth}",
            "shared": lambda row: row[0].shared,
            "tree positions": lambda row: row[1].positions,
            "rows positions": lambda row: row[2].positions,
            "tree KV kB": lambda row: f"{row[1].written * size:,.1f}",
            "rows KV kB": lambda row: f"{row[2].written * size:,.1f}",
            "tree ms": lambda row: f"{row[1].seconds * 1000:.2f}",
            "rows ms": lambda row: f"{row[2].seconds * 1000:.2f}",
            "rows / tree": lambda row: f"{row[2].seconds / row[1].seconds:.2f}x",
        },
    )
    print(report("tree_cost", machine(target.device, target.dtype), found))


def _cases(paths: list[int], depth: int, shared: list[int]) -> list[Case]:
    if max(shared) >= depth:
        raise BenchmarkError(f"--shared must be less than --depth {depth}, got {max(shared)}.")
    # A single path shares nothing, whatever s is: count it once.
    kept = {Case(k, depth, 0 if k == 1 else s) for s, k in product(shared, paths)}
    return sorted(kept, key=lambda case: (case.shared, case.paths))


def measure(
    target: Target, cases: Sequence[Case], context: int, rounds: int
) -> dict[Case, dict[str, Cost]]:
    """Measure both forms of every tree after the same context, alternating."""
    deepest = max(1 + case.depth for case in cases)
    if context + deepest > target.max_model_len:
        raise BenchmarkError(
            f"--context must be at most {target.max_model_len - deepest} for this model and "
            f"depth, got {context}."
        )
    target.add(_KEY)
    target.prefill(_KEY, [token % target.vocab_size for token in range(context)])
    return {case: _measure_case(target, case, rounds) for case in cases}


def _measure_case(target: Target, case: Case, rounds: int) -> dict[str, Cost]:
    tree, rows = case.tree(target.vocab_size), Rows(target)
    verify: dict[str, Callable[..., object]] = {"tree": target.verify, "rows": rows.verify}
    rows.verify([_KEY], [tree])  # so that the slab has its final size
    positions, copied = rows.num_positions, rows.num_copied

    def run(form: str, tree: TokenTree) -> float:
        return timed(lambda: verify[form]([_KEY], [tree]))[0]

    found = in_turn(FORMS, [tree], rounds, run, warm_up=1, doing=f"{len(tree)} nodes")
    nodes = len(tree)
    return {
        "tree": Cost(nodes, nodes, median(found["tree"][0])),
        "rows": Cost(positions, positions + copied, median(found["rows"][0])),
    }


class Rows:
    """Verifies like `Target`, with one batch row per path: the request's own, and forks of it.

    Attributes:
        num_positions: positions computed so far: the lengths of all paths, root included.
        num_copied: positions of the context copied to forks so far.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self.num_positions = 0
        self.num_copied = 0

    @torch.inference_mode()
    def verify(self, keys: Sequence[int], trees: Sequence[TokenTree]) -> list[Tensor]:
        """One forward pass over all paths of all trees, which leaves nothing behind.

        Returns:
            The logits after every node of each tree, [n+1, V]; for a node on several paths, those
            of the first path.
        """
        paths = [_paths(tree) for tree in trees]
        new, forks = count(INTERNAL_KEY, -1), list[int]()
        rows, chains = list[int](), list[TokenTree]()
        for key, tree, of_tree in zip(keys, trees, paths, strict=True):
            own = [key, *islice(new, len(of_tree) - 1)]
            for fork in own[1:]:
                self._target.fork(key, fork)
            self.num_copied += len(own[1:]) * self._target.cached(key)
            forks += own[1:]
            rows += own
            chains += [chain([tree.tokens[node] for node in path]) for path in of_tree]
        self.num_positions += sum(map(len, chains))
        outputs = iter(self._target.verify(rows, chains))
        found = [_by_node([(path, next(outputs).scores) for path in of_tree]) for of_tree in paths]
        # Closing a row moves the last row into its place, with only its committed KV. So the forks
        # are closed together, the newest first: then none of them is moved.
        for fork in reversed(forks):
            self._target.remove(fork)
        return found


def _paths(tree: TokenTree) -> list[tuple[int, ...]]:
    """The nodes of each path from the root to a leaf."""
    return [(0, *tree.path(node)) for node in range(len(tree)) if not tree.children[node]]


def _by_node(scored: Sequence[tuple[tuple[int, ...], Tensor]]) -> Tensor:
    """Logits by node, [n+1, V], from the logits of the paths."""
    size = 1 + max(path[-1] for path, _ in scored)
    logits = scored[0][1].new_empty(size, scored[0][1].shape[1])
    for path, rows in reversed(scored):
        logits[list(path)] = rows
    return logits


if __name__ == "__main__":
    typer.run(main)
