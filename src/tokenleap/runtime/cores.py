"""How many cores and how much memory this process may use: its affinity and control groups."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, MutableMapping
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def available_cores(groups: Path = _OWN, root: Path = _ROOT) -> int:
    """Cores that this process may use; a quota of 1.5 cores counts as 2."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = min(_quotas(groups, root), default=math.inf)
    return max(1, min(cores, math.ceil(quota))) if math.isfinite(quota) else cores


def memory_limit(groups: Path = _OWN, root: Path = _ROOT) -> int:
    """Bytes that the process's control groups let it use; a very large number without a limit."""
    found = [
        int(text)
        for folder, _ in _folders("memory", groups, root)
        for name in ("memory.max", "memory.limit_in_bytes")
        for text in _lines(folder / name)
        if text.strip().isdigit()  # not "max"
    ]
    return min(found, default=sys.maxsize)


def _quotas(groups: Path, root: Path) -> Iterator[float]:
    """The quotas, in cores.

    Version 2 has one file "MICROSECONDS PERIOD"; version 1 has a file for each of the two.
    """
    for folder, old in _folders("cpu", groups, root):
        yield from _quota(folder, old)


def _folders(controller: str, groups: Path, root: Path) -> Iterator[tuple[Path, bool]]:
    """The folders of the process's groups and of all groups above them; whether of version 1.

    Version 2 has lines "0::/path", and version 1 has lines "3:cpu,cpuacct:/path". In a container,
    the path may be that of the host, and the group is at the root.
    """
    for line in _lines(groups):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controller if controllers else root
        own = top / path.strip().lstrip("/")
        for folder in (own, *own.parents):
            if folder == top or top in folder.parents:
                yield folder, bool(controllers)


def _quota(folder: Path, old: bool) -> Iterator[float]:
    if old:
        words = [*_lines(folder / "cpu.cfs_quota_us"), *_lines(folder / "cpu.cfs_period_us")]
    else:
        words = [word for line in _lines(folder / "cpu.max") for word in line.split()]
    if len(words) == 2 and all(word.strip().isdigit() for word in words):  # not "max" or "-1"
        yield int(words[0]) / int(words[1])


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


# How long PyTorch's OpenMP threads spin. OpenMP reads it when PyTorch is loaded.


_NAME = "GOMP_SPINCOUNT"
_COUNT = "20000"  # about 0.2 ms, which covers the time between two passes

_bounds: list[str] = []  # the bounds that this process has set


def bound_spinning() -> None:
    """Bound it for this process and its children, if PyTorch is not loaded and none was chosen.

    PyTorch's threads spin for milliseconds after all that they did together, also when other
    programs wait for the cores.
    """
    chosen = "OMP_WAIT_POLICY" in os.environ or _NAME in os.environ
    if "torch" not in sys.modules and not chosen:
        os.environ[_NAME] = _COUNT
        _bounds.append(_COUNT)


def unbound_spinning(environment: MutableMapping[str, str]) -> None:
    """Remove the bound from an environment, unless somebody else has chosen it."""
    if environment.get(_NAME) in _bounds:
        del environment[_NAME]
