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
    TopBeta,
    Typical,
)
from tokenleap.core.config import nearest, plugin, plugin_names
from tokenleap.errors import ConfigError

__all__ = ["RULES", "AcceptanceRule", "Accepted", "Origin", "TargetDistributions", "rule_class"]

PLUGINS = "tokenleap.acceptance"
"""Group of entry points in which other packages declare a rule's class."""

RULES: dict[str, type[AcceptanceRule]] = {
    rule.name: rule
    for rule in (Coupled, Rejection, KSequential, Block, Typical, TopBeta, Lenient, Distance)
}


def rule_class(name: str) -> type[AcceptanceRule]:
    """The rule with this name, from this library or from another package."""
    rule = RULES.get(name) or plugin(PLUGINS, name)
    if rule is None:
        names = [*RULES, *plugin_names(PLUGINS)]
        raise ConfigError(f"unknown acceptance rule '{name}': {nearest(name, names)}")
    if not (isinstance(rule, type) and issubclass(rule, AcceptanceRule)):
        raise ConfigError(
            f"acceptance rule '{name}': the entry point in {PLUGINS} has to name a subclass of "
            f"AcceptanceRule, not {rule!r}."
        )
    return rule
