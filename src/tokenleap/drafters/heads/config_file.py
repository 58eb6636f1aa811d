"""`config.json` of EAGLE-3 and P-EAGLE heads in the `speculators` format: read, checked, written.

Fields that Tokenleap does not use are ignored. Those that it does not support are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Len
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from tokenleap.drafters.heads.eagle_layer import EagleConfig
from tokenleap.drafters.heads.folder import Verifier, read_json, validated
from tokenleap.drafters.heads.parallel_net import ParallelConfig
from tokenleap.errors import ModelError
from tokenleap.models.guard import guarded

__all__ = ["KINDS", "Description", "Verifier", "describe", "described", "read_description"]

SPECULATORS_VERSION = "0.9.0"
"""Version of the `speculators` package whose format is written; older ones are read as well."""

KINDS = {"eagle3": "eagle", "peagle": "parallel"}
"""`speculators_model_type` -> the method that drafts with such a head."""
_TITLES = {"eagle3": "EAGLE-3", "peagle": "P-EAGLE"}

_Size = Annotated[int, Gt(0), Le(2**24)]
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


class _DeepLayer(_Layer):
    # The layers of a head are alike: the fields say the number instead of 1.
    num_hidden_layers: _Size = 1  # type: ignore[assignment]


class _Verifier(_Part):
    name_or_path: str | None
    architectures: tuple[str, ...] = ()


class _Speculators(_Part):
    verifier: _Verifier


class _Proposal(_Part):
    speculative_tokens: _Size


class _Proposing(_Speculators):
    proposal_methods: Annotated[tuple[_Proposal, ...], Len(1)]


class _Notes(_Part):
    model_config = ConfigDict(extra="allow")

    verifier_layers: _Size | None = None


class _File(_Part):
    transformer_layer_config: _Layer
    speculators_config: _Speculators
    draft_vocab_size: _Size
    eagle_aux_hidden_state_layer_ids: Annotated[tuple[Annotated[int, Ge(0)], ...], Len(1)]
    norm_before_residual: bool
    norm_before_fc: Literal[False] = False
    fc_norm: bool = False
    norm_output: bool = False
    tokenleap: _Notes = Field(default_factory=_Notes)


class _ParallelFile(_File):
    transformer_layer_config: _DeepLayer
    speculators_config: _Proposing
    mask_token_id: Annotated[int, Ge(0)]


def read_description(path: Path, kinds: Sequence[str] = ("eagle3",)) -> Description:
    """Read `config.json`.

    Args:
        path: the file.
        kinds: names in `KINDS`: what it may describe.

    Raises:
        ModelError: the file is missing or damaged, describes another kind of drafter, or a variant
            that is not supported.
    """
    fields = read_json(path)
    kind = fields.get("speculators_model_type")
    if kind not in kinds:
        raise ModelError(
            f"{path}: 'speculators_model_type' is {kind!r}, and method '{KINDS[kinds[0]]}' needs "
            f"'{kinds[0]}': is this the folder of a trained {_TITLES[kinds[0]]} head?"
        )
    return described(fields, path)


def described(fields: Mapping[str, Any], path: Path) -> Description:
    """What the fields of `config.json` say.

    Raises:
        ModelError: a field is missing or wrong, or describes a variant that is not supported.
    """
    parallel = fields.get("speculators_model_type") == "peagle"
    file = validated(_ParallelFile if parallel else _File, fields, path)
    layer, notes = file.transformer_layer_config, file.tokenleap
    if layer.num_attention_heads % layer.num_key_value_heads:
        raise ModelError(
            f"{path}: num_attention_heads ({layer.num_attention_heads}) is not a multiple of "
            f"num_key_value_heads ({layer.num_key_value_heads})."
        )
    if isinstance(file, _ParallelFile) and file.mask_token_id >= layer.vocab_size:
        raise ModelError(
            f"{path}: mask_token_id ({file.mask_token_id}) is not below vocab_size "
            f"({layer.vocab_size})."
        )
    config = _config(file)
    with guarded(f"{path}: there is no such rotary embedding"):
        config.rotary()
    verifier = file.speculators_config.verifier
    name = verifier.name_or_path or "another model"
    return Description(
        config,
        Verifier(name, verifier.architectures, notes.verifier_layers),
        notes.model_extra or {},
    )


def _config(file: _File) -> EagleConfig:
    layer = file.transformer_layer_config
    rope = layer.rope_parameters or layer.rope_scaling or _Rope()
    parameters = rope.model_dump(exclude_none=True)
    parameters.setdefault("rope_theta", layer.rope_theta)
    sizes: dict[str, Any] = {
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_attention_heads": layer.num_attention_heads,
        "num_key_value_heads": layer.num_key_value_heads,
        "head_dim": layer.head_dim or max(1, layer.hidden_size // layer.num_attention_heads),
        "vocab_size": layer.vocab_size,
        "draft_vocab_size": file.draft_vocab_size,
        "aux_layers": file.eagle_aux_hidden_state_layer_ids,
        "max_position_embeddings": layer.max_position_embeddings,
        "rms_norm_eps": layer.rms_norm_eps,
        "rope_parameters": parameters,
        "norm_before_residual": file.norm_before_residual,
        "fc_norm": file.fc_norm,
        "norm_output": file.norm_output,
        "qk_norm": layer.model_type == "qwen3",
    }
    if not isinstance(file, _ParallelFile):
        return EagleConfig(**sizes)
    return ParallelConfig(
        **sizes,
        num_layers=file.transformer_layer_config.num_hidden_layers,
        mask_token_id=file.mask_token_id,
        depths=file.speculators_config.proposal_methods[0].speculative_tokens,
    )


def describe(description: Description) -> dict[str, Any]:
    """The fields of `config.json`."""
    config, verifier = description.config, description.verifier
    parallel = config if isinstance(config, ParallelConfig) else None
    kind = "peagle" if parallel else "eagle3"
    layer = {
        "model_type": "qwen3" if config.qk_norm else "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": parallel.num_layers if parallel else 1,
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
        "speculative_tokens": parallel.depths if parallel else 4,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    named = {"name_or_path": verifier.name_or_path, "architectures": list(verifier.architectures)}
    return {
        "architectures": ["PEagleDraftModel" if parallel else "Eagle3DraftModel"],
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": kind,
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
        **({"mask_token_id": parallel.mask_token_id} if parallel else {}),
        "tokenleap": {**description.notes, "verifier_layers": verifier.num_layers},
    }
