"""The seam between the loop and the drafters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor

from foretoken.control.base import Budget
from foretoken.core.config import Config
from foretoken.core.tree import Draft
from foretoken.decode import Outcome, StepTimes
from foretoken.drafters.overlap import VocabularyOverlap
from foretoken.request import Request

__all__ = ["Drafter", "DrafterOptions", "layers_of"]


class DrafterOptions(Config):
    """Base of a method's own options."""

    def default_num_speculative_tokens(self) -> int | None:
        """The draft length these options imply; None leaves it to the method."""
        return None


class Drafter(ABC):
    """Guesses what comes next.

    A drafter owns its state and catches up from the committed tokens of each request (invariant 4):
    it is told nothing about what was accepted except through them, and "all accepted" is no special
    case. It may not look at the target.
    """

    drafts_trees: bool = False
    """Whether a node of its drafts may have several children; an instance may say so of itself."""

    independent_siblings: bool = False
    """Whether the children of a node are independent draws from one shared q object;
    an instance may say so of itself."""

    looks_up: bool = False
    """Whether its drafts are certain tokens, found in much less time than a pass takes, with their
    features (`Draft.features`); an instance may say so of itself. It is not asked where nobody may
    draft."""

    reads_target_kv: bool = False
    """Whether it drafts on the target's own KV, and so only what follows the committed tokens."""

    hidden_layers: tuple[int, ...] = ()
    """Layers of the target whose hidden states it learns from (ids as in `runtime.network.Need`).
    It is then shown those of all committed tokens but the last, whatever chunked prefill,
    preemption and prefix caching do: by `observe_prefill` and by `Outcome.hidden`."""

    vocabulary_overlap: VocabularyOverlap | None = None
    """How its draft model's tokens compare with the target's, if it has one and both have names."""

    def level_sizes(self, limit: int) -> Sequence[int] | None:
        """Nodes at each level of a full draft of at most `limit`, for controllers; None for chains.

        Who makes branches and cannot tell beforehand says one a level; controllers see better.
        """
        return [1] * limit if self.drafts_trees else None

    @abstractmethod
    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """One draft per request, within its budget; an empty one where there is nothing to say.

        A node's q is the distribution it was drawn from (invariant 2), and no node is dropped for
        its value.
        """

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> None:  # noqa: B027
        """Learn from a step, the target's output included; most drafters learn nothing."""

    def observe_prefill(  # noqa: B027
        self, request: Request, start: int, hidden: Mapping[int, Tensor]
    ) -> None:
        """Learn from the hidden states of tokens that were computed before the first step.

        A preempted request is computed again: tokens may be shown twice, with the same bits.

        Args:
            request: whose tokens `token_ids[start : start + n]` were computed.
            start: the first of them.
            hidden: layer id -> [n, E], of at least `hidden_layers`.
        """

    def rewind(self, request: Request) -> None:
        """Tokens seen as committed have been taken back: a cascade's inner drafter guesses on.

        Starting afresh is always right; drafters with costly state do better.
        """
        self.release(request)

    def release(self, request: Request) -> None:  # noqa: B027 - most keep nothing
        """Forget a request that has ended."""

    def forget(self) -> None:  # noqa: B027 - most keep nothing
        """Forget what requests that have ended left for others."""


def layers_of(drafters: Sequence[Drafter]) -> tuple[int, ...]:
    """Layers whose hidden states any of these drafters wants, ascending."""
    return tuple(sorted({layer for drafter in drafters for layer in drafter.hidden_layers}))
