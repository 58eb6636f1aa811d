"""The configuration of a GGUF file's model, in Transformers' words. `convert` calls it.

Transformers' own reader parses the whole vocabulary for it, which takes ten seconds, and loses some
settings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tokenleap.errors import ModelError
from tokenleap.models.folder import check_config, check_sizes
from tokenleap.models.gguf_architectures import (
    REQUIRED_SETTINGS,
    THETA_OF_WINDOWS,
    WINDOW_PATTERN,
)
from tokenleap.models.gguf_file import GgufFile

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["config_of", "sampling_of"]

_THETA = 10_000.0
"""llama.cpp's, for files that do not say it."""

_SAMPLING = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
"""Fields of a generation config, and their names below `general.sampling` in a GGUF file."""


def config_of(file: GgufFile) -> PretrainedConfig:
    """The configuration of a file that `GgufFile.open` has checked.

    Raises:
        ModelError: The file says something that cannot be converted.
    """
    from transformers import AutoConfig

    about = file.about
    names = {**REQUIRED_SETTINGS, **about.required, **about.optional}
    given = {to: _number(file, name) for name, to in names.items() if file.has(name)}
    check_config(file.path, given)
    given["head_dim"] = _head_dim(file, given)
    groups = _number(file, "attention.head_count_kv")
    given["num_key_value_heads"] = given["num_attention_heads"] if groups is None else groups
    given["vocab_size"] = _vocab_size(file)
    given["tie_word_embeddings"] = all(tensor.name != "output.weight" for tensor in file.tensors)
    given["rope_parameters"] = _rope(file)
    for end in ("bos", "eos", "pad"):
        kind = {"pad": "padding"}.get(end, end)
        given[f"{end}_token_id"] = file.token_id(kind)
    if (pattern := file.setting(WINDOW_PATTERN)) is not None:
        if not pattern or not isinstance(pattern, int | list):
            raise file.wrong(WINDOW_PATTERN)
        given["layer_types"] = _layer_types(pattern, given["num_hidden_layers"])
    if about.model_type == "phi3":
        _check_phi(file, given)
    check_config(file.path, given)
    check_sizes(file.path, given, {each.name: each.shape for each in file.tensors})
    config: PretrainedConfig = AutoConfig.for_model(
        about.model_type, **(given | about.fields(given))
    )
    return config


def _number(file: GgufFile, name: str) -> Any:
    """A setting; it keeps no rounding error of float32, in which 1e-05 is 9.99999974e-06.

    Raises:
        ModelError: It differs between layers.
    """
    found = file.setting(name)
    if isinstance(found, list):
        if any(isinstance(each, list) for each in found):
            raise file.wrong(name)
        if len(set(found)) != 1:
            raise ModelError(f"{file.path} has another {name} in each layer, which is not known")
        (found,) = set(found)
    return float(str(np.float32(found))) if isinstance(found, float) else found


def _vocab_size(file: GgufFile) -> int:
    """Rows of the embedding.

    Raises:
        ModelError: There is none.
    """
    embedding = next((each for each in file.tensors if each.name == "token_embd.weight"), None)
    if embedding is None:
        raise ModelError(
            f"{file.path} lacks token_embd.weight, which every model has; get the file again"
        )
    return embedding.shape[0]


def _head_dim(file: GgufFile, given: dict[str, Any]) -> int:
    """The width of a head.

    Raises:
        ModelError: Only a part of each head is rotated.
    """
    sizes = {_number(file, name) for name in ("attention.key_length", "rope.dimension_count")}
    sizes.discard(None)
    if not all(isinstance(size, int) for size in sizes):
        raise file.wrong("attention.key_length")
    if not sizes:
        return int(given["hidden_size"] // given["num_attention_heads"])
    if len(sizes) > 1:
        raise ModelError(f"{file.path} rotates only a part of each head, which cannot be converted")
    return int(sizes.pop())


def _rope(file: GgufFile) -> dict[str, Any]:
    """The rotary embedding's parameters.

    Raises:
        ModelError: It is scaled in a way that cannot be converted.
    """
    kind, theta = file.setting("rope.scaling.type"), _base(file, "rope.freq_base")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        rope |= {"rope_type": "linear", "factor": _number(file, "rope.scaling.factor")}
    elif kind not in (None, "none"):
        raise ModelError(
            f"{file.path} has the rope.scaling.type {kind!r}, which cannot be converted; "
            "use the model's safetensors folder instead"
        )
    if file.about.model_type != "gemma3_text":
        return rope
    # Layers with a window have angles of their own, which older files do not say.
    windowed = {"rope_type": "default", "rope_theta": _base(file, THETA_OF_WINDOWS)}
    return {"full_attention": rope, "sliding_attention": windowed}


def _base(file: GgufFile, name: str) -> Any:
    return _number(file, name) if file.has(name) else _THETA


def _layer_types(pattern: int | list[bool], layers: int) -> list[str]:
    """Which layers have a window: a list says it, or the last of so many layers has none."""
    windowed = (
        pattern
        if isinstance(pattern, list)
        else [bool((index + 1) % pattern) for index in range(layers)]
    )
    return ["sliding_attention" if each else "full_attention" for each in windowed[:layers]]


def _check_phi(file: GgufFile, given: dict[str, Any]) -> None:
    """Phi-3 with a long context has factors for its angles; a window of 0 is none.

    Raises:
        ModelError: It has a long context.
    """
    longest = given["max_position_embeddings"]
    if given.setdefault("original_max_position_embeddings", longest) != longest:
        raise ModelError(f"{file.path} stretches its context, which cannot be converted")
    given["sliding_window"] = given.get("sliding_window") or None


def sampling_of(file: GgufFile) -> dict[str, Any]:
    """Fields of a generation config from what a GGUF file recommends."""
    values = {own: file.get(f"general.sampling.{name}") for own, name in _SAMPLING.items()}
    found = {name: value for name, value in values.items() if value is not None}
    return {"do_sample": True, **found} if found else {}
