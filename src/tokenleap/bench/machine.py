"""The machine of a measurement: processor and versions. Does not import torch."""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import tokenleap
from tokenleap.runtime.cores import available_cores

__all__ = [
    "host",
    "package_version",
    "processor_flags",
    "source_digest",
]


def host() -> dict[str, Any]:
    """Processor, cores and versions."""
    return {
        "cpu": _cpu_model(),
        "cores": available_cores(),
        "python": platform.python_version(),
        "torch": package_version("torch"),
        "transformers": package_version("transformers"),
        "tokenleap": tokenleap.__version__,
        "source": source_digest(),
    }


def package_version(name: str) -> str | None:
    """The installed version of a distribution; None if there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    return _of_processor("model name") or platform.processor() or platform.machine()


def processor_flags() -> frozenset[str]:
    """Names of the processor's sets of instructions, as Linux has them; elsewhere none."""
    return frozenset((_of_processor("flags") or _of_processor("Features")).split())


def _of_processor(field: str) -> str:
    """A field of the first core in Linux's table; empty if it is not there."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    values = (line.partition(":")[2].strip() for line in lines if line.startswith(field))
    return next(values, "")


def source_digest() -> str:
    """Twelve hexadecimal digits that change with every change of the package's source."""
    root = Path(tokenleap.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
