"""The order of contestants in each round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

__all__ = ["order"]

Method = TypeVar("Method")


def order(methods: Sequence[Method], index: int) -> list[Method]:
    """The order of the methods in one round.

    Rounds come in pairs: the second of a pair is the first backwards, and the next pair begins one
    method later. Over the rounds every method is before every other one as often as after it.
    """
    start = index // 2 % len(methods)
    turned = [*methods[start:], *methods[:start]]
    return turned[::-1] if index % 2 else turned
