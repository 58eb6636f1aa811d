"""`config.json` of an EAGLE-3 head in the `speculators` format: what is read, checked and written.

Fields that Foretoken does not use are ignored. Those that it does not support are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Len
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from foretoken.drafters.heads.eagle_net import EagleConfig
from foretoken.drafters.heads.folder import Verifier, read_json, validated
from foretoken.errors import ModelError

__all__ = ["Description", "Verifier", "describe", "read_description"]

SPECULATORS_VERSION = "0.9.0"
"""Version of the `speculators` package whose format is written; older ones are read as well."""

_Size = Annotated[int, Gt(0)]
_Positive = Annotated[FiniteFloat, Gt(0)]


@dataclass(frozen=True)
class Description:
    """What `config.json` says.

    Args:
        config: sizes and variants of the head.
        verifier: the model it was trained for.
        notes: what else was recorded about the training.
    """

    config: EagleConfig
    verifier: Verifier
    notes: Mapping[str, Any]


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore")


class _Rope(_Part):
    model_config = ConfigDict(extra="allow")
    # No objects: they are the parameters of each type of layer.
    __pydantic_extra__: dict[str, str | float | bool | list[Any] | None] = Field(init=False)

    rope_type: Literal["default", "linear", "llama3", "yarn"] = "default"
    rope_theta: _Positive | None = None
    partial_rotary_factor: Annotated[float, Ge(1), Le(1)] | None = None


class _Layer(_Part):
    model_type: Literal["llama", "qwen3"] = "llama"
    hidden_size: _Size
    intermediate_size: _Size
    num_attention_heads: _Size
    num_key_value_heads: _Size
    head_dim: _Size | None = None
    num_hidden_layers: Literal[1] = 1
    layer_types: tuple[Literal["full_attention"], ...] | None = None
    vocab_size: _Size
    max_position_embeddings: _Size
    rms_norm_eps: _Positive
    rope_theta: _Positive = 10000.0
    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None
    hidden_act: Literal["silu"] = "silu"
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False


class _Verifier(_Part):
    name_or_path: str | None
    architectures: tuple[str, ...] = ()


class _Speculators(_Part):
    verifier: _Verifier


class _Notes(_Part):
    model_config = ConfigDict(extra="allow")

    verifier_layers: _Size | None = None


class _File(_Part):
    transformer_layer_config: _Layer
    speculators_config: _Speculators
    draft_vocab_size: Annotated[int, Gt(0)]
    eagle_aux_hidden_state_layer_ids: Annotated[tuple[Annotated[int, Ge(0)], ...], Len(1)]
    norm_before_residual: bool
    norm_before_fc: Literal[False] = False
    fc_norm: bool = False
    norm_output: bool = False
    foretoken: _Notes = Field(default_factory=_Notes)


def read_description(path: Path) -> Description:
    """Read `config.json`.

    Raises:
        ModelError: the file is missing or damaged, describes another kind of drafter, or a variant
            that is not supported.
    """
    fields = read_json(path)
    kind = fields.get("speculators_model_type")
    if kind != "eagle3":
        raise ModelError(
            f"{path}: 'speculators_model_type' is {kind!r}, and method 'eagle' needs 'eagle3': is "
            "this the folder of a trained EAGLE-3 head?"
        )
    file = validated(_File, fields, path)
    layer, notes = file.transformer_layer_config, file.foretoken
    if layer.num_attention_heads % layer.num_key_value_heads:
        raise ModelError(
            f"{path}: num_attention_heads ({layer.num_attention_heads}) is not a multiple of "
            f"num_key_value_heads ({layer.num_key_value_heads})."
        )
    verifier = file.speculators_config.verifier
    name = verifier.name_or_path or "another model"
    return Description(
        _config(file),
        Verifier(name, verifier.architectures, notes.verifier_layers),
        notes.model_extra or {},
    )


def _config(file: _File) -> EagleConfig:
    layer = file.transformer_layer_config
    rope = layer.rope_parameters or layer.rope_scaling or _Rope()
    parameters = rope.model_dump(exclude_none=True)
    parameters.setdefault("rope_theta", layer.rope_theta)
    return EagleConfig(
        hidden_size=layer.hidden_size,
        intermediate_size=layer.intermediate_size,
        num_attention_heads=layer.num_attention_heads,
        num_key_value_heads=layer.num_key_value_heads,
        head_dim=layer.head_dim or max(1, layer.hidden_size // layer.num_attention_heads),
        vocab_size=layer.vocab_size,
        draft_vocab_size=file.draft_vocab_size,
        aux_layers=file.eagle_aux_hidden_state_layer_ids,
        max_position_embeddings=layer.max_position_embeddings,
        rms_norm_eps=layer.rms_norm_eps,
        rope_parameters=parameters,
        norm_before_residual=file.norm_before_residual,
        fc_norm=file.fc_norm,
        norm_output=file.norm_output,
        qk_norm=layer.model_type == "qwen3",
    )


def describe(description: Description) -> dict[str, Any]:
    """The fields of `config.json`."""
    config, verifier = description.config, description.verifier
    layer = {
        "model_type": "qwen3" if config.qk_norm else "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_parameters["rope_theta"],
        "rope_parameters": dict(config.rope_parameters),
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": 4,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    named = {"name_or_path": verifier.name_or_path, "architectures": list(verifier.architectures)}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": named,
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layers),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "foretoken": {**description.notes, "verifier_layers": verifier.num_layers},
    }
