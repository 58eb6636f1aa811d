"""Options of commands that can run on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tokenleap.cli.flat import in_panel
from tokenleap.cli.root import UsageError
from tokenleap.cli.session import llm_arguments

if TYPE_CHECKING:
    from tokenleap.cli.options import ModelOptions
    from tokenleap.config import SpeculativeConfig
    from tokenleap.ray.plan import Replicas

__all__ = ["RayOptions", "arguments_for_replicas", "as_given"]


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
        from tokenleap.ray.plan import Replicas

        return Replicas.parse(self.replicas)


def arguments_for_replicas(
    options: ModelOptions, config: SpeculativeConfig | None, **engine: Any
) -> dict[str, Any]:
    """Arguments of `LLM` in another process; see `llm_arguments`.

    Paths of what exists are absolute: that process may be in another folder.
    """
    found = llm_arguments(options, config, **engine)
    if config is not None:
        found["speculative_config"] = type(config)(**_changed(_fields(config), _absolute))
    if "generation_config" in found:
        found["generation_config"] = _absolute(found["generation_config"])
    return {**found, "model": _absolute(options.model)}


def as_given(settings: Mapping[str, Any], config: SpeculativeConfig | None) -> dict[str, Any]:
    """Settings of another process (`settings_of`) with paths as the user wrote them.

    So results are those of one process, which another run can go on with.
    """
    if config is None:
        return dict(settings)
    given: dict[str, str] = {}

    def note(path: str) -> str:
        given[_absolute(path)] = path
        return path

    _changed(_fields(config), note)

    def back(path: str) -> str:
        for absolute, relative in given.items():
            if path == absolute:
                return relative
            if path.startswith(f"{absolute}/"):  # of a set of drafters
                return str(Path(relative) / path[len(absolute) + 1 :])
        return path

    return {**settings, "speculative_config": _changed(settings["speculative_config"], back)}


def _fields(config: SpeculativeConfig) -> dict[str, Any]:
    """What the user wrote of it."""
    own = type(config).model_fields.keys() & config.model_fields_set
    return {name: getattr(config, name) for name in own} | (config.model_extra or {})


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """A configuration with other paths, also in drafters that it combines."""
    from tokenleap.drafters.registry import file_fields

    if isinstance(value, Mapping):
        paths = {"model", "drafters", *file_fields()}
        return {
            name: change(str(each))
            if name in paths and isinstance(each, str | Path) and str(each)
            else _changed(each, change)
            for name, each in value.items()
        }
    return [_changed(each, change) for each in value] if isinstance(value, list | tuple) else value


def _absolute(path: str) -> str:
    there = Path(path).expanduser()
    return str(there.absolute()) if there.exists() else path
