"""`pass`: learnt look-ahead embeddings make one target pass propose a block (PaSS).

Monea, Joulin, Grave, "PaSS: Parallel Speculative Sampling" (arXiv 2311.13581). It is `pad` with
embeddings [LA]_1 to [LA]_L that were trained for the target, in place of a padding token: [LA]_i
predicts the token i places behind the next one. The paper drafts and verifies in turns. Here the
pass that verifies a draft also computes look-ahead tokens below the root and below every drafted
token, as `pad` does.

The look-ahead tokens have ids behind the target's vocabulary (`Network.extend`). The target never
writes such a token, so they are never accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Gt, Le
from torch import Tensor

from tokenleap.drafters.heads.folder import (
    CONFIG,
    WEIGHTS,
    Verifier,
    check_layers,
    check_sizes,
    check_tensors,
    existing_folder,
    read_json,
    read_tensors,
    validated,
    write_folder,
)
from tokenleap.drafters.heads.notes import noted, notes_of
from tokenleap.drafters.heads.probe import check_target
from tokenleap.drafters.options.lookups import PassOptions
from tokenleap.drafters.pad import MOST_PADDING, PadDrafter
from tokenleap.errors import ModelError
from tokenleap.runtime.target import Target

__all__ = ["PassDrafter", "PassOptions", "read_pass_tokens", "write_pass_tokens"]

MODEL_TYPE = "tokenleap_pass"
_EMBEDDINGS = "look_ahead"

_Size = Annotated[int, Gt(0)]


class PassDrafter(PadDrafter):
    """See `PadDrafter`, with another padding token at each place.

    Args:
        first: id of the first of the look-ahead tokens; the others follow.
        count: L, their number.
    """

    def __init__(self, first: int, count: int) -> None:
        super().__init__(first)
        self.most_guesses, self.token_limit = count, first + count

    def padding(self, place: int) -> int:
        """See `PadDrafter.padding`."""
        return self._pad + place


@dataclass(frozen=True)
class _Sizes:
    """Of look-ahead embeddings.

    Args:
        hidden_size: E, the width of the target's embedding.
        vocab_size: V, of the target.
        num_tokens: L.
    """

    hidden_size: _Size
    vocab_size: _Size
    num_tokens: Annotated[_Size, Le(MOST_PADDING)]


def read_pass_tokens(path: str | Path, target: Target) -> Tensor:
    """The look-ahead embeddings [L, E] of a folder.

    Raises:
        ModelError: the folder does not exist, is damaged, or holds another kind of drafter.
        CompatibilityError: they were trained for another target.
    """
    folder = existing_folder(path)
    fields = read_json(folder / CONFIG)
    if fields.get("model_type") != MODEL_TYPE:
        raise ModelError(
            f"{folder / CONFIG} does not describe look-ahead embeddings: is this a folder that "
            "`tokenleap train pass` has written?"
        )
    sizes = validated(_Sizes, fields.get("config"), folder / CONFIG)
    verifier, notes = noted(fields, folder / CONFIG)
    check_layers(folder, verifier, target.network.num_layers)
    found = (target.vocab_size, target.hidden_size)
    check_sizes(folder, verifier, (sizes.vocab_size, sizes.hidden_size), found)
    check_target(folder, verifier, notes, target)
    tensors = read_tensors(folder / WEIGHTS)
    wanted = {_EMBEDDINGS: torch.empty(sizes.num_tokens, sizes.hidden_size)}
    check_tensors(folder / WEIGHTS, tensors, wanted, "look-ahead embeddings")
    return tensors[_EMBEDDINGS]


def write_pass_tokens(
    folder: Path, rows: Tensor, vocab_size: int, verifier: Verifier, notes: Mapping[str, Any]
) -> None:
    """Write look-ahead embeddings; each file appears complete or not at all.

    Args:
        folder: made if it does not exist.
        rows: [L, E] the embeddings.
        vocab_size: V, of the target.
        verifier: the target.
        notes: what else is to be recorded about the training.

    Raises:
        ModelError: the folder cannot be written.
    """
    fields = {
        "model_type": MODEL_TYPE,
        "config": asdict(_Sizes(rows.shape[1], vocab_size, len(rows))),
        **notes_of(verifier, notes),
    }
    write_folder(folder, {_EMBEDDINGS: rows.detach().contiguous()}, fields)
