"""The order of contestants over rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

__all__ = ["order"]

Method = TypeVar("Method")


def order(methods: Sequence[Method], index: int) -> list[Method]:
    """The order of the methods in one round.

    Every second round runs backwards, and every second pair begins one method later, so that over
    the rounds no method is always before or after another, first or last.
    """
    start = index // 2 % len(methods)
    turned = [*methods[start:], *methods[:start]]
    return turned[::-1] if index % 2 else turned
