"""The seam between the loop and the acceptance rules.

A rule is a pure function of (draft, p, noise): it walks down the tree and returns the accepted
path and one more token. It never sees logits, models, caches or global randomness.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Protocol

from foretoken.core.config import Config
from foretoken.core.distribution import Distribution
from foretoken.core.noise import StepNoise
from foretoken.core.tree import Draft

__all__ = ["AcceptanceRule", "Accepted", "Origin", "TargetDistributions"]


class Origin(StrEnum):
    """Where a committed token came from."""

    DRAFT = "draft"
    """Drafted and accepted."""
    CORRECTION = "correction"
    """Drawn from the residual after a rejected draft."""
    BONUS = "bonus"
    """Drawn from p after everything drafted on the path was accepted."""


@dataclass(frozen=True)
class Accepted:
    """What a rule decided.

    Args:
        path: accepted nodes from the root's child downwards; empty if none.
        token: the one more token that every step yields.
        rejected: nodes that were tried and turned down.
        reason: why what was drafted below the path was turned down; empty if nothing was drafted.
    """

    path: tuple[int, ...]
    token: int
    rejected: tuple[int, ...] = ()
    reason: str = ""

    @property
    def last(self) -> int:
        """The node below which `token` stands."""
        return self.path[-1] if self.path else 0

    @property
    def origin(self) -> Origin:
        """Where `token` came from."""
        return Origin.CORRECTION if self.reason else Origin.BONUS


class TargetDistributions(Protocol):
    """p at every node."""

    @property
    def greedy(self) -> bool:
        """Whether every distribution is one-hot because the temperature is 0."""
        ...

    def __getitem__(self, node: int) -> Distribution:
        """P after `node`: the distribution of the token that follows it."""
        ...

    def untempered(self, node: int) -> Distribution:
        """The same at temperature 1, for rules that judge likelihoods in greedy decoding."""
        ...


class AcceptanceRule(ABC):
    """Decides which drafted tokens are kept.

    Class attributes say what a rule needs and promises; they are checked against the drafter when
    a model is constructed (invariant 5).
    """

    class Options(Config):
        """The rule's own options."""

    name: ClassVar[str]
    lossless: ClassVar[bool]
    """Whether the output distribution is exactly p."""
    takes_trees: ClassVar[bool]
    """Whether a node may have several children."""
    needs_independent_siblings: ClassVar[bool] = False
    """Whether several children of a node have to be independent draws from one distribution."""
    couples_draft: ClassVar[bool] = False
    """Whether a sampling drafter should draw with the target's own noise."""
    ignores_draft_lengths: ClassVar[bool] = False
    """Whether the very tokens are the same however drafts are cut, not only their distribution."""

    def __init__(self, options: Config | None = None) -> None:
        self.options = self.Options() if options is None else options

    @abstractmethod
    def accept(self, draft: Draft, p: TargetDistributions, noise: StepNoise) -> Accepted:
        """Walk down the tree.

        Args:
            draft: the verified draft with its q.
            p: the target's distribution after every node.
            noise: chance, with depths counted from the root.
        """
