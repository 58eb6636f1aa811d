"""Acceptance rules: which drafted tokens are kept, and which token comes after them.

This registry is the only place that knows the rules by name. `SpeculativeConfig` looks them up.
"""

from __future__ import annotations

from tokenleap.core.acceptance.base import AcceptanceRule, Accepted, Origin, TargetDistributions
from tokenleap.core.acceptance.rules import (
    Block,
    Coupled,
    Distance,
    KSequential,
    Lenient,
    Rejection,
    Synthetic,
    TopBeta,
    Typical,
)
from tokenleap.core.config import registered

__all__ = ["RULES", "AcceptanceRule", "Accepted", "Origin", "TargetDistributions", "rule_class"]

PLUGINS = "tokenleap.acceptance"
"""Group of entry points in which other packages declare a rule's class."""

RULES: dict[str, type[AcceptanceRule]] = {
    rule.name: rule
    for rule in (
        *(Coupled, Rejection, KSequential, Block),
        *(Typical, TopBeta, Lenient, Distance, Synthetic),
    )
}


def rule_class(name: str) -> type[AcceptanceRule]:
    """The rule with this name, from this library or from another package."""
    rule: type[AcceptanceRule] = registered("acceptance rule", name, RULES, PLUGINS, AcceptanceRule)
    return rule
