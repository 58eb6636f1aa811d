"""Arguments of `LLM` and its methods: checks of numbers, and where unknown ones belong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tokenleap.config import SpeculativeConfig
from tokenleap.core.config import nearest
from tokenleap.core.params import SamplingParams
from tokenleap.errors import ConfigError

__all__ = ["REQUIRED", "check_at_least_1", "refuse_unknown", "refuse_unknown_engine"]

REQUIRED: Any = None
"""The default of prompts: without them, an error of ours says what to write."""

_INPUTS = (
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "inputs",
    "inputs_embeds",
    "prompt",
    "prompt_token_ids",
    "text",
)
"""What other libraries call a prompt, or what their tokenizers make of it."""

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


def refuse_unknown(method: str, unknown: Mapping[str, Any], prompts: object) -> None:
    """Say where an argument that `generate` does not take belongs.

    Args:
        method: what was called.
        unknown: arguments that it does not take.
        prompts: its first argument.

    Raises:
        ConfigError: there is one, or there are no prompts.
    """
    wanted = "a conversation" if method == "chat" else "text, or a list of token ids,"
    takes = f"give {wanted} as its first argument."
    for name in unknown:
        if _is_of(SamplingParams, name):
            own = SamplingParams.foreign_names.get(name, f"use SamplingParams({name}=...).")
            raise ConfigError(f"{method}() takes {name} in `sampling_params`: {own}")
        if _is_of(SpeculativeConfig, name):
            raise ConfigError(f"{method}() takes {name} in `speculative_config`: {_drafting(name)}")
        if name in _INPUTS:
            raise ConfigError(f"{method}() takes no argument {name!r}: {takes}")
        raise ConfigError(f"{method}() takes no argument {name!r}.")
    if prompts is REQUIRED:
        raise ConfigError(f"{method}() has no prompt: {takes}")


def refuse_unknown_engine(unknown: Mapping[str, Any], known: Iterable[str]) -> None:
    """Say what to write in place of an argument that `LLM` does not take.

    Raises:
        ConfigError: there is one.
    """
    for name in unknown:
        if name in _ENGINE:
            advice = _ENGINE[name]
        elif _is_of(SpeculativeConfig, name):
            advice = f"it belongs in `speculative_config`: {_drafting(name)}"
        elif _is_of(SamplingParams, name):
            advice = "give `SamplingParams` to generate()."
        else:
            advice = nearest(name, list(known))
        raise ConfigError(f"LLM() takes no argument {name!r}: {advice}")


def _is_of(options: type[SamplingParams] | type[SpeculativeConfig], name: str) -> bool:
    """Whether this is an option of these, or what another library calls one."""
    return name in options.field_names() or name in options.foreign_names


def _drafting(name: str) -> str:
    """What to write for an option of `SpeculativeConfig`."""
    return SpeculativeConfig.foreign_names.get(name, f"write {{'{name}': ...}}.")
