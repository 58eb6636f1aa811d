"""`Settings`: what a server allows, and how it is called."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Annotated, Literal, Self, TypeAlias

from annotated_types import Ge, Gt
from pydantic import ConfigDict, model_validator

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


LogFormat: TypeAlias = Literal["plain", "json"]

KEY_LIMITS = ("rpm_limit", "tpm_limit", "max_parallel_requests")
"""Limits of each API key."""


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
    rpm_limit: Annotated[int | None, Ge(1)] = None
    """Requests per minute of each API key; more get 429."""
    tpm_limit: Annotated[int | None, Ge(1)] = None
    """Tokens per minute of each API key, of prompts and outputs; more requests get 429."""
    max_parallel_requests: Annotated[int | None, Ge(1)] = None
    """Requests of each API key at a time; more get 429."""
    log_requests: bool = True
    """Write a line for each request."""
    log_format: LogFormat = "plain"
    """Form of these lines."""
    share_drafts: bool = False
    """Draft from the outputs of all earlier requests with the same API key. It is about requests
    without a `cache_salt`.
    """
    traces: bool = True
    """Answer requests that ask for the trace of their steps."""

    @model_validator(mode="after")
    def _limits_have_keys(self) -> Self:
        for name in self.limits:
            if not self.api_keys:
                raise ValueError(f"{name} limits each API key, and there is none: give --api-key.")
        return self

    @property
    def limits(self) -> dict[str, int]:
        """The limits of each API key, by their names."""
        found = {name: getattr(self, name) for name in KEY_LIMITS}
        return {name: limit for name, limit in found.items() if limit is not None}

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
