"""The target's laws after a step on the device: the host knows what was drawn from them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from foretoken.law import Law
from foretoken.sampling import Laws, Sampler
from foretoken.tree import TokenTree

__all__ = ["DeviceLaws", "Drawn"]


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


class DeviceLaws(Laws):
    """The target's laws, computed from the logits on the device if anyone looks.

    Those of greedy requests are known without. A trace says of the others that nobody looked.
    """

    def __init__(
        self,
        logits: Tensor,
        tree: TokenTree,
        sampler: Sampler,
        output_ids: Sequence[int],
        drawn: Sequence[int],
    ) -> None:
        # Not the parent's, which fetches the tokens of greedy laws from the device.
        self._logits, self._tree = logits, tree
        self._sampler, self._output_ids = sampler, output_ids
        known = enumerate(drawn) if sampler.plain_greedy else ()
        self._laws = {node: Law.one_hot(token) for node, token in known}
