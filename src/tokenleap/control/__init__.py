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
from tokenleap.control.cost_model import CostModel
from tokenleap.control.lookup_models import HybridModel, LookupModel
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


def controller_class(
    name: str, *, looks_up: bool = False, hybrid: bool = False
) -> type[Controller]:
    """The controller of this name, from this library or from another package.

    Args:
        looks_up: whether the drafter looks its tokens up.
        hybrid: whether it has a lookup and a trained draft.
    """
    controller: type[Controller] = registered("controller", name, CONTROLLERS, PLUGINS, Controller)
    if controller is CostModel:
        return HybridModel if hybrid else LookupModel if looks_up else CostModel
    return controller
