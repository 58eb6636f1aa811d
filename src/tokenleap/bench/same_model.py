"""Checks that the GGUF file for peers has the same model as the other contestants.

It compares what the file's header says: architecture, layers, hidden size and vocabulary. It cannot
tell two trainings of one architecture apart; their outputs differ, which the table shows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenleap.errors import ConfigError
from tokenleap.models.gguf_file import GgufFile

__all__ = ["check_same_model"]

_ARCHITECTURES = {
    **{name: name for name in ("llama", "qwen2", "qwen3", "gpt2", "gemma", "gemma2", "phi3")},
    "mistral": "llama",
    "mixtral": "llama",
    "gpt_neox": "gptneox",
    "phi": "phi2",
    "gemma3_text": "gemma3",
}
"""GGUF's names of Transformers' architectures; for others only sizes are compared."""


def check_same_model(file: Path, folder: Path) -> None:
    """Compare a GGUF file with a Hugging Face folder.

    Raises:
        ConfigError: they are different models.
        ModelError: the file is no GGUF file, or damaged.
    """
    told = _told(GgufFile.read(file))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    differences = [
        f"{name} {told[name]}, not {value}"
        for name, value in _expected(config).items()
        if value is not None and told[name] != value
    ]
    if differences:
        raise ConfigError(
            f"--gguf: {file} is another model than the one in {folder}: {'; '.join(differences)}."
        )


def _told(file: GgufFile) -> dict[str, Any]:
    rows = [tensor.shape[0] for tensor in file.tensors if tensor.name == "token_embd.weight"]
    return {
        "architecture": file.architecture,
        "layers": file.setting("block_count"),
        "hidden size": file.setting("embedding_length"),
        "vocabulary": rows[0] if rows else len(file.get("tokenizer.ggml.tokens") or ()),
    }


def _expected(config: dict[str, Any]) -> dict[str, Any]:
    """The same facts from a config.json; None is unknown."""
    config = {**config, **config.get("text_config", {})}
    return {
        "architecture": _ARCHITECTURES.get(config.get("model_type", "")),
        "layers": config.get("num_hidden_layers", config.get("n_layer")),
        "hidden size": config.get("hidden_size", config.get("n_embd")),
        "vocabulary": config.get("vocab_size"),
    }
