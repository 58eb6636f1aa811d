"""Ray itself: whether it is installed, and the cluster, which is ours or one to join."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from foretoken.errors import ForetokenError
from foretoken.ray.plan import Replicas, Share, share_of
from foretoken.runtime.cores import available_cores

__all__ = ["check_installed", "cluster", "share"]

OBJECT_STORE = 256 * 2**20
"""Bytes for what processes of a cluster of ours give each other: bodies and blocks of text."""
SECONDS = 5.0
"""Seconds in which the address of a cluster has to answer."""


def check_installed() -> None:
    """Refuse to go on without Ray.

    Raises:
        ForetokenError: it is not installed.
    """
    try:
        import ray.data
        import ray.serve
    except ImportError as error:
        raise ForetokenError(f"this needs {error.name}: pip install 'foretoken[ray]'") from None
    del ray


@contextmanager
def cluster(address: str | None, *, stays: bool = False) -> Iterator[bool]:
    """A connection to a Ray cluster.

    Args:
        address: HOST:PORT of a running one, or "auto" for the one on this machine; None starts one
            on this machine. A process that is connected already stays so.
        stays: whether the connection outlives the block, and so does a cluster that was started.

    Yields:
        Whether the cluster was started here, so that all in it ends with it.

    Raises:
        ForetokenError: Ray is not installed, or there is no cluster at this address.
    """
    check_installed()
    if address is not None and address != "auto":
        _check_address(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere
    import ray

    if ray.is_initialized() and address is None:
        yield False
        return
    settings: dict[str, Any] = {"address": address}
    if address is None:
        settings = {
            "address": "local",
            "num_cpus": available_cores(),
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE,
        }
    try:
        ray.init(**settings, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        where = "no Ray cluster could be started" if address is None else _nothing_at(address)
        if address is not None and "RAY_AUTH_MODE" not in os.environ:
            where += "; if it has a token, set RAY_AUTH_MODE=token"
        raise ForetokenError(f"{where} ({line})") from None
    try:
        yield address is None
    finally:
        if not stays:
            ray.shutdown()


def share(replicas: Replicas, *, device: str, threads: int | None) -> Share:
    """See `share_of`, for the machines of the cluster."""
    import ray

    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return share_of(
        [each.get("CPU", 0) for each in machines],
        [each.get("GPU", 0) for each in machines],
        replicas,
        device=device,
        threads=threads,
    )


def _check_address(address: str) -> None:
    """Refuse an address at which nobody listens: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit() or int(port) > 65535:
        raise ForetokenError(
            f"ray_address: must be HOST:PORT, such as 10.0.0.1:6379, got {address}"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), SECONDS).close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ForetokenError(f"{_nothing_at(address)} ({reason})") from None


def _nothing_at(address: str) -> str:
    return f"there is no Ray cluster at {address}: `ray start --head` starts one"
