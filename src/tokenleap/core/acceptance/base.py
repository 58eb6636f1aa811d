"""The interface between the loop (`decode.step`) and the acceptance rules.

A rule is a pure function of (draft, p, noise). It walks down the tree and returns the accepted path
and one more token: the correction or the bonus token. It never sees logits, models, caches or
global randomness.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, Protocol

from tokenleap.core.config import Config

if TYPE_CHECKING:
    from tokenleap.core.distribution import Distribution
    from tokenleap.core.noise import StepNoise
    from tokenleap.core.tree import Draft


class Origin(StrEnum):
    """Where a committed token came from."""

    DRAFT = "draft"
    """Drafted and accepted."""
    CORRECTION = "correction"
    """Drawn by the target after the drafted tokens at this position were rejected."""
    BONUS = "bonus"
    """Drawn from p after every drafted token of the path was accepted."""
    PLAIN = "plain"
    """Drawn from p in a step that drafted nothing, or found by a beam search."""


@dataclass(frozen=True)
class Accepted:
    """A rule's decision about one draft.

    Args:
        path: accepted nodes, from the root's child downwards; may be empty.
        token: the token after the path, the correction or the bonus token. Every step has one.
        rejected: nodes that were tried and rejected.
        reason: why the nodes below the path were rejected, for traces; empty if there were none.
    """

    path: tuple[int, ...]
    token: int
    rejected: tuple[int, ...] = ()
    reason: str = ""

    @property
    def last(self) -> int:
        """The last accepted node, which `token` follows; 0 (the root) if none was accepted."""
        return self.path[-1] if self.path else 0

    def origin(self, draft: Draft) -> Origin:
        """Where `token` came from, if this is the decision about a draft."""
        if not draft.tree.num_drafted:
            return Origin.PLAIN
        return Origin.CORRECTION if self.reason else Origin.BONUS


class TargetDistributions(Protocol):
    """The target's distributions p at every node of a tree (`sampler.TreeDistributions`)."""

    @property
    def greedy(self) -> bool:
        """Whether the temperature is 0, so that every p is one-hot."""
        ...

    def __getitem__(self, node: int) -> Distribution:
        """The distribution p of the token that follows `node`."""
        ...

    def untempered(self, node: int) -> Distribution:
        """The same at temperature 1, for lossy rules in greedy decoding."""
        ...


class AcceptanceRule(ABC):
    """Decides which drafted tokens are kept.

    Class attributes say what a rule needs and guarantees. They are checked against the drafter when
    an `LLM` is constructed (invariant 5).

    Args:
        options: the rule's own options; None takes the defaults.
    """

    class Options(Config):
        """The rule's own options."""

    name: ClassVar[str]
    """The name under which users choose the rule."""
    lossless: ClassVar[bool]
    """Whether the output has exactly the target's distribution p."""
    takes_trees: ClassVar[bool]
    """Whether a node may have several children."""
    needs_independent_siblings: ClassVar[bool] = False
    """Whether the children of a node must be independent draws from one distribution."""
    counts_draws: ClassVar[bool] = False
    """Whether several draws of a token may share a node: the rule tests `Draft.tries`, or judges a
    token by p alone. For other rules, every draw has a node of its own."""
    couples_draft: ClassVar[bool] = False
    """Whether a sampling drafter should draw with the target's own noise."""
    by_chance: ClassVar[bool] = False
    """Whether tokens are kept whatever p is: the text is not the target's, and such a rule is for
    measuring speed. Using it logs a warning, and requests to a server cannot ask for it."""
    ignores_draft_lengths: ClassVar[bool] = False
    """Whether the output tokens are the same for all draft lengths, not only their distribution."""

    def __init__(self, options: Config | None = None) -> None:
        self.options = self.Options() if options is None else options

    @abstractmethod
    def accept(self, draft: Draft, p: TargetDistributions, noise: StepNoise) -> Accepted:
        """Walk down the tree and decide.

        Args:
            draft: the verified draft with its q.
            p: the target's distribution after every node.
            noise: the random decisions, with depths counted from the root.

        Returns:
            The accepted path, and the token after it.
        """

    def beta(self, draft: Draft, p: TargetDistributions, noise: StepNoise) -> float:
        """The probability that the first drafted token is accepted, given its q: the rule's beta.

        Rules compute it from p and q where they can. This is for all others: 1 if `accept` keeps
        the token that was drafted and 0 if not, whose mean is the same.

        Args:
            draft: as in `accept`, with at least one drafted token.
            p: as in `accept`.
            noise: as in `accept`.
        """
        return float(bool(self.accept(draft.only([1]), p, noise).path))
