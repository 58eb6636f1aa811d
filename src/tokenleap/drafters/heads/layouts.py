"""Folders of trained heads: `HeadFolder.read` knows every layout in which they are published.

`LAYOUTS` has a row for each: which methods draft with such heads, how its `config.json` is
recognised, and what reads it. Whatever the layout, a `HeadFolder` has tensors by the names of our
networks, and `load` makes the network over a target's weights, after all checks. `write_head`
writes EAGLE-3 and P-EAGLE heads in the `speculators` format, which vLLM reads, EAGLE-1 heads as
their authors do, and heads without attention in a form of our own.

EAGLE heads mostly share the target's embedding and output rows, so a folder need not hold them. If
it does, they count: EAGLE's authors trained output rows of their own.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import torch
from annotated_types import Ge, Gt, Le, Len
from pydantic import AliasPath, BaseModel, ConfigDict, Field, FiniteFloat
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
    Notes,
    Verifier,
    ascend,
    check_layers,
    check_sizes,
    check_tensors,
    draft_tokens,
    first_of,
    noted,
    notes_of,
    read_json,
    read_shards,
    read_tensors,
    validated,
    vocabulary_weights,
    write_folder,
)
from tokenleap.drafters.heads.shipped import existing_folder
from tokenleap.drafters.heads.state_net import (
    BlockwiseNet,
    Depth,
    HydraNet,
    MedusaConfig,
    MedusaNet,
    MlpSpeculatorConfig,
    MlpSpeculatorNet,
    Size,
    StateConfig,
    StateNet,
)
from tokenleap.errors import CompatibilityError, ModelError
from tokenleap.models.folder import check_sizes as check_model_sizes
from tokenleap.models.load import guarded
from tokenleap.runtime.target import Target

EMBEDDING, OUTPUT_ROWS = "embed_tokens.weight", "lm_head.weight"
_TARGETS = "verifier_lm_head.weight"  # the target's output rows, beside the head's own
_MAPS = ("d2t", "t2d")
"""The draft vocabulary, as a file and a network have it; not weights."""
MODEL_TYPE = "tokenleap_head"
"""Of our own form."""
_UNKNOWN = "another model"

_Net = TypeVar("_Net", bound=nn.Module)
_Config = TypeVar("_Config", bound=StateConfig)


@dataclass(frozen=True)
class HeadFolder:
    """A trained head as its folder holds it, whatever the layout.

    Args:
        weights: the file of the tensors.
        notes: what else the folder says about the training.
        tensors: the weights by their names in our network.
        draft_tokens: [Vd] the target's ids of the draft vocabulary, ascending.
    """

    weights: Path
    config: EagleConfig | StateConfig
    verifier: Verifier
    notes: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    draft_tokens: Tensor

    @property
    def path(self) -> Path:
        return self.weights.parent

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    @classmethod
    def read(cls, path: str | Path, *methods: str) -> Self:
        """Read the folder of a head that one of these methods drafts with.

        Raises:
            ModelError: there is no such head in it, or it is damaged.
        """
        folder = existing_folder(path)
        fields = read_json(folder / CONFIG)
        for layout in LAYOUTS:
            if not layout.methods.isdisjoint(methods) and layout.fits(fields):
                found = layout.read(folder, fields)
                assert isinstance(found, cls), "other methods have other heads"
                return found
        raise ModelError(f"{folder / CONFIG}{_other(fields, methods[0])}")

    @abstractmethod
    def load(self, target: Target) -> nn.Module:
        """The network over a target's weights.

        Raises:
            CompatibilityError: the head was trained for another target.
            ModelError: the folder is damaged.
        """

    def _filled(self, net: _Net, kind: str, *, assign: bool = False) -> _Net:
        """A network with the file's tensors, which are checked, and not copied with `assign`."""
        wanted = net.state_dict()
        maps = {name: wanted.pop(name) for name in _MAPS if name in wanted}
        check_tensors(self.weights, self.tensors, wanted, kind)
        net.load_state_dict({**self.tensors, **maps}, assign=assign)
        net.train(False)
        return net


def _check_norm(target: Target, reader: str) -> None:
    if target.final_norm is None:
        raise CompatibilityError(
            f"{reader} reads hidden states after the final norm, and it is not known which norm of "
            "this architecture that is."
        )


def _other(fields: Mapping[str, Any], method: str) -> str:
    """The error in fields that fit no layout of a method's heads."""
    if method not in _EAGLES:
        return f" does not describe a head of method '{method}': is this the folder of such a head?"
    kind, title = _EAGLES[method]
    found = fields.get("speculators_model_type")
    return (
        f": 'speculators_model_type' is {found!r}, and method '{method}' needs '{kind}': is this "
        f"the folder of a trained {title} head?"
    )


# Heads with attention


@dataclass(frozen=True)
class EagleFolder(HeadFolder):
    """The folder of an EAGLE or P-EAGLE head.

    Args:
        vocabulary: the embedding and the output rows, as far as the file holds them.
    """

    config: EagleConfig
    vocabulary: Mapping[str, Tensor] = field(default_factory=dict)

    def for_target(self, num_layers: int) -> EagleFolder:
        """The same with the ids of the layers that it reads, if the folder does not say them."""
        if self.config.aux_layers:
            return self
        last = isinstance(self.config, FeatureConfig)
        layers = (num_layers,) if last else default_layers(num_layers)
        return replace(self, config=replace(self.config, aux_layers=layers))

    def load(self, target: Target) -> EagleNet:
        check_layers(self.path, self.verifier, target.network.num_layers)
        placed = self.for_target(target.network.num_layers)
        net = placed.net(*vocabulary_weights(target), target.final_norm)
        if isinstance(net, FeatureNet):
            _check_norm(target, f"{self.path}: {net.KIND}")
        if int(net.draft_tokens[-1]) >= target.vocab_size:
            raise CompatibilityError(
                f"{self.path}: the head drafts tokens that this model cannot: train one for it."
            )
        return net

    def net(
        self, embedding: Tensor, output_rows: Tensor, final_norm: nn.Module | None = None
    ) -> EagleNet:
        """The head over the target's embedding [V, E] and output rows [V, E].

        In place of these it has the file's own, where they differ. An EAGLE-1 head also reads
        hidden states with the target's final norm.
        """
        sizes = (self.config.vocab_size, self.config.hidden_size)
        for found in (tuple(embedding.shape), tuple(output_rows.shape)):
            check_sizes(self.path, self.verifier, sizes, found)
        here = {**self.shapes, EMBEDDING: tuple(embedding.shape)}
        check_model_sizes(self.path / CONFIG, asdict(self.config), here)
        tokens = self.draft_tokens
        rows = self._own(OUTPUT_ROWS, output_rows[tokens.to(output_rows.device)])
        net = new_net(self.config, self._own(EMBEDDING, embedding), rows, tokens, final_norm)
        return self._filled(net, net.KIND)

    def _own(self, name: str, shared: Tensor) -> Tensor:
        """The file's own tensor, or the target's if that is the same or the file has none."""
        own = self.vocabulary.get(name)
        if own is None:
            return shared
        check_tensors(self.weights, {name: own}, {name: shared}, EagleNet.KIND)
        return shared if torch.equal(own, shared.to("cpu", own.dtype)) else own.to(shared)


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


# Heads without attention


_STATE_NETS = (MedusaNet, HydraNet, BlockwiseNet, MlpSpeculatorNet)


@dataclass(frozen=True)
class StateFolder(HeadFolder):
    """The folder of a head without attention."""

    config: StateConfig

    @property
    def kind(self) -> type[StateNet]:
        return next(net for net in _STATE_NETS if net.Config is type(self.config))

    def load(self, target: Target) -> StateNet:
        config = self.config
        check_layers(self.path, self.verifier, target.network.num_layers)
        found = (target.vocab_size, target.hidden_size)
        check_sizes(self.path, self.verifier, (config.vocab_size, config.hidden_size), found)
        _check_norm(target, f"method '{self.kind.METHOD}'")
        if config.own_rows and not self.kind.reads_embedding(config):
            return self.net(*[torch.empty(0, config.hidden_size)] * 2)
        net = self.net(*vocabulary_weights(target))
        net.add_bias(target.logits_bias)
        return net

    def net(self, embedding: Tensor, rows: Tensor) -> StateNet:
        """The head over the target's embedding [V, E] and output rows [V, E]."""
        sizes = {
            "hidden_size": self.config.hidden_size,
            "intermediate_size": asdict(self.config).get("inner_size"),
            "num_layers": min(self.config.num_heads, len(self.tensors)),
        }
        check_model_sizes(self.path / CONFIG, sizes, self.shapes)
        net = self.kind(self.config, embedding, rows, self.draft_tokens)
        return self._filled(net, f"a head of method '{net.METHOD}'", assign=True)


# Writing


def write_head(
    folder: Path,
    net: EagleNet | StateNet,
    verifier: Verifier,
    notes: Mapping[str, Any],
    vocabulary: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a head in bfloat16; each file appears complete or not at all.

    Args:
        vocabulary: tensors of the target that the file is to hold, too (see `EagleFolder`).
    """
    tensors = net.state_dict()
    if isinstance(net, StateNet):
        fields = _own_fields(net, verifier, notes)
    elif isinstance(net, FeatureNet):
        fields = _authors_fields(net.config, verifier, notes)
        if net.config.draft_vocab_size == net.config.vocab_size:
            del tensors["d2t"], tensors["t2d"]  # the layout has none
    else:
        fields = _speculators_fields(net.config, verifier, notes)
    write_folder(folder, {**tensors, **(vocabulary or {})}, fields)


# `config.json` of EAGLE-3 and P-EAGLE heads in the `speculators` format: read, checked, written.
#
# Fields that Tokenleap does not use are ignored. Those that it does not support are refused.


SPECULATORS_VERSION = "0.9.0"
"""Version of the `speculators` package whose format is written; older ones are read as well."""

_EAGLES = {"eagle": ("eagle3", "EAGLE-3"), "parallel": ("peagle", "P-EAGLE")}
"""Method -> `speculators_model_type` of its heads, and their name."""

_Size = Annotated[int, Gt(0), Le(2**24)]
_Positive = Annotated[FiniteFloat, Gt(0)]


class _Rope(BaseModel):
    model_config = ConfigDict(extra="allow")
    # No objects: they are the parameters of each type of layer.
    __pydantic_extra__: dict[str, str | float | bool | list[Any] | None] = Field(init=False)

    rope_type: Literal["default", "linear", "llama3", "yarn"] = "default"
    rope_theta: _Positive | None = None
    partial_rotary_factor: Annotated[float, Ge(1), Le(1)] | None = None


class _Layer(BaseModel):
    model_type: Literal["llama", "qwen3"] = "llama"
    hidden_size: _Size
    intermediate_size: _Size
    num_attention_heads: _Size
    num_key_value_heads: _Size
    head_dim: _Size | None = None
    num_layers: Literal[1] = Field(1, validation_alias="num_hidden_layers")
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
    num_layers: _Size = Field(1, validation_alias="num_hidden_layers")  # type: ignore[assignment]


class _Named(BaseModel):
    name_or_path: str | None
    architectures: tuple[str, ...] = ()


_MOST_FUSED = 64  # layers that a head reads


class _File(BaseModel):
    transformer_layer_config: _Layer
    verifier: _Named = Field(validation_alias=AliasPath("speculators_config", "verifier"))
    draft_vocab_size: _Size
    aux_layers: Annotated[tuple[Annotated[int, Ge(0)], ...], Len(1, _MOST_FUSED)] = Field(
        validation_alias="eagle_aux_hidden_state_layer_ids"
    )
    norm_before_residual: bool
    norm_before_fc: Literal[False] = False
    fc_norm: bool = False
    norm_output: bool = False
    tokenleap: Notes = Field(default_factory=Notes)


_DEPTHS = AliasPath("speculators_config", "proposal_methods", 0, "speculative_tokens")


class _ParallelFile(_File):
    transformer_layer_config: _DeepLayer
    mask_token_id: Annotated[int, Ge(0)]
    depths: _Size = Field(validation_alias=_DEPTHS)


def _speculators(folder: Path, fields: Mapping[str, Any]) -> EagleFolder:
    weights = folder / WEIGHTS
    return _eagle(weights, _described(fields, folder / CONFIG), read_tensors(weights))


_Described = tuple[EagleConfig, Verifier, Mapping[str, Any]]
"""The sizes, the target and the notes of a `config.json`."""


def _eagle(weights: Path, described: _Described, tensors: dict[str, Tensor]) -> EagleFolder:
    """The folder, without what is not read, and with the target's tensors apart."""
    config = described[0]
    sizes = (config.draft_vocab_size, config.vocab_size)
    tokens = draft_tokens(weights, tensors.get("d2t"), *sizes)
    vocabulary = {n: tensors[n] for n in (EMBEDDING, OUTPUT_ROWS) if n in tensors}
    own = {n: x for n, x in tensors.items() if n not in (*_MAPS, _TARGETS, *vocabulary)}
    return EagleFolder(weights, *described, own, tokens, vocabulary)


def _described(fields: Mapping[str, Any], path: Path) -> _Described:
    """See `_Described`; in the `speculators` format."""
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
    name = file.verifier.name_or_path or _UNKNOWN
    verifier = Verifier(name, file.verifier.architectures, notes.verifier_layers)
    return config, verifier, notes.model_extra or {}


def _config(file: _File) -> EagleConfig:
    layer = file.transformer_layer_config
    rope = layer.rope_parameters or layer.rope_scaling or _Rope()
    parameters = rope.model_dump(exclude_none=True)
    parameters.setdefault("rope_theta", layer.rope_theta)
    kind = ParallelConfig if isinstance(file, _ParallelFile) else EagleConfig
    known = kind.__dataclass_fields__
    given: dict[str, Any] = {name: x for name, x in (*layer, *file) if name in known}
    given |= {
        "head_dim": layer.head_dim or max(1, layer.hidden_size // layer.num_attention_heads),
        "rope_parameters": parameters,
        "qk_norm": layer.model_type == "qwen3",
    }
    return kind(**given)


def _same(config: EagleConfig, part: type[BaseModel]) -> dict[str, Any]:
    """The fields of a configuration that a part of the file has, too, by the file's names."""
    return {
        str(each.validation_alias or name): getattr(config, name)
        for name, each in part.model_fields.items()
        if hasattr(config, name)
    }


def _speculators_fields(
    config: EagleConfig, verifier: Verifier, notes: Mapping[str, Any]
) -> dict[str, Any]:
    parallel = config if isinstance(config, ParallelConfig) else None
    kind = "peagle" if parallel else "eagle3"
    layer = {
        "model_type": "qwen3" if config.qk_norm else "llama",
        "num_hidden_layers": 1,
        **_same(config, _Layer),
        "rope_theta": config.rope_parameters["rope_theta"],
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
        **_same(config, _File),
        "target_hidden_size": None,
        "norm_before_fc": False,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        **({"mask_token_id": parallel.mask_token_id} if parallel else {}),
        "tokenleap": {**notes, "verifier_layers": verifier.num_layers},
    }


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


def _authors(folder: Path, fields: Mapping[str, Any]) -> EagleFolder:
    """A head of EAGLE's authors; `aux_layers` is empty where the target decides."""
    path = first_of(folder, WEIGHTS, "pytorch_model.bin")
    tensors = {
        name.replace("midlayer.", "layers.0."): tensor
        for name, tensor in read_tensors(path).items()
        if not name.endswith("rotary_emb.inv_freq")  # old files have it; it follows from the sizes
    }
    layers = _named_layers(fields)
    config, verifier, notes = _described(_as_speculators(fields, layers), folder / CONFIG)
    config = replace(config, aux_layers=layers)
    if "layers.0.hidden_norm.weight" not in tensors:
        sizes = {**asdict(config), "aux_layers": ()}
        config = FeatureConfig(**sizes, fc_bias=fields.get("bias", True) is not False)
    return _eagle(path, (config, verifier, notes), tensors)


def _named_layers(fields: Mapping[str, Any]) -> Any:
    """The ids of the fused layers as far as a file of EAGLE-3 has them; else none."""
    name = "eagle_aux_hidden_state_layer_ids"
    inner = fields.get("eagle_config")
    found = fields.get(name, inner.get(name) if isinstance(inner, dict) else None)
    return tuple(found) if isinstance(found, list) else ()


def _as_speculators(fields: Mapping[str, Any], layers: Any) -> dict[str, Any]:
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


def _authors_fields(
    config: FeatureConfig, verifier: Verifier, notes: Mapping[str, Any]
) -> dict[str, Any]:
    fields = _speculators_fields(config, verifier, notes)
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


# Our own form of heads without attention


def _own(kind: type[StateNet], folder: Path, fields: Mapping[str, Any]) -> StateFolder:
    path, method = folder / CONFIG, fields.get("method")
    if method != kind.METHOD:
        raise ModelError(
            f"{path}: this head is of method {method!r}, not '{kind.METHOD}': name its method."
        )
    config = validated(kind.Config, fields.get("config"), path)
    if (fault := config.fault()) is not None:
        raise ModelError(f"{path}: {fault}.")
    verifier, notes = noted(fields, path)
    weights = folder / WEIGHTS
    tensors = read_tensors(weights)
    sizes = (config.draft_vocab_size, config.vocab_size)
    tokens = draft_tokens(weights, tensors.pop("d2t", None), *sizes)
    return StateFolder(weights, config, verifier, notes, tensors, tokens)


def _own_fields(net: StateNet, verifier: Verifier, notes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model_type": MODEL_TYPE,
        "method": net.METHOD,
        "config": asdict(net.config),
        **notes_of(verifier, notes),
    }


# Published layouts of heads without attention.
#
# - Medusa, FasterDecoding's: `config.json` with `medusa_num_heads`, `medusa_num_layers` and
#   `base_model_name_or_path`; `medusa_lm_head.safetensors` or `.pt` with the tensors
#   {head}.{block}.linear.weight, .bias, and {head}.{blocks}.weight, the output layer.
# - Medusa, vLLM's: `model_type` "medusa", `num_heads`, `num_hidden_layers`, `truncated_vocab_size`,
#   `medusa_fc_bias`, `original_lm_head`; tensors blocks.{head}.layers.{block}.weight,
#   lm_heads.{head}.weight and `token_map`.
# - MLP speculators, IBM's: `model_type` "mlp_speculator", `emb_dim`, `inner_dim`, `n_predict`,
#   `tie_weights`, `scale_input`; tensors (speculator.)emb.{depth}.weight, proj.{depth}.weight,
#   head.{depth}.weight, ln.{depth}.weight and .bias, in one file or several.


class _Published(BaseModel):
    base_model_name_or_path: str = _UNKNOWN

    def config(self, kind: type[_Config], **more: Any) -> _Config:
        """A configuration with the fields of the same names, and more."""
        known = kind.__dataclass_fields__
        return kind(**{**{name: x for name, x in self if name in known}, **more})

    def folder(
        self,
        weights: Path,
        config: StateConfig,
        tensors: Mapping[str, Tensor],
        tokens: Tensor | None = None,
    ) -> StateFolder:
        verifier = Verifier(self.base_model_name_or_path)
        tokens = torch.arange(config.vocab_size) if tokens is None else tokens
        return StateFolder(weights, config, verifier, {}, tensors, tokens)


class _FasterDecoding(_Published):
    num_heads: Depth = Field(validation_alias="medusa_num_heads")
    num_layers: Depth = Field(1, validation_alias="medusa_num_layers")


def _fasterdecoding(folder: Path, fields: Mapping[str, Any]) -> StateFolder:
    """Files may have more heads than their configuration says; all are used."""
    given = validated(_FasterDecoding, fields, folder / CONFIG)
    path = first_of(folder, "medusa_lm_head.safetensors", "medusa_lm_head.pt")
    tensors = _renamed(
        read_tensors(path),
        (r"^medusa_head\.", ""),
        (r"^(\d+)\.(\d+)\.linear\.(weight|bias)$", r"blocks.\1.layers.\2.\3"),
        (rf"^(\d+)\.{given.num_layers}\.weight$", r"lm_heads.\1.weight"),
    )
    vocab_size, size = _shape(path, tensors, "lm_heads.0.weight")
    heads = sum(bool(re.fullmatch(r"lm_heads\.\d+\.weight", name)) for name in tensors)
    sizes = {"hidden_size": size, "vocab_size": vocab_size, "draft_vocab_size": vocab_size}
    sizes["num_heads"] = max(given.num_heads, heads)
    return given.folder(path, given.config(MedusaConfig, **sizes, own_rows=True), tensors)


def _renamed(tensors: Mapping[str, Tensor], *rules: tuple[str, str]) -> dict[str, Tensor]:
    """Tensors by the names that these rules make: pattern -> replacement, one after the other."""

    def name_of(name: str) -> str:
        for pattern, replacement in rules:
            name = re.sub(pattern, replacement, name)
        return name

    return {name_of(name): tensor for name, tensor in tensors.items()}


class _Vllm(_Published):
    hidden_size: Size
    vocab_size: Size
    draft_vocab_size: Size | None = Field(None, validation_alias="truncated_vocab_size")
    num_heads: Depth
    num_layers: Depth = Field(1, validation_alias="num_hidden_layers")
    bias: bool = Field(False, validation_alias="medusa_fc_bias")
    original_lm_head: bool = False


def _vllm(folder: Path, fields: Mapping[str, Any]) -> StateFolder:
    """With `original_lm_head` the heads share the target's output layer."""
    given = validated(_Vllm, fields, folder / CONFIG)
    path = folder / WEIGHTS
    tensors = _renamed(read_tensors(path), (r"^medusa_heads\.", ""))
    count = given.draft_vocab_size or given.vocab_size
    tokens, order = _token_map(path, tensors.pop("token_map", None), count, given.vocab_size)
    tensors.pop("lm_head.weight", None)  # the target's own
    if given.original_lm_head:
        tensors = {name: x for name, x in tensors.items() if not name.startswith("lm_heads.")}
    for name, tensor in tensors.items():
        if name.startswith("lm_heads.") and tensor.dim() == 2 and order is not None:
            places = {given.vocab_size: tokens, count: order}.get(len(tensor))
            tensors[name] = tensor if places is None else tensor[places]
    own_rows = not given.original_lm_head
    config = given.config(MedusaConfig, draft_vocab_size=count, own_rows=own_rows)
    return given.folder(path, config, tensors, tokens)


class _Ibm(_Published):
    vocab_size: Size
    hidden_size: Size = Field(validation_alias="emb_dim")
    num_heads: Depth = Field(validation_alias="n_predict")
    inner_size: Annotated[int, Ge(0)] = Field(0, validation_alias="inner_dim")
    tie_weights: bool = False
    scale_input: bool = False


def _ibm(folder: Path, fields: Mapping[str, Any]) -> StateFolder:
    """Files with tied weights may repeat them for every depth."""
    given = validated(_Ibm, fields, folder / CONFIG)
    config = given.config(
        MlpSpeculatorConfig,
        draft_vocab_size=given.vocab_size,
        inner_size=given.inner_size or given.hidden_size,
        own_rows=True,
        own_embedding=True,
    )
    named = _renamed(read_shards(folder), (r"^speculator\.", ""), (r"^head\.", "lm_heads."))
    if given.tie_weights:
        named = {name: tensor for name, tensor in named.items() if not _REPEATED.match(name)}
    return given.folder(folder / WEIGHTS, config, named)


_REPEATED = re.compile(r"(emb|lm_heads|ln)\.([1-9]\d*)\.|proj\.([2-9]|[1-9]\d+)\.")
"""Tensors of later depths, which are those of the first ones if weights are tied."""


def _token_map(
    path: Path, token_map: Tensor | None, count: int, vocab_size: int
) -> tuple[Tensor, Tensor | None]:
    """The draft vocabulary, ascending, and the places of its tokens in the file; None for all."""
    if count == vocab_size:
        return torch.arange(vocab_size), None
    if token_map is None:
        raise ModelError(f"{path}: 'token_map' of the {count} draft tokens is missing.")
    if token_map.shape == (count,) and not token_map.is_floating_point():
        tokens, order = token_map.long().sort()
        if ascend(tokens, vocab_size):
            return tokens, order
    raise ModelError(
        f"{path}: 'token_map' does not name {count} different token ids below {vocab_size}: the "
        "file is damaged."
    )


def _shape(path: Path, tensors: Mapping[str, Tensor], name: str) -> tuple[int, int]:
    """The shape [out, in] of a tensor that tells sizes that no configuration does."""
    tensor = tensors.get(name)
    if tensor is None or tensor.dim() != 2 or not tensor.numel():
        raise ModelError(f"{path}: the first output layer is missing: the file is incomplete.")
    return tensor.shape[0], tensor.shape[1]


# All layouts


@dataclass(frozen=True)
class Layout:
    """One layout of folders.

    Args:
        methods: those that draft with its heads.
        fits: whether the fields of a `config.json` are of this layout.
        read: (folder, fields) -> the head.
    """

    methods: frozenset[str]
    fits: Callable[[Mapping[str, Any]], bool]
    read: Callable[[Path, Mapping[str, Any]], HeadFolder]


def _says(name: str, value: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda fields: fields.get(name) == value


def _is_authors(fields: Mapping[str, Any]) -> bool:
    return "hidden_size" in fields and "speculators_model_type" not in fields


LAYOUTS = (
    Layout(frozenset({"eagle"}), _is_authors, _authors),
    Layout(frozenset({"eagle"}), _says("speculators_model_type", "eagle3"), _speculators),
    Layout(frozenset({"parallel"}), _says("speculators_model_type", "peagle"), _speculators),
    *(
        Layout(frozenset({net.METHOD}), _says("model_type", MODEL_TYPE), partial(_own, net))
        for net in _STATE_NETS
    ),
    Layout(frozenset({"medusa"}), lambda fields: "medusa_num_heads" in fields, _fasterdecoding),
    Layout(frozenset({"medusa"}), _says("model_type", "medusa"), _vllm),
    Layout(frozenset({"mlp_speculator"}), _says("model_type", "mlp_speculator"), _ibm),
)
"""All of them; the first that fits reads a folder."""
