"""The address of a running Ray cluster: whether it answers, and the token that it may want."""

from __future__ import annotations

import os
import socket
import sys
from importlib.util import find_spec
from pathlib import Path

from tokenleap.errors import TokenleapError

__all__ = ["answers", "nothing_at", "prepare"]

SECONDS = 5.0
"""Seconds in which the address of a cluster has to answer."""
_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
"""A call without arguments that Ray's head answers to whoever has its token."""


def prepare(address: str) -> None:
    """Make sure that a cluster can be joined, before `ray` is imported.

    Ray itself would try for minutes where nobody listens. It takes a token for granted on a cluster
    of this machine, but for an address only if `RAY_AUTH_MODE` says so, which it reads once, when
    it is imported. So a cluster that wants a token sets that variable here.

    Args:
        address: HOST:PORT.

    Raises:
        TokenleapError: there is no cluster, or it wants a token that this machine does not have.
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
    """Whether a cluster answers to who has this token.

    Raises:
        TokenleapError: what listens there is not Ray.
    """
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
