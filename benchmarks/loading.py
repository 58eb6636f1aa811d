"""One model in memory, and the `LLM`s that share it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from tokenleap import LLM, models
from tokenleap.models.support import default_device, default_dtype

__all__ = ["TINY", "Loaded", "llm_for", "load"]

TINY = "tiny"
"""The name of a model of two layers with random weights, for trying a benchmark out."""


@dataclass(frozen=True)
class Loaded:
    """A Transformers module and its tokenizer."""

    module: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None


def load(model: str, dtype: str, device: str) -> Loaded:
    """Load a folder, a GGUF file, an alias or `TINY` once, for several `LLM`s."""
    place = default_device(device)
    if model == TINY:
        return Loaded(_tiny(default_dtype(dtype, place), place), None)
    folder = models.resolve(model)
    module = models.load_model(folder, default_dtype(dtype, place), place)
    return Loaded(module, models.load_tokenizer(folder))


def _tiny(dtype: torch.dtype, place: torch.device) -> PreTrainedModel:
    config = AutoConfig.for_model(
        "llama",
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=dtype
    )
    model.to(place)  # type: ignore[arg-type]
    return model


def llm_for(loaded: Loaded, config: Mapping[str, Any], **options: Any) -> LLM:
    """An `LLM` on the loaded module, which stays unchanged.

    Args:
        loaded: the target.
        config: the speculative_config.
        options: further arguments of `LLM`.
    """
    return LLM(
        loaded.module,
        tokenizer=loaded.tokenizer,
        speculative_config=config,
        enable_prefix_caching=False,  # every round computes its prompts again
        **options,
    )
