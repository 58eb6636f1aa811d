"""Optimal token trees for a measured acceptance: which nodes are worth drafting.

Chen et al., "Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding". In the
*positional acceptance vector* a, a[i] is the probability that the target accepts a node's child of
rank i (0-based), wherever in the tree the node is. So a node is reached with the product of the
entries along its path, and the expected number of tokens of a pass is the sum over nodes:

    E(tree) = sum over its nodes, root included, of the product of a[rank] along the path

A dynamic program over subtrees finds the best tree of n nodes. The child of rank i takes some of
the nodes, and its siblings of higher rank share the rest:

    V(l, m)    = 1 + C(l, 0, m)
    C(l, i, m) = max(0, max over s = 1..m of a[i] V(l - 1, s - 1) + C(l, i + 1, m - s))

V(l, m) is the value of a node with at most m nodes in at most l levels below it. C(l, i, m) is what
its children of rank i and above add. A child needs all siblings of lower rank, so the program is
right for vectors that do not decrease, too. `tokenleap tree` calls these functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from operator import itemgetter
from statistics import median
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tokenleap.analysis.formulas import checked_cost, checked_count
from tokenleap.config import SpeculativeConfig
from tokenleap.core.params import SamplingParams
from tokenleap.drafters.registry import METHODS
from tokenleap.drafters.shapes import TreeOptions, closed
from tokenleap.errors import ConfigError

if TYPE_CHECKING:
    from tokenleap.llm import LLM, Prompt
    from tokenleap.runtime.costs import CostCurve
    from tokenleap.trace import StepTrace


@dataclass(frozen=True)
class Acceptance:
    """How often the child of each rank was accepted.

    Args:
        accepted: [K] number of steps whose accepted child had this rank.
    """

    accepted: tuple[int, ...]
    drafts: int
    draft_seconds: float

    @property
    def vector(self) -> tuple[float, ...]:
        return tuple(count / self.drafts for count in self.accepted)

    @property
    def errors(self) -> tuple[float, ...]:
        """[K] standard errors, if the steps are independent."""
        return tuple((rate * (1 - rate) / self.drafts) ** 0.5 for rate in self.vector)


def pass_costs(llm: LLM) -> CostCurve:
    """Seconds of a target pass by its number of positions."""
    from tokenleap.runtime.profiling import measure_costs

    return measure_costs(llm.engine.target)


def one_level(config: SpeculativeConfig, ranks: int) -> SpeculativeConfig:
    """The configuration that drafts one level of `ranks` children at every step."""
    if not issubclass(config.drafter_spec.options, TreeOptions):
        able = ", ".join(
            name for name, spec in METHODS.items() if issubclass(spec.options, TreeOptions)
        )
        raise ConfigError(
            f"method '{config.method_name}' takes no tree: give a draft model, or one of {able}."
        )
    fields = {name: getattr(config, name) for name in config.model_fields_set}
    always = {"tree": (ranks,), "num_speculative_tokens": ranks, "controller": "fixed"}
    return SpeculativeConfig.parse({**fields, **always})


def measure_acceptance(
    llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, ranks: int
) -> Acceptance:
    """Count the accepted ranks while the prompts are answered."""
    counts, seconds = [0] * ranks, []
    for prompt in prompts:
        steps = [step for step in _steps(llm, prompt, params) if step.drafted]
        for rank in map(accepted_rank, steps):
            if rank is not None and rank < ranks:
                counts[rank] += 1
        # A draft model reads the whole prompt in its first step.
        seconds.append([step.draft_seconds for step in steps])
    drafts = sum(map(len, seconds))
    if not drafts:
        raise ConfigError(
            f"method '{llm.speculative_config.method_name}' drafted nothing on these prompts: "
            "there is no acceptance to measure. Take other prompts or more tokens."
        )
    timed = [time for times in seconds for time in times[1:]] or [t[0] for t in seconds if t]
    return Acceptance(tuple(counts), drafts, median(timed))


def _steps(llm: LLM, prompt: Prompt, params: SamplingParams) -> list[StepTrace]:
    (result,) = llm.generate([prompt], params)
    return [step for output in result.outputs for step in output.trace]


def accepted_rank(step: StepTrace) -> int | None:
    """The rank of the root's accepted child; None if all were rejected."""
    if not step.accepted:
        return None
    return step.parents[: step.accepted[0]].count(-1)


Path: TypeAlias = tuple[int, ...]
"""A node, named by the ranks along its path from the root."""

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

SUM_TOLERANCE = 1e-6


@dataclass(frozen=True)
class BestTree:
    """A tree and its expected tokens.

    Args:
        paths: all drafted nodes, parents and lower-ranked siblings first; empty if no tree pays.
    """

    paths: tuple[Path, ...]
    expected_tokens: float

    @property
    def num_nodes(self) -> int:
        return len(self.paths)

    @property
    def depth(self) -> int:
        """Levels; each takes a pass of the draft model."""
        return max(map(len, self.paths), default=0)


@dataclass(frozen=True)
class BestSize:
    """The size of tree with the most tokens per second.

    Args:
        expected_tokens: expected tokens per pass of the best tree of this size.
    """

    nodes: int
    depth: int
    expected_tokens: float
    seconds: float


def acceptance_vector(values: Sequence[float]) -> Floats:
    """A checked positional acceptance vector, [K]."""
    vector = np.asarray(values, dtype=np.float64)
    if vector.ndim != 1 or not len(vector) or not np.all((vector >= 0) & (vector <= 1)):
        raise ConfigError(
            f"acceptance vector: must be probabilities between 0 and 1, got {list(values)}."
        )
    if vector.sum() > 1 + SUM_TOLERANCE:
        raise ConfigError(
            f"acceptance vector: must sum to at most 1, as one child at most is accepted, got "
            f"{vector.sum():.6g}."
        )
    return vector


def expected_tokens(paths: Sequence[Sequence[int]], acceptance: Sequence[float]) -> float:
    """E(tree) by its definition; tests compare the dynamic program with it."""
    by_rank = dict(enumerate(acceptance_vector(acceptance).tolist()))
    reached = (prod(by_rank.get(rank, 0.0) for rank in path) for path in closed(paths))
    return 1 + float(sum(reached))


def best_tree(acceptance: Sequence[float], max_nodes: int, max_depth: int) -> BestTree:
    """The tree with the most expected tokens per pass.

    It leaves out nodes that add nothing, so it may be smaller than allowed.
    """
    table = _Table.solved(acceptance_vector(acceptance), max_nodes, max_depth)
    paths = sorted(table.paths(max_depth, max_nodes), key=lambda path: (len(path), path))
    return BestTree(tuple(paths), float(table.values[max_depth, max_nodes]))


def best_size(
    acceptance: Sequence[float],
    costs: CostCurve,
    max_nodes: int,
    max_depth: int,
    draft_cost: float,
) -> BestSize:
    """The number of nodes and levels whose best tree has the most tokens per second.

    Verifying n nodes computes n + 1 positions, and every level takes one pass of the draft model.
    Among equals the smaller tree wins. No tree at all is one of the choices.
    """
    values = _Table.solved(acceptance_vector(acceptance), max_nodes, max_depth).values
    drafting = checked_cost("draft_cost", draft_cost) * np.arange(max_depth + 1)  # [D+1]
    verifying = np.array([costs(1 + nodes) for nodes in range(max_nodes + 1)])  # [N+1]
    seconds = drafting[:, None] + verifying
    rates = np.where(_needed(values), values / seconds, 0)
    depth, nodes = divmod(int(rates.argmax()), max_nodes + 1)
    return BestSize(nodes, depth, float(values[depth, nodes]), float(seconds[depth, nodes]))


def best_widths(
    acceptance: Sequence[float], max_nodes: int, max_depth: int
) -> tuple[tuple[int, ...], float]:
    """The best full tree, whose nodes of one level have equally many children, and its value.

    E = 1 + S(w1) (1 + S(w2) (1 + ...)), where S(w) is the sum of the first w entries.
    """
    sums = np.cumsum(acceptance_vector(acceptance)).tolist()

    @cache
    def best(nodes: int, depth: int) -> tuple[float, tuple[int, ...]]:
        found: tuple[float, tuple[int, ...]] = (1.0, ())
        for width in range(1, min(nodes, len(sums)) + 1) if depth else ():
            below, widths = best(nodes // width - 1, depth - 1)
            found = max(found, (1 + sums[width - 1] * below, (width, *widths)), key=itemgetter(0))
        return found

    value, widths = best(
        checked_count("max_nodes", max_nodes, 1), checked_count("max_depth", max_depth, 1)
    )
    return widths, value


@dataclass(frozen=True)
class _Table:
    """The solved dynamic program for D levels, K ranks and N nodes.

    Args:
        sizes: [D+1, K, N+1] nodes of the subtree of the child of this rank, if m nodes are left for
            it and its siblings of higher rank; 0 is no child.
    """

    values: Floats
    sizes: Ints

    @staticmethod
    def solved(acceptance: Floats, max_nodes: int, max_depth: int) -> _Table:
        nodes, depth = (
            checked_count("max_nodes", max_nodes, 1),
            checked_count("max_depth", max_depth, 1),
        )
        values = np.ones((depth + 1, nodes + 1))
        sizes = np.zeros((depth + 1, len(acceptance), nodes + 1), dtype=np.int64)
        for level in range(1, depth + 1):
            added = np.zeros(nodes + 1)  # C of the rank after the present one
            for rank in reversed(range(len(acceptance))):
                gains = acceptance[rank] * values[level - 1, :-1]
                added, sizes[level, rank] = _shared(gains, added)
            values[level] += added
        return _Table(values, sizes)

    def paths(self, depth: int, nodes: int, above: Path = ()) -> Iterator[Path]:
        """Nodes below `above`, for which this many levels and nodes are left."""
        for rank, sizes in enumerate(self.sizes[depth]):
            size = int(sizes[nodes])
            if not size:
                return
            yield (*above, rank)
            yield from self.paths(depth - 1, size - 1, (*above, rank))
            nodes -= size


def _shared(gains: Floats, added: Floats) -> tuple[Floats, Ints]:
    """Share m = 0..N nodes between a child and its siblings of higher rank.

    Args:
        gains: [N] what a child with a subtree of 1 to N nodes adds.
        added: [N+1] what its siblings of higher rank add with 0 to N nodes.

    Returns:
        [N+1] what all of them add, and [N+1] the nodes of the child's subtree: the smallest number
        that reaches this sum, or 0 for no child.
    """
    size = len(gains)
    left = np.arange(size + 1)[:, None] - np.arange(1, size + 1)  # [N+1, N] m - s, from -N
    padded = np.concatenate([added, np.full(size, -np.inf)])
    totals = gains + padded[left]  # negative indices count from the end: -inf
    best = totals.argmax(axis=1)
    highest = totals[np.arange(size + 1), best]
    gained = highest > 0
    return np.where(gained, highest, 0), np.where(gained, best + 1, 0)


def _needed(values: Floats) -> NDArray[np.bool_]:
    """[D+1, N+1] True where the best tree uses all of these levels and nodes.

    A size that its best tree does not use up would be charged for nodes that are not there.
    """
    needed = np.zeros(values.shape, dtype=np.bool_)
    needed[1:, 1:] = (values[1:, 1:] > values[1:, :-1]) & (values[1:, 1:] > values[:-1, 1:])
    needed[0, 0] = True
    return needed
