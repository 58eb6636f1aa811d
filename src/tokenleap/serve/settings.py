"""`Settings`: what a server allows, and how it is called."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Gt
from pydantic import ConfigDict

from tokenleap.core.config import Config
from tokenleap.errors import ConfigError

if TYPE_CHECKING:
    from tokenleap.config import SpeculativeConfig


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

    Options of `tokenleap serve` have a field's default, its bounds and its first sentence.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)

    served_model_names: tuple[str, ...]
    """Name in requests. The first of several is shown."""
    api_keys: tuple[str, ...] = ()
    """Key that requests need. Without any, none is needed."""
    host: str | None = None
    """Address to listen at; 0.0.0.0 is all. At a loopback address, requests have to name this
    machine in `Host`, or an allowed origin's. None if it is not known.
    """
    allowed_origins: tuple[str, ...] = ()
    """Origin of web pages that may use the server (CORS). "*" is any. Requests of other pages are
    refused.
    """
    models_memory: Annotated[int, Ge(1)] | None = None
    """Memory for all loaded models of several, such as 8GiB. None is 80% of what is free at the
    start.
    """
    max_waiting: Annotated[int, Ge(0)] = 256
    """Outputs that may wait for their turn; more get 429."""
    max_body_bytes: Annotated[int, Ge(1)] = 8 * 2**20
    """Limit of a request's body, such as 8MiB."""
    max_n: Annotated[int, Ge(1)] = 16
    """Maximum outputs of a prompt."""
    max_prompts: Annotated[int, Ge(1)] = 128
    """Maximum prompts of one completion."""
    max_logprobs: Annotated[int, Ge(0)] = 20
    """Maximum log-probabilities of a token."""
    body_timeout: Annotated[float, Gt(0)] = 30.0
    """Seconds in which a request's body has to come."""
    header_timeout: Annotated[float, Gt(0)] = 15.0
    """Seconds in which all headers of a request have to come."""
    write_timeout: Annotated[float, Gt(0)] = 30.0
    """Seconds in which a client has to take a piece of a stream. Then its request ends."""
    shutdown_timeout: Annotated[float, Ge(0)] = 30.0
    """Seconds that requests have left after SIGTERM."""
    log_requests: bool = True
    """Write a line of JSON for each request."""
    share_drafts: bool = False
    """Draft from the outputs of all earlier requests with the same API key. It is about requests
    without a `cache_salt`.
    """
    traces: bool = True
    """Answer requests that ask for the trace of their steps."""

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
