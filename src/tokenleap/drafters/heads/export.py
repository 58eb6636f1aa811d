"""Heads for other engines: what they need in the file beside what we write.

They take weights from the head's file that are the target's own: vLLM the output rows of a reduced
draft vocabulary, without which it does not load the head, and `speculators` the embedding as well,
without which it computes with whatever is in memory. See `layouts.py` for the format.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tokenleap.core.files import write_whole
from tokenleap.drafters.heads.eagle import load_parts
from tokenleap.drafters.heads.eagle_net import FeatureNet
from tokenleap.drafters.heads.folder import CONFIG, check_layers, read_json
from tokenleap.drafters.heads.layouts import EMBEDDING, OUTPUT_ROWS, EagleFolder, write_head
from tokenleap.drafters.heads.probe import Probe, look, our_text
from tokenleap.errors import CompatibilityError, ModelError
from tokenleap.runtime.target import Target

__all__ = ["check_folder", "export_head", "record_probe"]

_METHODS = ("eagle", "parallel")
"""Whose heads can be exported and checked."""


def export_head(
    source: Path, to: Path, embedding: Tensor, rows: Tensor, layers: int, verifier: str
) -> None:
    """Write an EAGLE-3 or P-EAGLE head as vLLM and `speculators` load it.

    Args:
        embedding: [V, E] the target's.
        rows: [V, E] of the target's output layer.
    """
    if to.exists() and to.resolve() == source.resolve():
        raise ModelError(f"{to} is the head itself: give another folder.")
    file = EagleFolder.read(source, *_METHODS).for_target(layers)
    net = file.net(embedding, rows)
    check_layers(source, file.verifier, layers)
    named = replace(file.verifier, name_or_path=verifier)
    vocabulary = {OUTPUT_ROWS: net.head, EMBEDDING: net.embedding}
    if isinstance(net, FeatureNet):
        if net.config.draft_vocab_size != net.config.vocab_size:
            raise ModelError(
                f"{source}: other engines load EAGLE-1 heads only if they can draft all tokens: "
                "train one with draft_vocab_size=null."
            )
        del vocabulary[OUTPUT_ROWS]  # the layout has none
    shared = {name: tensor.detach().contiguous() for name, tensor in vocabulary.items()}
    write_head(to, net, named, file.notes, shared)


# Records what a head that was trained elsewhere, or long ago, does with its target.


def check_folder(folder: Path, target: Target, tokenizer: PreTrainedTokenizerBase | None) -> Probe:
    """Check an EAGLE head as when it is loaded, then run it and a target on our text."""
    net, _, fusion = load_parts(EagleFolder.read(folder, *_METHODS), target, tokenizer)
    tokens = our_text(tokenizer)
    if len(tokens) < 2 or len(tokens) >= target.max_model_len:
        raise CompatibilityError(
            "a head is checked with a text of a few dozen tokens, and this model has no tokenizer, "
            "or no room for them."
        )
    return Probe.of(look(target, tokens, fusion.layers), net)


def record_probe(folder: Path, probe: Probe) -> None:
    """Add it to the head's `config.json`."""
    path = folder / CONFIG
    fields = read_json(path)
    fields["tokenleap"] = {**fields.get("tokenleap", {}), **probe.note()}
    text = json.dumps(fields, indent=2) + "\n"
    try:
        write_whole(path, lambda beside: beside.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be written: {error}.") from None
