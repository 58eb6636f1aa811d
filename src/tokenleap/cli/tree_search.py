"""`tokenleap tree`: measure acceptance and costs, compute the best tree, compare other shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenleap.cli.console import working
from tokenleap.drafters.tree_file import TreeFile
from tokenleap.engine.lines import shaped

if TYPE_CHECKING:
    from tokenleap.core.params import SamplingParams
    from tokenleap.llm import LLM
    from tokenleap.runtime.costs import CostCurve
    from tokenleap.tuning.measure_tree import Acceptance
    from tokenleap.tuning.sequoia import BestTree

__all__ = ["LARGEST", "Costs", "Found", "Rival", "measured", "solved"]

LARGEST = 128
"""Maximum nodes where costs choose the size. Costs above 64 positions are extrapolated."""


@dataclass(frozen=True)
class Costs:
    """The cost of a step: verification by positions, drafting by levels.

    Args:
        curve: seconds of a target pass by positions.
        level: seconds of drafting a level.
    """

    curve: CostCurve
    level: float

    def seconds(self, nodes: int, levels: int) -> float:
        """Seconds of drafting and verifying a tree."""
        return levels * self.level + self.curve(1 + nodes)


@dataclass(frozen=True)
class Rival:
    """A shape that the best tree is compared with, or the best tree itself."""

    name: str
    nodes: int
    levels: int
    expected_tokens: float

    def as_dict(self, costs: Costs | None) -> dict[str, Any]:
        """The shape for JSON."""
        rate = None if costs is None else self.tokens_per_second(costs)
        return {**vars(self), "tokens_per_second": rate}

    def tokens_per_second(self, costs: Costs) -> float:
        """Expected tokens per second, from measured costs."""
        return self.expected_tokens / costs.seconds(self.nodes, self.levels)


@dataclass(frozen=True)
class Found:
    """The best tree and the measurements it was computed from.

    Args:
        acceptance: the positional acceptance vector.
        measured: the counts behind the vector; None if it was given.
        costs: measured costs; None if the number of nodes was given.
        tree: the best tree.
        depth: the limit of levels.
        method: the drafting method; None if no model ran.
        model: the target; None if no model ran.
    """

    acceptance: tuple[float, ...]
    measured: Acceptance | None
    costs: Costs | None
    tree: BestTree
    depth: int
    method: str | None = None
    model: str | None = None

    def rivals(self) -> list[Rival]:
        """The tree, the chain of as many nodes, the best full tree, and no draft at all."""
        from tokenleap.analysis import expected_tokens
        from tokenleap.tuning.sequoia import best_widths

        nodes = self.tree.num_nodes
        none = Rival("no draft", 0, 0, 1.0)
        if not nodes:
            return [none]
        widths, tokens = best_widths(self.acceptance, nodes, self.depth)
        return [
            Rival("this tree", nodes, self.tree.depth, self.tree.expected_tokens),
            Rival("chain", nodes, nodes, expected_tokens(self.acceptance[0], nodes)),
            Rival(str(list(widths)), _full_nodes(widths), len(widths), tokens),
            none,
        ]

    def file(self) -> TreeFile:
        """The content of the file that `--output` names."""
        tree = self.tree
        return TreeFile(tree.paths, self.acceptance, tree.expected_tokens, self.method, self.model)

    def as_dict(self) -> dict[str, Any]:
        """The fields for JSON: the file's, the measurement and the comparison."""
        found = self.measured
        return {
            **self.file().as_dict(),
            "nodes": self.tree.num_nodes,
            "depth": self.tree.depth,
            "drafts": None if found is None else found.drafts,
            "errors": None if found is None else found.errors,
            "compared": [rival.as_dict(self.costs) for rival in self.rivals()],
        }


def _full_nodes(widths: Sequence[int]) -> int:
    """Nodes of a full tree: the sum over levels of the product of widths down to it."""
    total = 0
    for width in reversed(widths):
        total = width * (1 + total)
    return total


def solved(
    acceptance: Sequence[float],
    nodes: int | None,
    depth: int,
    measured: Acceptance | None = None,
    costs: Costs | None = None,
    **origin: str,
) -> Found:
    """The best tree of this many nodes; None takes the best number by measured costs."""
    from tokenleap.tuning.sequoia import BestTree, best_size, best_tree

    levels = depth
    if nodes is None:
        assert costs is not None, "without a number of nodes, the costs are measured"
        size = best_size(acceptance, costs.curve, LARGEST, depth, costs.level)
        nodes, levels = size.nodes, size.depth
    tree = best_tree(acceptance, nodes, levels) if nodes else BestTree((), 1.0)
    return Found(tuple(acceptance), measured, costs, tree, depth, **origin)


def measured(
    llm: LLM,
    texts: Sequence[str],
    params: SamplingParams,
    ranks: int,
    *,
    costs: bool,
    quiet: bool,
) -> tuple[Acceptance, Costs | None]:
    """Measure the acceptance of every rank, and the costs if wanted.

    Args:
        llm: a model that drafts one level of children.
        texts: prompts.
        params: how to sample; the seed is 0 if none is given.
        ranks: children of that level.
        costs: whether to time passes, too.
        quiet: show no progress.

    Raises:
        ConfigError: nothing was drafted.
    """
    from tokenleap.tuning.measure_tree import measure_acceptance, pass_costs

    prompts = [llm.encode(shaped(llm, text)) for text in texts]
    seeded = params.model_copy(update={"seed": params.seed or 0})
    with working("Measuring the acceptance of every rank", quiet=quiet):
        found = measure_acceptance(llm, prompts, seeded, ranks)
    if not costs:
        return found, None
    with working("Measuring the cost of verification", quiet=quiet):
        return found, Costs(pass_costs(llm), found.draft_seconds)
