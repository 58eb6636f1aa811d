"""Folders of heads without attention: our own form, and how published ones become the same.

Our own `config.json` is

    {"model_type": "tokenleap_head", "method": "medusa", "config": {"hidden_size": 576, ...},
     "tokenleap": {"verifier": {"name_or_path": ..., "architectures": [...]},
                   "verifier_layers": 30, ...}}

with the fields of the method's `StateConfig`. `model.safetensors` holds `StateNet.state_dict()`:
the weights, and `d2t`, the map of the draft vocabulary (an offset for each draft token, as in the
`speculators` format). What is the target's own is not in it. The published layouts are in
`state_layouts.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
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
    read_json,
    read_tensors,
    validated,
    vocabulary_weights,
    write_folder,
)
from tokenleap.drafters.heads.notes import noted, notes_of
from tokenleap.drafters.heads.state_net import StateConfig, StateNet
from tokenleap.errors import CompatibilityError, ModelError
from tokenleap.models.folder import check_sizes as check_model_sizes
from tokenleap.runtime.target import Target

__all__ = ["Layout", "StateFile", "load_net", "read_state_file", "write_state_file"]

MODEL_TYPE = "tokenleap_head"


@dataclass(frozen=True)
class StateFile:
    """What a folder holds.

    Args:
        path: the file of the weights.
        config: sizes and variants.
        verifier: the model that the head was trained for.
        tensors: the weights by the names of `StateNet.state_dict()`, without `d2t`.
        draft_tokens: [Vd] the target's ids of the draft vocabulary, ascending.
        notes: what else was recorded about the training.
    """

    path: Path
    config: StateConfig
    verifier: Verifier
    tensors: Mapping[str, Tensor]
    draft_tokens: Tensor
    notes: Mapping[str, Any] = field(default_factory=dict)

    def net(self, kind: type[StateNet], embedding: Tensor, rows: Tensor) -> StateNet:
        """The head over the target's embedding [V, E] and output rows [V, E].

        Raises:
            ModelError: tensors are missing, damaged, or do not have the shapes that the
                configuration says.
        """
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
    """Read a folder.

    Args:
        path: the folder.
        kind: the class of the head that it is to hold.
        layouts: the published layouts of such heads.

    Raises:
        ModelError: it does not exist, is damaged, or holds another kind of drafter.
    """
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
    """Write a head in our own form, in bfloat16; each file appears complete or not at all.

    Args:
        folder: made if it does not exist.
        net: the head.
        verifier: the model it was trained for.
        notes: what else is to be recorded about the training.

    Raises:
        ModelError: the folder cannot be written.
    """
    fields = {
        "model_type": MODEL_TYPE,
        "method": net.METHOD,
        "config": asdict(net.config),
        **notes_of(verifier, notes),
    }
    write_folder(folder, net.state_dict(), fields)


def load_net(file: StateFile, kind: type[StateNet], target: Target) -> StateNet:
    """The head of a folder, over a target's weights.

    Raises:
        CompatibilityError: it was trained for another model, or the target cannot have such heads.
        ModelError: its file is damaged.
    """
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
