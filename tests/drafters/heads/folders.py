"""Folders of heads and their faults, for the tests of all kinds of folders."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny import tiny_model
from tokenleap import LLM, SamplingParams
from tokenleap.errors import TokenleapError

Damage: TypeAlias = Callable[[Path], object]
Fault: TypeAlias = tuple[Damage, str]
"""Damage to a folder, and a pattern of the error message."""


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def change_inside(folder: Path, name: str, **fields: Any) -> None:
    """Change fields of an object in the configuration."""
    inner = json.loads((folder / "config.json").read_text())[name]
    change_config(folder, **{name: {**inner, **fields}})


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


# The same as damage that is done later


def config(**fields: Any) -> Damage:
    return lambda folder: change_config(folder, **fields)


def layer(**fields: Any) -> Damage:
    return lambda folder: change_inside(folder, "transformer_layer_config", **fields)


def tensors(new: Mapping[str, Tensor]) -> Damage:
    return lambda folder: change_tensors(folder, lambda held: held.update(new))


def without(*names: str) -> Damage:
    return lambda folder: change_tensors(folder, lambda held: [held.pop(name) for name in names])


def deleted(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def text(content: str, name: str = "config.json") -> Damage:
    return lambda folder: (folder / name).write_text(content)


def load_head(folder: Path, method: str, **fields: Any) -> LLM:
    """A tiny model, with these fields in its configuration, that drafts with the folder's head."""
    return LLM(tiny_model(**fields), speculative_config={"method": method, "model": str(folder)})


def assert_refused(folder: Path, fault: Fault, load: Callable[[Path], object]) -> None:
    """That loading the damaged folder is an error of one line."""
    damage, message = fault
    damage(folder)
    with pytest.raises(TokenleapError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def assert_drafts(folder: Path, method: str, prompt: list[int], **fields: Any) -> Any:
    """The output of a head that drafts, which is that of plain decoding."""
    params = SamplingParams(temperature=0, max_tokens=20)
    drafting = {"method": method, "model": str(folder), "controller": "fixed", **fields}
    (output,) = LLM(tiny_model(), speculative_config=drafting).generate([prompt], params)
    (plain,) = LLM(tiny_model()).generate([prompt], params)
    assert output.token_ids == plain.token_ids
    assert output.metrics.drafter_failure is None
    assert output.metrics.num_draft_tokens > 0
    return output


FILE_FAULTS: dict[str, Fault] = {
    "no weights": (deleted("model.safetensors"), "does not exist"),
    "no config": (deleted("config.json"), "config.json does not exist"),
    "no JSON": (text("{"), "cannot be read"),
    "no object": (text("[]"), "no JSON object"),
    "truncated": (truncate, "cannot be read"),
}
"""Faults of any folder."""

FAULTS: dict[str, Fault] = {
    **FILE_FAULTS,
    "no map": (without("d2t"), "'d2t' is missing"),
    "a falling map": (tensors({"d2t": -2 * torch.arange(48)}), "ascending"),
    "a map beyond the vocabulary": (tensors({"d2t": torch.full((48,), 60)}), "below 96"),
    "a map of negative tokens": (tensors({"d2t": torch.arange(48) - 5}), "ascending"),
    "a map of fractions": (tensors({"d2t": torch.arange(48.0)}), "ascending"),
    "a square map": (tensors({"d2t": torch.arange(48).view(6, 8)}), "ascending"),
}
"""Those of the folder of a head that can draft 48 of 96 tokens."""
