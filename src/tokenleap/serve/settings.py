"""`Settings`: what a server allows, and how it is called."""

from __future__ import annotations

import socket
from typing import Annotated

from annotated_types import Ge, Gt

from tokenleap.config import SpeculativeConfig
from tokenleap.core.config import Config
from tokenleap.errors import ConfigError

__all__ = ["Settings", "bound_socket"]


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket at this address. Clients can connect once the server runs."""
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


class Settings(Config):
    """Limits of a server, and what it tells about itself.

    Args:
        served_model_names: names under which requests may ask for the model; the first is shown.
        api_keys: a request to an endpoint of the model needs one of them; without any, none.
        host: the address that the server listens at, if it is known. At a loopback address,
            requests have to name this machine in `Host`, or an allowed origin's.
        allowed_origins: origins of web pages that may use the server (CORS); "*" is any. Requests
            of other pages are refused.
        max_waiting: most sequences that wait for a place among the running ones. More requests are
            answered with 429.
        max_logprobs: most tokens per position whose log-probabilities a request may ask for.
        header_timeout: seconds in which all headers of a request have to come.
        write_timeout: seconds in which a client has to take a piece of a stream; then its request
            ends.
        share_drafts: whether requests without a `cache_salt` draft from one another's outputs, as
            far as they have the same API key.
        traces: whether a request may ask for the trace of its steps.
    """

    served_model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    host: str | None = None
    allowed_origins: tuple[str, ...] = ()
    max_waiting: Annotated[int, Ge(0)] = 256
    max_body_bytes: Annotated[int, Ge(1)] = 8 * 2**20
    max_n: Annotated[int, Ge(1)] = 16
    max_prompts: Annotated[int, Ge(1)] = 128
    max_logprobs: Annotated[int, Ge(0)] = 20
    body_timeout: Annotated[float, Gt(0)] = 30.0
    header_timeout: Annotated[float, Gt(0)] = 15.0
    write_timeout: Annotated[float, Gt(0)] = 30.0
    shutdown_timeout: Annotated[float, Ge(0)] = 30.0
    log_requests: bool = True
    share_drafts: bool = False
    traces: bool = True

    @property
    def model(self) -> str:
        """The name that responses show."""
        return self.served_model_names[0]

    def check_learning(self, config: SpeculativeConfig | None) -> None:
        """Refuse a drafter that would learn from one client's text for another."""
        if config is None or config.online is None:
            return
        if not self.share_drafts:
            raise ConfigError(
                "online: what a drafter learns reaches all requests: serve with --share-drafts "
                "if they may read one another's text, or without 'online'."
            )
        if len(self.api_keys) > 1:
            raise ConfigError(
                f"online: what a drafter learns reaches all requests, and there are "
                f"{len(self.api_keys)} API keys: serve with one, or without 'online'."
            )
