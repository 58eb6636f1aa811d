"""`tokenleap serve`: OpenAI's API over HTTP."""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
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
    check_known,
    few,
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
from tokenleap.core.extras import how_to_install
from tokenleap.serve.settings import KEY_LIMITS, LogFormat, Settings, bound_socket

EXAMPLES = examples(
    "tokenleap serve smollm2-135m",
    "tokenleap serve DIR --quantization int4 --max-num-seqs 32 --port 8080",
    'tokenleap serve smollm2-135m --speculative-config \'{"method": "suffix"}\'',
    "tokenleap serve smollm2-135m --host 0.0.0.0 --api-key SECRET",
    "tokenleap serve --model small=smollm2-135m --model code=DIR --models-memory 8GiB",
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
    models: Annotated[
        list[str] | None,
        in_panel(
            "Server",
            "Model that requests select by this name, loaded on demand. Other options hold for "
            "all of them. May be repeated.",
            "--model",
            metavar="NAME=PATH",
            show_default="MODEL alone",
        ),
    ] = None
    models_memory: Annotated[
        str | None,
        option_of(
            Settings,
            "models_memory",
            "Server",
            metavar="AMOUNT",
            callback=amount,
            show_default="80% of what is free",
        ),
    ] = None
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

    def paths(self, *, replicas: bool, model: bool) -> dict[str, str] | None:
        """The models by their names; None if there is only MODEL.

        Args:
            replicas: whether there are replicas.
            model: whether MODEL was given.
        """
        if not self.models:
            if self.models_memory is not None:
                raise UsageError("--models-memory is for several models: add --model NAME=PATH")
            return None
        given = {"the argument MODEL": model, "--replicas": replicas}
        given["--served-model-name"] = self.served_model_name is not None
        for other in (name for name, there in given.items() if there):
            raise UsageError(f"{other} and --model NAME=PATH contradict each other: leave out one")
        found: dict[str, str] = {}
        for name, equals, path in (text.partition("=") for text in self.models):
            if not (name and equals and path):
                raise UsageError(f"--model: expected NAME=PATH, got {name}{equals}{path}")
            if name in found:
                raise UsageError(f"--model: there are two models with the name {name}")
            check_known(path)
            found[name] = path
        return found

    def settings(self, *models: str) -> Settings:
        """The server's settings."""
        keys, names = self.api_key or [], self.served_model_name or list(models)
        if not all(key.split() == [key] for key in keys):
            raise UsageError("--api-key: a key has a character and no spaces; repeat the option")
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
            models_memory=None
            if self.models_memory is None
            else num_bytes("models_memory", self.models_memory),
            **{name: getattr(self, name) for name in (*_COUNTED, "share_drafts")},
            log_requests=not self.no_log_requests,
            log_format=self.log_format or "plain",
            traces=not self.no_traces,
        )


@few(
    "host port served_model_name api_key max_model_len quantization "
    "method draft_model max_num_seqs models"
)
@flat
def serve(
    context: typer.Context,
    target: ServedModel,
    options: ServerOptions,
    speculation: SpeculationOptions,
    engine: ServingEngine,
    ray: RayOptions,
    quiet: Annotated[
        bool, in_panel("Server", "No spinner and no address on stderr.", "--quiet", "-q")
    ] = False,
) -> None:
    """Serve a model, or several, over HTTP, with OpenAI's API.

    It listens at this machine only, unless --host says otherwise. Ctrl-C or
    SIGTERM lets the running requests end first.
    """
    replicas = ray.wanted()
    source = context.get_parameter_source("model")
    paths = options.paths(
        replicas=replicas is not None, model=source is not None and source.name == "COMMANDLINE"
    )
    settings = options.settings(*(paths or [target.model]))
    for path in (paths or {"": target.model}).values():
        config = speculation.config_for(path)
        settings.check_learning(config)
        if paths and config is not None and config.online is not None:
            raise UsageError("online: a drafter learns for one model: serve it alone")
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
                names = ", ".join(settings.served_model_names if paths else [settings.model])
                remark(f"{names}: page at {page}, API at {page}/v1; Ctrl-C ends it")

        if replicas is None:
            from tokenleap import AsyncLLM
            from tokenleap.serve.run import serve as run

            def opened(path: str) -> AsyncLLM:
                model, config = replace(target, model=path), speculation.config_for(path)
                silent = quiet or paths is not None
                return AsyncLLM(open_llm(model, config, quiet=silent, **engine.arguments()))

            if paths is None:
                run(opened(target.model), settings, at, ready)
                return
            from tokenleap.serve.models import Models

            run(Models(paths, opened, settings, target.device), settings, at, ready)
            return
        from tokenleap.ray.cluster import cluster
        from tokenleap.ray.serving import deployed, serve_replicas

        config = speculation.config_for(target.model)
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
        raise UsageError(f"the server needs {error.name}: {how_to_install('serve')}") from None
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
