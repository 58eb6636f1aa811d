"""The model of an `LLM`: loaded by name, or given as a module. `LLMEngine` uses it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from tokenleap import models
from tokenleap.core.config import return_freed
from tokenleap.core.garbage import collected_later
from tokenleap.errors import ConfigError, ModelError
from tokenleap.models.folder import header_of, weight_files
from tokenleap.models.generation import generation_config_of, is_obeyed, sampling_defaults
from tokenleap.models.load import check_processes, guarded
from tokenleap.models.resolver import gguf_file
from tokenleap.models.store import identity_of
from tokenleap.models.support import default_device, default_dtype

if TYPE_CHECKING:
    from transformers import (
        GenerationConfig,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )

_PIECE_BYTES = 64 * 2**20
"""Read and converted at once. A file is not mapped: pages that were read would count as memory."""

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Those that the header of a safetensors file names, and that weights are converted from."""


class WeightSource(Protocol):
    """Where packing reads a model's tensors."""

    title: str  # a short name for the model

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor, by its name in the Hugging Face model."""
        ...

    @property
    def num_bytes(self) -> int: ...

    def read(
        self, name: str, dtype: torch.dtype, rows: tuple[int, int] | None = None
    ) -> Tensor: ...


@dataclass(frozen=True)
class _Place:
    file: Path
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class FolderWeights:
    def __init__(self, folder: Path) -> None:
        self._folder, self.title = folder, _title(folder)
        self._places: dict[str, _Place] = {}
        for file in weight_files(folder):
            self._places |= _places(file)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: place.shape for name, place in self._places.items()}

    @property
    def num_bytes(self) -> int:
        return sum(place.num_bytes for place in self._places.values())

    def identity(self) -> str:
        """Text that differs when the files have changed."""
        return identity_of([self._folder / "config.json", *weight_files(self._folder)])

    def read(self, name: str, dtype: torch.dtype, rows: tuple[int, int] | None = None) -> Tensor:
        place = self._places[name]
        first, stop = rows or (0, place.shape[0])
        converted = torch.empty(stop - first, *place.shape[1:], dtype=dtype, device="cpu")
        flat, piece = converted.flatten(), _PIECE_BYTES // place.dtype.itemsize
        try:
            with place.file.open("rb") as file:
                file.seek(place.start + first * (place.num_bytes // place.shape[0]))
                for start in range(0, len(flat), piece):
                    part = flat[start : start + piece]
                    content = bytearray(len(part) * place.dtype.itemsize)
                    if file.readinto(content) != len(content):
                        raise ModelError(f"{place.file} is truncated; get it again")
                    part.copy_(torch.frombuffer(content, dtype=place.dtype))
        except OSError as error:
            raise ModelError(f"cannot read {place.file}: {error.strerror or error}") from error
        return converted


def _title(folder: Path) -> str:
    """A folder's name; of the Hub's cache, whose folders are named by their commit, the model's."""
    path = folder.resolve()
    return path.parent.parent.name if path.parent.name == "snapshots" else path.name


def _places(file: Path) -> dict[str, _Place]:
    header = header_of(file)
    if other := {entry["dtype"] for entry in header.values()} - _DTYPES.keys():
        raise ModelError(f"{file} has weights of the dtype {min(other)}, which cannot be packed")
    return {
        name: _Place(file, entry["start"], _DTYPES[entry["dtype"]], tuple(entry["shape"]))
        for name, entry in header.items()
    }


class Packed(Protocol):
    """A model without a module (see `runtime/packed.py`)."""

    @property
    def folder(self) -> Path: ...

    @property
    def config(self) -> PreTrainedConfig: ...

    @property
    def generation_config(self) -> GenerationConfig: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...


OpenPacked: TypeAlias = Callable[[str | Path, torch.dtype, torch.device], Packed | None]
"""Opens a model's packed weights; None if the model must be loaded as a whole."""


def _as_a_whole(_name: str | Path, _dtype: torch.dtype, _device: torch.device) -> None:
    """Opens nothing."""


@dataclass
class LoadedModel:
    """A model with its tokenizer, if it has one."""

    model: PreTrainedModel | Packed
    tokenizer: PreTrainedTokenizerBase | None
    path: Path | None  # its folder; None if it was given as a module
    name: str | None = None  # what the user gave to load it by
    packed: bool = False
    tensor_parallel_size: int = 1  # processes that have a shard of the module each
    generation_config: str | Path = "auto"

    @staticmethod
    @collected_later()
    def of(
        model: str | Path | PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | str | Path | None,
        dtype: str | torch.dtype,
        device: str | torch.device,
        open_packed: OpenPacked = _as_a_whole,
        tensor_parallel_size: int = 1,
        generation_config: str | Path = "auto",
    ) -> LoadedModel:
        """Load a model by name, or take a loaded module as it is. The same goes for the tokenizer.

        `open_packed` is asked first, unless several processes are to have a shard each.
        """
        check_processes(tensor_parallel_size, model, device)
        if tensor_parallel_size > 1:
            _refuse_gguf(model)
        if isinstance(tokenizer, str | Path):
            tokenizer = _tokenizer_of(tokenizer)
        if not isinstance(model, str | Path):
            return LoadedModel(
                checked_module(model, dtype, device),
                tokenizer,
                None,
                tensor_parallel_size=tensor_parallel_size,
                generation_config=generation_config,
            )
        place = default_device(device)
        kind = default_dtype(dtype, place)
        packed = None if tensor_parallel_size > 1 else open_packed(model, kind, place)
        path = models.resolve(model) if packed is None else packed.folder
        found = packed or models.load_model(path, kind, place, tensor_parallel_size)
        return LoadedModel(
            found,
            tokenizer or models.load_tokenizer(path),
            path,
            str(model),
            packed is not None,
            tensor_parallel_size,
            generation_config,
        )

    @property
    def title(self) -> str:
        return self.name or type(self.model).__name__

    def forget_model(self) -> None:
        """Let go of the model, whose weights a network may have packed; nothing may read it now.

        Calling it again gives back what was freed since.
        """
        vars(self).pop("model", None)
        if self.path is not None:  # otherwise it is the user's, and stays
            return_freed()

    @property
    def reload(self) -> Callable[[], PreTrainedModel] | None:
        """Loads the module again; None if it was given as a module. It does not keep this one."""
        dtype, device = self.model.dtype, self.model.device
        if self.path is None:
            return None
        if self.packed:
            assert self.name is not None
            return partial(_load_again, self.name, dtype, device)
        return partial(models.load_model, self.path, dtype, device, self.tensor_parallel_size)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        ids: set[int] = set()
        configured = self.settings.eos_token_id if self.settings else None
        if configured is not None:
            ids.update([configured] if isinstance(configured, int) else configured)
        if self.tokenizer is not None and isinstance(self.tokenizer.eos_token_id, int):
            ids.add(self.tokenizer.eos_token_id)
        return tuple(sorted(ids))

    @cached_property
    def settings(self) -> GenerationConfig | None:
        """The generation config, whose special tokens are always read; None if there is none."""
        return generation_config_of(self.model, self.generation_config)

    @property
    def obeyed_settings(self) -> GenerationConfig | None:
        return self.settings if is_obeyed(self.generation_config) else None

    @property
    def beam_defaults(self) -> dict[str, Any]:
        names = ("length_penalty", "early_stopping", "renormalize_logits")
        given = {name: getattr(self.obeyed_settings, name, None) for name in names}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        return sampling_defaults(self.obeyed_settings)


def _refuse_gguf(model: object) -> None:
    """Refuse a file for several processes: Transformers shards folders of safetensors."""
    if isinstance(model, str | Path) and gguf_file(model) is not None:
        raise ConfigError(
            f"tensor_parallel_size: {model} is a GGUF file, which runs in one process: take the "
            "model's safetensors."
        )


def _load_again(name: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Load a model that was packed as a whole; a GGUF file is converted for it."""
    return models.load_model(models.resolve(name), dtype, device)


def _tokenizer_of(name: str | Path) -> PreTrainedTokenizerBase:
    found = models.find_tokenizer(name)
    if found is None:
        raise ConfigError(f"tokenizer: there is none in '{name}'.")
    return found


def checked_module(
    model: object, dtype: str | torch.dtype = "auto", device: str | torch.device = "auto"
) -> PreTrainedModel:
    """A model that was given as a module; refuses what is none, or is not as it was asked for."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            "model: expected a folder, a GGUF file, an alias or a PreTrainedModel, got "
            f"{type(model).__name__}."
        )
    if dtype != "auto" and default_dtype(dtype, model.device) != model.dtype:
        raise ConfigError(f"dtype: the loaded model is in {model.dtype}; convert it with .to().")
    if device != "auto" and torch.device(device) != model.device:
        raise ConfigError(f"device: the loaded model is on {model.device}; move it with .to().")
    return model


# A model's modules without its weights, for packing them layer by layer (`runtime/packed.py`).


def skeleton(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """A decoder-only model of an architecture of `family_of`, its parameters on the meta device.

    Only what has no parameters is complete: its rotary embedding, and a factor of its embedding.
    """
    from transformers import AutoModelForCausalLM

    with guarded(f"cannot load the model in {config.name_or_path}"):
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
        with torch.device("cpu"):
            rotary = model.model.rotary_emb
            model.model.rotary_emb = type(rotary)(config=model.config)
            embedding = model.get_input_embeddings()
            if (scale := getattr(embedding, "scalar_embed_scale", None)) is not None:  # Gemma
                embedding.embed_scale = torch.tensor(scale)
    made: PreTrainedModel = model.eval().requires_grad_(False)
    return made


def fill(module: nn.Module, weights: dict[str, Tensor]) -> None:
    """Give a module's parameters, of any device, these tensors, which are not copied."""
    module.load_state_dict(weights, assign=True)
    module.requires_grad_(False)


def empty(module: nn.Module) -> None:
    module.to("meta")
