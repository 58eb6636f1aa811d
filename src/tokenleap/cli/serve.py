"""`tokenleap serve`: OpenAI's API over HTTP."""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from tokenleap.cli.console import remark, working
from tokenleap.cli.options import (
    DEFAULT_MODEL,
    CachingOptions,
    MaxNumSeqs,
    ModelOptions,
    RayOptions,
    SpeculationOptions,
    amount,
    arguments_for_replicas,
    flat,
    in_panel,
    open_llm,
    option,
    option_group,
    option_of,
    options_of,
)
from tokenleap.cli.root import UsageError, examples
from tokenleap.core.config import num_bytes
from tokenleap.serve.settings import KEY_LIMITS, LogFormat, Settings, bound_socket

EXAMPLES = examples(
    "tokenleap serve smollm2-135m",
    "tokenleap serve DIR --quantization int4 --max-num-seqs 32 --port 8080",
    'tokenleap serve smollm2-135m --speculative-config \'{"method": "suffix"}\'',
    "tokenleap serve smollm2-135m --host 0.0.0.0 --api-key SECRET",
    "tokenleap serve smollm2-135m --replicas 2",
    "tokenleap serve smollm2-135m --replicas 1:8 --ray-address 10.0.0.1:6379",
)


def _named(name: str, **settings: Any) -> Any:
    """An option that may be repeated, for a field with several names."""
    return option_of(Settings, name, "Server", **{"show_default": "none", **settings})


@dataclass(frozen=True)
class ServedModel(ModelOptions):
    """The target, which is the command's argument."""

    model: Annotated[
        str,
        typer.Argument(
            help="Hugging Face folder or id (ORG/NAME), .gguf file or alias.", metavar="MODEL"
        ),
    ] = DEFAULT_MODEL


@option_group("Server")
class ServingEngine(CachingOptions):
    """Engine options of a server."""

    max_num_seqs: MaxNumSeqs = None
    generation_config: str = option(
        "Defaults for requests, and rules: auto (the model's), none, or a folder with another "
        "generation_config.json.",
        default="auto",
    )


_COUNTED = ("max_waiting", "max_n", "max_prompts", "max_logprobs", "shutdown_timeout", *KEY_LIMITS)


@dataclass(frozen=True)
class _Address:
    host: Annotated[str, option_of(Settings, "host", "Server")] = "127.0.0.1"
    port: Annotated[
        int, in_panel("Server", "Port to listen at; 0 takes a free one.", min=0, max=65535)
    ] = 8000
    served_model_name: Annotated[
        list[str] | None, _named("served_model_names", metavar="NAME", show_default="MODEL")
    ] = None
    api_key: Annotated[
        list[str] | None, _named("api_keys", metavar="KEY", envvar="TOKENLEAP_API_KEY")
    ] = None
    allowed_origins: Annotated[list[str] | None, _named("allowed_origins", metavar="ORIGIN")] = None
    max_body_size: Annotated[
        str, option_of(Settings, "max_body_bytes", "Server", metavar="AMOUNT", callback=amount)
    ] = "8MiB"


_LIMITS: Any = options_of(Settings, (*_COUNTED, "share_drafts"), "Server", _Address, defaults=True)


@option_group("Server")
class ServerOptions(_LIMITS):  # type: ignore[misc]
    """The address, names, keys and limits."""

    no_traces: bool = option(
        "Refuse requests that ask for the trace of their steps.", "--no-traces", default=False
    )
    no_log_requests: bool = option(
        "Write no line for each request.", "--no-log-requests", default=False
    )
    log_format: LogFormat | None = option(
        "Form of the line of each request.", show_default="plain", metavar="plain|json"
    )

    def settings(self, model: str) -> Settings:
        """The server's settings."""
        keys, names = self.api_key or [], self.served_model_name or [model]
        if not all(keys):
            raise UsageError("--api-key: a key cannot be empty")
        if self.no_log_requests and self.log_format:
            raise UsageError("--no-log-requests writes no lines: leave out --log-format")
        if not all(names):
            raise UsageError("--served-model-name: a name cannot be empty")
        return Settings(
            served_model_names=tuple(names),
            api_keys=tuple(keys),
            host=self.host,
            allowed_origins=tuple(self.allowed_origins or ()),
            max_body_bytes=num_bytes("max_body_size", self.max_body_size),
            **{name: getattr(self, name) for name in (*_COUNTED, "share_drafts")},
            log_requests=not self.no_log_requests,
            log_format=self.log_format or "plain",
            traces=not self.no_traces,
        )


@flat
def serve(
    target: ServedModel,
    options: ServerOptions,
    speculation: SpeculationOptions,
    engine: ServingEngine,
    ray: RayOptions,
    quiet: Annotated[
        bool, in_panel("Server", "No spinner and no address on stderr.", "--quiet", "-q")
    ] = False,
) -> None:
    """Serve a model over HTTP, with OpenAI's API.

    It listens at this machine only, unless --host says otherwise. Ctrl-C or
    SIGTERM lets the running requests end first.
    """
    replicas = ray.wanted()
    settings, config = options.settings(target.model), speculation.config_for(target.model)
    settings.check_learning(config)
    with bound_socket(options.host, options.port) as at:  # before the model is loaded
        with working("Starting", quiet=quiet):
            _check_libraries()
            if replicas is not None:
                from tokenleap.ray.cluster import check_there

                check_there()
        _show_requests(settings.log_format)

        def ready() -> None:
            if not quiet:
                page = _url(options.host, at.getsockname()[1])
                remark(f"{settings.model}: page at {page}, API at {page}/v1; Ctrl-C ends it")

        if replicas is None:
            from tokenleap.async_llm import AsyncLLM
            from tokenleap.serve.run import serve as run

            llm = open_llm(target, config, quiet=quiet, **engine.arguments())
            run(AsyncLLM(llm), settings, at, ready)
            return
        from tokenleap.ray.cluster import cluster
        from tokenleap.ray.serving import deployed, serve_replicas

        model = arguments_for_replicas(target, config, **engine.arguments())
        with ExitStack() as stack:
            with working("Starting Ray", quiet=quiet):
                ours = stack.enter_context(cluster(ray.ray_address))
            with working(f"Loading {target.model} on {replicas}", quiet=quiet):
                running = deployed(model, settings, replicas, threads=target.threads, ours=ours)
                handle = stack.enter_context(running)
            serve_replicas(handle, settings, at, ready)


def _check_libraries() -> None:
    """Refuse to load a model for a server that cannot run."""
    try:
        import fastapi
        import fastapi_offline
        import prometheus_client
        import uvicorn
    except ImportError as error:
        raise UsageError(f"the server needs {error.name}: pip install 'tokenleap[serve]'") from None
    del fastapi, fastapi_offline, prometheus_client, uvicorn


def _url(host: str, port: int) -> str:
    """Where a browser on this machine finds the server."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _show_requests(form: LogFormat) -> None:
    """Write the line of each request to standard error; JSON has its time itself."""
    lines = logging.getLogger("tokenleap.serve.requests")
    lines.setLevel(logging.INFO)
    lines.propagate = False
    if not lines.handlers:
        handler = logging.StreamHandler(sys.stderr)
        if form == "plain":
            handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        lines.addHandler(handler)
