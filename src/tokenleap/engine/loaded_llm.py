"""`LoadedLLM`: what runs in an `LLM`: model, dtype, device, runtime, and what drafts for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tokenleap.config import SpeculativeConfig
from tokenleap.core.config import nearest
from tokenleap.core.params import SamplingParams
from tokenleap.drafters.base import VocabularyOverlap
from tokenleap.drafters.online import OnlineReport
from tokenleap.drafters.vocabulary import DraftModel
from tokenleap.engine.llm_engine import EngineOptions, LLMEngine
from tokenleap.errors import ConfigError
from tokenleap.models.loaded import LoadedModel

__all__ = ["REQUIRED", "LoadedLLM", "check_at_least_1", "refuse_unknown", "refuse_unknown_engine"]


class LoadedLLM:
    """The part of `LLM` that says what was loaded; it generates nothing.

    Args:
        config: how to speculate by default; None takes the head that comes with the package.
        options: limits on memory and batches, and how passes are computed.
    """

    def __init__(
        self, loaded: LoadedModel, config: SpeculativeConfig | None, options: EngineOptions
    ) -> None:
        self.model_path, self.tokenizer = loaded.path, loaded.tokenizer
        self.eos_token_ids = loaded.eos_token_ids
        self._name = loaded.title
        self._source = loaded.name if loaded.packed else loaded.path
        self.engine = LLMEngine(loaded, config, options)  # it lets go of the module
        self.speculative_config = self.engine.strategies.config

    def __repr__(self) -> str:
        """One line about what runs."""
        shown = {
            "dtype": str(self.dtype).removeprefix("torch."),
            "quantization": self.engine.target.quantization,
            "device": str(self.device),
            "runtime": self.runtime,
            "tensor_parallel_size": shards if (shards := self.tensor_parallel_size) > 1 else None,
            "method": self.speculative_config.method_name,
        }
        fields = [f"{name}={value!r}" for name, value in shown.items() if value is not None]
        return f"LLM({', '.join([repr(self._name), *fields])})"

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        return self.engine.target.most_tokens

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and KV."""
        return self.engine.target.dtype

    @property
    def runtime(self) -> str:
        """The runtime of the passes: "native", "lean", "module" or "compiled".

        "lean" and "module" use PyTorch's operations; "module" runs the Transformers module, and
        "compiled" the same with its MLPs under `torch.compile`.
        """
        return self.engine.target.network.name

    @property
    def tensor_parallel_size(self) -> int:
        """Number of processes over which the model's weights are spread."""
        return self.engine.target.peers.size

    @property
    def device(self) -> torch.device:
        """Where the model runs; the device of this process, if there are several."""
        return self.engine.target.device

    @property
    def bit_exact(self) -> bool:
        """Whether a position's bits are the same however many are computed with it (invariant 7).

        It is spot-checked at construction, for this model, dtype and machine. On the native runtime
        the check includes trees. If it is False, the default controller is `fixed`: a controller
        that reads the clock would change the output.
        """
        return self.engine.target.bit_exact

    @property
    def controller(self) -> str:
        """The name of the controller that runs by default.

        If `speculative_config` names none, it is `fixed` where draft lengths may change the output.
        """
        return self.engine.controller

    @property
    def vocabulary_overlap(self) -> VocabularyOverlap | None:
        """How many tokens the draft model shares with the target, and how it drafts for it.

        None without a draft model, or if one of the tokenizers is missing. If there are several
        draft models, it describes the one that was loaded last.
        """
        return self.engine.strategies.vocabulary_overlap

    def as_draft_model(self) -> DraftModel:
        """This model as the draft model of another `LLM`; its weights are in memory once.

        `LLM(other, speculative_config={"model": this})` calls it. The draft model has KV rows of
        its own, and this model's dtype, quantization and runtime.
        """
        return DraftModel(self.engine.lend(), self.tokenizer, self._source)

    @property
    def online_report(self) -> OnlineReport | None:
        """Report on what the drafter has learnt while serving; None without `online`.

        It is that of the `LLM`'s own `speculative_config`.
        """
        return self.engine.online_report


# Arguments of `LLM` and its methods: checks of numbers, and where unknown ones belong.


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
"""Other libraries' names for a prompt, or for what their tokenizers make of it."""

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
    "revision": "write it after the id: 'ORG/NAME@REVISION'.",
    "gpu_memory_utilization": "use 'kv_cache_memory'.",
    "kv_cache_memory_bytes": "use 'kv_cache_memory'.",
    "enforce_eager": "use runtime='torch'.",
    "trust_remote_code": "code that comes with a model never runs here; leave it out.",
    "hf_token": "log in with `hf auth login`.",
}
"""Arguments of other libraries' constructors, and what to write for `LLM` instead."""


def check_at_least_1(**values: int) -> None:
    """Refuse arguments that are too small."""
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"{name}: must be at least 1, got {value}.")


def refuse_unknown(method: str, unknown: Mapping[str, Any], prompts: object) -> None:
    """Say where an argument that `generate` does not take belongs."""
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
    """Say what to write in place of an argument that `LLM` does not take."""
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
    """The advice on an option of `SpeculativeConfig`."""
    return SpeculativeConfig.foreign_names.get(name, f"write {{'{name}': ...}}.")
