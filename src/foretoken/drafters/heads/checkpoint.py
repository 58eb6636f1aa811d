"""Folders of trained EAGLE-3 heads, in the `speculators` format.

A folder holds `config.json` (see `config_file.py`) and `model.safetensors`; vLLM reads the same
format. The embedding and the head rows are the target's own, so a folder need not hold them. If it
does (other engines need the rows of a reduced vocabulary), they are not read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretoken.drafters.heads.config_file import Description, describe, read_description
from foretoken.drafters.heads.eagle_net import EagleNet
from foretoken.errors import CompatibilityError, ModelError

__all__ = ["Checkpoint", "read_checkpoint", "write_checkpoint"]

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_FROM_TARGET = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight")


@dataclass(frozen=True)
class Checkpoint:
    """What a folder holds.

    Args:
        path: the folder.
        description: its `config.json`.
        tensors: the weights by their names in the file, without those of the target.
    """

    path: Path
    description: Description
    tensors: Mapping[str, Tensor]

    def draft_tokens(self) -> Tensor:
        """[Vd] the target's ids of the draft vocabulary, ascending.

        Raises:
            ModelError: the file's map does not say that.
        """
        config, weights = self.description.config, self.path / WEIGHTS
        count, vocab_size = config.draft_vocab_size, config.vocab_size
        offsets = self.tensors.get("d2t")
        if offsets is None:
            if count != vocab_size:
                raise ModelError(
                    f"{weights}: 'd2t' is missing, the map of the {count} draft tokens to the "
                    f"target's {vocab_size}: the file is incomplete."
                )
            return torch.arange(vocab_size)
        if offsets.shape == (count,) and not offsets.is_floating_point():
            tokens = offsets.long() + torch.arange(count)
            inside = int(tokens[0]) >= 0 and int(tokens[-1]) < vocab_size
            if inside and bool((tokens.diff() > 0).all()):
                return tokens
        raise ModelError(
            f"{weights}: 'd2t' does not map {count} draft tokens to ascending token ids below "
            f"{vocab_size}: the file is damaged."
        )

    def net(self, embedding: Tensor, output_rows: Tensor) -> EagleNet:
        """The head over the target's embedding [V, E] and output rows [V, E].

        Raises:
            CompatibilityError: the target has other sizes.
            ModelError: tensors are missing, damaged, or do not have the shapes that `config.json`
                says.
        """
        config = self.description.config
        sizes = (config.vocab_size, config.hidden_size)
        for found in (tuple(embedding.shape), tuple(output_rows.shape)):
            if found != sizes:
                raise CompatibilityError(
                    f"{self.path}: this head was trained for "
                    f"{self.description.verifier.name_or_path} with a vocabulary of {sizes[0]} and "
                    f"hidden size {sizes[1]}; this model has {found[0]} and {found[1]}: train one "
                    "for it."
                )
        tokens = self.draft_tokens()
        net = EagleNet(config, embedding, output_rows[tokens.to(output_rows.device)], tokens)
        wanted = net.state_dict()
        tensors = {**self.tensors, "d2t": wanted["d2t"], "t2d": wanted["t2d"]}
        self._check(tensors, wanted)
        net.load_state_dict(tensors)
        net.train(False)
        return net

    def _check(self, tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
        weights = self.path / WEIGHTS
        for name in sorted(wanted.keys() ^ tensors.keys()):
            state = "is missing" if name in wanted else "is not part of an EAGLE-3 head"
            raise ModelError(
                f"{weights}: tensor '{name}' {state}: the file is incomplete, or of another kind "
                "of drafter."
            )
        for name, tensor in tensors.items():
            if tensor.shape != wanted[name].shape:
                raise ModelError(
                    f"{weights}: tensor '{name}' has shape {list(tensor.shape)}, and {CONFIG} says "
                    f"{list(wanted[name].shape)}: the two do not belong together."
                )
            if not tensor.isfinite().all():
                raise ModelError(
                    f"{weights}: tensor '{name}' has numbers that are not finite: the file is "
                    "damaged, or its training failed."
                )


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Read a folder.

    Raises:
        ModelError: it does not exist, is damaged, or is of another kind.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ModelError(f"there is no folder {path}: give the folder of a trained head.")
    description = read_description(folder / CONFIG)
    return Checkpoint(folder, description, _read_tensors(folder / WEIGHTS))


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist: the folder is incomplete.") from None
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read: {error}.") from None
    return {name: tensor for name, tensor in tensors.items() if name not in _FROM_TARGET}


def write_checkpoint(folder: Path, net: EagleNet, description: Description) -> None:
    """Write a head in bfloat16; each file appears complete or not at all.

    Args:
        folder: made if it does not exist.
        net: the head.
        description: what `config.json` is to say.

    Raises:
        ModelError: the folder cannot be written.
    """
    tensors = {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for name, tensor in net.state_dict().items()
    }
    text = json.dumps(describe(description), indent=2) + "\n"
    _replace(folder / WEIGHTS, lambda path: save_file(tensors, path))
    _replace(folder / CONFIG, lambda path: path.write_text(text, encoding="utf-8"))


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write beside the file, then put the result in its place."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(beside)
        beside.replace(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be written: {error}.") from None
    finally:
        with suppress(OSError):
            beside.unlink()
