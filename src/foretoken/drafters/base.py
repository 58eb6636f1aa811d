"""The seam between the loop and the drafters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from foretoken.config import Config
from foretoken.control import Budget
from foretoken.request import Request
from foretoken.tree import Draft

if TYPE_CHECKING:
    from foretoken.decode import Outcome, StepTimes
    from foretoken.drafters.vocabulary import VocabularyOverlap

__all__ = ["Drafter", "DrafterOptions"]


class DrafterOptions(Config):
    """Base of a method's own options."""

    def default_num_speculative_tokens(self) -> int | None:
        """The draft length these options imply; None leaves it to the method."""
        return None


class Drafter(ABC):
    """Guesses what comes next.

    A drafter owns its state and catches up from the committed tokens of each request (law 4): it is
    told nothing about what was accepted except through them, and "all accepted" is no special case.
    It may not look at the target.
    """

    makes_branches: bool = False
    """Whether a node of its drafts may have several children; an instance may say so of itself."""

    independent_siblings: bool = False
    """Whether several children of a node are independent draws from one law, and share its object;
    an instance may say so of itself."""

    looks_up: bool = False
    """Whether its drafts are certain tokens, found in much less time than a pass takes, with their
    grounds (`Draft.grounds`); an instance may say so of itself. It is not asked where nobody may
    draft."""

    reads_target_kv: bool = False
    """Whether it drafts on the target's own KV, and so only what follows the committed tokens."""

    vocabulary_overlap: VocabularyOverlap | None = None
    """How its draft model's tokens compare with the target's, if it has one and both have names."""

    def level_sizes(self, limit: int) -> Sequence[int] | None:
        """Nodes at each level of a full draft of at most `limit`, for controllers; None for chains.

        Who makes branches and cannot tell beforehand says one a level; controllers see better.
        """
        return [1] * limit if self.makes_branches else None

    @abstractmethod
    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """One draft per request, within its budget; an empty one where there is nothing to say.

        A node's q is the law it was drawn from (law 2), and no node is dropped for its value.
        """

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> None:  # noqa: B027
        """See what the step brought, the target's logits included; most learn nothing."""

    def rewind(self, request: Request) -> None:
        """Tokens seen as committed have been taken back: a cascade's inner drafter guesses on.

        Starting afresh is always right; drafters with costly state do better.
        """
        self.release(request)

    def release(self, request: Request) -> None:  # noqa: B027 - most keep nothing
        """Forget a request that has ended."""

    def forget(self) -> None:  # noqa: B027 - most keep nothing
        """Forget what requests that have ended left for others."""
