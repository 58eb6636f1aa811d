"""Folders of trained EAGLE-3 and P-EAGLE heads, in the `speculators` format.

A folder holds `config.json` (see `checkpoint.py`) and `model.safetensors`; vLLM reads the same
format. The embedding and the output rows are mostly the target's own, so a folder need not hold
them. If it does, they count: EAGLE's authors trained output rows of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le, Len
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat
from torch import Tensor, nn

from tokenleap.drafters.heads.eagle_net import (
    EagleConfig,
    EagleNet,
    FeatureConfig,
    FeatureNet,
    ParallelConfig,
    ParallelNet,
    default_layers,
)
from tokenleap.drafters.heads.folder import (
    CONFIG,
    WEIGHTS,
    Verifier,
    check_sizes,
    check_tensors,
    draft_tokens,
    existing_folder,
    first_of,
    read_json,
    read_tensors,
    validated,
    write_folder,
)
from tokenleap.errors import ModelError
from tokenleap.models.folder import check_sizes as check_model_sizes
from tokenleap.models.load import guarded

__all__ = [
    "EMBEDDING",
    "KINDS",
    "OUTPUT_ROWS",
    "Checkpoint",
    "Description",
    "Verifier",
    "describe",
    "described",
    "fields_of",
    "file_tensors",
    "new_net",
    "read_checkpoint",
    "read_description",
    "read_published",
    "write_checkpoint",
]


# `config.json` of EAGLE-3 and P-EAGLE heads in the `speculators` format: read, checked, written.
#
# Fields that Tokenleap does not use are ignored. Those that it does not support are refused.


SPECULATORS_VERSION = "0.9.0"
"""Version of the `speculators` package whose format is written; older ones are read as well."""

KINDS = {"eagle3": "eagle", "peagle": "parallel"}
"""`speculators_model_type` -> the method that drafts with such a head."""
_TITLES = {"eagle3": "EAGLE-3", "peagle": "P-EAGLE"}

_Size = Annotated[int, Gt(0), Le(2**24)]
_Positive = Annotated[FiniteFloat, Gt(0)]


@dataclass(frozen=True)
class Description:
    """The contents of a `config.json`."""

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
    """Read `config.json`."""
    fields = read_json(path)
    kind = fields.get("speculators_model_type")
    if kind not in kinds:
        raise ModelError(
            f"{path}: 'speculators_model_type' is {kind!r}, and method '{KINDS[kinds[0]]}' needs "
            f"'{kinds[0]}': is this the folder of a trained {_TITLES[kinds[0]]} head?"
        )
    return described(fields, path)


def described(fields: Mapping[str, Any], path: Path) -> Description:
    """Parse the fields of a `config.json`."""
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


EMBEDDING, OUTPUT_ROWS = "embed_tokens.weight", "lm_head.weight"
_NOT_READ = "verifier_lm_head.weight"  # the target's output rows, beside the head's own


def new_net(
    config: EagleConfig,
    embedding: Tensor,
    head: Tensor,
    draft_tokens: Tensor,
    final_norm: nn.Module | None = None,
) -> EagleNet:
    """The network of a configuration; its weights are undefined. See `EagleNet`, `FeatureNet`."""
    if isinstance(config, ParallelConfig):
        return ParallelNet(config, embedding, head, draft_tokens)
    if isinstance(config, FeatureConfig):
        return FeatureNet(config, embedding, head, draft_tokens, final_norm)
    return EagleNet(config, embedding, head, draft_tokens)


@dataclass(frozen=True)
class Checkpoint:
    """The contents of a folder.

    Args:
        tensors: the weights by their names in the file, without those of `vocabulary`.
        vocabulary: the embedding and the output rows, as far as the file holds them.
    """

    path: Path
    weights: Path
    description: Description
    tensors: Mapping[str, Tensor]
    vocabulary: Mapping[str, Tensor]

    def draft_tokens(self) -> Tensor:
        """[Vd] the target's ids of the draft vocabulary, ascending."""
        config = self.description.config
        sizes = (config.draft_vocab_size, config.vocab_size)
        return draft_tokens(self.weights, self.tensors.get("d2t"), *sizes)

    def for_target(self, num_layers: int) -> Checkpoint:
        """The same with the ids of the layers that it reads, if the folder does not say them."""
        config = self.description.config
        if config.aux_layers:
            return self
        last = isinstance(config, FeatureConfig)
        layers = (num_layers,) if last else default_layers(num_layers)
        named = replace(self.description, config=replace(config, aux_layers=layers))
        return replace(self, description=named)

    def net(
        self, embedding: Tensor, output_rows: Tensor, final_norm: nn.Module | None = None
    ) -> EagleNet:
        """The head over the target's embedding [V, E] and output rows [V, E].

        In place of these it has the file's own, where they differ. An EAGLE-1 head also reads
        hidden states with the target's final norm.
        """
        config = self.description.config
        sizes = (config.vocab_size, config.hidden_size)
        for found in (tuple(embedding.shape), tuple(output_rows.shape)):
            check_sizes(self.path, self.description.verifier, sizes, found)
        shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        here = {**shapes, EMBEDDING: tuple(embedding.shape)}
        check_model_sizes(self.path / CONFIG, asdict(config), here)
        tokens = self.draft_tokens()
        rows = self._own(OUTPUT_ROWS, output_rows[tokens.to(output_rows.device)])
        net = new_net(config, self._own(EMBEDDING, embedding), rows, tokens, final_norm)
        wanted = net.state_dict()
        tensors = {**self.tensors, "d2t": wanted["d2t"], "t2d": wanted["t2d"]}
        check_tensors(self.weights, tensors, wanted, net.KIND)
        net.load_state_dict(tensors)
        net.train(False)
        return net

    def _own(self, name: str, shared: Tensor) -> Tensor:
        """The file's own tensor, or the target's if that is the same or the file has none."""
        own = self.vocabulary.get(name)
        if own is None:
            return shared
        check_tensors(self.weights, {name: own}, {name: shared}, EagleNet.KIND)
        return shared if torch.equal(own, shared.to("cpu", own.dtype)) else own.to(shared)


def read_checkpoint(path: str | Path, kinds: Sequence[str] = ("eagle3",)) -> Checkpoint:
    """Read a folder."""
    folder = existing_folder(path)
    published = read_published(folder, read_json(folder / CONFIG)) if "eagle3" in kinds else None
    if published is None:
        weights, description = folder / WEIGHTS, read_description(folder / CONFIG, kinds)
        tensors = read_tensors(weights)
    else:
        weights, description, tensors = published
    tensors.pop(_NOT_READ, None)
    names = tensors.keys() & {EMBEDDING, OUTPUT_ROWS}
    vocabulary = {name: tensors.pop(name) for name in names}
    return Checkpoint(folder, weights, description, tensors, vocabulary)


def file_tensors(net: EagleNet) -> dict[str, Tensor]:
    """The tensors of a file; EAGLE-1's layout has no maps where all tokens can be drafted."""
    tensors = net.state_dict()
    if isinstance(net, FeatureNet) and net.config.draft_vocab_size == net.config.vocab_size:
        del tensors["d2t"], tensors["t2d"]
    return tensors


def write_checkpoint(folder: Path, net: EagleNet, description: Description) -> None:
    """Write a head in bfloat16; each file appears complete or not at all."""
    write_folder(folder, file_tensors(net), fields_of(description))


# Layouts of EAGLE's authors (SafeAILab), in which EAGLE-1 heads are also written.
#
# `config.json` has the fields of a Llama model with one layer. The weights are `model.safetensors`
# or `pytorch_model.bin`, and their names tell the form:
#
#     EAGLE-1 and EAGLE-2: fc (2 E -> E, with a bias unless "bias" is false), layers.0 without
#         input_layernorm, mostly embed_tokens
#     EAGLE-3: fc (3 E -> E), midlayer or layers.0 with hidden_norm, norm, lm_head, d2t, t2d
#
# None of them names the target. EAGLE-3's need not name the layers whose inputs are fused either;
# these are then `default_layers`. EAGLE-1 has no draft vocabulary. Ours may have one, with
# `draft_vocab_size` and `d2t` as in EAGLE-3, and `tokenleap` holds our notes.


_DEFAULTS: Mapping[str, Any] = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6}
"""Of the class that reads such files (`EConfig`)."""


def read_published(
    folder: Path, fields: Mapping[str, Any]
) -> tuple[Path, Description, dict[str, Tensor]] | None:
    """Read a folder whose configuration is that of a Llama model.

    Returns:
        The file of the weights; what config.json says; and the weights by the names of
        `EagleNet.state_dict()`. `aux_layers` is empty where the target decides. None if the fields
        are of another kind.
    """
    if "hidden_size" not in fields or "speculators_model_type" in fields:
        return None
    path = first_of(folder, WEIGHTS, "pytorch_model.bin")
    tensors = {
        name.replace("midlayer.", "layers.0."): tensor
        for name, tensor in read_tensors(path).items()
        if not name.endswith("rotary_emb.inv_freq")  # old files have it; it follows from the sizes
    }
    layers = _named_layers(fields)
    found = described(_as_speculators(fields, layers), folder / CONFIG)
    config = replace(found.config, aux_layers=layers)
    if "layers.0.hidden_norm.weight" not in tensors:
        sizes = {**asdict(config), "aux_layers": ()}
        config = FeatureConfig(**sizes, fc_bias=fields.get("bias", True) is not False)
    return path, replace(found, config=config), tensors


def _named_layers(fields: Mapping[str, Any]) -> Any:
    """The ids of the fused layers as far as a file of EAGLE-3 has them; else none."""
    name = "eagle_aux_hidden_state_layer_ids"
    inner = fields.get("eagle_config")
    found = fields.get(name, inner.get(name) if isinstance(inner, dict) else None)
    return tuple(found) if isinstance(found, list) else ()


def _as_speculators(fields: Mapping[str, Any], layers: Any) -> dict[str, Any]:
    """The same in the fields of the `speculators` format."""
    notes = fields.get("tokenleap", {})
    unknown = {"name_or_path": None}
    verifier = notes.get("verifier", unknown) if isinstance(notes, dict) else unknown
    layer = {"num_key_value_heads": fields.get("num_attention_heads"), **_DEFAULTS, **fields}
    if isinstance(scaling := fields.get("rope_scaling"), dict) and "type" in scaling:
        layer["rope_scaling"] = {"rope_type": scaling["type"], **scaling}
    return {
        "transformer_layer_config": layer,
        "speculators_config": {"verifier": verifier},
        "draft_vocab_size": fields.get("draft_vocab_size") or fields.get("vocab_size"),
        "eagle_aux_hidden_state_layer_ids": layers or [0],
        "norm_before_residual": False,
        "tokenleap": {name: note for name, note in notes.items() if name != "verifier"}
        if isinstance(notes, dict)
        else notes,
    }


def fields_of(description: Description) -> dict[str, Any]:
    """The fields of `config.json` in the layout in which a head is written."""
    fields, config = describe(description), description.config
    if not isinstance(config, FeatureConfig):
        return fields
    reduced = config.draft_vocab_size != config.vocab_size
    return {
        "architectures": ["LlamaForCausalLM"],
        **fields["transformer_layer_config"],
        "bias": config.fc_bias,
        **({"draft_vocab_size": config.draft_vocab_size} if reduced else {}),
        "tie_word_embeddings": False,
        "dtype": fields["dtype"],
        "tokenleap": {
            **fields["tokenleap"],
            "verifier": fields["speculators_config"]["verifier"],
        },
    }
