"""The inputs of a pass: the nodes of several rows, and the slots that each node sees.

Networks want this in different forms. Native code takes the numbers as they are; PyTorch's
operations take tensors, which are made when they are asked for. Rows may have different numbers of
nodes. Attention then wants a rectangle, [B, N] with padding; all other work is done node by node
and is best done on the nodes alone, [T]: in a batch of sixteen in which one row drafts five tokens,
padding would be four fifths of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from foretoken.core.tree import TokenTree
from foretoken.runtime.attention import padded_rows

__all__ = ["PassInputs", "RowNodes", "tree_nodes"]


@dataclass(frozen=True)
class RowNodes:
    """The nodes of one row, n of them.

    Args:
        start: slot of the first node's KV; the others follow.
        tokens: [n].
        positions: [n].
        prefixes: [n] slots that a node sees from the row's beginning on.
        tails: [n] slots that it sees behind those, itself included, ascending; empty where no node
            sees any, as in a chain.
    """

    start: int
    tokens: Sequence[int] = ()
    positions: Sequence[int] = ()
    prefixes: Sequence[int] = ()
    tails: Sequence[Sequence[int]] = ()

    def __len__(self) -> int:
        return len(self.tokens)


def tree_nodes(tree: TokenTree, num_computed: int, length: int) -> RowNodes:
    """A tree behind `length` committed tokens, its first `num_computed` nodes left out.

    A node sees the committed tokens, its ancestors and itself.
    """
    start = length + num_computed
    if tree.is_chain:
        stop = length + len(tree)
        return RowNodes(
            start, tree.tokens[num_computed:], range(start, stop), range(start + 1, stop + 1)
        )
    visibility = tree.visibility[num_computed:]
    return RowNodes(
        start,
        tree.tokens[num_computed:],
        [length + depth for depth in tree.depths[num_computed:]],
        [length + prefix for prefix, _ in visibility],
        [[length + node for node in tail] for _, tail in visibility],
    )


@dataclass(frozen=True)
class PassInputs:
    """One pass over B rows of at most N nodes, T in all.

    Args:
        rows: the nodes of each row.
        first: the first of these adjacent rows of the slab.
        nodes: N; more than any row has where a network wants padding.
        span: S, the slots that attention looks at, those that nobody sees included.
        dtype: of the mask.
        device: of the tensors.
    """

    rows: Sequence[RowNodes]
    first: int
    nodes: int
    span: int
    dtype: torch.dtype
    device: torch.device

    @property
    def num_nodes(self) -> int:
        """Nodes computed: T, but for the padding of a single row."""
        return self.nodes if len(self.rows) == 1 else sum(len(row) for row in self.rows)

    @cached_property
    def tokens(self) -> Tensor:
        """[B, N]; padding has token 0."""
        tokens = torch.zeros(len(self.rows), self.nodes, dtype=torch.long)
        for index, row in enumerate(self.rows):
            tokens[index, : len(row)] = torch.tensor(row.tokens)
        return tokens.to(self.device)

    @cached_property
    def positions(self) -> Tensor:
        """[B, N]; padding stands at the first node's slot."""
        starts = torch.tensor([row.start for row in self.rows])
        positions = starts[:, None].repeat(1, self.nodes)
        for index, row in enumerate(self.rows):
            positions[index, : len(row)] = torch.tensor(row.positions)
        return positions.to(self.device)

    @cached_property
    def mask(self) -> Tensor:
        """[B, 1, padded_rows(N), S] additive.

        Padding sees the row's slots before it and one more, so that no softmax is empty.
        """
        size = padded_rows(self.nodes)
        prefixes = torch.tensor([row.start + 1 for row in self.rows])[:, None].repeat(1, size)
        for index, row in enumerate(self.rows):
            prefixes[index, : len(row)] = torch.tensor(row.prefixes)
        hidden = torch.arange(self.span) >= prefixes[:, :, None]  # [B, padded N, S]
        for index, row in enumerate(self.rows):
            for node, tail in enumerate(row.tails):
                hidden[index, node, tail] = False
        mask = torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(hidden, -torch.inf)
        return mask[:, None].to(self.device)

    @cached_property
    def used(self) -> Tensor | None:
        """[T] which of the B N places are nodes, ascending; None where all are computed."""
        counts = [len(row) for row in self.rows]
        if len(self.rows) == 1 or min(counts) == self.nodes:
            return None
        places = [row * self.nodes + torch.arange(count) for row, count in enumerate(counts)]
        return torch.cat(places).to(self.device)

    def flat(self, padded: Tensor) -> Tensor:
        """[B, N, ...] -> [T, ...]: the nodes."""
        flat = padded.flatten(0, 1)
        return flat if self.used is None else flat[self.used]

    def padded(self, flat: Tensor) -> Tensor:
        """[T, ...] -> [B, N, ...]: zeros where no node is."""
        shape = (len(self.rows), self.nodes, *flat.shape[1:])
        if self.used is None:
            return flat.view(shape)
        places = flat.new_zeros(len(self.rows) * self.nodes, *flat.shape[1:])
        places[self.used] = flat
        return places.view(shape)
