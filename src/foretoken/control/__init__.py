"""Controllers: how much to draft. One a file; this registry is what knows them by name."""

from __future__ import annotations

from foretoken.config import nearest
from foretoken.control.base import Budget, Controller
from foretoken.control.batch import BatchTable
from foretoken.control.confidence import Confidence
from foretoken.control.cost_model import CostModel
from foretoken.control.costs import CostCurve
from foretoken.control.fixed import Fixed
from foretoken.control.heuristic import Heuristic
from foretoken.errors import ConfigError

__all__ = ["CONTROLLERS", "Budget", "Controller", "CostCurve", "Fixed", "controller_class"]

CONTROLLERS: dict[str, type[Controller]] = {
    controller.name: controller
    for controller in (Fixed, Heuristic, Confidence, BatchTable, CostModel)
}


def controller_class(name: str) -> type[Controller]:
    """The controller of this name.

    Raises:
        ConfigError: no controller has this name.
    """
    if name not in CONTROLLERS:
        raise ConfigError(f"unknown controller '{name}': {nearest(name, list(CONTROLLERS))}")
    return CONTROLLERS[name]
