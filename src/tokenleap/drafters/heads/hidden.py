"""States of the committed text, which heads make from the target's hidden states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

__all__ = ["Committed", "States"]

Hidden: TypeAlias = Mapping[int, Tensor]
"""Layer id -> [n, E] the target's hidden states of n tokens."""

_MOST_WAITING = 512
"""Parts of a text whose states are not made yet: each of them holds on to the output of a pass."""


class States:
    """States of adjacent tokens, or of the nodes of a tree, in one buffer.

    Args:
        most: keeps only the last ones, at least so many; None keeps all.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._buffer = torch.empty(0, 0)
        self._first = self._length = 0

    def __len__(self) -> int:
        return self._length

    def keep(self, start: int, states: Tensor) -> None:
        """Keep states [n, E] of the tokens from `start` on; those after them are forgotten."""
        self.cut(start)
        if self._most is not None:
            start, states = start + max(0, len(states) - self._most), states[-self._most :]
        if self._first + self._length != start:
            assert self._most is not None, "states of tokens before these are missing"
            self._first, self._length = start, 0
        self._make_room(len(states), states)
        self._buffer[self._length : self._length + len(states)] = states
        self._length += len(states)

    def _make_room(self, count: int, like: Tensor) -> None:
        if self._length + count <= len(self._buffer):
            return
        if self._most is not None and self._length > self._most:
            dropped = self._length - self._most
            self._buffer[: self._most] = self._buffer[dropped : self._length].clone()
            self._first, self._length = self._first + dropped, self._most
            if self._length + count <= len(self._buffer):
                return
        larger = like.new_empty(max(64, 2 * (self._length + count)), like.shape[1])
        if self._length:
            larger[: self._length] = self._buffer[: self._length]
        self._buffer = larger

    def cut(self, length: int) -> None:
        """Forget all but the first `length` tokens of the text."""
        self._length = max(0, min(self._length, length - self._first))

    def __getitem__(self, places: slice | Sequence[int]) -> Tensor:
        """[n, E] a view for a slice, else a copy."""
        index = places if isinstance(places, slice) else list(places)
        return self._buffer[: self._length][index]

    def at(self, index: int) -> Tensor | None:
        """[1, E] the state of a token; None if it is not kept."""
        place = index - self._first
        return self[place : place + 1] if 0 <= place < self._length else None


class Fuses(Protocol):
    """Makes states of the hidden states of these layers."""

    layers: tuple[int, ...]

    def __call__(self, hidden: Hidden) -> Tensor:
        """Hidden states of n tokens -> [n, E] their states."""
        ...


class Committed:
    """The states of a request's committed tokens. They are made when they are first read.

    A head that drafts in only some of the steps then makes the states of many tokens at once.

    Args:
        fusion: makes them.
    """

    def __init__(self, fusion: Fuses) -> None:
        self.fusion = fusion
        self._made = States()
        self._waiting: list[tuple[int, Hidden]] = []  # number of tokens, their hidden states
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def keep(self, start: int, hidden: Hidden) -> None:
        """Keep the hidden states of the tokens from `start` on."""
        assert start <= self._length, "hidden states of tokens before these are missing"
        if start < self._length:
            self.cut(start)
        count = len(hidden[self.fusion.layers[0]])
        self._waiting.append((count, hidden))
        self._length += count
        if len(self._waiting) == _MOST_WAITING:
            self._make()

    def cut(self, length: int) -> None:
        """Forget all but the first `length`."""
        while self._waiting and self._length > length:
            count, hidden = self._waiting.pop()
            left = max(0, count - (self._length - length))
            self._length -= count - left
            if left:
                part = {layer: states[:left] for layer, states in hidden.items()}
                self._waiting.append((left, part))
        self._made.cut(length)
        self._length = min(self._length, length)

    def __getitem__(self, tokens: slice) -> Tensor:
        """[n, E] a view."""
        if self._waiting:
            self._make()
        return self._made[tokens]

    @torch.inference_mode()  # as in a step, since prompts are shown outside of one
    def _make(self) -> None:
        parts = [hidden for _, hidden in self._waiting]
        hidden = {layer: torch.cat([part[layer] for part in parts]) for layer in self.fusion.layers}
        self._made.keep(len(self._made), self.fusion(hidden))
        self._waiting = []
