"""Names of packed weights in the cache, which `tokenleap models` lists and models are loaded by.

Such a name stands for the model whose weights were packed, with their quantization and dtype.
`runtime/packed.py` makes the names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenleap.errors import ConfigError, ModelError
from tokenleap.models import store

__all__ = ["PackedName", "as_packed", "packed_beginning", "packed_name"]

_NAME = re.compile(
    r".\.(?P<form>gguf|int8|int4|int4-draft)-(?P<dtype>float32|bfloat16)(?:-[0-9a-f]{8}){1,2}"
)
_FOR_DRAFTS = "int4-draft"
_QUANTIZATION = {"gguf": "auto", _FOR_DRAFTS: "int4"}


@dataclass(frozen=True, slots=True)
class PackedName:
    """What a name of packed weights stands for.

    Attributes:
        source: The model: a folder, a GGUF file or an alias.
        form: How it is packed: "int8", "int4", "int4-draft", or "gguf" for a file's own numbers.
        dtype: Of what is not packed, such as "bfloat16".
    """

    source: str
    form: str
    dtype: str

    @property
    def quantization(self) -> str:
        """How users write the form as `quantization`, or as `draft_quantization`."""
        return _QUANTIZATION.get(self.form, self.form)


def packed_beginning(title: str, form: str, dtype: str, origin: Path) -> str:
    """How the name of packed weights begins; behind it is what tells versions of the model apart.

    Args:
        title: A short name of the model.
        form: See `PackedName`.
        dtype: See `PackedName`.
        origin: The model's folder or file.
    """
    return f"{title}.{form}-{dtype}-{store.key_of(str(origin.resolve()))}"


def packed_name(model: object) -> PackedName | None:
    """What a model's name says, if it is that of packed weights in the cache; None if it is not.

    Raises:
        ModelError: What was packed is not there any more.
    """
    if not isinstance(model, str) or (found := _NAME.search(model)) is None:
        return None
    if found.end() != len(model) or "/" in model or Path(model).exists():
        return None
    entries = (each for each in store.cached() if each.name == model and each.kind == "packed")
    if (entry := next(entries, None)) is None:
        return None
    source = Path(entry.source)
    if not source.exists():
        raise ModelError(
            f"{model} was packed from {source}, which is not there any more; delete it with "
            f"`tokenleap models remove {model}`"
        )
    # The folder of an alias may be built anew, and only its alias has a drafting head of ours.
    converted = source.name if source == store.cache_dir() / "models" / source.name else ""
    known = converted or str(source)
    return PackedName(known, found["form"], found["dtype"])


def as_packed(model: Any, quantization: Any, dtype: Any) -> tuple[Any, Any, Any]:
    """The model, quantization and dtype that a name of packed weights stands for.

    Args:
        model: As `LLM` takes it. All but such names are returned as they are.
        quantization: As `LLM` takes it.
        dtype: As `LLM` takes it.

    Raises:
        ConfigError: Quantization or dtype contradict the name, or it is for draft models only.
        ModelError: What was packed is not there any more.
    """
    if (packed := packed_name(model)) is None:
        return model, quantization, dtype
    if packed.form == _FOR_DRAFTS:
        raise ConfigError(
            f"model: {model} has weights for draft models; take {packed.source} with "
            "quantization int4."
        )
    for name, given, held in (
        ("quantization", quantization, packed.quantization),
        ("dtype", str(dtype).removeprefix("torch."), packed.dtype),
    ):
        if given not in ("auto", held):
            raise ConfigError(
                f"{name}: {model} has {packed.form} weights in {packed.dtype}, not {given}: leave "
                f"{name} out, or take {packed.source}."
            )
    return packed.source, packed.quantization, packed.dtype
