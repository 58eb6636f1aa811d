"""Reading a GGUF file, or all parts of a split one: is it complete, and can it be converted?

A setting or a tensor that conversion dropped could change what the model computes. A file with an
unknown one is therefore refused. `resolver` opens files to convert, and `tokenleap bench` compares
a peer's file with the target.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import numpy.typing as npt

from tokenleap.errors import ModelError
from tokenleap.models.folder import check_config, check_sizes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# The configuration of a GGUF file's model, in Transformers' words.
#
# Transformers' own reader parses the whole vocabulary for it, which takes ten seconds, and loses
# some settings.


_THETA = 10_000.0  # llama.cpp's, for files that do not say it

_SAMPLING = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
"""Fields of a generation config, and their names below `general.sampling` in a GGUF file."""


def config_of(file: GgufFile) -> PretrainedConfig:
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
    """A setting; it keeps no rounding error of float32, in which 1e-05 is 9.99999974e-06."""
    found = file.setting(name)
    if isinstance(found, list):
        if any(isinstance(each, list) for each in found):
            raise file.wrong(name)
        if len(set(found)) != 1:
            raise ModelError(f"{file.path} has another {name} in each layer, which is not known")
        (found,) = set(found)
    return float(str(np.float32(found))) if isinstance(found, float) else found


def _vocab_size(file: GgufFile) -> int:
    embedding = next((each for each in file.tensors if each.name == "token_embd.weight"), None)
    if embedding is None:
        raise ModelError(
            f"{file.path} lacks token_embd.weight, which every model has; get the file again"
        )
    return embedding.shape[0]


def _head_dim(file: GgufFile, given: dict[str, Any]) -> int:
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
    kind, theta = file.setting("rope.scaling.type"), _base(file, "rope.freq_base")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        rope |= {"rope_type": "linear", "factor": _number(file, "rope.scaling.factor")}
    elif kind not in (None, "none"):
        raise ModelError(
            f"{file.path} has the rope.scaling.type {kind!r}, which cannot be converted; "
            "use the model's safetensors folder instead"
        )
    elif file.about.model_type == "llama":
        rope |= _llama3(file, theta)
    if file.about.model_type != "gemma3_text":
        return rope
    # Layers with a window have angles of their own, which older files do not say.
    windowed = {"rope_type": "default", "rope_theta": _base(file, THETA_OF_WINDOWS)}
    return {"full_attention": rope, "sliding_attention": windowed}


def _llama3(file: GgufFile, theta: float) -> dict[str, Any]:
    """How Llama 3.1 and later slow their angles down; empty if the file's are not those.

    llama.cpp's converter computes the divisor of every angle from Transformers' settings. The
    largest divisor is the factor, and published models have the same of the others.
    """
    found = next((each for each in file.tensors if each.name == ROPE_DIVISORS), None)
    if found is None or not found.is_float or len(found.shape) != 1:
        return {}
    divisors = found.values()
    low, high, context, factor = 1.0, 4.0, 8192, float(divisors.max())
    angles = theta ** -(np.arange(len(divisors)) / len(divisors))
    smooth = ((context * angles / (2 * np.pi) - low) / (high - low)).clip(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if factor <= 1 or not np.allclose(divisors, expected, rtol=1e-4):
        return {}
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }


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
    """Phi-3 with a long context has factors for its angles; a window of 0 is none."""
    longest = given["max_position_embeddings"]
    if given.setdefault("original_max_position_embeddings", longest) != longest:
        raise ModelError(f"{file.path} stretches its context, which cannot be converted")
    given["sliding_window"] = given.get("sliding_window") or None


def sampling_of(file: GgufFile) -> dict[str, Any]:
    """Fields of a generation config from what a GGUF file recommends."""
    values = {own: file.get(f"general.sampling.{name}") for own, name in _SAMPLING.items()}
    found = {name: value for name, value in values.items() if value is not None}
    return {"do_sample": True, **found} if found else {}


# The architectures of GGUF files: what llama.cpp calls a setting, and what Transformers does.
#
# A setting that is not listed here could change what a model computes: a file with one is refused.


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
"""Settings of every architecture that `gguf.py` converts, or that tensors' shapes repeat."""

ROPE_DIVISORS = "rope_freqs.weight"
WINDOW_PATTERN = "attention.sliding_window_pattern"
THETA_OF_WINDOWS = "rope.freq_base_swa"

_WINDOW = {"attention.sliding_window": "sliding_window"}
_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}


@dataclass(frozen=True)
class Architecture:
    """An architecture, in the words of both libraries."""

    name: str
    model_type: str
    # further settings, and their fields in the configuration
    required: Mapping[str, str] = field(default_factory=dict)
    optional: Mapping[str, str] = field(default_factory=dict)
    converted: Collection[str] = ()
    # those that llama.cpp has in its code, by those that the file gives
    fields: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda _given: {}
    pairs: bool = False  # rows that rotate together lie side by side, not half a head apart
    # whether the native runtime runs it, quantized as the file is if sizes fit
    native: bool = False
    norms_from_one: bool = False  # the file stores the weights of norms plus one

    @property
    def known(self) -> set[str]:
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
    """The architecture of a file; None if it is unknown."""
    found = [each for each in ARCHITECTURES if each.name == name]
    experts = "expert_count" in set(settings)
    return next((each for each in found if len(found) == 1 or bool(each.required) == experts), None)


Bytes = npt.NDArray[np.uint8]

_MAGIC = b"GGUF"
_HINT = "use the model's safetensors folder instead"
_PART = re.compile(r"(.*-)(\d{5})(-of-(\d{5})\.gguf)", re.IGNORECASE)
_BLOCK = re.compile(r"blk\.(\d+)\.")
_FLOATS = {
    gguf.GGMLQuantizationType.F32,
    gguf.GGMLQuantizationType.F16,
    gguf.GGMLQuantizationType.BF16,
}


def gguf_parts(path: Path) -> list[Path]:
    """All files of a GGUF model in order: the file, or the parts of a split one."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    start, _, end, count = match.groups()
    parts = [path.with_name(f"{start}{number:05d}{end}") for number in range(1, int(count) + 1)]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise ModelError(
            f"{path} is one of {count} parts, and {missing[0]} is not beside it; get all parts"
        )
    return parts


@dataclass(frozen=True, slots=True)
class GgufTensor:
    file: Path
    name: str
    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    @property
    def elements(self) -> int:
        return int(np.prod(self.shape))

    @property
    def is_float(self) -> bool:
        return self.kind in _FLOATS

    def rows(self, first: int = 0, stop: int | None = None) -> Bytes:
        """The bytes of some rows, or all; read, not mapped, since mapped pages count as memory."""
        count = self.shape[0]
        width, stop = self.num_bytes // count, count if stop is None else stop
        size = (stop - first) * width
        try:
            found = np.fromfile(self.file, np.uint8, size, offset=self.offset + first * width)
        except OSError as error:
            raise ModelError(f"cannot read {self.file}: {error.strerror or error}") from error
        if len(found) != size:
            raise ModelError(f"{self.file} is truncated; get the file again")
        return found.reshape(stop - first, width)

    def values(self, first: int = 0, stop: int | None = None) -> npt.NDArray[np.float32]:
        """The dequantized values of some rows, or all, in GGUF's order."""
        rows = self.rows(first, stop)
        flat = gguf.dequantize(rows, self.kind).astype(np.float32, copy=False)
        values = flat.reshape(len(rows), *self.shape[1:])
        if not np.isfinite(values).all():
            raise ModelError(
                f"{self.file} is damaged: {self.name} has weights that are not finite; get the "
                f"file again"
            )
        return values


class _Reader(gguf.GGUFReader):
    """The package's reader, which takes seconds for a vocabulary, with arrays read at once."""

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[npt.NDArray[Any]], list[int], list[gguf.GGUFValueType]]:
        if raw_type != gguf.GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        data = self.data.view(np.ndarray)
        kind, count = struct.unpack_from("<IQ", data.data, orig_offs)
        parts: list[npt.NDArray[Any]] = [data[orig_offs : orig_offs + 4]]
        at = orig_offs + 12
        types = [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType(kind)]
        if kind == gguf.GGUFValueType.STRING:
            content = data.data
            for _ in range(count):
                (length,) = struct.unpack_from("<Q", content, at)
                parts.append(data[at + 8 : at + 8 + length])
                at += 8 + length
            return at - orig_offs, parts, list(range(1, len(parts))), types
        if kind not in self.gguf_scalar_to_np:
            return super()._get_field_parts(orig_offs, raw_type)
        numbers = self._get(at, self.gguf_scalar_to_np[types[1]], count)
        if len(numbers) != count:
            raise ValueError("an array that goes on after the end of the file")
        return at - orig_offs + numbers.nbytes, [*parts, numbers], [1], types


@dataclass(frozen=True, slots=True)
class GgufFile:
    path: Path
    reader: gguf.GGUFReader
    tensors: tuple[GgufTensor, ...]

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Open a file and check that all of it can be converted."""
        file = cls.read(path)
        file._check_content()
        return file

    @classmethod
    def read(cls, path: Path) -> GgufFile:
        """Open a file of any architecture, without the checks of `open`."""
        parts = gguf_parts(path)
        readers = [_reader(part) for part in parts]
        tensors = [each for part in zip(parts, readers, strict=True) for each in _tensors(*part)]
        file = cls(parts[0], readers[0], tuple(tensors))
        count = file.get("split.count") or 1
        if not isinstance(count, int):
            raise file.wrong("split.count")
        if count != len(parts):
            raise ModelError(
                f"{path} is one of {count} parts, but is not named like NAME-00001-of-"
                f"{count:05d}.gguf, so the others cannot be found; give the parts their names back"
            )
        return file

    @property
    def architecture(self) -> str:
        return str(self.get("general.architecture"))

    @property
    def elements(self) -> int:
        return sum(tensor.elements for tensor in self.tensors)

    def get(self, key: str) -> Any:
        field = self.reader.get_field(key)
        try:
            return None if field is None else field.contents()
        except (ValueError, TypeError, IndexError) as error:
            raise self.wrong(key) from error

    def wrong(self, key: str) -> ModelError:
        """The error for a metadata key whose value no model has."""
        return ModelError(f"{self.path} has a wrong value for {key}; get the file again")

    def token_id(self, name: str) -> int | None:
        """The id of a special token such as "eos"."""
        key = f"tokenizer.ggml.{name}_token_id"
        found = self.get(key)
        tokens = self.reader.get_field("tokenizer.ggml.tokens")
        count = 0 if tokens is None else len(tokens.data)
        if found is not None and not (isinstance(found, int) and 0 <= found < count):
            raise self.wrong(key)
        return found

    def setting(self, name: str) -> Any:
        """The value of one of the architecture's settings, or None."""
        return self.get(f"{self.architecture}.{name}")

    def has(self, name: str) -> bool:
        return f"{self.architecture}.{name}" in self.reader.fields

    @property
    def settings(self) -> set[str]:
        prefix = f"{self.architecture}."
        return {key.removeprefix(prefix) for key in self.reader.fields if key.startswith(prefix)}

    @property
    def about(self) -> Architecture:
        found = named(self.architecture, self.settings)
        if found is None:
            supported = ", ".join(dict.fromkeys(each.name for each in ARCHITECTURES))
            raise ModelError(
                f"{self.path} has the GGUF architecture {self.architecture!r}, which cannot be "
                f"converted (supported: {supported}); {_HINT}"
            )
        return found

    def _check_content(self) -> None:
        about = self.about
        for tensor in self.tensors:
            if not tensor.is_float and tensor.kind not in gguf.quants._type_traits:
                raise ModelError(
                    f"{self.path} has {tensor.name} in {tensor.kind.name}, a quantization that "
                    f"cannot be read; get the model in another one"
                )
        names = self.settings
        if missing := sorted({*REQUIRED_SETTINGS, *about.required} - names):
            raise ModelError(f"{self.path} lacks settings of its model: {', '.join(missing)}")
        if unknown := sorted(names - about.known):
            raise ModelError(
                f"{self.path} has settings that cannot be converted: {', '.join(unknown)}; {_HINT}"
            )
        blocks = {match[1] for each in self.tensors if (match := _BLOCK.match(each.name))}
        if self.setting("block_count") != len(blocks):
            raise ModelError(
                f"{self.path} has the tensors of {len(blocks)} blocks, and its block_count is "
                f"{self.setting('block_count')!r:.30}; get the file again"
            )


def _reader(path: Path) -> gguf.GGUFReader:
    _check_magic(path)
    try:
        return _Reader(path)
    # The reader trusts its file: a damaged one can raise any exception.
    except Exception as error:
        unknown = re.search(r"(\d+)\)? is not a valid GGMLQuantizationType", str(error))
        if unknown is not None:
            raise ModelError(
                f"{path} has tensors of the unknown quantization {unknown[1]}; get the model in "
                f"another one"
            ) from error
        size = path.stat().st_size
        raise ModelError(
            f"{path} is truncated or damaged: its {size} bytes do not hold what its head "
            f"describes; get the file again"
        ) from error


def _tensors(path: Path, reader: gguf.GGUFReader) -> Iterator[GgufTensor]:
    if sum(int(each.n_bytes) for each in reader.tensors) > path.stat().st_size:
        raise ModelError(f"{path} is damaged: its tensors share numbers; get the file again")
    for each in reader.tensors:
        shape = tuple(reversed(each.shape.tolist()))
        if not shape or min(shape) < 1:
            raise ModelError(f"{path} is damaged: {each.name} has no numbers; get the file again")
        if len(shape) == 1 and each.tensor_type not in _FLOATS:
            raise ModelError(f"{path} is damaged: {each.name} is quantized; get the file again")
        yield GgufTensor(
            path, each.name, each.tensor_type, shape, int(each.data_offset), int(each.n_bytes)
        )


def _check_magic(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    if magic != _MAGIC:
        raise ModelError(f"{path} is not a GGUF file: it starts with {magic!r}, not {_MAGIC!r}")
