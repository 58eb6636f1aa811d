"""The socket of a server. This file imports nothing else, so a wrong address is told at once."""

from __future__ import annotations

import socket

__all__ = ["bound_socket"]


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket at this address. Nobody can connect before the server runs."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise OSError(error.errno, f"{error.strerror}: choose another --host", host) from None
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        made.close()
        raise OSError(
            error.errno, f"{error.strerror}: choose another --port", f"{host}:{port}"
        ) from error
    return made
