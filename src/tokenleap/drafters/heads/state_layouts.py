"""Published layouts of heads without attention.

- Medusa, FasterDecoding's: `config.json` with `medusa_num_heads`, `medusa_num_layers` and
  `base_model_name_or_path`; `medusa_lm_head.safetensors` or `.pt` with the tensors
  {head}.{block}.linear.weight, .bias, and {head}.{blocks}.weight, the output layer.
- Medusa, vLLM's: `model_type` "medusa", `num_heads`, `num_hidden_layers`, `truncated_vocab_size`,
  `medusa_fc_bias`, `original_lm_head`; tensors blocks.{head}.layers.{block}.weight,
  lm_heads.{head}.weight and `token_map`.
- MLP speculators, IBM's: `model_type` "mlp_speculator", `emb_dim`, `inner_dim`, `n_predict`,
  `tie_weights`, `scale_input`; tensors (speculator.)emb.{depth}.weight, proj.{depth}.weight,
  head.{depth}.weight, ln.{depth}.weight and .bias, in one file or several.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor

from tokenleap.drafters.heads.folder import (
    CONFIG,
    WEIGHTS,
    Verifier,
    first_of,
    read_json,
    read_tensors,
    validated,
)
from tokenleap.drafters.heads.medusa import MedusaConfig
from tokenleap.drafters.heads.mlp_speculator import MlpSpeculatorConfig
from tokenleap.drafters.heads.state_file import StateFile
from tokenleap.drafters.heads.state_net import Depth, Size
from tokenleap.errors import ModelError

__all__ = ["fasterdecoding_medusa", "ibm_mlp_speculator", "vllm_medusa"]

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
