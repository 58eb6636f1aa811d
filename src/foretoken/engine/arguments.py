"""Arguments of `LLM` and its methods: checks of numbers, and where unknown ones belong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foretoken.config import SpeculativeConfig
from foretoken.core.params import SamplingParams
from foretoken.errors import ConfigError

__all__ = ["check_at_least_1", "refuse_unknown"]


def check_at_least_1(**values: int) -> None:
    """Refuse arguments that are too small.

    Raises:
        ConfigError: a value is less than 1.
    """
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"{name}: must be at least 1, got {value}.")


def refuse_unknown(method: str, unknown: Mapping[str, Any]) -> None:
    """Say where an argument that `generate` does not take belongs.

    Raises:
        ConfigError: there is one.
    """
    for name in unknown:
        if name in SamplingParams.field_names() or name in SamplingParams.foreign_names:
            own = SamplingParams.foreign_names.get(name, f"use SamplingParams({name}=...).")
            raise ConfigError(f"{method}() takes {name} in `sampling_params`: {own}")
        if name in SpeculativeConfig.field_names() or name in SpeculativeConfig.foreign_names:
            own = SpeculativeConfig.foreign_names.get(name, f"write {{'{name}': ...}}.")
            raise ConfigError(f"{method}() takes {name} in `speculative_config`: {own}")
        raise ConfigError(f"{method}() takes no argument {name!r}.")
