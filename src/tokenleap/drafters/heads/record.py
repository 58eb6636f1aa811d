"""Records what a head that was trained elsewhere, or long ago, does with its target."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from tokenleap.core.files import write_whole
from tokenleap.drafters.heads.checkpoint import read_checkpoint
from tokenleap.drafters.heads.config_file import KINDS
from tokenleap.drafters.heads.eagle import load_parts
from tokenleap.drafters.heads.folder import CONFIG, read_json
from tokenleap.drafters.heads.probe import Probe, look, our_text
from tokenleap.errors import CompatibilityError, ModelError
from tokenleap.runtime.target import Target

__all__ = ["check_folder", "record_probe"]


def check_folder(folder: Path, target: Target, tokenizer: PreTrainedTokenizerBase | None) -> Probe:
    """What an EAGLE head and a target do on our text, after the checks of loading it.

    Raises:
        CompatibilityError: it was trained for another model, or there is no text.
        ModelError: the folder is damaged.
    """
    net, _, fusion = load_parts(read_checkpoint(folder, list(KINDS)), target, tokenizer)
    tokens = our_text(tokenizer)
    if len(tokens) < 2 or len(tokens) >= target.max_model_len:
        raise CompatibilityError(
            "a head is checked with a text of a few dozen tokens, and this model has no tokenizer, "
            "or no room for them."
        )
    return Probe.of(look(target, tokens, fusion.layers), net)


def record_probe(folder: Path, probe: Probe) -> None:
    """Add it to the head's `config.json`.

    Raises:
        ModelError: the file cannot be read or written.
    """
    path = folder / CONFIG
    fields = read_json(path)
    fields["tokenleap"] = {**fields.get("tokenleap", {}), **probe.note()}
    text = json.dumps(fields, indent=2) + "\n"
    try:
        write_whole(path, lambda beside: beside.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be written: {error}.") from None
