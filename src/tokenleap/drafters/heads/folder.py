"""Read, check and write the folders of trained heads: all that they have in common.

A folder holds a `config.json` and the weights. Every error names the file, says what is wrong with
it, and is one line.
"""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from annotated_types import Gt, Le
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tokenleap.core import files
from tokenleap.core.files import write_whole
from tokenleap.errors import CompatibilityError, ModelError
from tokenleap.models.folder import indexed_files
from tokenleap.runtime.target import Target

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

_Fields = TypeVar("_Fields")


@dataclass(frozen=True)
class Verifier:
    """The model that a head was trained for.

    Args:
        num_layers: its decoder layers; None if the file does not say.
    """

    name_or_path: str
    architectures: tuple[str, ...] = ()
    num_layers: int | None = None


def first_of(folder: Path, *names: str) -> Path:
    """The first of these files that exists; the last one if there is none."""
    paths = [folder / name for name in names]
    return next((path for path in paths if path.exists()), paths[-1])


def read_json(path: Path) -> dict[str, Any]:
    """The object that a file holds."""
    try:
        value = files.read_json(path)
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist: give the folder of a trained head.") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}.") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object.")
    return value


def validated(kind: type[_Fields], fields: Any, path: Path) -> _Fields:
    try:
        return files.validated(kind, fields)
    except ValueError as error:
        raise ModelError(f"{path}: {error}.") from None


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or of PyTorch's `.pt` (only tensors are loaded)."""
    try:
        tensors: Any = load_file(path) if path.suffix == ".safetensors" else _unpickled(path)
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist: the folder is incomplete.") from None
    except pickle.UnpicklingError:  # PyTorch's message says how to run it all the same
        raise ModelError(
            f"{path} cannot be read: it is damaged, or a pickle of more than tensors, which could "
            "run code and is never loaded; save its tensors as safetensors."
        ) from None
    except Exception as error:  # damaged files make PyTorch's reader raise errors of any kind
        reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
        raise ModelError(f"{path} cannot be read: {reason}.") from None
    if not isinstance(tensors, dict) or not all(isinstance(x, Tensor) for x in tensors.values()):
        raise ModelError(f"{path} holds something else than tensors by their names.")
    for name, tensor in tensors.items():
        if not _is_whole(tensor):
            raise ModelError(f"{path}: tensor '{name}' has other numbers than the file holds.")
    return {str(name): tensor for name, tensor in tensors.items()}


def _is_whole(tensor: Tensor) -> bool:
    """Whether all numbers of a tensor are in memory, each of them once."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return False
    return tensor.nbytes <= tensor.untyped_storage().nbytes()


def read_shards(folder: Path) -> dict[str, Tensor]:
    """The tensors of model.safetensors, or of the files that its index names."""
    index = f"{WEIGHTS}.index.json"
    if (folder / WEIGHTS).exists() or not (folder / index).exists():
        return read_tensors(folder / WEIGHTS)
    tensors: dict[str, Tensor] = {}
    for file in indexed_files(folder, index, (".safetensors",)):
        tensors |= read_tensors(file)
    return tensors


def _unpickled(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about files that it then refuses
        return torch.load(path, map_location="cpu", weights_only=True)


def check_tensors(
    path: Path, tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor], kind: str
) -> None:
    """Compare a file's tensors with those that its configuration asks for."""
    for name in sorted(wanted.keys() ^ tensors.keys()):
        state = "is missing" if name in wanted else f"is not part of {kind}"
        raise ModelError(
            f"{path}: tensor '{name}' {state}: the file is incomplete, or of another kind of "
            "drafter."
        )
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            raise ModelError(
                f"{path}: tensor '{name}' has shape {list(tensor.shape)}, and {CONFIG} says "
                f"{list(wanted[name].shape)}: the two do not belong together."
            )
        if wanted[name].is_floating_point() and tensor.dtype not in _DTYPES:
            raise ModelError(f"{path}: tensor '{name}' is {tensor.dtype}: convert it to float16.")
        if not tensor.isfinite().all():
            raise ModelError(
                f"{path}: tensor '{name}' has numbers that are not finite: the file is damaged, or "
                "its training failed."
            )


def draft_tokens(path: Path, offsets: Tensor | None, count: int, vocab_size: int) -> Tensor:
    """The draft vocabulary of a file.

    Args:
        offsets: [Vd] its tensor `d2t`: the target's id of a draft token, minus the draft token's.

    Returns:
        [Vd] the target's ids, ascending.
    """
    if offsets is None:
        if count != vocab_size:
            raise ModelError(
                f"{path}: 'd2t' is missing, the map of the {count} draft tokens to the target's "
                f"{vocab_size}: the file is incomplete."
            )
        return torch.arange(vocab_size)
    if offsets.shape == (count,) and not offsets.is_floating_point():
        tokens = offsets.long() + torch.arange(count)
        if ascend(tokens, vocab_size):
            return tokens
    raise ModelError(
        f"{path}: 'd2t' does not map {count} draft tokens to ascending token ids below "
        f"{vocab_size}: the file is damaged."
    )


def ascend(tokens: Tensor, vocab_size: int) -> bool:
    """Whether these are different ids below a vocabulary's size, in order."""
    inside = bool(((tokens >= 0) & (tokens < vocab_size)).all())  # `diff` may overflow
    return inside and bool((tokens.diff() > 0).all())


def check_sizes(
    folder: Path, verifier: Verifier, sizes: tuple[int, int], found: tuple[int, ...]
) -> None:
    if sizes != found:
        raise CompatibilityError(
            f"{folder}: this head was trained for {verifier.name_or_path} with a vocabulary of "
            f"{sizes[0]} and hidden size {sizes[1]}; this model has {found[0]} and {found[1]}: "
            "train one for it."
        )


def check_layers(folder: Path, verifier: Verifier, layers: int) -> None:
    if verifier.num_layers not in (None, layers):
        raise CompatibilityError(
            f"{folder}: this head was trained for {verifier.name_or_path} with "
            f"{verifier.num_layers} layers, and this model has {layers}: train one for it."
        )


def vocabulary_weights(target: Target) -> tuple[Tensor, Tensor]:
    """The target's embedding and output rows, [V, E] each."""
    weights = target.vocabulary_weights
    if weights is None:
        raise CompatibilityError(
            "the weights of this model's output layer are not in memory any more: load the model "
            "by name, or name the head in LLM(speculative_config=...)."
        )
    return weights


def write_folder(folder: Path, tensors: Mapping[str, Tensor], fields: Mapping[str, Any]) -> None:
    """Write a head, its weights in bfloat16; each file appears complete or not at all."""
    narrow = {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    _write(folder / WEIGHTS, lambda beside: save_file(narrow, beside))
    write_fields(folder, fields)


def write_fields(folder: Path, fields: Mapping[str, Any]) -> None:
    text = json.dumps(fields, indent=2) + "\n"
    _write(folder / CONFIG, lambda beside: beside.write_text(text, encoding="utf-8"))


def _write(path: Path, write: Callable[[Path], object]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, write)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be written: {error}.") from None


# What folders of our own form note in `config.json` on the training and its target.
#
# {"tokenleap": {"verifier": {"name_or_path": ..., "architectures": [...]},
# "verifier_layers": 30, ...}}


class Notes(BaseModel):
    model_config = ConfigDict(extra="allow")

    verifier_layers: Annotated[int, Gt(0), Le(2**24)] | None = None


class _OwnNotes(Notes):
    verifier: Verifier


def noted(fields: Mapping[str, Any], path: Path) -> tuple[Verifier, Mapping[str, Any]]:
    """The target that one of our own folders names, and what else it notes on the training."""
    notes = validated(_OwnNotes, fields.get("tokenleap"), path)
    return replace(notes.verifier, num_layers=notes.verifier_layers), notes.model_extra or {}


def notes_of(verifier: Verifier, notes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `config.json` that `noted` reads."""
    named = {"name_or_path": verifier.name_or_path, "architectures": list(verifier.architectures)}
    return {"tokenleap": {**notes, "verifier": named, "verifier_layers": verifier.num_layers}}
