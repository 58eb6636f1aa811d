"""Convert pickle checkpoints (`.bin`, `.pt`, `.pth`) to folders of safetensors.

Pickles can run code. A process of its own reads them, with `weights_only`, limits and no rights but
to write into a new folder: this file is also its program. What it made is checked as any file of a
stranger, and moved to its place when all of it is there.
"""

from __future__ import annotations

import glob
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from tokenleap.core.sandbox import confine, end_with, limit
from tokenleap.errors import ModelError
from tokenleap.models.folder import PICKLES, header_of, indexed_files, pickle_files, read_config
from tokenleap.models.load import guarded
from tokenleap.models.resolver import BESIDE_WEIGHTS, folder_size, wait
from tokenleap.models.store import bytes_text, progress, tells_of_full_disk

_INDEX = "pytorch_model.bin.index.json"

_FORBIDS = ("files", "system calls")
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT", "LANG")  # and no tokens
_MAKING = ".tokenleap-"
"""In the name of a folder that a process is making; its number follows."""
_BESIDE_FILE = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("*.model", "*.spm", "*.jinja"),
)
"""What belongs to a single file of weights: other files may be anybody's."""
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_SECONDS, _SECONDS_PER_GB, _MEGABYTES = 60, 100, 1024  # of CPU and memory, beside the file's


def convert_pickles(source: Path, output: Path) -> list[str]:
    """Write the weights in a folder, or in one file, as safetensors, with the files beside them.

    Returns:
        What `confine` could forbid the process that read the pickles.
    """
    if output.exists():
        raise ModelError(f"{output} exists already: name a new folder")
    folder = source if source.is_dir() else source.parent
    targets = _targets(source)
    tied = _tied(folder)
    needed = sum(file.stat().st_size for file in targets)
    parent = output.absolute().parent
    if not parent.is_dir():
        raise ModelError(f"there is no folder {parent} to make {output.name} in")
    try:
        _remove_leftovers(output)
        if (free := shutil.disk_usage(parent).free) < needed:
            raise _full(parent, needed, free)
        making = parent / f".{output.name}{_MAKING}{os.getpid()}"
        making.mkdir()
        try:
            forbidden = _run(targets, making, tied, needed)
            beside = BESIDE_WEIGHTS if source.is_dir() else _BESIDE_FILE
            _finish(folder, targets, making, beside)
            making.rename(output.absolute())
        finally:
            shutil.rmtree(making, ignore_errors=True)
    except OSError as error:
        raise ModelError(f"cannot write {output}: {error.strerror or error}") from error
    return forbidden


def _targets(source: Path) -> dict[Path, str]:
    """The pickle files to convert, and the names of their safetensors files."""
    if not source.is_dir():
        if source.suffix not in PICKLES or not source.is_file():
            raise ModelError(f"{source} is neither a folder nor a {', '.join(PICKLES)} file")
        return {source: "model.safetensors"}
    if next(source.glob("*.safetensors"), None) is not None:
        raise ModelError(f"{source} has safetensors already: load it as it is")
    if (source / _INDEX).is_file():
        files = indexed_files(source, _INDEX, PICKLES)
        return {
            file: f"model-{number:05d}-of-{len(files):05d}.safetensors"
            for number, file in enumerate(files, start=1)
        }
    found = pickle_files(source)
    whole = [file for file in found if file.name == "pytorch_model.bin"] or found
    if not whole:
        raise ModelError(f"{source} has no weights in pickle files ({', '.join(PICKLES)})")
    if len(whole) > 1:
        names = ", ".join(file.name for file in whole)
        raise ModelError(f"{source} has several pickle files, and no {_INDEX}: name one of {names}")
    return {whole[0]: "model.safetensors"}


def _tied(folder: Path) -> dict[str, str]:
    """Weights that the model of a folder shares: the names that are left out, and those kept."""
    if not (folder / "config.json").is_file():
        return {}
    import transformers

    fields = read_config(folder)
    kind = getattr(transformers, (fields.get("architectures") or [""])[0], None)
    keys = getattr(kind, "_tied_weights_keys", None)
    if kind is None or not isinstance(keys, dict):
        return {}
    with guarded(f"cannot read {folder / 'config.json'}"):
        config = kind.config_class.from_dict(fields)
    return keys if config.get_text_config().tie_word_embeddings else {}


def _run(
    targets: Mapping[Path, str], making: Path, tied: Mapping[str, str], total: int
) -> list[str]:
    """Let a sandboxed process convert the files."""
    largest = max(file.stat().st_size for file in targets)
    job: dict[str, Any] = {
        "parent": os.getpid(),
        "folder": str(making),
        "files": [[str(file.absolute()), name] for file, name in targets.items()],
        "tied": dict(tied),
        "seconds": _SECONDS + _SECONDS_PER_GB * total / 1e9,
        "megabytes": _MEGABYTES + 3 * largest // 1_000_000,
        "most_written": (_MEGABYTES << 20) + 3 * total,
    }
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    path = os.pathsep.join(each for each in sys.path if each)
    with (
        progress("Converting to safetensors", "seconds per GB", total) as report,
        subprocess.Popen(
            [sys.executable, "-P", "-m", "tokenleap.models.pickles", json.dumps(job)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**kept, "PYTHONPATH": path, **dict.fromkeys(_ONE_THREAD, "1")},
            start_new_session=True,
        ) as process,
    ):
        try:
            said, errors = wait(process, lambda: report(folder_size(making)))
        except BaseException:
            process.kill()
            raise
    if process.returncode == 0:
        return [name for name in _FORBIDS if name in said]
    last = (errors.strip().splitlines() or [""])[-1][:500]
    if tells_of_full_disk(last):
        raise _full(making.parent, total, shutil.disk_usage(making.parent).free)
    if process.returncode == -getattr(signal, "SIGXCPU", 0):
        last = f"it takes more than {job['seconds']:.0f} s of CPU to read"
    elif process.returncode < 0 or "MemoryError" in last or "can't allocate memory" in last:
        last = f"it needs more than {bytes_text(job['megabytes'] << 20)} of memory, or is damaged"
    raise ModelError(f"{_names(targets)} cannot be converted: {last or 'the process failed'}")


def _full(folder: Path, needed: int, free: int) -> ModelError:
    return ModelError(
        f"the disk is full: {folder} needs {bytes_text(needed)} free and has {bytes_text(free)}; "
        "free some space, or name a folder on another disk"
    )


def _names(targets: Mapping[Path, str]) -> str:
    first, *rest = targets
    return str(first.parent if rest else first)


def _finish(folder: Path, targets: Mapping[Path, str], making: Path, beside: Sequence[str]) -> None:
    """Check the files that were made, and add the index, configuration and tokenizer."""
    mode = making.stat().st_mode & 0o666  # safetensors' files are readable by their owner only
    index: dict[str, str] = {}
    for name in targets.values():
        path = making / name
        if path.is_symlink() or not path.is_file():
            raise ModelError(f"the process that read {_names(targets)} made no file {name}")
        index |= dict.fromkeys(header_of(path), name)
        path.chmod(mode)
    for path in making.iterdir():
        if path.name not in targets.values():
            raise ModelError(f"the process that read {_names(targets)} made a file {path.name}")
    if len(targets) > 1:
        total = sum((making / name).stat().st_size for name in targets.values())
        content = {"metadata": {"total_size": total}, "weight_map": index}
        (making / "model.safetensors.index.json").write_text(json.dumps(content, indent=2))
    for pattern in beside:
        for path in folder.glob(pattern):
            if path.is_file() and not path.name.endswith(".index.json"):
                shutil.copyfile(path, making / path.name)
    for path in making.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _remove_leftovers(output: Path) -> None:
    """Remove what killed processes have left of the same folder."""
    for path in output.absolute().parent.glob(f".{glob.escape(output.name)}{_MAKING}*"):
        number = path.name.rpartition(_MAKING)[2]
        if number.isdecimal() and path.is_dir() and not psutil.pid_exists(int(number)):
            shutil.rmtree(path, ignore_errors=True)


# The program of the process that reads pickles.


def main(job: dict[str, Any]) -> None:
    end_with(job["parent"])
    import torch
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    sample = io.BytesIO()
    torch.save({"weight": torch.zeros(1)}, sample)
    torch.load(io.BytesIO(sample.getvalue()), weights_only=True)  # imports what it needs
    folder = Path(job["folder"])
    limit(job["seconds"], job["megabytes"])
    print(*confine(folder), sep="\n", flush=True)
    written = 0
    for source, target in job["files"]:
        try:
            tensors = _distinct(_read(Path(source)), job["tied"])
            written += sum(each.nbytes for each in tensors.values())
            if written > job["most_written"]:
                raise ValueError(f"it would become {written} bytes, far more than its files have")
            save_file(tensors, folder / target, metadata={"format": "pt"})
        except BaseException as error:
            sys.exit(_reason(error))


def _read(path: Path) -> dict[str, Any]:
    import warnings

    import torch

    warnings.simplefilter("ignore")  # about files that it then refuses
    with path.open("rb") as file:
        mapped = file.read(4) == b"PK\x03\x04"
    found = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    if not isinstance(found, dict) or not found:
        raise TypeError(f"it holds no tensors by their names, but a {type(found).__name__}")
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise TypeError(
                f"it holds more than tensors by their names: {name!r:.60} is a "
                f"{type(value).__name__}; save the model's state_dict() alone"
            )
    return found


def _distinct(tensors: dict[str, Any], tied: Mapping[str, str]) -> dict[str, Any]:
    """The tensors without those that the model shares; others in the same memory are copied."""
    kept: dict[str, Any] = {}
    places: set[int] = set()
    for name, tensor in tensors.items():
        original = tensors.get(tied.get(name, ""))
        if original is not None and _same(tensor, original):
            continue
        whole = tensor.detach().contiguous()
        place = whole.untyped_storage().data_ptr()
        if place in places or whole.untyped_storage().nbytes() != whole.nbytes:
            whole = whole.clone()
        places.add(place)
        kept[name] = whole
    return kept


def _same(one: Any, other: Any) -> bool:
    return bool(
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
    )


def _reason(error: BaseException) -> str:
    """Why a file cannot be converted, in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    if (
        type(error).__name__ == "UnpicklingError"
    ):  # PyTorch's message says how to run it all the same
        named = re.search(r"GLOBAL (\S+)", text)
        what = f" ({named[1]})" if named else ""
        return f"it is damaged, or holds more than tensors{what}, which could run code"
    if isinstance(error, MemoryError):
        return "MemoryError"
    return text


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
