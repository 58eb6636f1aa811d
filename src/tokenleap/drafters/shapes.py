"""Shapes of drafted trees: which nodes get children, how many, and which nodes are kept.

`ModelDrafter` grows its trees by a `Shape`, and `TreeOptions` chooses the shape. A shape does not
know models. It decides by the nodes' ranks and probabilities.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from annotated_types import Ge, Gt, Le, Len
from pydantic import FiniteFloat, field_validator, model_validator

from tokenleap.core.files import read_json
from tokenleap.core.params import GREEDY_BELOW
from tokenleap.drafters.base import DrafterOptions
from tokenleap.errors import TokenleapError
from tokenleap.runtime.growth_plan import GrowthPlan

if TYPE_CHECKING:
    from tokenleap.control import Budget
    from tokenleap.core.distribution import Distribution

MAX_NODES = 256
MAX_DEPTH = 64
MAX_RANKS = 64
"""Most children of a node."""


@dataclass(eq=False)
class Node:
    """A node of a tree that is being drafted.

    Args:
        ranks: [depth] the rank of each node on the path down to it: the number of its earlier
            siblings.
    """

    token: int
    distribution: Distribution
    parent: Node | None
    ranks: tuple[int, ...]
    path_prob: float = 1.0
    stopped: bool = field(default=False)

    @property
    def depth(self) -> int:
        return len(self.ranks)


class Shape(ABC):
    """How a tree grows, level by level."""

    prunes: ClassVar[bool] = False
    """Whether `kept` chooses among more nodes than the budget allows. Growth then does not end when
    the budget's number of nodes is reached."""

    branches: bool = True
    """Whether a node may have several children."""

    @abstractmethod
    def width(self, ranks: tuple[int, ...]) -> int:
        """Number of children of the node with these ranks (`Node.ranks`); () is the root."""

    def frontier(self, level: Sequence[Node]) -> list[Node]:
        """The nodes of a new level that get children in the next pass."""
        return [node for node in level if self.width(node.ranks)]

    def kept(self, path_probs: Sequence[float], depths: Sequence[int], limit: int) -> Sequence[int]:
        """Indices of the draft's nodes among all: at most `limit`, parents first, with ancestors.

        Args:
            path_probs: [n] of all nodes that have grown, parents first.
            depths: [n] of the same, from 1 on.
        """
        return range(min(limit, len(depths)))

    def plan(self, depth: int) -> GrowthPlan | None:
        """How trees of this depth grow, for networks that grow them in one call.

        None if that depends on the ranks of nodes.
        """
        return None

    def positions(self, budget: Budget) -> int:
        """Most nodes that the model scores while a tree grows; each takes a KV slot."""
        return max(0, budget.nodes)

    def level_sizes(self, limit: int) -> list[int]:
        """Nodes at depths 1, 2, ... of a full tree with at most `limit` nodes."""
        sizes: list[int] = []
        level: list[tuple[int, ...]] = [()]
        while (left := limit - sum(sizes)) > 0:
            level = [(*ranks, rank) for ranks in level for rank in range(self.width(ranks))][:left]
            if not level:
                break
            sizes.append(len(level))
        return sizes


class Chain(Shape):
    """One child per node, as deep as the budget allows."""

    branches = False

    def width(self, ranks: tuple[int, ...]) -> int:
        return 1

    def plan(self, depth: int) -> GrowthPlan:
        return GrowthPlan((1,) * depth)

    def positions(self, budget: Budget) -> int:
        return budget.chain

    def level_sizes(self, limit: int) -> list[int]:
        return [1] * limit


class Widths(Shape):
    """Every node at depth d has `widths[d]` children.

    Args:
        widths: children per node at depths 0 (the root), 1, ...
    """

    def __init__(self, widths: Sequence[int]) -> None:
        self._widths = tuple(widths)
        self.branches = max(self._widths, default=1) > 1

    def width(self, ranks: tuple[int, ...]) -> int:
        return self._widths[len(ranks)] if len(ranks) < len(self._widths) else 0

    def plan(self, depth: int) -> GrowthPlan:
        return GrowthPlan(self._widths[:depth])

    @property
    def num_nodes(self) -> int:
        """Nodes of the full tree, without the root."""
        total, level = 0, 1
        for width in self._widths:
            level *= width
            total += level
        return total


class Paths(Shape):
    """A static tree, given as a list of paths of ranks as in Medusa and EAGLE.

    Args:
        paths: each names one node; [0, 2] is the third child of the root's first child. The
            ancestors of a named node, and the earlier siblings of all these nodes, belong to the
            tree too.
    """

    def __init__(self, paths: Sequence[Sequence[int]]) -> None:
        self._widths: dict[tuple[int, ...], int] = {}
        for path in paths:
            for depth, rank in enumerate(path):
                above = tuple(path[:depth])
                self._widths[above] = max(self._widths.get(above, 0), rank + 1)
        self.branches = max(self._widths.values(), default=1) > 1

    def width(self, ranks: tuple[int, ...]) -> int:
        return self._widths.get(ranks, 0)

    @property
    def num_nodes(self) -> int:
        return sum(self._widths.values())


class Dynamic(Shape):
    """Grow where the drafter is confident, then keep the most probable nodes.

    Li et al., "EAGLE-2". At every level, the `top_k` nodes with the highest path probability get
    `top_k` children each. At the end the nodes with the highest path probability are kept. They
    form a tree, because no node has a higher path probability than its parent.
    """

    prunes: ClassVar[bool] = True

    def __init__(self, top_k: int, depth: int) -> None:
        self._top_k = top_k
        self._depth = depth

    def width(self, ranks: tuple[int, ...]) -> int:
        return self._top_k if len(ranks) < self._depth else 0

    def plan(self, depth: int) -> GrowthPlan:
        return GrowthPlan((self._top_k,) * min(depth, self._depth), beam=self._top_k)

    def positions(self, budget: Budget) -> int:
        """See `Shape.positions`: `top_k` nodes of every level except the last."""
        return self._top_k * max(0, min(budget.depth, self._depth) - 1)

    def level_sizes(self, limit: int) -> list[int]:
        """See `Shape.level_sizes`: an estimate, since the drafter's probabilities decide.

        It is made as if pruning kept a node of every level, and otherwise the levels near the root.
        """
        levels = min(self._depth, limit)
        full = [self._top_k, *[self._top_k**2] * (levels - 1)]
        sizes: list[int] = []
        for level, size in enumerate(full[:levels], 1):
            sizes.append(min(size, limit - sum(sizes) - (levels - level)))
        return sizes

    def frontier(self, level: Sequence[Node]) -> list[Node]:
        """The `top_k` nodes of a level with the highest path probability."""
        best = sorted(super().frontier(level), key=lambda node: -node.path_prob)
        return best[: self._top_k]

    def kept(self, path_probs: Sequence[float], depths: Sequence[int], limit: int) -> Sequence[int]:
        """The nodes with the highest path probability; on a tie those closer to the root."""
        best = sorted(range(len(depths)), key=lambda node: (-path_probs[node], depths[node]))
        return sorted(best[:limit], key=depths.__getitem__)


# `SampledOptions`: the parameters that a drafter's q has of its own.


OF_Q = ("draft_temperature", "draft_top_k", "draft_top_p")
"""The fields of `SampledOptions`."""


class SampledOptions(DrafterOptions):
    """Options of drafters that draw their tokens.

    q is the distribution after temperature, top-k and top-p, and tokens are drawn from it. So every
    lossless rule stays lossless (Leviathan et al., section 2.2: standardized sampling).

    Args:
        draft_temperature: temperature of the draft. None takes the request's; 0 drafts the most
            probable token, for sampled requests too.
        draft_top_k: draw from the k most probable tokens; 0 from all. None takes the request's
            `top_k`.
        draft_top_p: draw from the smallest set of most probable tokens whose mass reaches this; 1
            from all. None takes the request's `top_p`.
    """

    draft_temperature: Annotated[FiniteFloat, Ge(0), Le(100)] | None = None
    draft_top_k: Annotated[int, Ge(0)] | None = None
    draft_top_p: Annotated[float, Gt(0), Le(1)] | None = None

    @model_validator(mode="after")
    def _truncates_what_is_drawn(self) -> Self:
        temperature = self.draft_temperature
        if temperature is not None and temperature < GREEDY_BELOW:
            for name in OF_Q[1:]:
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name} has no effect with draft_temperature 0, which draws nothing: "
                        "remove one of the two."
                    )
        return self


# `TreeOptions`: how users choose the shape of drafted trees (`shapes.py`).


class TreeOptions(SampledOptions):
    """Options shared by all methods that draft with a model, besides those of `SampledOptions`.

    Args:
        tree: the shape of the draft. None is a chain. [4, 2, 2, 1] gives the root four children,
            each of them two, and so on. [[0], [0, 0], [1]] names each node by the ranks on the path
            from the root, as in Medusa and EAGLE. "dynamic" grows EAGLE-2's tree. A `Path`, or text
            that ends in .json, names a file written by `tokenleap tree`.
        tree_top_k: for "dynamic": nodes expanded per level, and children of each.
        tree_depth: for "dynamic": levels of the tree.
        expansion: how children are chosen. `top_k` takes the most probable tokens (q is one-hot),
            `sample` draws without replacement, and `sample_with_replacement` draws independently.
            `auto` is `sample` for sampled requests and `top_k` for greedy ones. At temperature 0,
            where nothing can be drawn, `sample` takes the most probable tokens, too.
    """

    tree: (
        Literal["dynamic"]
        | Annotated[tuple[Annotated[int, Ge(1), Le(MAX_RANKS)], ...], Len(1)]
        | Annotated[tuple[tuple[Annotated[int, Ge(0), Le(MAX_RANKS - 1)], ...], ...], Len(1)]
        | None
    ) = None
    tree_top_k: Annotated[int, Ge(1), Le(MAX_RANKS)] = 4
    tree_depth: Annotated[int, Ge(1), Le(MAX_DEPTH)] = 5
    expansion: Literal["auto", "top_k", "sample", "sample_with_replacement"] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _tree_of_a_file(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and is_tree_file(fields.get("tree")):
            return {**fields, "tree": TreeFile.load(fields["tree"]).paths}
        return fields

    @field_validator("tree", mode="before")
    @classmethod
    def _not_too_long(cls, value: object) -> object:
        """What is longer is not even read."""
        if isinstance(value, list | tuple):
            longest = max(
                (len(each) for each in value if isinstance(each, list | tuple)), default=0
            )
            if len(value) > MAX_NODES or longest > MAX_DEPTH:
                raise ValueError(
                    f"a tree has at most {MAX_NODES} nodes, and a path {MAX_DEPTH} ranks"
                )
        return value

    @field_validator("tree")
    @classmethod
    def _not_too_large(cls, value: object) -> object:
        if isinstance(value, tuple):
            if () in value:
                raise ValueError("a path needs at least one rank")
            nodes = _static(value).num_nodes
            if nodes > MAX_NODES:
                raise ValueError(f"the tree has {nodes} nodes, more than {MAX_NODES}")
        return value

    @model_validator(mode="after")
    def _dynamic_trees_are_not_sampled(self) -> Self:
        # `Dynamic.kept` drops nodes because of their probability. Invariant 2 forbids that for
        # sampled nodes.
        if self.tree == "dynamic" and self.expansion not in ("auto", "top_k"):
            raise ValueError(f"tree 'dynamic' takes expansion 'top_k', not '{self.expansion}'.")
        return self

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> Self:
        if self.tree != "dynamic":
            for name in ("tree_top_k", "tree_depth"):
                if name in self.model_fields_set:
                    raise ValueError(f"{name} is for tree 'dynamic': remove it.")
        for name in OF_Q:
            if getattr(self, name) is None:
                continue
            if self.expansion == "top_k":
                raise ValueError(f"{name} has no effect where children are the top-k: remove it.")
            if self.tree == "dynamic":
                raise ValueError(
                    f"{name} is not for tree 'dynamic': dynamic trees always take the request's "
                    "own parameters. Remove it."
                )
        return self

    def takes_most_probable(self, temperature: float, *, coupled: bool) -> bool:
        """Whether children at this temperature are the top-k tokens, whatever the noise is.

        Args:
            coupled: whether the drafter knows the target's noise. Dynamic trees then have the
                tokens that the target probably draws with it (`growth.clearest`).
        """
        if self.expansion in ("auto", "sample") and temperature < GREEDY_BELOW:
            return True
        if self.expansion == "auto":
            return self.tree == "dynamic" and not coupled
        return self.expansion == "top_k"

    def default_num_speculative_tokens(self) -> int | None:
        """The number of nodes of a static tree; None for a chain or a dynamic tree."""
        return _static(self.tree).num_nodes if isinstance(self.tree, tuple) else None


def _static(tree: tuple[int, ...] | tuple[tuple[int, ...], ...]) -> Widths | Paths:
    if isinstance(tree[0], tuple):
        return Paths([path for path in tree if isinstance(path, tuple)])
    return Widths([width for width in tree if isinstance(width, int)])


def shape_of(options: TreeOptions) -> Shape:
    """The shape that the options choose; a chain without the option `tree`."""
    if options.tree is None:
        return Chain()
    if isinstance(options.tree, tuple):
        return _static(options.tree)
    return Dynamic(options.tree_top_k, options.tree_depth)


# Files that hold the shape of a static tree.
#
# `tokenleap tree` writes them, and the option `tree` reads them. A file is one JSON object with the
# fields of `TreeFile`: {"format": "tokenleap-tree-1", "paths": [[0], [1], [0, 0]], ...}.


FORMAT = "tokenleap-tree-1"


@dataclass(frozen=True)
class TreeFile:
    """The shape of a tree, and the measurement that it was optimised for.

    Args:
        paths: [n] every node as the ranks on the path down to it, as in `shapes.Paths`.
        method: the method that drafted while the vector was measured; None if it was given.
        model: the target of the measurement; None if the vector was given.
    """

    paths: tuple[tuple[int, ...], ...]
    acceptance: tuple[float, ...] = ()
    expected_tokens: float | None = None
    method: str | None = None
    model: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @staticmethod
    def load(path: str | Path) -> TreeFile:
        value = _read(Path(path))
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise TokenleapError(
                f"{path} is not a tree: expected an object with format '{FORMAT}', as written by "
                "`tokenleap tree --output`."
            )
        _check_origin(path, value)
        return TreeFile(
            _checked_paths(path, value.get("paths")),
            tuple(value.get("acceptance", ())),
            *(value.get(name) for name in ("expected_tokens", "method", "model")),
        )


def is_tree_file(value: object) -> bool:
    """Whether a value of the option `tree` names a file: a `Path`, or text that ends in .json."""
    return isinstance(value, Path) or (isinstance(value, str) and value.endswith(".json"))


def _read(path: Path) -> Any:
    try:
        return read_json(path.expanduser())
    except OSError as error:
        raise TokenleapError(f"cannot read tree {path}: {error.strerror or error}.") from error
    except ValueError as error:
        raise TokenleapError(f"{path} is not a tree: not JSON in UTF-8 ({error}).") from error


def _checked_paths(path: str | Path, paths: Any) -> tuple[tuple[int, ...], ...]:
    if not isinstance(paths, list) or not paths or not all(map(_is_path, paths)):
        raise TokenleapError(
            f"{path} is a damaged tree: paths must be a list of lists of ranks, each between 0 "
            f"and {MAX_RANKS - 1}."
        )
    deepest = max(map(len, paths))
    if deepest > MAX_DEPTH:
        raise TokenleapError(f"{path}: the tree is {deepest} levels deep, more than {MAX_DEPTH}.")
    nodes = len(closed(paths))
    if nodes > MAX_NODES:
        raise TokenleapError(f"{path}: the tree has {nodes} nodes, more than {MAX_NODES}.")
    return tuple(map(tuple, paths))


def _check_origin(path: str | Path, value: dict[str, Any]) -> None:
    acceptance = value.get("acceptance", [])
    if not isinstance(acceptance, list) or not all(map(_is_number, acceptance)):
        raise TokenleapError(f"{path} is a damaged tree: acceptance must be a list of numbers.")
    tokens = value.get("expected_tokens")
    if tokens is not None and not _is_number(tokens):
        raise TokenleapError(f"{path} is a damaged tree: expected_tokens must be a number.")
    for name in ("method", "model"):
        if not isinstance(value.get(name), str | None):
            raise TokenleapError(f"{path} is a damaged tree: {name} must be text.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_path(path: Any) -> bool:
    return (
        isinstance(path, list)
        and bool(path)
        and all(type(rank) is int and 0 <= rank < MAX_RANKS for rank in path)
    )


def closed(paths: Sequence[Sequence[int]]) -> set[tuple[int, ...]]:
    """All nodes of a tree as paths of ranks."""
    return {
        (*path[:depth], rank)
        for path in paths
        for depth, last in enumerate(path)
        for rank in range(last + 1)
    }
