"""Causal LMs that become draft models: made, checked, and written. `distill.py` trains them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from tokenleap import models
from tokenleap.errors import CompatibilityError, ConfigError, ModelError, in_one_line
from tokenleap.models.guard import silent
from tokenleap.models.support import check_supported, context_length

__all__ = [
    "Sizes",
    "checked",
    "decoder",
    "embedding",
    "first_layers",
    "loaded",
    "new_lm",
    "output_layer",
    "target_tokenizer",
    "write_lm",
]

_GENERATION = "generation_config.json"
_SCRATCH = ": start from 'scratch'"


@dataclass(frozen=True)
class Sizes:
    """Of a draft model; None means that they follow from the target's.

    Args:
        hidden_size: width of the hidden states.
        num_layers: decoder layers.
        num_heads: attention heads of each layer.
        intermediate_size: of the MLPs.
    """

    hidden_size: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    intermediate_size: int | None = None

    def layers_for(self, target: PreTrainedConfig) -> int:
        """Decoder layers; by default an eighth of the target's."""
        return self.num_layers or max(1, target.num_hidden_layers // 8)


def new_lm(target: PreTrainedConfig, sizes: Sizes) -> PreTrainedModel:
    """A Llama with random weights, tied embeddings, and the target's vocabulary and context.

    Args:
        target: the configuration of its text part.
        sizes: by default half of the target's width, in multiples of 64, with its head size and
            the proportion of its MLPs.
    """
    width = target.hidden_size
    head_dim = getattr(target, "head_dim", None) or width // target.num_attention_heads
    hidden_size = sizes.hidden_size or max(64, width // 128 * 64)
    proportion = (getattr(target, "intermediate_size", None) or 4 * width) / width
    rope = dict(getattr(target, "rope_parameters", None) or {})
    config = LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=hidden_size,
        intermediate_size=sizes.intermediate_size
        or 64 * max(1, round(hidden_size * proportion / 64)),
        num_hidden_layers=sizes.layers_for(target),
        num_attention_heads=sizes.num_heads or max(1, hidden_size // head_dim),
        head_dim=head_dim,
        max_position_embeddings=context_length(target, None),
        rms_norm_eps=getattr(target, "rms_norm_eps", 1e-5),
        rope_parameters={"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)},
        tie_word_embeddings=True,
        **_special_tokens(target),
    )
    return _made(LlamaForCausalLM, config)


def _special_tokens(config: PreTrainedConfig) -> dict[str, Any]:
    """The ids of the special tokens, for another configuration."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(config, name, None) for name in names}


def _made(kind: Any, config: PreTrainedConfig) -> PreTrainedModel:
    """A model with random weights in float32."""
    lm: PreTrainedModel = kind(config).float()
    return lm


def first_layers(name: str, sizes: Sizes) -> PreTrainedModel:
    """A copy of a model with only its first layers.

    Args:
        name: a folder or an alias.
        sizes: `num_layers`.

    Raises:
        ModelError: there is no such model.
        ConfigError: it does not have so many layers.
        CompatibilityError: its logits are more than its output layer's.
    """
    whole = models.load_model(models.resolve(name), torch.float32, torch.device("cpu"))
    config = deepcopy(whole.config)
    text = config.get_text_config()
    wanted, there = sizes.layers_for(text), text.num_hidden_layers
    if wanted > there:
        raise ConfigError(f"num_layers: the target has {there} layers, got {wanted}.")
    text.num_hidden_layers = wanted
    if kinds := getattr(text, "layer_types", None):
        text.layer_types = kinds[:wanted]
    lm = _made(type(whole), config)
    missing = lm.load_state_dict(whole.state_dict(), strict=False).missing_keys
    assert not missing, missing
    return checked(lm, f"start: {name}", _SCRATCH)


def loaded(
    name: str, vocab_size: int, tokenizer: PreTrainedTokenizerBase | None
) -> PreTrainedModel:
    """A model to start from.

    Args:
        name: a folder or an alias.
        vocab_size: the target's.
        tokenizer: the target's, if it has one.

    Raises:
        ModelError: there is no such model.
        CompatibilityError: it has another vocabulary, or cannot draft.
    """
    folder = models.resolve(name)
    own = models.load_tokenizer(folder)
    lm = models.load_model(folder, torch.float32, torch.device("cpu"))
    if own is None or tokenizer is None:
        same = lm.config.get_text_config().vocab_size == vocab_size
    else:  # padding behind the last token may differ
        same = own.get_vocab() == tokenizer.get_vocab()
    if not same:
        raise CompatibilityError(
            f"start: {name} has another vocabulary than the target: start from a model with the "
            "target's tokenizer, or from 'scratch'."
        )
    return checked(lm.requires_grad_(True), f"start: {name}", _SCRATCH)


@torch.no_grad()
def checked(lm: PreTrainedModel, name: str, advice: str = "") -> PreTrainedModel:
    """The same model, if it can draft, and its logits are its output layer's.

    Args:
        lm: the model.
        name: its name, for the message.
        advice: what to do instead, for the message.

    Raises:
        CompatibilityError: it cannot, or they are scaled or capped.
    """
    check_supported(lm, context_length(lm.config, None))
    tokens = torch.arange(4, device=lm.device).unsqueeze(0)
    lm.train(False)
    states = decoder(lm)(input_ids=tokens, use_cache=False).last_hidden_state
    if not torch.allclose(lm(input_ids=tokens).logits, output_layer(lm)(states), atol=1e-4):
        raise CompatibilityError(
            f"{name} changes the logits of its output layer, which is not supported{advice}."
        )
    return lm


def decoder(lm: Any) -> Any:
    """The part of a causal LM that computes hidden states."""
    return lm.get_decoder()


def embedding(lm: Any) -> Any:
    """The part that looks tokens up."""
    return lm.get_input_embeddings()


def output_layer(lm: Any) -> Any:
    """The part that makes logits of them."""
    return lm.get_output_embeddings()


def target_tokenizer(name: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a target; None if it has none, or no folder."""
    folder = _folder(name)
    return models.load_tokenizer(folder) if folder else None


def _folder(name: str) -> Path | None:
    """Of a target; None if it was not loaded by name."""
    try:
        return models.resolve(name)
    except ModelError:
        return None


def write_lm(
    lm: PreTrainedModel,
    target: str,
    folder: Path,
    notes: Mapping[str, Any],
    more: Sequence[Callable[[Path], None]] = (),
) -> None:
    """Write a model in bfloat16, with the tokenizer and the generation config of the target.

    Each file appears complete or not at all, `config.json` last.

    Args:
        lm: the model; it is not changed.
        target: name of the target; without a folder of this name, neither of the two is written.
        folder: made if it does not exist.
        notes: on the training, for `config.json`.
        more: they write further files into a folder.

    Raises:
        ModelError: the folder cannot be written.
    """
    beside = folder / ".writing"
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir(parents=True)
        _save(lm, target, beside, notes)
        for write in more:
            write(beside)
        for file in sorted(beside.iterdir(), key=lambda path: path.name == "config.json"):
            file.replace(folder / file.name)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{folder} cannot be written: {in_one_line(error)}.") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _save(lm: PreTrainedModel, target: str, folder: Path, notes: Mapping[str, Any]) -> None:
    copy: Any = deepcopy(lm)
    copy.to(device="cpu", dtype=torch.bfloat16)
    copy.config.tokenleap = {"target": target, **notes}
    own = lm.config.get_text_config()
    generation: Any = GenerationConfig  # which has no type hints
    copy.generation_config = generation(**_special_tokens(own))
    with silent():  # it would write into the progress of training
        copy.save_pretrained(folder, max_shard_size="1000GB")  # one file, whole or not there
    if (tokenizer := target_tokenizer(target)) is not None:
        tokenizer.save_pretrained(folder)
    given = _folder(target)
    if given and (given / _GENERATION).is_file():
        shutil.copyfile(given / _GENERATION, folder / _GENERATION)
