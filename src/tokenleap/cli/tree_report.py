"""How `tokenleap tree` shows its result: the acceptance vector, the tree, other shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from tokenleap.cli.console import display, plain

if TYPE_CHECKING:
    from tokenleap.cli.tree_search import Found
    from tokenleap.tuning.measure_tree import Acceptance

__all__ = ["drawn", "show_found"]

SHOWN = 40
"""Maximum nodes of a drawing; of a larger tree it shows the most probable."""

Path = tuple[int, ...]


def show_found(found: Found) -> None:
    """Print the vector, the tree, and a comparison with other shapes of its size."""
    console = display()
    if found.measured is not None:
        what = f"{found.model}, {found.method}: accepted in {found.measured.drafts} drafts"
        console.print(plain(f"{what}\n"))
        console.print(_vector_table(found.measured))
        console.print()
    if found.tree.paths:
        console.print(plain(f"{found.tree.num_nodes} nodes; probability of reaching each\n"))
        console.print(drawn(found.tree.paths, found.acceptance))
        console.print()
    console.print(_rival_table(found))
    console.print()
    console.print(plain(_verdict(found)))


def _vector_table(acceptance: Acceptance) -> Table:
    table = _table("rank", "accepted", "error")
    for rank, (rate, error) in enumerate(zip(acceptance.vector, acceptance.errors, strict=True)):
        table.add_row(str(rank), f"{rate:.4f}", f"{error:.4f}")
    return table


def drawn(paths: Sequence[Path], acceptance: Sequence[float], shown: int = SHOWN) -> Tree:
    """A drawing of the tree, with the probability of reaching each node.

    Args:
        paths: all nodes.
        acceptance: the positional acceptance vector.
        shown: maximum nodes to draw; the rest is counted below their ancestors.
    """
    reached = {path: prod(acceptance[rank] for rank in path) for path in paths}
    # A node is never more probable than its parent, which is shallower: the kept nodes are a tree.
    best = sorted(paths, key=lambda path: (-reached[path], len(path), path))
    kept = set(best[:shown])
    root = Tree(plain("last token", "note"), guide_style="note")
    branches: dict[Path, Tree] = {(): root}
    for path in sorted(kept, key=lambda path: (len(path), path)):
        branches[path] = branches[path[:-1]].add(_node(path, reached))
    hidden = Counter(_above(path, branches) for path in best[shown:])
    for path, count in hidden.items():
        branches[path].add(plain(f"{count} more", "note"))
    return root


def _node(path: Path, reached: Mapping[Path, float]) -> Text:
    return Text.assemble((str(path[-1]), "head"), f"  {reached[path]:.3f}")


def _above(path: Path, branches: Mapping[Path, Tree]) -> Path:
    """The nearest ancestor that is drawn."""
    return next(path[:depth] for depth in range(len(path) - 1, -1, -1) if path[:depth] in branches)


def _rival_table(found: Found) -> Table:
    rates = () if found.costs is None else ("tokens\nper second",)
    table = _table("", "\nnodes", "\nlevels", "tokens\nper pass", *rates)
    for rival in found.rivals():
        cells = [str(rival.nodes), str(rival.levels), f"{rival.expected_tokens:.3f}"]
        if found.costs is not None:
            cells.append(f"{rival.tokens_per_second(found.costs):.1f}")
        table.add_row(plain(rival.name, "draft" if rival.name == "this tree" else ""), *cells)
    return table


def _verdict(found: Found) -> str:
    if not any(found.acceptance):
        return "No tree: no drafted token is ever accepted."
    if not found.tree.paths:
        return "No tree: by the measured costs, none is faster than plain decoding."
    tree, chain, full, _ = found.rivals()
    over_chain = tree.expected_tokens / chain.expected_tokens - 1
    over_full = tree.expected_tokens / full.expected_tokens - 1
    return (
        f"Expected {tree.expected_tokens:.3f} tokens per pass: {over_chain:+.1%} over the chain of "
        f"as many nodes, {over_full:+.1%} over the best full tree."
    )


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="head", padding=(0, 2, 0, 0))
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if heading or index else "left")
    return table
