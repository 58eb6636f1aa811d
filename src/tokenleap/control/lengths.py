"""`OutputLengths`: how much longer an output becomes, judged by those that have ended."""

from __future__ import annotations

from collections import deque

__all__ = ["OutputLengths"]

_REMEMBERED = 32
"""Outputs that are remembered."""


class OutputLengths:
    """The lengths of the last outputs, in tokens."""

    def __init__(self) -> None:
        self._ended: deque[int] = deque(maxlen=_REMEMBERED)

    def add(self, length: int) -> None:
        """Remember an output that has ended."""
        self._ended.append(length)

    def left(self, generated: int, most: int) -> float:
        """Tokens that an output is expected to have before it.

        It is the mean of what followed in the remembered outputs that became longer. An output that
        is longer than all of them is expected to double.

        Args:
            generated: its tokens so far.
            most: tokens that may follow at most; expected as long as nothing is remembered.
        """
        if not self._ended:
            return float(most)
        longer = [length - generated for length in self._ended if length > generated]
        expected = sum(longer) / len(longer) if longer else float(generated)
        return min(float(most), expected)
