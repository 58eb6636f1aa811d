"""`TreeOptions`: how users choose the shape of drafted trees (`shapes.py`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from annotated_types import Ge, Le, Len
from pydantic import field_validator, model_validator

from tokenleap.core.params import GREEDY_BELOW
from tokenleap.drafters.sampled import OF_Q, SampledOptions
from tokenleap.drafters.shapes import Chain, Dynamic, Paths, Shape, Widths
from tokenleap.drafters.tree_file import MAX_NODES, TreeFile, is_tree_file

__all__ = ["TreeOptions", "shape_of"]


class TreeOptions(SampledOptions):
    """Options shared by all methods that draft with a model, besides those of `SampledOptions`.

    Args:
        tree: the shape of the draft. None is a chain. [4, 2, 2, 1] gives the root four children,
            each of them two, and so on. [[0], [0, 0], [1]] names the nodes by their ranks (see
            `Paths`). "dynamic" grows EAGLE-2's tree (see `Dynamic`). A `Path`, or text that ends
            in .json, names a file written by `tokenleap tree`.
        tree_top_k: for "dynamic": nodes expanded per level, and children of each.
        tree_depth: for "dynamic": the number of levels.
        expansion: how children are chosen. `top_k` takes the most probable tokens (q is one-hot),
            `sample` draws without replacement, and `sample_with_replacement` draws independently.
            `auto` is `sample` for sampled requests and `top_k` for greedy ones. At temperature 0,
            where nothing can be drawn, `sample` takes the most probable tokens, too.
    """

    tree: (
        Literal["dynamic"]
        | Annotated[tuple[Annotated[int, Ge(1), Le(64)], ...], Len(1)]
        | Annotated[tuple[tuple[Annotated[int, Ge(0), Le(63)], ...], ...], Len(1)]
        | None
    ) = None
    tree_top_k: Annotated[int, Ge(1), Le(64)] = 4
    tree_depth: Annotated[int, Ge(1), Le(64)] = 5
    expansion: Literal["auto", "top_k", "sample", "sample_with_replacement"] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _tree_of_a_file(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and is_tree_file(fields.get("tree")):
            return {**fields, "tree": TreeFile.load(fields["tree"]).paths}
        return fields

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
            temperature: of the draft.
            coupled: whether the drafter knows the target's noise. Dynamic trees then have the
                tokens that the target probably draws with it (`drafters.drawing.clearest`).
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
