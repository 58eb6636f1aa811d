"""`Occurrences`: where the latest tokens of an output occur in a given text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tokenleap.drafters.options.lookups import LONGEST_ALIGNED

__all__ = ["SEPARATOR", "Occurrences", "Positions"]

SEPARATOR = -1
"""Stands between two texts that are searched as one; no token has this id."""

Positions: TypeAlias = NDArray[np.int64]


class Occurrences:
    """Finds the longest suffix of an output that occurs in a text.

    Args:
        tokens: the text, or several with a `SEPARATOR` between each two.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._array = np.array(tokens, dtype=np.int64)
        self._ends = _ends_of(self._array)

    def longest(self, suffix: Sequence[int]) -> tuple[Positions, int]:
        """Positions behind the occurrences of the longest suffix, ascending, and its length.

        Where the text ends, nothing follows, so this is no occurrence.

        Args:
            suffix: the output's latest tokens; of those, `LONGEST_ALIGNED` are compared.

        Returns:
            No positions, and 0, if the last token does not occur.
        """
        ends = self._ends.get(suffix[-1], _NOWHERE)
        length = int(len(ends) > 0)
        while len(ends) and length < min(len(suffix), LONGEST_ALIGNED):
            longer = ends[ends > length]
            longer = longer[self._array[longer - length - 1] == suffix[-length - 1]]
            if not len(longer):
                break
            ends, length = longer, length + 1
        return ends, length

    def of(self, token: int) -> Positions:
        """Positions behind the occurrences of one token, ascending."""
        return self._ends.get(token, _NOWHERE)


_NOWHERE: Positions = np.empty(0, dtype=np.int64)


def _ends_of(tokens: NDArray[Any]) -> dict[int, Positions]:
    """Token -> positions behind its occurrences, ascending, without the ends of texts.

    Args:
        tokens: [N] token ids and separators.
    """
    (followed,) = (tokens[1:] != SEPARATOR).nonzero()
    order = followed[tokens[followed].argsort(kind="stable")]
    distinct, starts = np.unique(tokens[order], return_index=True)
    return dict(zip(distinct.tolist(), np.split(order + 1, starts[1:]), strict=False))
