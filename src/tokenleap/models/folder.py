"""Checks of a Hugging Face model folder that read no weights.

`resolver` calls `check_folder`, and `load` the others. `gguf_config` checks the configuration of a
GGUF file in the same way.

Transformers trusts a `config.json`: a number of layers that no file could fill keeps it busy for
hours, and text where a number should be fails somewhere else, later. So the fields that decide what
is computed are checked first.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, Strict, create_model

from tokenleap.core.files import parsed_json, read_json, validated
from tokenleap.errors import ModelError

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]  # of the tensors of a model's files, by name

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_KERNELS = {"attn_implementation", "experts_implementation"}
"""Settings that may name a repository of kernels."""

_LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_decoder_layers",
    "encoder_layers",
    "decoder_layers",
)
_WIDTHS = ("hidden_size", "n_embd", "d_model")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_SIZES = (
    *_WIDTHS,
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "head_dim",
    "d_kv",
    "d_ff",
    "ffn_dim",
    "n_inner",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    *_EXPERTS,
)
_CONTEXTS = (
    "max_position_embeddings",
    "max_target_positions",
    "max_source_positions",
    "n_positions",
    "max_seq_len",
    "original_max_position_embeddings",
)
_POSITIVE = (
    "rope_theta",
    "rope_local_base_freq",
    "factor",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "query_pre_attn_scalar",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
)
_RELATIVE = ("relative_attention_max_distance", "relative_attention_num_buckets")
_ROPE = ("rope_theta", "rope_parameters", "rope_scaling", "rotary_emb_base")
_LONGEST, _LONGEST_TABLE = 2**24, 2**16
"""Most positions of a context, and of one that may be computed as a table when a model is made."""
_SWITCHES = ("tie_word_embeddings", "is_encoder_decoder", "use_sliding_window")

_Count = Annotated[int, Strict(), Gt(0), Le(2**31 - 1)]
_Token = Annotated[int, Strict(), Ge(-1), Le(2**31 - 1)]
_Tokens = _Token | list[_Token]
_Number = Annotated[FiniteFloat, Strict()]
_Positive = Annotated[FiniteFloat, Strict(), Gt(0)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore")


def _optional(names: tuple[str, ...], kind: Any) -> dict[str, Any]:
    return dict.fromkeys(names, (kind | None, None))


@cache
def _config_kind() -> type[BaseModel]:
    """A `config.json`: the fields that decide what is computed, of all architectures."""
    rope: dict[str, Any] = {
        **_optional(_POSITIVE, _Positive),
        **_optional(_CONTEXTS, _Count),
        **_optional(("partial_rotary_factor",), Annotated[_Positive, Le(1)]),
        **_optional(("beta_fast", "beta_slow", "attention_factor", "mscale"), _Number),
        **_optional(("low_freq_factor", "high_freq_factor"), _Positive),
        **_optional(("long_factor", "short_factor"), list[_Positive]),
        **_optional(("rope_type", "type"), str),
    }
    flat = create_model("_Rope", __base__=_Part, **rope)
    by_kind = _optional(("full_attention", "sliding_attention"), flat)
    whole = create_model("_Ropes", __base__=flat, **by_kind)
    fields: dict[str, Any] = {
        **_optional((*_LAYERS, *_SIZES, "num_labels", "num_experts_per_tok"), _Count),
        **_optional(("intermediate_size",), _Count | list[_Count]),
        **_optional(("encoder_layers",), Literal[0] | _Count),  # a decoder alone has none
        **_optional(_CONTEXTS, Annotated[_Count, Le(_LONGEST)]),
        **_optional(_RELATIVE, Annotated[_Count, Le(_LONGEST_TABLE)]),
        **_optional(("sliding_window",), Annotated[int, Strict(), Ge(0), Le(2**31 - 1)]),
        **_optional(_POSITIVE, _Positive),
        **_optional(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), _Number),
        **_optional(("partial_rotary_factor",), Annotated[_Positive, Le(1)]),
        **_optional(("rope_parameters", "rope_scaling"), whole),
        **_optional(_SWITCHES, Annotated[bool, Strict()]),
        **_optional(("layer_types",), list[str]),
        **_optional(("model_type", "hidden_act", "hidden_activation"), str),
        **_optional(("architectures",), list[str]),
        **_token_fields(),
    }
    return create_model("_Config", __base__=_Part, **fields)


def _token_fields() -> dict[str, Any]:
    names = ("bos", "eos", "pad", "unk", "decoder_start", "forced_bos", "forced_eos")
    return _optional(tuple(f"{name}_token_id" for name in names), _Tokens)


@cache
def _generation_kind() -> type[BaseModel]:
    """A `generation_config.json`."""
    count = Annotated[int, Strict(), Ge(0)]
    fields: dict[str, Any] = {
        **_token_fields(),
        **_optional(("temperature", "top_p", "length_penalty"), _Number),
        **_optional(("repetition_penalty",), _Positive),
        **_optional(("top_k", "no_repeat_ngram_size", "min_length", "max_length"), count),
        **_optional(("early_stopping",), Annotated[bool, Strict()] | Literal["never"]),
    }
    return create_model("_Generation", __base__=_Part, **fields)


class _Tokenizer(_Part):
    """A `tokenizer_config.json`."""

    model_max_length: Annotated[float, Strict(), Gt(0)] | None = None
    padding_side: Literal["left", "right"] | None = None
    truncation_side: Literal["left", "right"] | None = None
    chat_template: str | list[dict[str, str]] | dict[str, str] | None = None
    tokenizer_class: str | None = None
    added_tokens_decoder: dict[str, Any] = Field(default_factory=dict)


def check_folder(folder: Path) -> None:
    read_config(folder)
    weight_files(folder)


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} is not a Hugging Face model folder: it has no config.json")
    config = _read_object(path)
    for part in (config, *config.values()):
        for name in _KERNELS & (part.keys() if isinstance(part, dict) else set()):
            if "/" in str(part[name]):  # Transformers would fetch and run it
                raise ModelError(
                    f"{path} names code on the Hugging Face Hub ({name}), which "
                    "is never run; remove that setting"
                )
    check_config(path, config)
    generation = folder / "generation_config.json"
    if generation.is_file():
        _check(_generation_kind(), generation, _read_object(generation))
    return config


def check_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    if path.is_file():
        _check(_Tokenizer, path, _read_object(path))


def check_config(path: Path, config: Mapping[str, Any]) -> None:
    for name in (None, "text_config", "decoder", "encoder"):
        part = config if name is None else config.get(name)
        if isinstance(part, Mapping):
            _check(_config_kind(), path, part)
            _check_table(path, part)
            heads, shared = (part.get(f"num_{kind}_heads") for kind in ("attention", "key_value"))
            if heads and shared and heads % shared:
                raise ModelError(
                    f"{path}: {heads} attention heads cannot share {shared} key-value heads"
                )


def _check_table(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse the context of a model without rotary embeddings that would take minutes to make."""
    longest = _most(config, _CONTEXTS)
    if longest > _LONGEST_TABLE and not any(config.get(name) for name in _ROPE):
        raise ModelError(
            f"{path} describes a context of {longest} tokens without rotary embeddings; at most "
            f"{_LONGEST_TABLE} are possible"
        )


def check_sizes(path: Path, config: Mapping[str, Any], shapes: Shapes) -> None:
    """Compare the sizes of a checked configuration with the tensors that are there.

    A model much larger than its files would be made before its weights are found missing.
    """
    present = sum(math.prod(shape) for shape in shapes.values())
    if "quantization_config" in config:
        present *= _PACKED
    for part in _parts(config):
        layers, least = _most(part, _LAYERS), _least(part)
        if layers > len(shapes):
            raise ModelError(
                f"{path} describes {layers} layers, and its weights are {len(shapes)} tensors; get "
                "the model again"
            )
        if least > _SLACK * present:
            raise ModelError(
                f"{path} describes a model of at least {least} numbers, and its weights have "
                f"{present}; get the model again"
            )


_SLACK = 4
"""Models whose layers share weights have more than their files: at most so many times as many."""

_PACKED = 32  # most weights of a quantized model in a number of its files: bits in an int32


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A configuration and all that are in it, such as those of a text and a vision model."""
    yield config
    for value in config.values():
        if isinstance(value, Mapping):
            yield from _parts(value)


def _least(config: Mapping[str, Any]) -> int:
    layers, width = _most(config, _LAYERS), _most(config, _WIDTHS)
    experts = _most(config, _EXPERTS) * _most(config, ("moe_intermediate_size",))
    inner = experts or _most(config, ("intermediate_size",))
    heads = _most(config, ("num_attention_heads",)) * _most(config, ("head_dim",))
    whole = width * (_most(config, ("vocab_size",)) + layers * max(inner, heads, width))
    return max(whole, _most(config, _SIZES))


def _most(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    found = (config.get(name) for name in names)
    return max((size for size in found if isinstance(size, int)), default=0)


def weight_files(folder: Path) -> list[Path]:
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    if not (folder / _INDEX).is_file():
        raise ModelError(_no_weights(folder))
    return indexed_files(folder, _INDEX, (".safetensors",))


def indexed_files(folder: Path, index: str, suffixes: tuple[str, ...]) -> list[Path]:
    """The files of a sharded model, all of which are there."""
    shards = _read_object(folder / index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ModelError(f"{folder / index} has no weight_map; get the model again")
    ends = "|".join(map(re.escape, suffixes))
    name = Annotated[str, Field(pattern=rf"^[^/\\\x00]+({ends})$")]
    _check(dict[str, name], folder / index, shards)
    files = [folder / name for name in sorted(set(shards.values()))]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ModelError(
            f"{folder} lacks {len(missing)} of its {len(files)} weight files, {missing[0]} first; "
            f"get the model again"
        )
    return files


def header_of(file: Path) -> dict[str, Any]:
    """Name -> dtype, shape and `start`, its place, of each tensor of a safetensors file.

    Reading them reveals a truncated file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "numpy"):  # checks the header and the file's length
            pass
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = parsed_json(opened.read(length))
    except (OSError, SafetensorError, ValueError) as error:
        raise ModelError(f"{file} is truncated or damaged ({error}); get it again") from error
    header.pop("__metadata__", None)
    return {
        name: {**entry, "start": 8 + length + entry["data_offsets"][0]}
        for name, entry in header.items()
    }


PICKLES = (".bin", ".pt", ".pth")
_NO_WEIGHTS = {"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt"}


def pickle_files(folder: Path) -> list[Path]:
    """The pickle files in a folder that may have a model's weights."""
    found = (path for path in sorted(folder.iterdir()) if path.suffix in PICKLES)
    return [path for path in found if path.is_file() and path.name not in _NO_WEIGHTS]


def conversion(source: str | Path) -> str:
    """Why a folder, file or Hub model with pickles is not loaded, and the command that helps."""
    name = Path(str(source).partition("@")[0]).resolve()
    output = f"{name.stem if name.suffix in PICKLES else name.name}-safetensors"
    return (
        f"pickle files ({', '.join(PICKLES)}), which are never loaded because they can run code; "
        "make safetensors of them in a sandboxed process: "
        f"tokenleap models convert {shlex.quote(str(source))} --output {shlex.quote(output)}"
    )


def _no_weights(folder: Path) -> str:
    if pickle_files(folder):
        return f"{folder} holds its weights only as {conversion(folder)}"
    if (gguf := next(folder.glob("*.gguf"), None)) is not None:
        return f"{folder} has no {_WEIGHTS}; to use its GGUF file, name the file: {gguf}"
    return f"{folder} has no weights: neither {_WEIGHTS} nor {_INDEX} is there"


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object")
    return content


def _check(kind: Any, path: Path, fields: Any) -> None:
    try:
        validated(kind, fields)
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from None
