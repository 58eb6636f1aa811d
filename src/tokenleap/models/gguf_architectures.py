"""The architectures of GGUF files: what llama.cpp calls a setting, and what Transformers does.

A setting that is not listed here could change what a model computes. A file that has one is refused
(`gguf_file.py`). `gguf_config.py` makes configurations, and `gguf_weights.py` reads tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ARCHITECTURES", "REQUIRED_SETTINGS", "SHARED_SETTINGS", "Architecture", "named"]

REQUIRED_SETTINGS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
"""Settings that every file has, and their fields in Transformers' configuration."""

SHARED_SETTINGS = {
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "vocab_size",
}
"""Settings of every architecture that `gguf_config.py` converts, or that tensors' shapes repeat."""

WINDOW_PATTERN = "attention.sliding_window_pattern"
THETA_OF_WINDOWS = "rope.freq_base_swa"

_WINDOW = {"attention.sliding_window": "sliding_window"}
_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}


@dataclass(frozen=True)
class Architecture:
    """An architecture, in the words of both libraries.

    Attributes:
        name: llama.cpp's, which the keys of settings begin with.
        model_type: Transformers'.
        required: Further settings that every file has, and their fields in the configuration.
        optional: Settings that a file may have, and their fields.
        converted: Further settings that `gguf_config.py` converts.
        fields: Fields that llama.cpp has in its code, by the fields that the file gives.
        pairs: Whether query and key rows that rotate together lie side by side in the file.
            Transformers has them half a head apart.
        native: Whether the native runtime runs it, in the file's own numbers if the sizes fit.
        norms_from_one: Whether the file stores the weights of norms plus one.
    """

    name: str
    model_type: str
    required: Mapping[str, str] = field(default_factory=dict)
    optional: Mapping[str, str] = field(default_factory=dict)
    converted: Collection[str] = ()
    fields: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda _given: {}
    pairs: bool = False
    native: bool = False
    norms_from_one: bool = False

    @property
    def known(self) -> set[str]:
        """All settings that a file may have."""
        return {
            *REQUIRED_SETTINGS,
            *SHARED_SETTINGS,
            *self.required,
            *self.optional,
            *self.converted,
        }


def _gemma_scalar(layers_of_27b: int) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """llama.cpp tells Gemma's 27B models, which scale queries in another way, by their layers."""

    def fields(given: Mapping[str, Any]) -> dict[str, Any]:
        is_27b = given["num_hidden_layers"] == layers_of_27b
        per_head = given["hidden_size"] // given["num_attention_heads"]
        return {"query_pre_attn_scalar": per_head if is_27b else given["head_dim"]}

    return fields


ARCHITECTURES = (
    Architecture("llama", "llama", pairs=True, native=True),
    Architecture(
        "llama",
        "mixtral",
        required={**_EXPERTS, "expert_count": "num_local_experts"},
        fields=lambda _given: {"sliding_window": None},
        pairs=True,
    ),
    Architecture("qwen2", "qwen2", native=True),
    Architecture("qwen3", "qwen3", native=True),
    Architecture(
        "qwen2moe",
        "qwen2_moe",
        required={
            **_EXPERTS,
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        fields=lambda _given: {"norm_topk_prob": False},
    ),
    Architecture(
        "qwen3moe",
        "qwen3_moe",
        required={**_EXPERTS, "expert_feed_forward_length": "moe_intermediate_size"},
        fields=lambda _given: {"norm_topk_prob": True},
    ),
    Architecture(
        "gemma2",
        "gemma2",
        required={
            **_WINDOW,
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        converted={WINDOW_PATTERN},
        fields=_gemma_scalar(46),
        native=True,
        norms_from_one=True,
    ),
    Architecture(
        "gemma3",
        "gemma3_text",
        required=_WINDOW,
        optional={"final_logit_softcapping": "final_logit_softcapping"},
        converted={WINDOW_PATTERN, THETA_OF_WINDOWS},
        fields=_gemma_scalar(62),
        native=True,
        norms_from_one=True,
    ),
    Architecture(
        "phi3",
        "phi3",
        optional={
            **_WINDOW,
            "rope.scaling.original_context_length": "original_max_position_embeddings",
        },
        native=True,
    ),
    Architecture(
        "granite",
        "granite",
        required={"attention.scale": "attention_multiplier"},
        optional={
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        pairs=True,
        native=True,
    ),
    Architecture("olmo2", "olmo2", native=True),
    Architecture("smollm3", "smollm3", pairs=True, native=True),
)
"""All that can be converted."""


def named(name: str, settings: Iterable[str]) -> Architecture | None:
    """The architecture of a file; None if it is unknown.

    Args:
        name: llama.cpp's name.
        settings: The file's settings, which tell Mixtral from Llama.
    """
    found = [each for each in ARCHITECTURES if each.name == name]
    experts = "expert_count" in set(settings)
    return next((each for each in found if len(found) == 1 or bool(each.required) == experts), None)
