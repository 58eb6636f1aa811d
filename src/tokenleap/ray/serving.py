"""`tokenleap serve --replicas N`: the server's app on replicas of Ray Serve."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Iterator, Mapping
from inspect import signature
from typing import Any

from tokenleap.errors import TokenleapError, in_one_line
from tokenleap.llm import LLM
from tokenleap.ray.cluster import (
    Replicas,
    Share,
    is_there,
    share,
    watched,
)
from tokenleap.serve.app import Faults, guarded
from tokenleap.serve.run import TokenleapServer, until_signalled
from tokenleap.serve.settings import Settings

TOLD_SECONDS = 5.0
"""Seconds in which replicas have to learn that they end."""
PROBLEM_SECONDS = 60.0
"""Seconds in which all replicas have to say whether they have loaded the model."""
HEALTH_PERIOD = 2.0
"""Seconds between two looks at a replica. Ray replaces one that has died when it looks."""
SPARE = 64
"""Calls beyond those for outputs that a replica takes: health, metrics, tokens of texts."""


def serve_replicas(
    handle: Any, settings: Settings, at: socket.socket, ready: Callable[[], object] = lambda: None
) -> None:
    """Answer requests with these replicas until a signal ends it."""
    from tokenleap.ray.replicas import Front

    with watched() as alive:
        front = Front(handle, settings, alive)
        app = guarded(Faults(front), settings)
        until_signalled(TokenleapServer(app, front, settings, ready), at)
        if not front.alive:
            raise TokenleapError("the Ray cluster has ended: start it and the server again")


@contextlib.contextmanager
def deployed(
    model: Mapping[str, Any],
    settings: Settings,
    replicas: Replicas,
    *,
    threads: int | None = None,
    ours: bool = False,
) -> Iterator[Any]:
    """Replicas on the cluster that this process is connected to; they end with the block."""
    of_each = share(model, replicas, threads)
    from ray import serve as ray_serve
    from ray.serve.schema import LoggingConfig

    from tokenleap.ray.replicas import NO_ANSWER

    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    ray_serve.start(proxy_location="Disabled", logging_config=quiet)
    name = f"tokenleap {settings.model}".replace("#", "-")  # which Ray puts between parts of names
    if name in ray_serve.status().applications:
        raise TokenleapError(
            f"the cluster serves {settings.model} already: end that with `serve shutdown`, or "
            "choose another --served-model-name"
        )
    try:
        application = _deployment(model, settings, replicas, of_each, quiet)
        try:
            handle = ray_serve.run(application, name=name, route_prefix=None)
            _check_loaded(handle)
        except NO_ANSWER as error:
            raise TokenleapError(f"the replicas do not start: {in_one_line(error)}") from None
        try:
            yield handle
        finally:
            if not ours and is_there():
                with contextlib.suppress(*NO_ANSWER):
                    handle.broadcast("cut_off").results(
                        timeout_s=TOLD_SECONDS, return_exceptions=True
                    )
    finally:
        if not ours and is_there():
            ray_serve.delete(name)
            if not ray_serve.status().applications:
                ray_serve.shutdown()


def _check_loaded(handle: Any) -> None:
    """Ask all replicas for what went wrong when they were made."""
    for problem in handle.broadcast("problem").results(timeout_s=PROBLEM_SECONDS):
        if problem is not None:
            raise problem


def _deployment(
    model: Mapping[str, Any],
    settings: Settings,
    replicas: Replicas,
    of_each: Share,
    logs: Any,
) -> Any:
    """The application that Ray Serve runs."""
    from ray import serve as ray_serve
    from ray.serve.config import RequestRouterConfig

    from tokenleap.ray.replicas import Replica

    rows = int(model.get("max_num_seqs") or signature(LLM).parameters["max_num_seqs"].default)
    scaling: dict[str, Any] = {"num_replicas": replicas.least}
    if replicas.scales:
        scaling = {
            "autoscaling_config": {
                "min_replicas": replicas.least,
                "max_replicas": replicas.most,
                "target_ongoing_requests": rows,  # more would have to wait for a row
            }
        }
    made = ray_serve.deployment(
        Replica,
        name="Replica",
        max_ongoing_requests=rows + settings.max_waiting + SPARE,
        graceful_shutdown_timeout_s=settings.shutdown_timeout,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=HEALTH_PERIOD,
        ray_actor_options={"num_cpus": of_each.cores, "num_gpus": of_each.gpus},
        request_router_config=RequestRouterConfig(
            request_router_class="tokenleap.ray.router:PrefixRouter"
        ),
        logging_config=logs,
        **scaling,
    )
    # The front has the guards and the log.
    own = settings.model_copy(update={"log_requests": False, "api_keys": ()})
    return made.bind(dict(model), own, of_each.cores)
