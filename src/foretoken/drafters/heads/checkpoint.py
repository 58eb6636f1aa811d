"""Folders of trained EAGLE-3 heads, in the `speculators` format.

A folder holds `config.json` (see `config_file.py`) and `model.safetensors`; vLLM reads the same
format. The embedding and the output rows are mostly the target's own, so a folder need not hold
them. If it does, they count: EAGLE's authors trained output rows of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from foretoken.drafters.heads.config_file import Description, describe, read_description
from foretoken.drafters.heads.eagle_net import EagleNet
from foretoken.drafters.heads.folder import (
    CONFIG,
    WEIGHTS,
    check_sizes,
    check_tensors,
    draft_tokens,
    existing_folder,
    read_tensors,
    write_folder,
)

__all__ = ["EMBEDDING", "OUTPUT_ROWS", "Checkpoint", "read_checkpoint", "write_checkpoint"]

EMBEDDING, OUTPUT_ROWS = "embed_tokens.weight", "lm_head.weight"
_NOT_READ = "verifier_lm_head.weight"  # the target's output rows, beside the head's own


@dataclass(frozen=True)
class Checkpoint:
    """What a folder holds.

    Args:
        path: the folder.
        description: its `config.json`.
        tensors: the weights by their names in the file, without those of `vocabulary`.
        vocabulary: the embedding and the output rows, as far as the file holds them.
    """

    path: Path
    description: Description
    tensors: Mapping[str, Tensor]
    vocabulary: Mapping[str, Tensor]

    def draft_tokens(self) -> Tensor:
        """[Vd] the target's ids of the draft vocabulary, ascending.

        Raises:
            ModelError: the file's map does not say that.
        """
        config = self.description.config
        sizes = (config.draft_vocab_size, config.vocab_size)
        return draft_tokens(self.path / WEIGHTS, self.tensors.get("d2t"), *sizes)

    def net(self, embedding: Tensor, output_rows: Tensor) -> EagleNet:
        """The head over the target's embedding [V, E] and output rows [V, E].

        In place of these it has the file's own, where they differ.

        Raises:
            CompatibilityError: the target has other sizes.
            ModelError: tensors are missing, damaged, or do not have the shapes that `config.json`
                says.
        """
        config = self.description.config
        sizes = (config.vocab_size, config.hidden_size)
        for found in (tuple(embedding.shape), tuple(output_rows.shape)):
            check_sizes(self.path, self.description.verifier, sizes, found)
        tokens = self.draft_tokens()
        rows = self._own(OUTPUT_ROWS, output_rows[tokens.to(output_rows.device)])
        net = EagleNet(config, self._own(EMBEDDING, embedding), rows, tokens)
        wanted = net.state_dict()
        tensors = {**self.tensors, "d2t": wanted["d2t"], "t2d": wanted["t2d"]}
        check_tensors(self.path / WEIGHTS, tensors, wanted, "an EAGLE-3 head")
        net.load_state_dict(tensors)
        net.train(False)
        return net

    def _own(self, name: str, shared: Tensor) -> Tensor:
        """The file's own tensor, or the target's if that is the same or the file has none."""
        own = self.vocabulary.get(name)
        if own is None:
            return shared
        check_tensors(self.path / WEIGHTS, {name: own}, {name: shared}, "an EAGLE-3 head")
        return shared if torch.equal(own, shared.to("cpu", own.dtype)) else own.to(shared)


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Read a folder.

    Raises:
        ModelError: it does not exist, is damaged, or is of another kind.
    """
    folder = existing_folder(path)
    description = read_description(folder / CONFIG)
    tensors = read_tensors(folder / WEIGHTS)
    tensors.pop(_NOT_READ, None)
    names = tensors.keys() & {EMBEDDING, OUTPUT_ROWS}
    return Checkpoint(folder, description, tensors, {name: tensors.pop(name) for name in names})


def write_checkpoint(folder: Path, net: EagleNet, description: Description) -> None:
    """Write a head in bfloat16; each file appears complete or not at all.

    Args:
        folder: made if it does not exist.
        net: the head.
        description: what `config.json` is to say.

    Raises:
        ModelError: the folder cannot be written.
    """
    write_folder(folder, net.state_dict(), describe(description))
