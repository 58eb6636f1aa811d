"""Heads for other engines: what they need in the file beside what we write.

They take weights from the head's file that are the target's own: vLLM the output rows of a reduced
draft vocabulary, without which it does not load the head, and `speculators` the embedding as well,
without which it computes with whatever is in memory. See `checkpoint.py` for the format.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from tokenleap.drafters.heads.checkpoint import (
    EMBEDDING,
    OUTPUT_ROWS,
    file_tensors,
    read_checkpoint,
)
from tokenleap.drafters.heads.config_file import KINDS
from tokenleap.drafters.heads.feature_net import FeatureNet
from tokenleap.drafters.heads.folder import check_layers, write_folder
from tokenleap.drafters.heads.published import fields_of
from tokenleap.errors import ModelError

__all__ = ["export_head"]


def export_head(
    source: Path, to: Path, embedding: Tensor, rows: Tensor, layers: int, verifier: str
) -> None:
    """Write an EAGLE-3 or P-EAGLE head as vLLM and `speculators` load it.

    Args:
        source: the folder of the head.
        to: the folder to write.
        embedding: [V, E] the target's.
        rows: [V, E] of the target's output layer.
        layers: how many decoder layers the target has.
        verifier: the target's name, as the other engine is to find it.

    Raises:
        ModelError: the head cannot be read, or the folder cannot be written or is the same.
        CompatibilityError: the head was trained for another model.
    """
    if to.exists() and to.resolve() == source.resolve():
        raise ModelError(f"{to} is the head itself: give another folder.")
    checkpoint = read_checkpoint(source, list(KINDS)).for_target(layers)
    net = checkpoint.net(embedding, rows)
    described = checkpoint.description
    check_layers(source, described.verifier, layers)
    named = replace(described, verifier=replace(described.verifier, name_or_path=verifier))
    vocabulary = {OUTPUT_ROWS: net.head, EMBEDDING: net.embedding}
    if isinstance(net, FeatureNet):
        if net.config.draft_vocab_size != net.config.vocab_size:
            raise ModelError(
                f"{source}: other engines load EAGLE-1 heads only if they can draft all tokens: "
                "train one with draft_vocab_size=null."
            )
        del vocabulary[OUTPUT_ROWS]  # the layout has none
    shared = {name: tensor.detach().contiguous() for name, tensor in vocabulary.items()}
    write_folder(to, {**file_tensors(net), **shared}, fields_of(named))
