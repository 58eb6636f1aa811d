"""The inputs of a pass: the nodes of several rows, and the slots that each node sees.

`Passes` makes them. Native code reads the numbers. Networks on PyTorch's operations read tensors,
which are made when they are first accessed.

Rows may have different numbers of nodes. Attention then needs a rectangle with padding, [B, N]. All
other operations run on the nodes alone, [T]: in a batch of sixteen in which one row drafts five
tokens, four fifths of the rectangle are padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from tokenleap.core.tree import TokenTree
from tokenleap.runtime.attention import padded_rows

# Attention windows: layers that see only the positions near a node.
#
# Windows count positions, not slots. In a token tree, a node's slot says nothing about its
# position, so masks are made by the ranks of what a node sees (`PassInputs.mask_within`).


FULL = "full_attention"
_CHUNKED = "chunked_attention"
_SIZES = {"sliding_attention": "sliding_window", _CHUNKED: "attention_chunk_size"}
"""Kinds of layers with windows, and the fields of configurations with their sizes."""


@dataclass(frozen=True)
class Window:
    """The positions up to a node's own that a layer sees."""

    size: int
    # a node sees its own chunk of `size` tokens only, not `size` - 1 before it
    chunked: bool = False

    def first(self, positions: Tensor) -> Tensor:
        """The first position that a node at each of these positions sees; it may be negative."""
        if self.chunked:
            return positions // self.size * self.size
        return positions + (1 - self.size)


def windows_by_kind(config: PreTrainedConfig) -> Mapping[str, Window]:
    """The windows of a decoder-only model by the kinds of its layers (`layer_types`).

    A model without `layer_types` has the same window in all layers, or none.
    """
    kinds = getattr(config, "layer_types", None)
    own = type(config)().to_dict()  # other fields of a file are left over, and nothing reads them
    sizes = {kind: getattr(config, f, None) for kind, f in _SIZES.items() if f in own}
    return {
        kind: Window(size, kind == _CHUNKED)
        for kind, size in sizes.items()
        if size and (kinds is None or kind in kinds)
    }


def layer_windows(config: PreTrainedConfig) -> tuple[Window | None, ...]:
    """The window of each layer of a decoder-only model; None if it sees the whole text."""
    windows = windows_by_kind(config)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return tuple(windows.get(kind) for kind in kinds)
    return (next(iter(windows.values()), None),) * int(config.num_hidden_layers)


def resized(window: Window | None, size: int) -> Window | None:
    return None if window is None else replace(window, size=size)


def resize_windows(config: PreTrainedConfig, size: int) -> None:
    for kind in windows_by_kind(config):
        setattr(config, _SIZES[kind], size)


@dataclass(frozen=True)
class RowNodes:
    """The n nodes of one row, whose KV is in adjacent slots.

    A node sees so many of the row's first slots, its prefix, and the slots of its tail, ascending;
    its own slot is in one of them. There are no tails if no node has one, as in a chain.
    """

    start: int
    tokens: Sequence[int] = ()
    positions: Sequence[int] = ()
    prefixes: Sequence[int] = ()
    tails: Sequence[Sequence[int]] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def part(self, first: int, count: int) -> RowNodes:
        """At most `count` nodes from the `first` on; those before were computed in earlier passes.

        It has just `count` nodes: after the last, token 0 stands, and sees what padding sees.
        """
        cut = slice(first, first + count)
        start, missing = self.start + first, count - len(self.tokens[cut])
        return RowNodes(
            start,
            (*self.tokens[cut], *[0] * missing),
            (*self.positions[cut], *[start] * missing),
            (*self.prefixes[cut], *[start + 1] * missing),
            self.tails[cut],
        )


def tree_nodes(tree: TokenTree, num_computed: int, length: int) -> RowNodes:
    """The nodes of a tree after `length` committed tokens, without the first `num_computed`."""
    start = length + num_computed
    if tree.is_chain:
        stop = length + len(tree)
        return RowNodes(
            start, tree.tokens[num_computed:], range(start, stop), range(start + 1, stop + 1)
        )
    visibility = tree.visibility_from(num_computed)
    return RowNodes(
        start,
        tree.tokens[num_computed:],
        [length + depth for depth in tree.depths[num_computed:]],
        [length + prefix for prefix, _ in visibility],
        [[length + node for node in tail] for _, tail in visibility],
    )


def masked_nodes(tokens: Sequence[int], mask_token: int, num_masks: int, length: int) -> RowNodes:
    """Tokens after `length` committed ones, and a block of masks, which all see each other."""
    first_mask = length + len(tokens)
    stop = first_mask + num_masks
    return RowNodes(
        length,
        (*tokens, *[mask_token] * num_masks),
        range(length, stop),
        [*range(length + 1, first_mask + 1), *[stop] * num_masks],
    )


@dataclass(frozen=True)
class StateRows:
    """Adjacent rows of a buffer [m, E], the states of n nodes.

    Native code reads and writes the memory: the first operation of PyTorch after a pass, which has
    taken the caches, takes as long as native code for a small layer.
    """

    buffer: Tensor
    first: int
    count: int  # n

    @staticmethod
    def of(states: Tensor) -> StateRows:
        """All rows of a tensor."""
        return StateRows(states, 0, len(states))

    @property
    def tensor(self) -> Tensor:
        """[n, E] a view."""
        return self.buffer[self.first : self.first + self.count]


@dataclass(frozen=True)
class PassInputs:
    """One pass over B adjacent rows of the slab, with at most N nodes each and T in all."""

    rows: Sequence[RowNodes]
    first: int
    nodes: int  # N; it exceeds the longest row if the network needs padding
    span: int  # S, the slots that attention reads, a multiple of `KEY_BLOCK`
    dtype: torch.dtype
    device: torch.device
    states: StateRows | None = None  # [T, E] row by row, for a drafting head that reads states

    def last_nodes(self, most: int | None, least: int = 0) -> list[int]:
        """[L] indices of the last `most` nodes of each row among the T nodes; all with None.

        The last one is repeated until there are `least`, for networks in which the bits of fewer
        depend on their number.
        """
        ends = accumulate(map(len, self.rows))
        counts = [len(row) if most is None else min(most, len(row)) for row in self.rows]
        found = [n for e, count in zip(ends, counts, strict=True) for n in range(e - count, e)]
        return found + found[-1:] * (least - len(found))

    @property
    def states_of_nodes(self) -> Tensor:
        """[T, E] `states`, and zeros for the padding of a single row, which is computed."""
        assert self.states is not None, "this network reads states"
        if len(self.rows) > 1:
            return self.states.tensor
        return F.pad(self.states.tensor, (0, 0, 0, self.nodes - self.states.count))

    @cached_property
    def tokens(self) -> Tensor:
        """[B, N] token ids; 0 for padding."""
        tokens = torch.zeros(len(self.rows), self.nodes, dtype=torch.long)
        for index, row in enumerate(self.rows):
            tokens[index, : len(row)] = torch.tensor(row.tokens)
        return tokens.to(self.device)

    @cached_property
    def positions(self) -> Tensor:
        """[B, N] positions in the text; for padding, the row's `start`."""
        starts = torch.tensor([row.start for row in self.rows])
        positions = starts[:, None].repeat(1, self.nodes)
        for index, row in enumerate(self.rows):
            positions[index, : len(row)] = torch.tensor(row.positions)
        return positions.to(self.device)

    @cached_property
    def mask(self) -> Tensor:
        """[B, 1, padded_rows(N), S]: 0 where a node sees a slot, -inf elsewhere.

        Padding sees the slots up to the row's `start`: a softmax over no slots would be NaN.
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
    def ranks(self) -> Tensor:
        """[B, padded_rows(N), S] the position of each slot that a node sees; else meaningless.

        It is the number of slots seen before, because a node sees one slot per position.
        """
        return (self.mask[:, 0] == 0).cumsum(-1) - 1

    def mask_within(self, window: Window | None) -> Tensor:
        """`mask` for layers with this window; the same tensor if the window hides nothing."""
        if window is None or self.span <= window.size:
            return self.mask
        if window not in self._narrower:
            padding = padded_rows(self.nodes) - self.nodes
            first = window.first(F.pad(self.positions, (0, padding)))  # [B, padded N]
            hidden = (self.ranks < first[..., None])[:, None]
            self._narrower[window] = self.mask.masked_fill(hidden, -torch.inf)
        return self._narrower[window]

    @cached_property
    def _narrower(self) -> dict[Window, Tensor]:
        return {}

    @cached_property
    def used(self) -> Tensor | None:
        """[T] which of the B N places are nodes, ascending.

        None if all places are computed: without padding, or with a single row, padding included.
        """
        counts = [len(row) for row in self.rows]
        if len(self.rows) == 1 or min(counts) == self.nodes:
            return None
        places = [row * self.nodes + torch.arange(count) for row, count in enumerate(counts)]
        return torch.cat(places).to(self.device)

    def flat(self, padded: Tensor) -> Tensor:
        """[B, N, ...] -> [T, ...]: leave out the padding."""
        flat = padded.flatten(0, 1)
        return flat if self.used is None else flat[self.used]

    def padded(self, flat: Tensor) -> Tensor:
        """[T, ...] -> [B, N, ...]: put zeros into the padding."""
        shape = (len(self.rows), self.nodes, *flat.shape[1:])
        if self.used is None:
            return flat.view(shape)
        places = flat.new_zeros(len(self.rows) * self.nodes, *flat.shape[1:])
        places[self.used] = flat
        return places.view(shape)


# Embeddings of token ids after the vocabulary, which a drafter has learnt (`Network.extend`).


def look_up(tokens: Tensor, embedding: Tensor, more: Tensor | None) -> Tensor:
    """The rows [..., E] of tokens in [V, E] or, from id V on, in [L, E], which may be missing."""
    if more is None:
        return F.embedding(tokens, embedding)
    known = F.embedding(tokens.clamp(max=len(embedding) - 1), embedding)
    return _chosen(tokens, known, more, len(embedding))


def _chosen(tokens: Tensor, known: Tensor, more: Tensor, first: int) -> Tensor:
    """[..., E] the rows `known` of tokens below `first`, and those [L, E] of the others."""
    added = F.embedding((tokens - first).clamp(min=0), more).to(known.dtype)
    return torch.where((tokens >= first).unsqueeze(-1), added, known)


class ExtendedEmbedding(nn.Module):
    """An embedding module of V tokens, with more tokens [L, E] after them."""

    def __init__(self, inner: nn.Module, rows: Tensor) -> None:
        super().__init__()
        self.inner, self.first = inner, len(inner.weight)  # type: ignore[arg-type]
        self.rows = nn.Parameter(rows)

    @property
    def weight(self) -> Tensor:
        """[V, E] the rows of the vocabulary, for callers that tie or measure them."""
        weight = self.inner.weight
        assert isinstance(weight, Tensor)
        return weight

    def forward(self, tokens: Tensor) -> Tensor:
        known: Tensor = self.inner(tokens.clamp(max=self.first - 1))
        return _chosen(tokens, known, self.rows, self.first)


def extended(embedding: nn.Module, rows: Tensor) -> tuple[ExtendedEmbedding, int]:
    """An embedding module with more tokens [L, E], and the first of their ids.

    It shares the weights of the vocabulary.
    """
    if isinstance(embedding, ExtendedEmbedding):
        known = embedding.rows
        more = torch.cat([known, rows.to(known)])
        module = ExtendedEmbedding(embedding.inner, more)
        return module.requires_grad_(False), module.first + len(known)
    weight = embedding.weight
    assert isinstance(weight, Tensor)
    module = ExtendedEmbedding(embedding, rows.to(weight.device, weight.dtype))
    return module.requires_grad_(False), len(weight)
