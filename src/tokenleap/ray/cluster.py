"""Ray itself: whether it is installed, and the cluster, which is ours or one to join."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from starlette.types import Receive, Scope

from tokenleap.core.extras import how_to_install
from tokenleap.errors import ConfigError, TokenleapError, in_one_line
from tokenleap.runtime.cores import available_cores


@dataclass(frozen=True)
class Replicas:
    """How many replicas: a number, or a range in which load decides."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str | int) -> Replicas:
        """`"2"`, or `"1:4"`."""
        found = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", str(text).strip(), re.ASCII)
        if found is None:
            raise ConfigError(f"replicas: must be a number, or MIN:MAX such as 1:4, got {text}")
        least = int(found[1])
        most = int(found[2] or least)
        if least < 1:
            raise ConfigError(f"replicas: there must be at least 1, got {text}")
        if most < least:
            raise ConfigError(f"replicas: MIN is above MAX in {text}")
        return cls(least, most)

    def __str__(self) -> str:
        if self.scales:
            return f"{self.least} to {self.most} replicas"
        return "1 replica" if self.most == 1 else f"{self.most} replicas"

    @property
    def scales(self) -> bool:
        """Whether load decides."""
        return self.least < self.most


@dataclass(frozen=True)
class Share:
    """Resources that Ray reserves for a replica."""

    cores: int
    gpus: int = 0


def share_of(
    cores: Sequence[float],
    gpus: Sequence[float],
    replicas: Replicas,
    *,
    device: str,
    threads: int | None,
) -> Share:
    """An equal share of the cluster for each replica, of which none is spread over machines."""
    wanted = 1 if device.startswith("cuda") or (device == "auto" and sum(gpus) >= 1) else 0
    if wanted and sum(int(each) for each in gpus) < replicas.most:
        raise ConfigError(
            f"replicas: {replicas.most} need a GPU each, and there are "
            f"{sum(int(each) for each in gpus)}: take fewer replicas, or device cpu"
        )
    most = threads or max((int(each) for each in cores), default=0)
    for count in range(most, 0 if threads is None else threads - 1, -1):
        if sum(int(each // count) for each in cores) >= replicas.most:
            return Share(count, wanted)
    total = sum(int(each) for each in cores)
    need = "a core each" if threads is None else f"{threads} cores each"
    raise ConfigError(
        f"replicas: {replicas.most} need {need}, and there are {total}: take fewer"
        + ("" if threads is None else ", or fewer threads")
    )


def beside(share: Share, cores: Sequence[float]) -> float:
    """Cores that Ray sets aside for a replica, so that some machine has one for other work.

    A replica has as many threads as its share has cores all the same. They do not wait for others,
    but a task that reads a file would wait forever for a core of its own.
    """
    if share.cores > 1:
        return share.cores - 1
    return 0.5 if max(cores, default=0) >= 2 else 0


# Which replica has a prompt's beginning in its caches: the routing, without Ray.


BLOCK = 64
"""Characters of a block, whose hash covers all blocks before it, too."""
MOST_BLOCKS = 128
"""Blocks of a prompt that are looked at."""
MOST_KEYS = 65536
"""Keys that are remembered; the ones that were used last stay."""

_PARTS = {
    "/v1/chat/completions": ("tools", "messages"),
    "/v1/completions": ("prompt",),
    "/v1/responses": ("tools", "instructions", "input"),
}
"""The fields with the prompt, in the order in which the model reads them."""


def prompt_keys(path: str, body: bytes, caller: str = "") -> list[int]:
    """Hashes of the beginnings of a request's prompt, from the shortest to the whole prompt.

    Prompts that begin with the same blocks of characters have the same first keys, if caches share
    them: the requests have the same API key and the same salt.

    Returns:
        No keys where there is no prompt, and for bodies that the endpoint will refuse.
    """
    parts = _PARTS.get(path)
    if parts is None:
        return []
    try:
        fields = json.loads(body)
        if not isinstance(fields, dict):
            return []
        text = "".join(_text(fields[part]) for part in parts if fields.get(part))
        salt = f"{caller} {fields.get('cache_salt') or ''}"
    except (ValueError, RecursionError):  # writing may go deeper than reading
        return []
    text = text[: BLOCK * MOST_BLOCKS]
    keys, before = list[int](), blake2b(salt.encode(errors="replace"), digest_size=8).digest()
    for start in range(0, len(text), BLOCK):
        piece = text[start : start + BLOCK].encode(errors="replace")
        before = blake2b(before + piece, digest_size=8).digest()
        keys.append(int.from_bytes(before))
    return keys


def _text(value: Any) -> str:
    """Without the closing bracket of a list: a conversation that goes on begins the same."""
    return value if isinstance(value, str) else json.dumps(value)[:-1]


class PrefixMemory:
    """Which replicas have seen which beginnings of prompts."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, set[str]] = OrderedDict()

    def ranked(self, keys: Sequence[int], loads: Mapping[str, int]) -> list[str]:
        """The replicas for a prompt, the best one first.

        That is the one that has seen most of the prompt, unless it is busy: it has more than twice
        as many requests as the one with the fewest, and two more. Replicas that have seen equally
        much are in the order of their loads, and then of a hash, so that all who route alike
        choose alike.
        """
        known = dict.fromkeys(loads, 0)
        left = set(loads)
        for key in keys:
            left &= self._seen.get(key, set())
            if not left:
                break
            for replica in left:
                known[replica] += 1
        first = keys[0] if keys else 0
        busy = 2 * min(loads.values(), default=0) + 2

        def place(replica: str) -> tuple[bool, int, int, bytes]:
            tie = blake2b(f"{first} {replica}".encode(), digest_size=8).digest()
            return loads[replica] > busy, -known[replica], loads[replica], tie

        return sorted(loads, key=place)

    def saw(self, keys: Sequence[int], replica: str) -> None:
        """Remember that this replica has computed a prompt."""
        for key in keys:
            self._seen.setdefault(key, set()).add(replica)
            self._seen.move_to_end(key)
        while len(self._seen) > MOST_KEYS:
            self._seen.popitem(last=False)

    def keep(self, replicas: set[str]) -> None:
        """Forget all other replicas."""
        for key in [key for key, seen in self._seen.items() if seen - replicas]:
            self._seen[key] &= replicas
            if not self._seen[key]:
                del self._seen[key]


# What goes between the front and a replica: a request as a value, and messages of ASGI.


Message: TypeAlias = MutableMapping[str, Any]

LOG = "tokenleap.log"
"""The type of a message of a replica with the fields for the log line of the request."""

_FIELDS = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string"),
    *("root_path", "headers", "client", "server"),
)


@dataclass(frozen=True)
class Call:
    """A request that has come in completely.

    Args:
        scope: what ASGI says of it, without what belongs to a process.
    """

    scope: dict[str, Any]
    body: bytes
    caller: str = ""

    @classmethod
    def of(cls, scope: Scope, body: bytes) -> Call:
        """A request that a server has read."""
        caller = scope.get("state", {}).get("caller", "")
        return cls({name: scope[name] for name in _FIELDS if name in scope}, body, caller)

    def as_scope(self) -> Scope:
        """The scope for an app."""
        return {**self.scope, "state": {"caller": self.caller}}

    def receiver(self) -> Receive:
        """Brings an app the body, and then nothing: a client that goes away ends the call."""
        messages = [{"type": "http.request", "body": self.body, "more_body": False}]

        async def receive() -> Message:
            if not messages:
                await asyncio.Event().wait()
            return messages.pop()

        return receive


# One page of metrics of several replicas.


def joined(pages: Iterable[str]) -> str:
    """Pages in Prometheus' text format as one: each metric once, with the samples of all pages.

    Samples have a label that tells the pages apart, so nothing is added up.
    """
    heads: dict[str, str] = {}  # by the name of the metric
    samples: dict[str, list[str]] = {}
    for page in pages:
        for metric in page.split("# HELP ")[1:]:
            lines = metric.splitlines(keepends=True)  # HELP, TYPE, samples
            name = metric.split(" ", 1)[0]
            heads[name] = "# HELP " + "".join(lines[:2])
            samples.setdefault(name, []).extend(lines[2:])
    return "".join(heads[name] + "".join(samples[name]) for name in heads)


OBJECT_STORE = 256 * 2**20
"""Bytes for what processes of a cluster of ours give each other: bodies and blocks of text."""
LOST_SECONDS = 15.0
"""Seconds without an answer after which a cluster has ended. Ray ends the process after 60."""
_EVERY = 3.0
"""Seconds between two looks at it."""


def check_there() -> None:
    """Refuse to go on without Ray; `cluster` imports it, which reads the environment."""
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
    """Resources of each machine of the cluster."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _missing(name: str | None) -> TokenleapError:
    return TokenleapError(f"this needs {name}: {how_to_install('ray')}")


def _failed(address: str | None, error: Exception) -> TokenleapError:
    """The error if Ray could not be started or joined."""
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
"""A call without arguments that Ray's head answers to callers with its token."""


def prepare(address: str) -> None:
    """Make sure that a cluster can be joined, before `ray` is imported.

    Ray itself would try for minutes if none listens. It takes a token for granted on a cluster
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
    """The message about an address without a cluster."""
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
