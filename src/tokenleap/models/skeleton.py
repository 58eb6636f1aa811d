"""A model's modules without its weights, for networks whose weights are packed files.

`runtime/packed.py` makes a model of it. The weights that something besides the network reads are
put in: those of the embedding and of the final norm.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tokenleap.models.guard import guarded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["empty", "fill", "skeleton"]


def skeleton(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """A decoder-only model whose parameters are on the meta device.

    Only what has no parameters is complete: its rotary embedding, and a factor of its embedding.

    Args:
        folder: a Hugging Face folder, whose weights are not read, of an architecture for which
            `family_of` can have one.
        dtype: the dtype of the parameters.

    Raises:
        ModelError: the configuration cannot be read.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    with guarded(f"cannot load the model in {folder}"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
        with torch.device("cpu"):
            rotary = model.model.rotary_emb
            model.model.rotary_emb = type(rotary)(config=model.config)
            embedding = model.get_input_embeddings()
            if (scale := getattr(embedding, "scalar_embed_scale", None)) is not None:  # Gemma
                embedding.embed_scale = torch.tensor(scale)
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
    made: PreTrainedModel = model.eval().requires_grad_(False)
    return made


def fill(module: nn.Module, weights: dict[str, Tensor]) -> None:
    """Give a module's parameters, of any device, these tensors, which are not copied."""
    module.load_state_dict(weights, assign=True)
    module.requires_grad_(False)


def empty(module: nn.Module) -> None:
    """Let go of the weights of a module."""
    module.to("meta")
