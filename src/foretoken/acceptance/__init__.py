"""Acceptance rules: which drafted tokens are kept, and which token comes after them.

One rule a file; this registry is the only place that knows them by name.
"""

from __future__ import annotations

from foretoken.acceptance.base import AcceptanceRule, Accepted, Origin, TargetLaws
from foretoken.acceptance.block import Block
from foretoken.acceptance.coupled import Coupled
from foretoken.acceptance.k_sequential import KSequential
from foretoken.acceptance.lenient import Lenient
from foretoken.acceptance.rejection import Rejection
from foretoken.acceptance.top_beta import TopBeta
from foretoken.acceptance.typical import Typical
from foretoken.config import nearest
from foretoken.errors import ConfigError

__all__ = ["RULES", "AcceptanceRule", "Accepted", "Origin", "TargetLaws", "rule_class"]

RULES: dict[str, type[AcceptanceRule]] = {
    rule.name: rule for rule in (Coupled, Rejection, KSequential, Block, Typical, TopBeta, Lenient)
}


def rule_class(name: str) -> type[AcceptanceRule]:
    """The rule of this name.

    Raises:
        ConfigError: no rule has this name.
    """
    if name not in RULES:
        raise ConfigError(f"unknown acceptance rule '{name}': {nearest(name, list(RULES))}")
    return RULES[name]
