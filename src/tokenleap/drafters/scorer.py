"""`Scorer`: the interface of the drafting models behind `ModelDrafter`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from tokenleap.core.tree import TokenTree
from tokenleap.request import Request
from tokenleap.runtime.network import GrownTree, GrowthLimit, GrowthPlan, PassOutput
from tokenleap.runtime.target import Target

__all__ = ["GrowingScorer", "Scorer", "TargetScorer"]


class Scorer(Protocol):
    """A drafting model with its KV: the part of `ModelDrafter` that differs between methods."""

    reads_target_kv: bool
    """See `Drafter.reads_target_kv`."""

    partial: bool
    """Whether the drafting model lacks some of the target's tokens. Their logits are -inf."""

    token_ids: Tensor | None
    """[Vd] the target's ids of the tokens that logits stand for, ascending; None if these are all
    tokens of the target."""

    def room(self, request: Request) -> int:
        """Most tokens it can draft after the committed ones; below 1 it cannot draft."""
        ...

    def admit(self, requests: Sequence[Request], num_nodes: int) -> Sequence[Request]:
        """The requests for which it has memory to score `num_nodes` drafted nodes each."""
        ...

    def pending(self, request: Request) -> list[int]:
        """Committed tokens whose KV is missing, the root last; the others are in the cache."""
        ...

    def verify(
        self, keys: Sequence[int], trees: Sequence[TokenTree], num_computed: Sequence[int]
    ) -> list[PassOutput]:
        """One pass over the new nodes of each tree.

        Args:
            keys: [B] request keys.
            trees: [B] the pending tokens as a chain, then the drafted nodes to score.
            num_computed: [B] nodes at the beginning of each tree that earlier passes computed.
                It is 0 in the first pass, which has no drafted nodes.

        Returns:
            [B] outputs with logits [n, V] of the n new nodes of each tree, or [n, Vd] with
            `token_ids`. In the first pass, the last one's are enough: those of the root.
        """
        ...

    def finish_draft(self, request: Request, num_tokens: int) -> None:
        """End the draft of a request and free the KV of its drafted nodes.

        Args:
            request: the request.
            num_tokens: nodes at the beginning of its last tree that are committed tokens. A model
                with KV of its own keeps theirs.
        """
        ...

    def release(self, request: Request) -> None:
        """Forget a request."""
        ...


class GrowingScorer(ABC):
    """A scorer whose model may be able to draft a whole tree in one call."""

    @abstractmethod
    def grow(
        self,
        keys: Sequence[int],
        pending: Sequence[Sequence[int]],
        plan: GrowthPlan,
        limits: Sequence[GrowthLimit],
    ) -> list[GrownTree] | None:
        """Draft trees of the most probable tokens (see `Passes.grow`).

        Args:
            keys: [B] request keys.
            pending: [B] what `Scorer.pending` has returned.
            plan: how all trees grow.
            limits: [B] where each tree ends.

        Returns:
            [B] trees of the target's tokens; None if the model cannot do this.
        """


class TargetScorer(Scorer):
    """A part of the target as drafting model, on the target's own KV rows.

    Args:
        target: the target, or a part of its network over the same rows.
    """

    reads_target_kv = True
    partial = False
    token_ids: Tensor | None = None

    def __init__(self, target: Target) -> None:
        self._target = target

    def room(self, request: Request) -> int:
        """Tokens left in the target's context."""
        return self._target.max_model_len - len(request.token_ids)

    def admit(self, requests: Sequence[Request], _num_nodes: int) -> Sequence[Request]:
        """All requests: the engine provides room in the target's rows."""
        return requests

    def pending(self, request: Request) -> list[int]:
        """Only the root: the target's rows hold the KV of all tokens before it (invariant 1)."""
        return [request.root]

    def finish_draft(self, request: Request, num_tokens: int) -> None:
        """Nothing to do: verification computes all nodes again, in all layers."""

    def release(self, request: Request) -> None:
        """Nothing to do: the engine frees the target's row."""
