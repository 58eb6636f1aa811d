"""Models that Tokenleap can run: architectures, devices, dtypes, and why others are refused.

The checks here read the configuration. `Target`, which calls them, also tests the behaviour of
every model it takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedConfig

from tokenleap.errors import CompatibilityError, ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHORT_DTYPES = {"half": torch.float16, "float": torch.float32}  # vLLM's

ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
RECURRENT_LAYERS = {"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", "recurrent"}

REBUILT_ATTENTION = {"bloom", "falcon", "mpt"}
"""Types of models whose attention `runtime/module.py` computes."""

_AUDIO = "of the models that read audio, only Whisper is supported"
_PARTS = "its layers have other parts than those of BART and T5"

REFUSED_SOURCES = {
    "bigbird_pegasus": "its encoder attends to random blocks",
    "blenderbot-small": "it adds positions after the norm of its embedding, unlike BART",
    "fsmt": "its output layer is an embedding, with vocabularies of two languages",
    "led": "its encoder attends to windows and pads the source",
    "longt5": "its encoder attends to windows and pads the source",
    "moonshine": _AUDIO,
    "moonshine_streaming": _AUDIO,
    "nllb-moe": "its experts have a capacity, so outputs would depend on the batch",
    "pegasus_x": "its encoder attends to blocks and pads the source",
    "prophetnet": "its decoder predicts several streams of tokens",
    "seamless_m4t": _PARTS,
    "seamless_m4t_v2": _PARTS,
    "speech_to_text": _AUDIO,
    "speecht5": _AUDIO,
    "switch_transformers": "its experts have a capacity, so outputs would depend on the batch",
}
"""Encoder-decoders whose decoder looks like that of the others, by type, and what is different."""


def context_length(config: PreTrainedConfig, max_model_len: int | None) -> int:
    """Most tokens of a row (the decoder's): the model's own limit, or `max_model_len`."""
    own = _own_context(config.get_text_config())
    if max_model_len is None:
        return own or 2**31 - 1
    if max_model_len < 2 or (own is not None and max_model_len > own):
        limit = f"2 to {own}" if own is not None else "at least 2"
        raise ConfigError(f"max_model_len: must be {limit} for this model, got {max_model_len}.")
    return max_model_len


def _own_context(config: PreTrainedConfig) -> int | None:
    """Most positions of the decoder; None without a limit, as T5, whose positions are relative."""
    fields = ("max_target_positions", "max_position_embeddings", "max_seq_len")
    found = (getattr(config, field, None) for field in fields)
    own: int | None = next((limit for limit in found if limit), None)
    return own


def check_supported(model: PreTrainedModel, max_model_len: int) -> None:
    """Refuse architectures that cannot verify token trees or roll back."""
    name, config = type(model).__name__, model.config.get_text_config()
    if not model.can_generate():
        raise CompatibilityError(f"{name} has no language-model head; load a model that has one.")
    if model.config.is_encoder_decoder:
        check_encoder_decoder(name, model.config)
        return
    check_layers(name, config, max_model_len, stateful=getattr(model, "_is_stateful", False))
    rebuilt = config.model_type in REBUILT_ATTENTION
    if not rebuilt and not getattr(model, "_supports_attention_backend", False):
        raise CompatibilityError(
            f"{name} does not use Transformers' attention interface, so it cannot apply the "
            "mask of a token tree."
        )


def check_layers(
    name: str, config: PreTrainedConfig, max_model_len: int, *, stateful: bool = False
) -> None:
    """Refuse what the configuration of a decoder-only model tells of its layers."""
    layers = set(getattr(config, "layer_types", None) or ())
    if stateful or layers & RECURRENT_LAYERS:
        raise CompatibilityError(
            f"{name} keeps recurrent state, which cannot be rolled back after a rejected draft."
        )
    if others := sorted(layers - ATTENTION_LAYERS):
        raise CompatibilityError(
            f"{name} has layers of the kind '{others[0]}', which choose or compress the keys that "
            "they attend to, so they cannot apply the mask of a token tree."
        )
    _check_rope(name, config, max_model_len)
    _check_temperature(name, config, max_model_len)


def check_encoder_decoder(name: str, config: PreTrainedConfig) -> None:
    """Refuse by type what cannot be seen; `runtime.seq2seq.structure` looks at the others."""
    if config.model_type in REFUSED_SOURCES:
        raise CompatibilityError(f"{name} is not supported: {REFUSED_SOURCES[config.model_type]}.")
    if isinstance(getattr(config, "decoder", None), PreTrainedConfig):
        raise CompatibilityError(
            f"{name} joins an encoder and a decoder with a configuration each; encoder-decoders "
            "with one configuration work."
        )


def _check_rope(name: str, config: PreTrainedConfig, max_model_len: int) -> None:
    """Refuse rotary frequencies that depend on the longest row of a pass."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_kind = [rope for rope in parameters.values() if isinstance(rope, Mapping)]  # as Gemma 3
    for rope in by_kind or [parameters]:
        own = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") == "dynamic":
            own = own or config.max_position_embeddings
        if rope.get("rope_type") in ("dynamic", "longrope") and not (own and max_model_len <= own):
            advice = f"; set max_model_len={own} or less to use it" if own else ""
            raise CompatibilityError(
                f"{name} scales its rotary frequencies by the longest row of a batch "
                f"('{rope['rope_type']}'), so outputs would depend on the batch{advice}."
            )


def _check_temperature(name: str, config: PreTrainedConfig, max_model_len: int) -> None:
    """Refuse Llama 4's scaling of queries where it begins: it counts places in the cache."""
    first = getattr(config, "floor_scale", None)
    if getattr(config, "attn_temperature_tuning", False) and first and max_model_len >= first:
        raise CompatibilityError(
            f"{name} scales queries from position {first} on by their place in the KV cache, which "
            "is not the position of a node in a token tree; set "
            f"max_model_len={int(first) - 1} or less to use it."
        )


def default_device(device: str | torch.device) -> torch.device:
    """The device of this name; "auto" is a GPU if there is one, else the CPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"device: unknown device '{device}'; try 'cpu' or 'cuda'.") from None
    if place.type not in ("cpu", "cuda"):
        raise ConfigError(f"device: '{place.type}' is not supported; use 'cpu' or 'cuda'.")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: no CUDA device is available here; use device='cpu'.")
    return place


def default_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of this name; "auto" is bfloat16 if the device computes in it, else float32."""
    if dtype == "auto":
        return torch.bfloat16 if _has_bfloat16(device) else torch.float32
    chosen = {**DTYPES, **SHORT_DTYPES}.get(dtype) if isinstance(dtype, str) else dtype
    if chosen is None or chosen not in DTYPES.values():
        raise ConfigError(f"dtype: must be auto, {', '.join(DTYPES)}, got '{dtype}'.")
    if chosen == torch.float16 and device.type == "cpu":
        raise ConfigError("dtype: float16 is for GPUs; on a CPU use bfloat16 or float32.")
    return chosen


def _has_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    return device.type == "cpu" and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
