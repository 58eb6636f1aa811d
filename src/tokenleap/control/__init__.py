"""Controllers decide how much to draft. This registry maps names to them.

Other packages add controllers through entry points (`core.config.plugin`).
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
from tokenleap.core.config import nearest, plugin, plugin_names
from tokenleap.errors import ConfigError
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
    controller = CONTROLLERS.get(name) or plugin(PLUGINS, name)
    if controller is None:
        names = [*CONTROLLERS, *plugin_names(PLUGINS)]
        raise ConfigError(f"unknown controller '{name}': {nearest(name, names)}")
    if not (isinstance(controller, type) and issubclass(controller, Controller)):
        raise ConfigError(
            f"controller '{name}': the entry point in {PLUGINS} has to name a subclass of "
            f"Controller, not {controller!r}."
        )
    if controller is CostModel:
        return HybridModel if hybrid else LookupModel if looks_up else CostModel
    return controller
