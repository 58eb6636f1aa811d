"""Convert a GGUF file to a Hugging Face folder: config, weights in float32, tokenizer.

Transformers' own reader drops tensors without a message, and fills parameters that the file lacks
with random numbers. `resolver` calls this module.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import gguf
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokenleap.errors import ModelError
from tokenleap.models.gguf import ROPE_DIVISORS, Bytes, GgufFile, GgufTensor, config_of, sampling_of
from tokenleap.models.load import guarded, load_tokenizer
from tokenleap.models.store import progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_FLOAT_BYTES = 4
# Limits the memory of a conversion.
_SHARD_BYTES = 2_000_000_000
# Config and tokenizer: a few megabytes even with the largest vocabularies.
_SMALL_FILES_BYTES = 32_000_000


def converted_bytes(file: GgufFile) -> int:
    """How many bytes the Hugging Face folder of a GGUF file takes, rounded up."""
    return file.elements * _FLOAT_BYTES + _SMALL_FILES_BYTES


def convert_gguf(file: GgufFile, folder: Path) -> None:
    """Convert a GGUF file to a Hugging Face folder with the exact dequantized values, float32."""
    with progress(
        f"Converting {file.path.name}", "half a minute per GB", file.elements * 4
    ) as report:
        model = convert_settings(file, folder)
        with guarded(f"cannot convert {file.path}"):
            _write_weights(GgufWeights(file, model), folder, report)


def convert_settings(file: GgufFile, folder: Path) -> PreTrainedModel:
    with guarded(f"cannot convert {file.path}"):
        model = empty_model(file)
        _save_configs(file, model, folder)
        GgufWeights(file, model)  # checks the tensors
        convert_tokenizer(file, folder)
    return model


def empty_model(file: GgufFile) -> PreTrainedModel:
    """The file's model on the meta device."""
    from transformers import AutoModelForCausalLM

    config = config_of(file)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.config.architectures = [type(model).__name__]
    model.config.dtype = torch.float32
    return model


def _save_configs(file: GgufFile, model: PreTrainedModel, folder: Path) -> None:
    from transformers import GenerationConfig

    model.config.save_pretrained(folder)
    # A chat model may end a turn and a text with different tokens.
    ends = [file.token_id(end) for end in ("eos", "eot")]
    stops = list(dict.fromkeys(end for end in ends if end is not None))
    generation = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=file.token_id("bos"),
        eos_token_id=stops[0] if len(stops) == 1 else stops or None,
        pad_token_id=file.token_id("padding"),
        **sampling_of(file),
    )
    generation.save_pretrained(folder)


def _write_weights(weights: GgufWeights, folder: Path, report: Callable[[int], None]) -> None:
    from safetensors.torch import save_file

    shards = list(_shards(weights.shapes))
    index: dict[str, str] = {}
    done = 0
    for number, shard in enumerate(shards, start=1):
        tensors: dict[str, Tensor] = {}
        for name in shard:
            tensors[name] = weights.read(name, torch.float32).contiguous()
            done += tensors[name].nbytes
            report(done)
        shard_name = "model.safetensors"
        if len(shards) > 1:
            shard_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, folder / shard_name, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, shard_name)
    if len(shards) > 1:
        content = json.dumps({"metadata": {"total_size": done}, "weight_map": index}, indent=2)
        (folder / "model.safetensors.index.json").write_text(content, encoding="utf-8")


def _shards(shapes: dict[str, tuple[int, ...]]) -> Iterator[list[str]]:
    """Groups of weights, each of at most `_SHARD_BYTES` dequantized bytes or one weight."""
    shard: list[str] = []
    size = 0
    for name, shape in shapes.items():
        num_bytes = torch.Size(shape).numel() * _FLOAT_BYTES
        if shard and size + num_bytes > _SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += num_bytes
    yield shard


# The weights of a GGUF file, by their Hugging Face names: as they are stored, or as values.
#
# `runtime/packed.py` packs them. `convert` writes the values of all of them.


_Sources: TypeAlias = tuple[GgufTensor, ...]
"""The tensors that make up a weight: one, or the gates and the ups of all experts."""

_PIECE_ELEMENTS = 2**23  # values that are dequantized at once

_EXPERTS = ".experts."
_GATE_UP = "gate_up_proj"


class GgufWeights:
    """The weights of a GGUF file (see `WeightSource`)."""

    def __init__(self, file: GgufFile, model: PreTrainedModel) -> None:
        self.title = file.path.stem
        self._file, self._model = file, model
        self._sources = _sources(file, model)
        state = model.state_dict()
        self._shapes = {name: tuple(state[name].shape) for name in self._sources}
        for name, sources in self._sources.items():
            _check_shape(file, sources, self._shapes[name])

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self._file.tensors)

    def kind(self, name: str) -> gguf.GGMLQuantizationType:
        return self._sources[name][0].kind

    def is_float(self, name: str) -> bool:
        return self._sources[name][0].is_float

    def blocks(self, name: str) -> Bytes:
        """The bytes of all rows of a weight [rows, bytes of a row], in the model's order."""
        (tensor,) = self._sources[name]
        return np.ascontiguousarray(self._reordered(tensor, tensor.rows()))

    def read(self, name: str, dtype: torch.dtype, rows: tuple[int, int] | None = None) -> Tensor:
        sources = self._sources[name]
        if len(sources) > 1:  # [experts, I, E] each
            assert rows is None
            return torch.cat([_values(tensor, dtype) for tensor in sources], dim=1)
        (tensor,) = sources
        if self._file.about.norms_from_one and name.endswith("norm.weight"):
            return (_values(tensor, torch.float32) - 1).to(dtype)
        if rows is not None:  # of the embedding or the output layer, which are never reordered
            return _values(tensor, dtype, *rows)
        values = _values(tensor, dtype)
        given = np.arange(len(values))[:, None]
        order = self._reordered(tensor, given)
        if order is not given:
            values = values[torch.from_numpy(order[:, 0])]
        return values.view(self._shapes[name])

    def _reordered(self, tensor: GgufTensor, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """All rows of a tensor, values or bytes, in the order of the Hugging Face model."""
        config = self._model.config
        if self._file.about.pairs and ".attn_q." in tensor.name:
            return _rotary_halves(rows, config.num_attention_heads)
        if self._file.about.pairs and ".attn_k." in tensor.name:
            return _rotary_halves(rows, config.num_key_value_heads)
        return rows


def _sources(file: GgufFile, model: PreTrainedModel) -> dict[str, _Sources]:
    wanted = _gguf_names(file, model)
    present = {tensor.name: tensor for tensor in file.tensors}
    needed = {each for names in wanted.values() for each in names}
    if missing := sorted(needed - present.keys()):
        raise ModelError(
            f"{file.path} lacks {len(missing)} weights of its model, {missing[0]} first; "
            f"get the file again"
        )
    rope = getattr(model.config, "rope_parameters", None) or {}
    converted = {ROPE_DIVISORS} if rope.get("rope_type") == "llama3" else set()
    if unknown := sorted(present.keys() - needed - converted):
        raise ModelError(
            f"{file.path} has {len(unknown)} weights that cannot be converted, {unknown[0]} "
            f"first; use the model's safetensors folder instead"
        )
    return {name: tuple(present[each] for each in names) for name, names in wanted.items()}


def _gguf_names(file: GgufFile, model: PreTrainedModel) -> dict[str, list[str]]:
    """GGUF's names of the tensors of every weight, by Hugging Face name."""
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    layers = model.config.num_hidden_layers
    gguf_names = gguf.get_tensor_name_map(kinds[file.architecture], layers)
    names: dict[str, list[str]] = {}
    for name in model.state_dict():
        stem, _, suffix = name.rpartition(".")
        if _EXPERTS in name:  # one parameter for all experts, without "weight"
            parts = ("gate_proj", "up_proj") if suffix == _GATE_UP else (suffix,)
            names[name] = [f"{gguf_names.get_name(f'{stem}.{part}')}.weight" for part in parts]
        else:
            names[name] = [f"{gguf_names.get_name(stem)}.{suffix}"]
    if model.config.tie_word_embeddings:
        del names["lm_head.weight"]
    return names


def _check_shape(file: GgufFile, sources: _Sources, expected: tuple[int, ...]) -> None:
    tensor = sources[0]
    shapes = [source.shape for source in sources]
    if len(sources) > 1:
        experts, outputs, *inputs = expected
        fits = shapes == len(sources) * [(experts, outputs // len(sources), *inputs)]
    else:  # a single row is stored as a vector
        fits = tensor.shape == expected or (1, *tensor.shape) == expected
    if not fits:
        found = shapes[0] if len(shapes) == 1 else shapes
        raise ModelError(f"{file.path} has {tensor.name} as {found}, expected {expected}")


def _values(
    tensor: GgufTensor, dtype: torch.dtype, first: int = 0, stop: int | None = None
) -> Tensor:
    """Some rows of a tensor, or all, in GGUF's order."""
    stop = tensor.shape[0] if stop is None else stop
    values = torch.empty(stop - first, *tensor.shape[1:], dtype=dtype, device="cpu")
    for start, end in _pieces(tensor, first, stop):
        values[start - first : end - first] = torch.from_numpy(tensor.values(start, end))
    return values


def _pieces(tensor: GgufTensor, first: int, stop: int) -> list[tuple[int, int]]:
    """Rows from `first` to `stop` in pieces of a limited size."""
    rows = max(1, _PIECE_ELEMENTS * tensor.shape[0] // max(1, tensor.elements))
    return [(start, min(start + rows, stop)) for start in range(first, stop, rows)]


def _rotary_halves(weight: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Put the rows of heads [heads * head size, ...] that rotate together half a head apart.

    GGUF stores them side by side (a0 b0 a1 b1), Hugging Face as a0 a1 b0 b1.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


# The tokenizer of a GGUF file, as files that `AutoTokenizer` reads.
#
# Transformers makes a tokenizer from a GGUF file's vocabulary, but splits some text differently
# from the model's own tokenizer. This module corrects the known cases and refuses the others.
# `convert` calls it.


# `tokenizer.ggml.pre` names the pre-tokenizer. Transformers 5.23 splits text for these correctly.
_CORRECT_SPLITS = {"gpt-2", "qwen2", "dbrx", "smaug-bpe", "llama-bpe", "llama3", "llama-v3"}
# It splits text for these as for GPT-2, although they split off every digit first.
_DIGIT_SPLITS = {"smollm", "refact", "starcoder", "command-r"}
# A word that is a token by itself is not put together from pieces.
_WHOLE_WORDS = {"llama-bpe", "llama3", "llama-v3"}

# What Transformers calls the parts of a vocabulary, and the last part of GGUF's keys.
_VOCABULARY = {
    "tokenizer_type": "model",
    "pre_tokenizer_type": "pre",
    "tokens": "tokens",
    "scores": "scores",
    "token_type": "token_type",
    "merges": "merges",
}
_SPECIAL = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}

# Token types whose text must not change: normal, control, user-defined.
_CHECKED_TYPES = {1, 3, 4}
_PROBE = "  Two  spaces, 12 apples\n\n\tand 3.14 more;\r\n it's I'LL (é🎉中文) "
_MAX_TOKEN = 4096  # characters of a token: Transformers tries all its parts, two by two
_HINT = "use the model's safetensors folder instead"


def convert_tokenizer(file: GgufFile, folder: Path) -> None:
    """Write the tokenizer of a GGUF file, with its chat template, into a folder."""
    from transformers import PreTrainedTokenizerFast

    kind, split = file.get("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre")
    if kind != "llama" and (kind != "gpt2" or split not in _CORRECT_SPLITS | _DIGIT_SPLITS):
        raise ModelError(
            f"{file.path} has a tokenizer (model {kind!r}, pre {split!r}) that cannot be "
            f"converted; {_HINT}"
        )
    _check_vocabulary(file)
    backend = _backend(file)
    if split in _DIGIT_SPLITS:
        _split_digits(backend)
    if split in _WHOLE_WORDS:
        backend.model.ignore_merges = True
    if kind == "llama":
        _keep_leading_spaces(backend, file.get("tokenizer.ggml.add_space_prefix") is not False)
    tokens = file.get("tokenizer.ggml.tokens")
    special = {name: file.token_id(key) for name, key in _SPECIAL.items()}
    # Files of these vocabularies need not say that a text begins with a token of its own.
    begins = file.get("tokenizer.ggml.add_bos_token")
    usual = kind == "llama" or split in _WHOLE_WORDS
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        model_max_length=file.setting("context_length"),
        chat_template=file.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **{name: tokens[number] for name, number in special.items() if number is not None},
    )
    tokenizer.add_bos_token = usual if begins is None else begins  # type: ignore[misc]
    tokenizer.add_eos_token = bool(file.get("tokenizer.ggml.add_eos_token"))  # type: ignore[misc]
    tokenizer.save_pretrained(folder)
    _repeat_added(tokenizer, folder / "tokenizer_config.json")
    _check_saved(file, tokenizer, folder)


def _repeat_added(tokenizer: PreTrainedTokenizerBase, config: Path) -> None:
    """Write the added tokens where Transformers reads them without parsing the vocabulary."""
    added = tokenizer.added_tokens_decoder
    content = json.loads(config.read_text(encoding="utf-8"))
    content["added_tokens_decoder"] = {number: x.__getstate__() for number, x in added.items()}
    config.write_text(json.dumps(content, indent=2), encoding="utf-8")


def _check_vocabulary(file: GgufFile) -> None:
    tokens = file.get("tokenizer.ggml.tokens")
    if not _are(str, tokens) or max(map(len, tokens), default=_MAX_TOKEN + 1) > _MAX_TOKEN:
        raise file.wrong("tokenizer.ggml.tokens")
    for key, kind, size in (
        ("scores", float, len(tokens)),
        ("token_type", int, len(tokens)),
        ("merges", str, None),
    ):
        name = f"tokenizer.ggml.{key}"
        given = file.get(name)
        if given is not None and not (_are(kind, given) and size in (None, len(given))):
            raise file.wrong(name)
    for key, single in (("tokenizer.chat_template", str), ("tokenizer.ggml.add_bos_token", bool)):
        if not isinstance(file.get(key), single | None):
            raise file.wrong(key)


def _are(kind: type, values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(each, kind) for each in values)


def _backend(file: GgufFile) -> Any:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    given = {name: file.get(f"tokenizer.ggml.{key}") for name, key in _VOCABULARY.items()}
    present = {name: value for name, value in given.items() if value is not None}
    return convert_gguf_tokenizer(file.architecture, present)[0]


def _split_digits(backend: Any) -> None:
    from tokenizers import pre_tokenizers

    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _keep_leading_spaces(backend: Any, prefix: bool) -> None:
    """Insert a space before the text even if it starts with one, as SentencePiece does.

    Transformers 5.23 does not, and ignores that some vocabularies have no such prefix.
    """
    from tokenizers import decoders, normalizers

    replace = [normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), *replace] if prefix else replace
    )
    backend.pre_tokenizer = None
    join = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*join, decoders.Strip(" ", 1, 0)] if prefix else join)


def _pieces_of(tokenizer: Any) -> tuple[list[int], list[str]]:
    """How the probe text is encoded, and how the pre-tokenizer splits it."""
    splitter = tokenizer.backend_tokenizer.pre_tokenizer
    split = [] if splitter is None else [piece for piece, _ in splitter.pre_tokenize_str(_PROBE)]
    return tokenizer(_PROBE)["input_ids"], split


def _check_saved(file: GgufFile, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Check that the saved tokenizer encodes like `tokenizer` and has the file's tokens."""
    loaded = load_tokenizer(folder)
    assert loaded is not None
    # For some architectures Transformers ignores the saved class and loads another.
    if _pieces_of(loaded) != _pieces_of(tokenizer):
        raise ModelError(
            f"{file.path} has a tokenizer that Transformers changes when loading it; {_HINT}"
        )
    tokens = file.get("tokenizer.ggml.tokens")
    types = file.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    spaces = file.get("tokenizer.ggml.model") == "llama"
    loaded_tokens = loaded.convert_ids_to_tokens(list(range(len(tokens))))
    for number, (old, new, kind) in enumerate(zip(tokens, loaded_tokens, types, strict=True)):
        # llama.cpp stores spaces of user-defined tokens as they are.
        same = new == old or (spaces and new == old.replace(" ", "▁"))
        if not same and kind in _CHECKED_TYPES:
            raise ModelError(
                f"{file.path} has token {number} {old!r}, which Transformers turns into {new!r}; "
                f"{_HINT}"
            )
