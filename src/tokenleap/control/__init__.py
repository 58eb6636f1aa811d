"""Controllers decide how much to draft. This registry maps names to them.

Other packages add controllers through entry points (`core.config.registered`).
"""

from __future__ import annotations

from tokenleap.control.base import (
    BatchTable,
    Budget,
    Confidence,
    Controller,
    Fixed,
    Heuristic,
    within,
)
from tokenleap.control.cost_model import CostModel, HybridModel, LookupModel
from tokenleap.core.config import registered
from tokenleap.runtime.costs import CostCurve

__all__ = [
    "CONTROLLERS",
    "Budget",
    "Controller",
    "CostCurve",
    "Fixed",
    "controller_class",
    "within",
]

PLUGINS = "tokenleap.controllers"
"""Group of entry points in which other packages declare a controller's class."""

CONTROLLERS: dict[str, type[Controller]] = {
    controller.name: controller
    for controller in (Fixed, Heuristic, Confidence, BatchTable, CostModel)
}


FOR_LOOKUPS: dict[str, type[Controller]] = {LookupModel.name: LookupModel}
"""Replacements, by name, for drafters that look their tokens up (`DrafterTraits.looks_up`)."""

FOR_HYBRIDS: dict[str, type[Controller]] = {HybridModel.name: HybridModel}
"""Replacements, by name, for drafters that have a lookup and a trained draft (`hybrid`)."""


def controller_class(
    name: str, *, looks_up: bool = False, hybrid: bool = False
) -> type[Controller]:
    """The controller of this name, from this library or from another package."""
    controller: type[Controller] = registered("controller", name, CONTROLLERS, PLUGINS, Controller)
    replacements = FOR_HYBRIDS if hybrid else FOR_LOOKUPS if looks_up else {}
    return replacements.get(name, controller)
