"""Arguments of `LLM` and its methods: checks of numbers, and where unknown ones belong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from foretoken.config import SpeculativeConfig
from foretoken.core.config import nearest
from foretoken.core.params import SamplingParams
from foretoken.errors import ConfigError

__all__ = ["check_at_least_1", "refuse_unknown", "refuse_unknown_engine"]

_ENGINE = {
    "assistant_model": "use speculative_config={'model': ...}.",
    "n_ctx": "use 'max_model_len'.",
    "max_seq_len": "use 'max_model_len'.",
    "n_threads": "call torch.set_num_threads(), or set OMP_NUM_THREADS.",
    "n_gpu_layers": "use 'device'.",
    "torch_dtype": "use 'dtype'.",
    "device_map": "use 'device'.",
    "load_in_8bit": "use quantization='int8'.",
    "load_in_4bit": "use quantization='int4'.",
    "quantization_config": "use 'quantization'.",
    "revision": "write it behind the id: 'ORG/NAME@REVISION'.",
    "gpu_memory_utilization": "use 'kv_cache_memory'.",
    "kv_cache_memory_bytes": "use 'kv_cache_memory'.",
    "enforce_eager": "use runtime='torch'.",
    "trust_remote_code": "code that comes with a model never runs here; leave it out.",
    "hf_token": "log in with `hf auth login`.",
}
"""What other libraries' constructors take, and what to write for `LLM` instead."""


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


def refuse_unknown_engine(unknown: Mapping[str, Any], known: Iterable[str]) -> None:
    """Say what to write in place of an argument that `LLM` does not take.

    Raises:
        ConfigError: there is one.
    """
    for name in unknown:
        if name in _ENGINE:
            advice = _ENGINE[name]
        elif name in SpeculativeConfig.field_names() or name in SpeculativeConfig.foreign_names:
            own = SpeculativeConfig.foreign_names.get(name, f"write {{'{name}': ...}}.")
            advice = f"it belongs in `speculative_config`: {own}"
        elif name in SamplingParams.field_names() or name in SamplingParams.foreign_names:
            advice = "give `SamplingParams` to generate()."
        else:
            advice = nearest(name, list(known))
        raise ConfigError(f"LLM() takes no argument {name!r}: {advice}")
