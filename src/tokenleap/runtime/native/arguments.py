"""The arrays that the structures of a call point to (`c_structures.py`); for `decoder.py`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import (
    Array,
    addressof,
    c_uint64,
)
from dataclasses import replace
from itertools import chain, repeat

from torch import Tensor

from tokenleap.runtime.inputs import PassInputs
from tokenleap.runtime.native.c_structures import CDraw, CTree, CTrees
from tokenleap.runtime.network import GrownTree, GrowthDraw, GrowthLimit, GrowthPlan, Need

__all__ = ["NodeArrays", "TreeArrays"]

_MOST_CHILDREN = 64
"""See `Ranking::MOST` in ranking.h."""
_NO_LIMIT = 2**31 - 1
_LOW = 2**64 - 1


class TreeArrays:
    """The trees to grow, and the memory for their nodes.

    Args:
        plan: how they grow.
        limits: where each ends.
        token_ids: see `GrowingNetwork.grow`.
        nodes: nodes of the first pass.

    Attributes:
        rows: rows of logits that the passes need memory for.
    """

    def __init__(
        self,
        plan: GrowthPlan,
        limits: Sequence[GrowthLimit],
        token_ids: Tensor | None,
        nodes: int,
    ) -> None:
        assert max(plan.widths) <= _MOST_CHILDREN
        levels = max(limit.depth for limit in limits)
        self._widths, self._token_ids = array("i", plan.widths[:levels]), token_ids
        sizes = list(zip(plan.frontiers, self._widths, strict=False))
        count, most = len(limits), sum(frontier * width for frontier, width in sizes)
        self._trees = (CTree * count)(*map(_tree, limits))
        self._tokens, self._parents = (array(kind, bytes(8 * count * most)) for kind in "qi")
        self._probabilities = array("f", bytes(4 * count * most))
        frontiers = [frontier for frontier, _ in sizes]
        self._draws = _draws(limits)
        self._sources, self._shown = array("i"), array("f")
        self._keeps_logits = self._draws is not None and plan.beam is None
        if self._draws is not None:
            self._sources = array("i", bytes(4 * count * most))
            self._shown = array("f", bytes(4 * count * most))
        self.rows = count * (sum(frontiers) if self._keeps_logits else max(frontiers))
        self.arguments = CTrees(
            trees=self._trees,
            token_ids=None if token_ids is None else token_ids.data_ptr(),
            widths=self._widths.buffer_info()[0],
            levels=len(self._widths),
            beam=plan.beam or 0,
            most=most,
            widest=max(nodes, count * max(frontiers)),
            tokens=self._tokens.buffer_info()[0],
            parents=self._parents.buffer_info()[0],
            probabilities=self._probabilities.buffer_info()[0],
            draws=None if self._draws is None else addressof(self._draws),
            sources=self._sources.buffer_info()[0],
            shown=self._shown.buffer_info()[0],
        )

    def grown(self, logits: Tensor) -> list[GrownTree]:
        """The trees, when they have grown.

        Args:
            logits: [rows, V] those of all passes.
        """
        return [self._tree(index, tree, logits) for index, tree in enumerate(self._trees)]

    def _tree(self, index: int, tree: CTree, logits: Tensor) -> GrownTree:
        if tree.undecided:
            return GrownTree((), (), (), undecided=True)
        first = index * self.arguments.most
        at = slice(first, first + tree.drafted)
        found = GrownTree(self._tokens[at], self._parents[at], self._probabilities[at])
        if not self._keeps_logits:
            return found
        return replace(found, logits=logits, rows=self._sources[at], shown=self._shown[at])


def _draws(limits: Sequence[GrowthLimit]) -> Array[CDraw] | None:
    draws = [limit.draw for limit in limits if limit.draw is not None]
    assert len(draws) in (0, len(limits)), "all trees of a call draw, or none"
    return (CDraw * len(draws))(*map(_draw, draws)) if draws else None


def _draw(draw: GrowthDraw) -> CDraw:
    noise = draw.noise
    _, trial, position, stream = noise.counter(noise.token_stream, 0)
    key = (c_uint64 * 2)(noise.seed & _LOW, noise.seed >> 64)
    limits = draw.limits
    return CDraw(
        key=key,
        trial=trial,
        stream=stream,
        position=position,
        temperature=draw.temperature,
        min_p=limits.min_p,
        top_p=limits.top_p,
        top_k=limits.top_k,
        coupled=draw.coupled,
    )


def _tree(limit: GrowthLimit) -> CTree:
    nodes = _NO_LIMIT if limit.nodes is None else limit.nodes
    return CTree(limit.min_token_prob, limit.min_path_prob, limit.depth, nodes)


class NodeArrays:
    """The nodes of all rows, as the arrays that `Pass` points to."""

    def __init__(self, inputs: PassInputs, need: Need) -> None:
        rows = [row for row in inputs.rows if len(row)]
        self._tokens = array("q", chain.from_iterable(row.tokens for row in rows))
        numbers = [range(row.start, row.start + len(row)) for row in rows]
        self._ints = {
            "positions": array("i", chain.from_iterable(row.positions for row in rows)),
            "prefixes": array("i", chain.from_iterable(row.prefixes for row in rows)),
            "slots": array("i", chain.from_iterable(numbers)),
            "rows": array("i"),
            "tails": array("i"),
            "scored_nodes": array("i", inputs.last_nodes(need.last) if need.logits else ()),
        }
        starts = array("i", [0])
        for index, row in enumerate(inputs.rows, inputs.first):
            self._ints["rows"].extend(repeat(index, len(row)))
            if row.tails:
                for tail in row.tails:
                    self._ints["tails"].extend(tail)
                    starts.append(len(self._ints["tails"]))
            else:
                starts.extend(repeat(starts[-1], len(row)))
        self._ints["tail_starts"] = starts

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def scored(self) -> int:
        """L, the number of nodes whose logits are needed."""
        return len(self._ints["scored_nodes"])

    def addresses(self) -> dict[str, int]:
        """Field of `Pass` -> address of its array; valid as long as this object lives."""
        found = {name: numbers.buffer_info()[0] for name, numbers in self._ints.items()}
        return {"tokens": self._tokens.buffer_info()[0], **found}
