"""Folders of heads without attention: our own form, and how published ones become the same.

Our own `config.json` is

    {"model_type": "tokenleap_head", "method": "medusa", "config": {"hidden_size": 576, ...},
     "tokenleap": {"verifier": {"name_or_path": ..., "architectures": [...]},
                   "verifier_layers": 30, ...}}

with the fields of the method's `StateConfig`. `model.safetensors` holds `StateNet.state_dict()`:
the weights, and `d2t`, the map of the draft vocabulary (an offset for each draft token, as in the
`speculators` format). What is the target's own is not in it. The published layouts are in
`state_file.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import torch
from annotated_types import Ge
from torch import Tensor

from tokenleap.drafters.heads.folder import (
    CONFIG,
    WEIGHTS,
    Verifier,
    check_layers,
    check_sizes,
    check_tensors,
    draft_tokens,
    existing_folder,
    first_of,
    noted,
    notes_of,
    read_json,
    read_tensors,
    validated,
    vocabulary_weights,
    write_folder,
)
from tokenleap.drafters.heads.state_net import (
    Depth,
    MedusaConfig,
    MlpSpeculatorConfig,
    Size,
    StateConfig,
    StateNet,
)
from tokenleap.errors import CompatibilityError, ModelError
from tokenleap.models.folder import check_sizes as check_model_sizes
from tokenleap.runtime.target import Target

__all__ = [
    "Layout",
    "StateFile",
    "fasterdecoding_medusa",
    "ibm_mlp_speculator",
    "load_net",
    "read_state_file",
    "vllm_medusa",
    "write_state_file",
]


MODEL_TYPE = "tokenleap_head"


@dataclass(frozen=True)
class StateFile:
    """What a folder holds.

    Args:
        draft_tokens: [Vd] the target's ids of the draft vocabulary, ascending.
    """

    path: Path
    config: StateConfig
    verifier: Verifier
    tensors: Mapping[str, Tensor]
    draft_tokens: Tensor
    notes: Mapping[str, Any] = field(default_factory=dict)

    def net(self, kind: type[StateNet], embedding: Tensor, rows: Tensor) -> StateNet:
        """The head over the target's embedding [V, E] and output rows [V, E]."""
        fields = asdict(self.config)
        sizes = {
            "hidden_size": self.config.hidden_size,
            "intermediate_size": fields.get("inner_size"),
            "num_layers": min(self.config.num_heads, len(self.tensors)),
        }
        shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        check_model_sizes(self.path.parent / CONFIG, sizes, shapes)
        net = kind(self.config, embedding, rows, self.draft_tokens)
        check_tensors(self.path, self.tensors, net.wanted(), f"a head of method '{kind.METHOD}'")
        # The file's own tensors, without a copy.
        net.load_state_dict({**self.tensors, "d2t": net.d2t}, assign=True)
        net.train(False)
        return net


Layout: TypeAlias = Callable[[Path, Mapping[str, Any]], StateFile | None]
"""Reads a published layout: (folder, fields of its config.json) -> the same as our own form; None
if the fields are of another kind.

Raises:
    ModelError: the folder is damaged.
"""


def read_state_file(
    path: str | Path, kind: type[StateNet], layouts: tuple[Layout, ...] = ()
) -> StateFile:
    """Read a folder."""
    folder = existing_folder(path)
    fields = read_json(folder / CONFIG)
    if fields.get("model_type") == MODEL_TYPE:
        return _read_own(folder, fields, kind)
    for layout in layouts:
        if (found := layout(folder, fields)) is not None:
            return found
    raise ModelError(
        f"{folder / CONFIG} does not describe a head of method '{kind.METHOD}': is this the folder "
        "of such a head?"
    )


def _read_own(folder: Path, fields: Mapping[str, Any], kind: type[StateNet]) -> StateFile:
    path, method = folder / CONFIG, fields.get("method")
    if method != kind.METHOD:
        raise ModelError(
            f"{path}: this head is of method {method!r}, not '{kind.METHOD}': name its method."
        )
    config = validated(kind.Config, fields.get("config"), path)
    if (fault := config.fault()) is not None:
        raise ModelError(f"{path}: {fault}.")
    verifier, notes = noted(fields, path)
    tensors = read_tensors(folder / WEIGHTS)
    sizes = (config.draft_vocab_size, config.vocab_size)
    tokens = draft_tokens(folder / WEIGHTS, tensors.pop("d2t", None), *sizes)
    return StateFile(folder / WEIGHTS, config, verifier, tensors, tokens, notes)


def write_state_file(
    folder: Path, net: StateNet, verifier: Verifier, notes: Mapping[str, Any]
) -> None:
    """Write a head in our own form, in bfloat16; each file appears complete or not at all."""
    fields = {
        "model_type": MODEL_TYPE,
        "method": net.METHOD,
        "config": asdict(net.config),
        **notes_of(verifier, notes),
    }
    write_folder(folder, net.state_dict(), fields)


def load_net(file: StateFile, kind: type[StateNet], target: Target) -> StateNet:
    """The head of a folder, over a target's weights."""
    folder, config = file.path.parent, file.config
    check_layers(folder, file.verifier, target.network.num_layers)
    check_sizes(
        folder,
        file.verifier,
        (config.vocab_size, config.hidden_size),
        (target.vocab_size, target.hidden_size),
    )
    if target.final_norm is None:
        raise CompatibilityError(
            f"method '{kind.METHOD}' reads hidden states after the final norm, and it is not known "
            "which norm of this architecture that is."
        )
    if config.own_rows and not kind.reads_embedding(config):
        return file.net(kind, *[torch.empty(0, config.hidden_size)] * 2)
    net = file.net(kind, *vocabulary_weights(target))
    net.add_bias(target.logits_bias)
    return net


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


_UNKNOWN = "another model"


@dataclass(frozen=True)
class _FasterDecoding:
    medusa_num_heads: Depth
    medusa_num_layers: Depth = 1
    base_model_name_or_path: str = _UNKNOWN


def fasterdecoding_medusa(folder: Path, fields: Mapping[str, Any]) -> StateFile | None:
    """See `Layout`. Files may have more heads than their configuration says; all are used."""
    if "medusa_num_heads" not in fields:
        return None
    given = validated(_FasterDecoding, dict(fields), folder / CONFIG)
    path = first_of(folder, "medusa_lm_head.safetensors", "medusa_lm_head.pt")
    layers = given.medusa_num_layers
    tensors = {
        _renamed(name.removeprefix("medusa_head."), layers): tensor
        for name, tensor in read_tensors(path).items()
    }
    sizes = _shape(path, tensors, "lm_heads.0.weight")
    heads = max(given.medusa_num_heads, _count(tensors))
    config = MedusaConfig(sizes[1], sizes[0], sizes[0], heads, own_rows=True, num_layers=layers)
    verifier = Verifier(given.base_model_name_or_path)
    return StateFile(path, config, verifier, tensors, torch.arange(sizes[0]))


def _renamed(name: str, layers: int) -> str:
    if match := re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", name):
        head, layer, part = match.groups()
        return f"blocks.{head}.layers.{layer}.{part}"
    if match := re.fullmatch(rf"(\d+)\.{layers}\.weight", name):
        return f"lm_heads.{match[1]}.weight"
    return name


def _count(tensors: Mapping[str, Tensor]) -> int:
    return sum(re.fullmatch(r"lm_heads\.\d+\.weight", name) is not None for name in tensors)


@dataclass(frozen=True)
class _Vllm:
    hidden_size: Size
    vocab_size: Size
    num_heads: Depth
    num_hidden_layers: Depth = 1
    truncated_vocab_size: Size | None = None
    medusa_fc_bias: bool = False
    original_lm_head: bool = False
    base_model_name_or_path: str = _UNKNOWN


def vllm_medusa(folder: Path, fields: Mapping[str, Any]) -> StateFile | None:
    """See `Layout`. With `original_lm_head` the heads share the target's output layer."""
    if fields.get("model_type") != "medusa":
        return None
    given = validated(_Vllm, dict(fields), folder / CONFIG)
    path = folder / WEIGHTS
    tensors = {
        name.removeprefix("medusa_heads."): tensor for name, tensor in read_tensors(path).items()
    }
    count = given.truncated_vocab_size or given.vocab_size
    tokens, order = _token_map(path, tensors.pop("token_map", None), count, given.vocab_size)
    tensors.pop("lm_head.weight", None)  # the target's own
    if given.original_lm_head:
        tensors = {name: x for name, x in tensors.items() if not name.startswith("lm_heads.")}
    for name, tensor in tensors.items():
        if name.startswith("lm_heads.") and tensor.dim() == 2 and order is not None:
            places = {given.vocab_size: tokens, count: order}.get(len(tensor))
            tensors[name] = tensor if places is None else tensor[places]
    config = MedusaConfig(
        given.hidden_size,
        given.vocab_size,
        count,
        given.num_heads,
        own_rows=not given.original_lm_head,
        num_layers=given.num_hidden_layers,
        bias=given.medusa_fc_bias,
    )
    return StateFile(path, config, Verifier(given.base_model_name_or_path), tensors, tokens)


@dataclass(frozen=True)
class _Mlp:
    vocab_size: Size
    emb_dim: Size
    n_predict: Depth
    inner_dim: Annotated[int, Ge(0)] = 0
    tie_weights: bool = False
    scale_input: bool = False
    base_model_name_or_path: str = _UNKNOWN


def ibm_mlp_speculator(folder: Path, fields: Mapping[str, Any]) -> StateFile | None:
    """See `Layout`. Files with tied weights may repeat them for every depth."""
    if fields.get("model_type") != "mlp_speculator":
        return None
    given = validated(_Mlp, dict(fields), folder / CONFIG)
    config = MlpSpeculatorConfig(
        given.emb_dim,
        given.vocab_size,
        given.vocab_size,
        given.n_predict,
        own_rows=True,
        inner_size=given.inner_dim or given.emb_dim,
        tie_weights=given.tie_weights,
        scale_input=given.scale_input,
        own_embedding=True,
    )
    named = {_ibm_name(name): tensor for name, tensor in _read_shards(folder).items()}
    if given.tie_weights:
        named = {name: tensor for name, tensor in named.items() if not _REPEATED.match(name)}
    verifier = Verifier(given.base_model_name_or_path)
    tokens = torch.arange(given.vocab_size)
    return StateFile(folder / WEIGHTS, config, verifier, named, tokens)


_REPEATED = re.compile(r"(emb|lm_heads|ln)\.([1-9]\d*)\.|proj\.([2-9]|[1-9]\d+)\.")
"""Tensors of later depths, which are those of the first ones if weights are tied."""


def _ibm_name(name: str) -> str:
    name = name.removeprefix("speculator.")
    return f"lm_heads.{name.removeprefix('head.')}" if name.startswith("head.") else name


def _read_shards(folder: Path) -> dict[str, Tensor]:
    """The tensors of model.safetensors, or of the files that its index names."""
    index = folder / f"{WEIGHTS}.index.json"
    if (folder / WEIGHTS).exists() or not index.exists():
        return read_tensors(folder / WEIGHTS)
    shards = validated(_Index, read_json(index), index).weight_map.values()
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(shards)):
        if Path(shard).name != shard:
            raise ModelError(f"{index}: '{shard}' is not the name of a file of this folder.")
        tensors |= read_tensors(folder / shard)
    return tensors


@dataclass(frozen=True)
class _Index:
    weight_map: dict[str, str]


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
        if int(tokens[0]) >= 0 and int(tokens[-1]) < vocab_size and bool((tokens.diff() > 0).all()):
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
