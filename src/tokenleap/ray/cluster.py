"""Ray itself: whether it is installed, and the cluster, which is ours or one to join."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenleap.errors import TokenleapError, in_one_line
from tokenleap.ray.plan import Replicas, Share, beside, share_of
from tokenleap.runtime.cores import available_cores

__all__ = [
    "answers",
    "check_installed",
    "check_there",
    "cluster",
    "cores_beside",
    "is_there",
    "nothing_at",
    "prepare",
    "share",
    "watched",
]


OBJECT_STORE = 256 * 2**20
"""Bytes for what processes of a cluster of ours give each other: bodies and blocks of text."""
LOST_SECONDS = 15.0
"""Seconds without an answer after which a cluster has ended. Ray ends the process after 60."""
_EVERY = 3.0
"""Seconds between two looks at it."""


def check_there() -> None:
    """Refuse to go on without Ray, and leave its import, which reads the environment, to `cluster`."""
    if find_spec("ray") is None:
        raise _missing("ray")


def check_installed() -> None:
    """Refuse to go on without Ray and what it needs."""
    try:
        import ray.data
        import ray.serve
    except ImportError as error:
        raise _missing(error.name) from None
    del ray


@contextmanager
def cluster(address: str | None, *, stays: bool = False) -> Iterator[bool]:
    """A connection to a Ray cluster.

    Args:
        address: HOST:PORT of a running one, or "auto" for the one on this machine; None starts one
            on this machine. A process that is connected already stays so.
    """
    if address is not None and address != "auto":
        prepare(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere
    check_installed()
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
    with _ending_at_sigterm(wanted=not stays) as again:
        try:
            try:
                ray.init(**settings, logging_level=logging.ERROR)
            except ray.exceptions.AuthenticationError as error:
                where = "a Ray cluster of this machine" if address is None else address
                raise TokenleapError(f"{where} refuses the token: {in_one_line(error)}") from None
            except Exception as error:  # Ray raises a plain one if its processes start too slowly
                raise _failed(address, error) from None
            again()
            yield address is None
        finally:
            if not stays:
                ray.shutdown()


def share(model: Mapping[str, Any], replicas: Replicas, threads: int | None) -> Share:
    """See `share_of`, for a model with these arguments of `LLM` on the machines of the cluster."""
    machines = _machines()
    return share_of(
        [each.get("CPU", 0) for each in machines],
        [each.get("GPU", 0) for each in machines],
        replicas,
        device=str(model.get("device", "auto")),
        threads=threads,
    )


def cores_beside(of_each: Share) -> float:
    """See `beside`, for the machines of the cluster."""
    return beside(of_each, [each.get("CPU", 0) for each in _machines()])


def is_there() -> bool:
    """Whether the head of the cluster answers that this process is connected to."""
    import ray

    return answers(ray.get_runtime_context().gcs_address)


@contextmanager
def watched() -> Iterator[Callable[[], bool]]:
    """Watch the head of the cluster that this process is connected to, in a thread."""
    import ray

    address = ray.get_runtime_context().gcs_address
    lost, done = threading.Event(), threading.Event()

    def watch() -> None:
        answered = time.monotonic()
        while time.monotonic() - answered < LOST_SECONDS:
            if done.wait(_EVERY):
                return
            asked = time.monotonic()
            if answers(address):  # an answer that does not come takes a while, too
                answered = asked
        lost.set()

    threading.Thread(target=watch, name="tokenleap-watch", daemon=True).start()
    try:
        yield lambda: not lost.is_set()
    finally:
        done.set()


def _machines() -> list[dict[str, float]]:
    """What each machine of the cluster has."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _missing(name: str | None) -> TokenleapError:
    return TokenleapError(f"this needs {name}: pip install 'tokenleap[ray]'")


def _failed(address: str | None, error: Exception) -> TokenleapError:
    """What to say if Ray could not be started or joined."""
    line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    where = "no Ray cluster could be started" if address is None else nothing_at(address)
    return TokenleapError(f"{where} ({line})")


@contextmanager
def _ending_at_sigterm(*, wanted: bool) -> Iterator[Callable[[], object]]:
    """Let SIGTERM raise `SystemExit` in this block, if that is wanted and can be."""
    if not wanted or threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return

    def end(number: int, frame: object) -> None:
        del frame
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield lambda: signal.signal(signal.SIGTERM, end)
    finally:
        signal.signal(signal.SIGTERM, before)


# The address of a running Ray cluster: whether it answers, and the token that it may want.


SECONDS = 5.0
"""Seconds in which the address of a cluster has to answer."""
_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
"""A call without arguments that Ray's head answers to whoever has its token."""


def prepare(address: str) -> None:
    """Make sure that a cluster can be joined, before `ray` is imported.

    Ray itself would try for minutes where nobody listens. It takes a token for granted on a cluster
    of this machine, but for an address only if `RAY_AUTH_MODE` says so, which it reads once, when
    it is imported. So a cluster that wants a token sets that variable here.
    """
    host, port = _parts(address)
    try:
        socket.create_connection((host, port), SECONDS).close()
    except OSError as error:
        raise TokenleapError(f"{nothing_at(address)} ({error.strerror or error})") from None
    if os.environ.get("RAY_USE_TLS", "0") != "0" or find_spec("grpc") is None:
        return  # Ray's own words have to do
    if _takes(address, None):
        return
    token = _token()
    if token is None or not _takes(address, token):
        has = "wants a token" if token is None else "has another token"
        raise TokenleapError(
            f"the Ray cluster at {address} {has}: copy ~/.ray/auth_token from its first machine"
        )
    if "ray" in sys.modules or os.environ.get("RAY_AUTH_MODE", "token") != "token":
        raise TokenleapError(
            f"the Ray cluster at {address} wants a token: set RAY_AUTH_MODE=token before the start"
        )
    os.environ["RAY_AUTH_MODE"] = "token"


def answers(address: str) -> bool:
    """Whether anybody listens at this address."""
    try:
        socket.create_connection(_parts(address), SECONDS).close()
    except OSError:
        return False
    return True


def nothing_at(address: str) -> str:
    """What to say of an address at which there is no cluster."""
    return f"there is no Ray cluster at {address}: `ray start --head` starts one"


def _parts(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit() or int(port) > 65535:
        raise TokenleapError(
            f"ray_address: must be HOST:PORT, such as 10.0.0.1:6379, got {address}"
        )
    return host.strip("[]"), int(port)


def _takes(address: str, token: str | None) -> bool:
    """Whether a cluster answers to who has this token."""
    import grpc

    sent = [] if token is None else [("authorization", f"Bearer {token}")]
    options = [("grpc.enable_http_proxy", 0)]  # nor does Ray use one
    with grpc.insecure_channel(address, options) as channel:
        try:
            channel.unary_unary(_ALIVE)(b"", timeout=SECONDS, metadata=sent)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                return False
            reason = str(error.code().name).lower().replace("_", " ")
            raise TokenleapError(f"{nothing_at(address)} ({reason})") from None
    return True


def _token() -> str | None:
    """The token of this machine, from where Ray takes it."""
    if text := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return text
    path = os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token"
    try:
        return Path(path).read_text(encoding="utf-8").strip() or None
    except OSError:
        return None
