"""What the host knows of the laws after a step on the device: what was drawn from them."""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.law import Law

__all__ = ["Drawn"]


class Drawn:
    """Laws of which only the tokens drawn from them are known: one-hot at those."""

    greedy = False

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens

    def __getitem__(self, node: int) -> Law:
        """The outcome of a chain's node as a law."""
        return Law.one_hot(self._tokens[node])

    def untempered(self, node: int) -> Law:
        """Asked for by lossy rules, which the device does not run."""
        raise AssertionError(f"the law of node {node} is not known")
