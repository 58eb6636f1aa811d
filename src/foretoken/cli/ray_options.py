"""Options of commands that can run on a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from foretoken.cli.flat import in_panel
from foretoken.cli.root import UsageError
from foretoken.cli.session import llm_arguments

if TYPE_CHECKING:
    from foretoken.cli.options import ModelOptions
    from foretoken.config import SpeculativeConfig
    from foretoken.ray.plan import Replicas

__all__ = ["RayOptions", "arguments_for_replicas"]


@dataclass(frozen=True)
class RayOptions:
    """How many replicas, and where."""

    replicas: Annotated[
        str | None,
        in_panel(
            "Ray",
            "Copies of the model, each in a process of its own on a Ray cluster; MIN:MAX lets load "
            "decide.",
            metavar="N",
            show_default="no cluster",
        ),
    ] = None
    ray_address: Annotated[
        str | None,
        in_panel(
            "Ray",
            "Cluster to join, or auto for the one on this machine.",
            metavar="HOST:PORT",
            show_default="one on this machine, for this command only",
        ),
    ] = None

    def wanted(self) -> Replicas | None:
        """How many replicas; None without Ray.

        Raises:
            UsageError: --ray-address has no effect.
            ConfigError: the number is wrong.
        """
        if self.replicas is None:
            if self.ray_address is not None:
                raise UsageError("--ray-address is for replicas: add --replicas N")
            return None
        from foretoken.ray.plan import Replicas

        return Replicas.parse(self.replicas)


def arguments_for_replicas(
    options: ModelOptions, config: SpeculativeConfig | None, **engine: Any
) -> dict[str, Any]:
    """Arguments of `LLM` in another process; see `llm_arguments`.

    Paths are absolute: that process may be in another folder.
    """
    found = llm_arguments(options, config, **engine)
    if config is not None and config.model is not None:
        found["speculative_config"] = config.model_copy(update={"model": _absolute(config.model)})
    return {**found, "model": _absolute(options.model)}


def _absolute(model: Any) -> Any:
    if isinstance(model, str) and Path(model).expanduser().exists():
        return str(Path(model).expanduser().absolute())
    return model
