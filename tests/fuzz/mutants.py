"""Damaged files, made by the number, and what a reader may do with them.

`mutant` damages one file of a folder: its bytes, the fields of its JSON, or the header of its
tensors. The same number gives the same damage. `failures` lets a reader loose on many mutants in a
process of its own, whose memory and time are limited. A reader may succeed, or raise a
`TokenleapError` of one line. Everything else is a failure: another exception, a crash, a hang.
"""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from tokenleap.errors import TokenleapError

__all__ = ["Failure", "Files", "Reader", "failures", "mutant"]

Files: TypeAlias = Mapping[str, bytes]
"""The files of a folder, by name."""

SECONDS = 20
"""After which a reader hangs; the slowest takes less than one."""

MEMORY = 2 << 30
"""Bytes that a reader may map beyond what its process has; no seed has a hundredth of it."""

_NUMBERS = [0, 1, -1, 0.5, 255, 2**16, 2**20, 10**9, 2**31, 2**32 - 1, 2**63, 10**30, -(10**9)]
_VALUES: list[Any] = [
    *_NUMBERS,
    *(1e308, -1e308, float("nan"), float("inf"), None, True, False, "", "x", "9" * 40, "../x"),
    *("\ud800", "a\nb", "x" * 10_000, [], [[]], {}, {"a": 1}, [None], [0.5, "x"], [1] * 5000),
]
_WORDS = [0, 1, 2, 7, 255, 10**6, 10**9, 2**31 - 1, 2**32 - 1, 2**62, 2**63, 2**64 - 1]


@dataclass(frozen=True)
class Reader:
    """A reader of files.

    Args:
        seed: an intact folder.
        read: reads the folder that it is given, all of it that matters.
    """

    seed: Files
    read: Callable[[Path], object]


@dataclass(frozen=True)
class Failure:
    """A failure of a reader with the mutant of a number."""

    number: int
    what: str


def mutant(seed: Files, number: int) -> Files:
    """The files with one of them damaged; 0 is the intact folder."""
    if not number:
        return seed
    dice = random.Random(number)
    name = dice.choice(sorted(seed))
    content = seed[name]
    damages = [_bytes, *([_json] * 3 if _is_json(content) else [])]
    damages += [_tensors] * 3 if name.endswith(("safetensors", "datastore", "ngrams")) else []
    damages += [_field] * 3 if content.startswith(b"GGUF") else []
    return {**seed, name: dice.choice(damages)(content, dice)}


def _bytes(content: bytes, dice: random.Random) -> bytes:
    """Some bytes are wrong, missing, or there twice."""
    data, kind = bytearray(content), dice.randrange(6)
    at = dice.randrange(len(data) + 1) if data else 0
    size = min(dice.choice([1, 2, 8, 64, 1000]), len(data) - at)
    if kind == 0:
        for _ in range(dice.choice([1, 1, 2, 8])):
            if data:
                data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    elif kind == 1:
        del data[at:]
    elif kind == 2:
        del data[at : at + size]
    elif kind == 3:
        data[at:at] = data[at : at + size]
    elif kind == 4:
        data[at : at + size] = dice.randbytes(size)
    else:
        data[at : at + 8] = dice.choice(_WORDS).to_bytes(8, "little")[: dice.choice([1, 4, 8])]
    return bytes(data)


def _is_json(content: bytes) -> bool:
    try:
        json.loads(content.splitlines()[0] if content else b"")
        return True
    except ValueError:
        return content.startswith(b"{\n")


def _json(content: bytes, dice: random.Random) -> bytes:
    """A value somewhere in JSON, or in a line of it, is another one."""
    try:
        return _written(_changed(json.loads(content), dice))
    except ValueError:
        lines = content.splitlines()
        place = dice.randrange(len(lines))
        lines[place] = _written(_changed(json.loads(lines[place]), dice))
        return b"\n".join(lines) + b"\n"


def _written(value: Any) -> bytes:
    text = json.dumps(value)
    if '"deep"' in text:
        text = text.replace('"deep"', "[" * 5000 + "]" * 5000)
    return text.encode()


def _changed(value: Any, dice: random.Random) -> Any:
    """A copy with one of its values replaced, left out, or doubled."""
    value = copy.deepcopy(value)
    places = list(_places(value))
    if not places:
        return dice.choice(_VALUES)
    inside, key = dice.choice(places)
    old, kind = inside[key], dice.randrange(8)
    if kind == 0:
        del inside[key]
    elif kind == 1:
        inside[key] = [old, old]
    elif kind == 2:
        inside[key] = str(old)
    elif kind == 3:
        inside[key] = "deep"
    elif kind == 4 and isinstance(old, int | float):
        inside[key] = old * dice.choice([-1, 2, 1000, 0.5]) + dice.choice([0, 1])
    elif kind == 4 and isinstance(inside, dict):
        inside[f"{key}x"] = inside.pop(key)
    else:
        inside[key] = dice.choice(_VALUES)
    return value


def _places(value: Any) -> Iterable[tuple[Any, Any]]:
    """(container, key) of every value; of long lists, the first ones."""
    if isinstance(value, dict | list):
        for key in list(value)[:200] if isinstance(value, dict) else range(min(50, len(value))):
            yield value, key
            yield from _places(value[key])


def _tensors(content: bytes, dice: random.Random) -> bytes:
    """The header of a safetensors file says something else, or is at another place."""
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length], content[8 + length :]
    if dice.randrange(4):
        header = _json(header, dice)
    else:
        header = header.rstrip() + b" " * dice.randrange(1, 17)  # tensors lie at odd places
    if not dice.randrange(4):
        data = _bytes(data, dice)
    return len(header).to_bytes(8, "little") + header + data


def _field(content: bytes, dice: random.Random) -> bytes:
    """A number in the metadata of a GGUF file, or in the description of a tensor, is another."""
    names = [b".attention.", b".rope.", b"_count", b"_length", b"_id", b"tokenizer.", b".weight"]
    name, data = dice.choice(names), bytearray(content)
    found = [at for at in range(min(len(data), 20_000)) if content.startswith(name, at)]
    at = dice.choice(found or [8]) + dice.randrange(len(name) + 24)
    word = dice.choice(_WORDS).to_bytes(8, "little")[: dice.choice([1, 4, 8])]
    data[at : at + len(word)] = word
    return bytes(data)


def failures(reader: Reader, numbers: Iterable[int]) -> list[Failure]:
    """The failures of a reader, with the numbers of the mutants."""
    left, found = list(numbers), []
    while left:
        done, failed = _batch(reader, left)
        found += failed
        left = left[done:]
    return found


def _batch(reader: Reader, numbers: list[int]) -> tuple[int, list[Failure]]:
    """Read mutants in a process of its own until it ends: how many, and its failures."""
    ours, theirs = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this process has threads, which do nothing
        child = os.fork()
    if not child:
        os.close(ours)
        _work(reader, numbers, theirs)
    os.close(theirs)
    with os.fdopen(ours, encoding="utf-8", errors="replace") as report:
        lines = report.read().splitlines()
    _, status = os.waitpid(child, 0)
    found = [Failure(*json.loads(line)) for line in lines if line.startswith("[")]
    done = sum(not line.startswith("[") for line in lines)
    if done < len(numbers):
        done += 1
        found.append(Failure(numbers[done - 1], _end(status)))
    return done, found


def _end(status: int) -> str:
    if not os.WIFSIGNALED(status):
        return f"it ends its process with {os.waitstatus_to_exitcode(status)}"
    name = signal.Signals(os.WTERMSIG(status)).name
    return f"it hangs for {SECONDS} s" if name == "SIGALRM" else f"it ends its process by {name}"


def _work(reader: Reader, numbers: list[int], report: int) -> NoReturn:
    """Read mutants, and write a line after each, before it one of what went wrong."""
    try:
        _limit()
        with tempfile.TemporaryDirectory() as scratch:
            for number in numbers:
                folder = Path(scratch) / str(number)
                wrong = _read(reader, folder, number)
                signal.alarm(0)
                if wrong:
                    os.write(report, (json.dumps([number, wrong]) + "\n").encode())
                os.write(report, b"done\n")
                shutil.rmtree(folder)
    except BaseException:  # nothing of this process may go on in the tests
        os.write(report, (json.dumps([-1, traceback.format_exc()]) + "\n").encode())
    os._exit(0)


def _limit() -> None:
    os.environ |= {"TOKENIZERS_PARALLELISM": "false"}
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    sys.setrecursionlimit(1000)


def _read(reader: Reader, folder: Path, number: int) -> str | None:
    """Read a mutant, and return what is wrong with how it was read, or None."""
    folder.mkdir()
    for name, content in mutant(reader.seed, number).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    signal.alarm(SECONDS)
    try:
        reader.read(folder)
    except TokenleapError as error:
        message = str(error)
        if "\n" in message.strip() or not message.isprintable():
            return f"its error is not one line: {message[:300]!r}"
        if len(message) > 4000:
            return f"its error has {len(message)} characters"
        if "memory" in message or not number:
            return message
    except MemoryError:
        return "it takes too much memory\n" + traceback.format_exc()
    except BaseException:
        return traceback.format_exc()
    return None
