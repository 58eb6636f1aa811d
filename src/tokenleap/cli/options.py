"""Options that several commands share, in dataclasses that commands take as parameters (`flat`).

Those of sampling and of a server's limits are made of fields of `SamplingParams` and `Settings`.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields, is_dataclass, make_dataclass
from functools import cache, partial, wraps
from importlib.util import find_spec
from pathlib import Path
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

import typer
from annotated_types import Ge

from tokenleap.cli.console import remark, working
from tokenleap.cli.root import HELP_ALL, SAMPLING, UsageError, flag
from tokenleap.core.config import Config, num_bytes
from tokenleap.core.extras import how_to_install
from tokenleap.core.params import SamplingParams
from tokenleap.runtime.choices import QUANTIZATION_OPTIONS, RUNTIMES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tokenleap.config import SpeculativeConfig
    from tokenleap.llm import LLM
    from tokenleap.ray.cluster import Replicas

# From options to a loaded model, with progress on stderr; for every command that needs one.


def open_llm(
    options: ModelOptions, config: SpeculativeConfig | None, *, quiet: bool = False, **engine: Any
) -> LLM:
    """Load the target, and the draft model if the configuration names one; see `llm_arguments`."""
    arguments = llm_arguments(options, config, **engine)
    with working(f"Loading {options.model}", quiet=quiet):
        from tokenleap import LLM

        options.set_threads()
        llm = LLM(**arguments)
    overlap = llm.vocabulary_overlap
    if overlap is not None and overlap.way != "same" and not quiet:
        remark(str(overlap))
    return llm


def llm_arguments(
    options: ModelOptions, config: SpeculativeConfig | None, **engine: Any
) -> dict[str, Any]:
    """Arguments of `LLM`, for models that are there, or are fetched or converted now."""
    from tokenleap.models.resolver import gguf_file

    if gguf_file(options.model) is None:  # `LLM` converts those in its own way
        resolve(options.model)
    if config is not None:
        find_draft(config)
    return {
        "model": options.model,
        "speculative_config": config,
        "dtype": options.dtype,
        "device": options.device,
        "max_model_len": options.max_model_len,
        "quantization": options.quantization,
        "runtime": options.runtime,
        **engine,
    }


def find_draft(config: SpeculativeConfig) -> None:
    """Fetch or convert the draft model if needed."""
    from tokenleap.models.resolver import gguf_file

    if config.model is not None and not config.takes_head and gguf_file(config.model) is None:
        resolve(config.model)


def check_head(config: SpeculativeConfig) -> SpeculativeConfig:
    """The configuration; refuses a trained head that is not there, before PyTorch is loaded."""
    from tokenleap.drafters.heads.shipped import existing_folder
    from tokenleap.errors import ModelError

    if config.takes_head:
        try:
            existing_folder(config.model)
        except ModelError as error:
            raise UsageError(str(error)) from error
    return config


def open_tokenizer(model: str) -> PreTrainedTokenizerBase:
    folder = resolve(model)
    with working(f"Loading the tokenizer of {model}"):
        from tokenleap.models import load_tokenizer

        tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise UsageError(f"{model} has no tokenizer")
    return tokenizer


def resolve(name: str) -> Path:
    """A model's folder; fetches or converts the model first if needed, with a progress bar."""
    from tokenleap import models
    from tokenleap.errors import ModelError

    try:
        return models.resolve(name)
    except ModelError as error:
        if _is_model(name):
            raise
        raise UsageError(str(error)) from error


def check_known(name: str) -> None:
    """Refuse a model that is neither here nor can be fetched, without fetching it."""
    from tokenleap import models
    from tokenleap.models.resolver import packed_name

    cached = (each.name for each in models.cached())
    if not (_is_model(name) or packed_name(name) or name in cached):
        raise UsageError(f"there is no model '{name}': `tokenleap models` lists the known ones")


def _is_model(name: str) -> bool:
    """Whether this is a path that exists, or the name of a model that can be fetched."""
    from tokenleap import models
    from tokenleap.models.resolver import is_hub_id

    if name in models.aliases() or name in models.short_names() or is_hub_id(name):
        return True
    try:
        return bool(name) and Path(name).expanduser().exists()
    except (OSError, RuntimeError):  # no valid file name, or no such user in `~user`
        return False


# Groups of options as parameters of a command.
#
#     @option_group("Amount")
#     class Amount:
#         rounds: int = option("Runs of every prompt.", default=3, min=1)
#
#     @flat
#     def bench(prompts: ..., amount: Amount, model: ModelOptions) -> None: ...
#
# Typer accepts single parameters only. `flat` shows it the fields of the groups instead, and builds
# the groups when the command is called. A field may also be annotated with its Typer option.

Group = TypeVar("Group")


@dataclass_transform(frozen_default=True)
def option_group(panel: str) -> Callable[[type[Group]], type[Group]]:
    """A dataclass whose `option` fields are in a panel of the help page."""

    def made(kind: type[Group]) -> type[Group]:
        for item in vars(kind).values():
            if isinstance(item, Field):
                item.metadata["option"].rich_help_panel = panel
        return dataclass(frozen=True)(kind)

    return made


def option(text: str, *names: str, default: Any = None, **settings: Any) -> Any:
    """A field of a group: an option with this help."""
    return field(default=default, metadata={"option": typer.Option(*names, help=text, **settings)})


def in_panel(panel: str, text: str, *names: str, **settings: Any) -> Any:
    """A Typer option in a panel of the help page."""
    return typer.Option(*names, help=text, rich_help_panel=panel, **settings)


JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
JsonOutput = Annotated[bool, in_panel("Output", "Print one JSON object.", "--json")]


def option_of(
    model: type[Config], name: str, panel: str, *names: str, before: str = "", **settings: Any
) -> Any:
    """A Typer option for a field; the first sentence of its docstring is the help.

    Args:
        before: what the help begins with.
    """
    described = str(model.model_fields[name].description).replace("\n", " ")
    text = re.split(r"\.(?= |$)", described)[0] + "."
    if before:
        text = f"{before}{text[0].lower()}{text[1:]}"
    if (form := _form(model, name)) == TEXTS:
        text += " May be repeated."
    return in_panel(panel, text, *names, **{"metavar": form, **settings})


def options_of(
    model: type[Config],
    names: Iterable[str],
    panel: str,
    *bases: type,
    defaults: bool = False,
    **settings: Mapping[str, Any],
) -> Any:
    """A dataclass with an option for each of these fields.

    Args:
        defaults: whether options have the fields' defaults and bounds. If not, an option that is
            not given is None, and the model says what is wrong.
        settings: further arguments of `option_of`, by the field's name.
    """
    found: list[tuple[str, Any, Any]] = []
    for name in names:
        kind, field = _kinds(model, name)[0], model.model_fields[name]
        more = dict(settings.get(name, {}))
        if defaults:
            more["min"] = next((each.ge for each in field.metadata if isinstance(each, Ge)), None)
        option = option_of(model, name, panel, *([flag(name)] if kind is bool else []), **more)
        if defaults or kind is bool:
            found.append((name, Annotated[kind, option], field.default))
        else:
            kind = _WRITTEN.get(_form(model, name), kind)
            found.append((name, Annotated[kind | None, option], None))
    return make_dataclass(model.__name__, found, bases=bases, frozen=True)


JSON, IDS, TEXTS = "JSON", "ID,ID,...", "TEXT"
_WRITTEN: dict[str | None, Any] = {JSON: str, IDS: str, TEXTS: list[str]}


def _form(model: type[Config], name: str) -> str | None:
    """How a field is written in a shell; None for a number or a switch."""
    kinds = _kinds(model, name)
    if any(get_origin(kind) is Mapping for kind in kinds):
        return JSON
    items = [get_args(kind)[0] for kind in kinds if get_origin(kind) in (Sequence, tuple)]
    return None if not items else IDS if items[0] is int else TEXTS


def _kinds(model: type[Config], name: str) -> tuple[Any, ...]:
    """The types of a field, without bounds."""
    hint = _hints(model)[name]
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


@cache
def _hints(model: type[Config]) -> dict[str, Any]:
    return get_type_hints(model)


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """The command with every dataclass parameter replaced by the dataclass's fields."""
    groups: dict[str, type] = {}
    shown: list[inspect.Parameter] = []
    for parameter in _parameters(command):
        kind = parameter.annotation
        if isinstance(kind, type) and is_dataclass(kind):
            groups[parameter.name] = kind
            shown += _parameters(kind)
        else:
            shown.append(parameter)

    @wraps(command)
    def run(**values: Any) -> None:
        for name, kind in groups.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
        command(**values)

    run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return run


def few(names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Name the options that --help shows of a command with many; --help-all shows all of them."""

    def made(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**values: Any) -> None:
            del values[HELP_ALL]
            command(**values)

        signature = inspect.signature(command)
        added = inspect.Parameter(
            HELP_ALL, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_HelpAll
        )
        run.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*signature.parameters.values(), added]
        )
        run.__annotations__ = {**command.__annotations__, HELP_ALL: _HelpAll}
        run.first = frozenset(names.split())  # type: ignore[attr-defined]
        return run

    return made


def _show_all(context: typer.Context, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        context.meta[HELP_ALL] = True
        typer.echo(context.get_help())
        raise typer.Exit


_HelpAll = Annotated[
    bool,
    typer.Option("--help-all", help="Show all options.", is_eager=True, callback=_show_all),
]


N = TypeVar("N", int, float)


def numbers(
    text: str, kind: type[N], wrong: str, holds: Callable[[N], bool] = lambda _: True
) -> list[N]:
    """The numbers of a list with commas; `wrong` begins the message if one does not hold."""
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(map(holds, found)):
        raise UsageError(f"{wrong}, got {text}")
    return found


def need_matplotlib(flag_name: str) -> None:
    if find_spec("matplotlib") is None:
        raise UsageError(f"{flag_name} needs Matplotlib: {how_to_install('plots')}")


def refuse_given(reason: str, *options: Any) -> None:
    """Refuse options that would have no effect."""
    for group in options:
        for item in fields(group):
            if getattr(group, item.name) != item.default:
                raise UsageError(f"{flag(item.name)}: {reason}")


def _parameters(of: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a command or of a group, with evaluated annotations."""
    hints, only = get_type_hints(of, include_extras=True), inspect.Parameter.KEYWORD_ONLY
    for item in fields(of) if is_dataclass(of) else ():
        if "option" in item.metadata:
            hints[item.name] = Annotated[hints[item.name], item.metadata["option"]]
    parameters = inspect.signature(of).parameters.values()
    return [each.replace(kind=only, annotation=hints[each.name]) for each in parameters]


PROMPTS_HELP = "Text with a prompt per line, or .jsonl with a prompt per object."

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_METHOD = "ngram"
"""The default method: it needs no second model, and costs nothing where it finds no match."""

UNSAID = "default"
"""As a `--method`: what runs without one."""


_speculation = partial(in_panel, "Speculation")
_engine = partial(in_panel, "Engine")


def _one_of(param: typer.CallbackParam, name: str) -> str:
    known = {"quantization": QUANTIZATION_OPTIONS, "runtime": RUNTIMES}[str(param.name)]
    if name not in known:
        raise UsageError(f"{flag(str(param.name))}: must be one of {', '.join(known)}, got {name}")
    return name


def amount(param: typer.CallbackParam, text: str | None) -> str | None:
    """Refuse an invalid amount of memory before the model is fetched."""
    if text is not None:
        num_bytes(str(param.name), text)
    return text


@option_group("Model")
class ModelOptions:
    """The target and how it runs."""

    model: str = option(
        "Hugging Face folder or id (ORG/NAME), .gguf file, or a name from `tokenleap models`.",
        "--model",
        "-m",
        default=DEFAULT_MODEL,
    )
    dtype: str = option("auto, float32, bfloat16 or float16 (GPU).", default="auto")
    device: str = option("auto, cpu, cuda, ...", default="auto")
    max_model_len: int | None = option(
        "Limit of prompt and output tokens together.", show_default="the model's"
    )
    quantization: str = option(
        "auto (a GGUF file as it is), none, or smaller weights: int8, int4 (CPU).",
        default="auto",
        callback=_one_of,
        autocompletion=lambda: list(QUANTIZATION_OPTIONS),
    )
    runtime: str = option(
        "auto, native (C++ on a CPU), torch or compiled; or a name that was shown.",
        default="auto",
        callback=_one_of,
    )
    threads: int | None = option(
        "Threads on a CPU.", min=1, show_default="OMP_NUM_THREADS, else all cores"
    )

    def __post_init__(self) -> None:
        """Take the model, quantization and dtype that a name of packed weights stands for."""
        from tokenleap.models.resolver import as_packed

        known = as_packed(self.model, self.quantization, self.dtype)
        for name, value in zip(("model", "quantization", "dtype"), known, strict=True):
            object.__setattr__(self, name, value)

    def set_threads(self) -> None:
        """Let this process compute with `threads`, if they were given."""
        if self.threads is not None:
            from tokenleap.runtime.native.network import set_num_threads

            set_num_threads(self.threads)


MaxNumSeqs = Annotated[int | None, _engine("Maximum sequences at once.", show_default="16")]


@option_group("Engine")
class EngineOptions:
    """Memory limits and chunked prefill: arguments of `LLM`."""

    kv_cache_memory: str | None = option(
        "Memory limit of the KV cache, such as 512MiB.",
        show_default="as needed",
        metavar="AMOUNT",
        callback=amount,
    )
    max_num_batched_tokens: int | None = option(
        "Maximum prompt tokens prefilled between steps.", show_default="512"
    )

    def arguments(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


@option_group("Engine")
class CachingOptions(EngineOptions):
    """Engine options of commands whose prompts may share a beginning."""

    prefix_cache_memory: str | None = option(
        "Memory limit of the prefix cache.",
        show_default="256MiB",
        metavar="AMOUNT",
        callback=amount,
    )
    no_enable_prefix_caching: bool = option(
        "Turn the prefix cache off.", "--no-enable-prefix-caching", default=False
    )
    batch_invariant: bool = option(
        "Give all passes one shape, for equal bits where kernels are chosen by shape.",
        "--batch-invariant",
        default=False,
    )

    def __post_init__(self) -> None:
        if self.prefix_cache_memory is not None and self.no_enable_prefix_caching:
            raise UsageError("--prefix-cache-memory: --no-enable-prefix-caching keeps nothing")

    def arguments(self) -> dict[str, Any]:
        """The options that were given, as `LLM` takes them."""
        given = super().arguments()
        return {"enable_prefix_caching": not given.pop("no_enable_prefix_caching"), **given}


RuleOption = Annotated[
    str | None, _speculation("Acceptance rule.", show_default="coupled, lossless")
]


@option_group("Speculation")
class SpeculationOptions:
    """How tokens are drafted and verified."""

    method: str | None = option(
        f"Drafter (`tokenleap methods`), or {UNSAID}.",
        show_default=f"{DEFAULT_METHOD}; hybrid where a head comes with the package",
    )
    num_speculative_tokens: int | None = option(
        "Maximum tokens drafted per step.", show_default="the method's"
    )
    draft_model: str | None = option(
        "Folder, id (ORG/NAME), .gguf file or alias, for --method draft_model; the folder of a "
        "trained head or Spec-Drafter."
    )
    acceptance: RuleOption = None
    controller: str | None = option(
        "Chooses how much to draft at each step.",
        show_default="cost_model; fixed unless the rule is coupled",
    )
    speculative_config: str | None = option(
        "All of this as a JSON object, with more fields of the method.", metavar="JSON"
    )

    def __post_init__(self) -> None:
        if self.method == UNSAID:
            object.__setattr__(self, "method", None)

    def config_for(self, model: str, *, beams: bool = False) -> SpeculativeConfig | None:
        """See `config`; None leaves the choice to `LLM`, which may use a head of ours."""
        from tokenleap.drafters.heads.shipped import shipped_head

        fields = self._fields()
        if beams and not fields:
            return _speculative_config({"method": "none"}, model)
        if shipped_head(model) is not None and not {"method", "model"} & fields.keys():
            if not fields:
                return None
            fields["method"] = "hybrid"
        return _speculative_config(fields, model)

    def config(self, model: str, *, trees: bool = True) -> SpeculativeConfig:
        """The configuration that flags and JSON describe together.

        Args:
            trees: whether a head that comes with the model drafts trees.
        """
        return _speculative_config(self._fields(), model, trees=trees)

    def _fields(self) -> dict[str, Any]:
        fields = parse_object("--speculative-config", self.speculative_config)
        flags = {**vars(self), "model": self.draft_model}
        del flags["draft_model"], flags["speculative_config"]
        for name, value in flags.items():
            if value is None:
                continue
            if name in fields and not _agree(value, fields[name]):
                typed = "--draft-model" if name == "model" else flag(name)
                raise UsageError(
                    f"{typed} {value} contradicts {json.dumps({name: fields[name]})} in "
                    "--speculative-config"
                )
            fields.setdefault(name, value)
        return fields


def parse_object(flag_name: str, text: str | None) -> dict[str, Any]:
    """The JSON object that a flag has as its value; empty for None."""
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{flag_name} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{flag_name} must be a JSON object, such as {{...}}, got {text}")
    return value


def _agree(flag_value: Any, field: Any) -> bool:
    """Whether a flag and a JSON field agree; the field may be an object with further options."""
    return bool(flag_value == (field.get("rule") if isinstance(field, dict) else field))


def _speculative_config(
    fields: dict[str, Any], model: str, *, trees: bool = True
) -> SpeculativeConfig:
    from tokenleap.config import SpeculativeConfig
    from tokenleap.drafters.heads.shipped import with_shipped

    if not isinstance(fields.get("model"), str | None):
        raise UsageError("model in --speculative-config must be a path, an id or an alias")
    if "model" not in fields:
        fields.setdefault("method", DEFAULT_METHOD)
    return check_head(SpeculativeConfig.parse(with_shipped(fields, model, trees=trees)))


# Options of sampling that several commands share: `SamplingParams` as flags (see `flat`).


_SAMPLING: Any = options_of(
    SamplingParams,
    SAMPLING,
    "Sampling",
    temperature={"show_default": "the model's, else 0"},
    max_tokens={"show_default": "the model's, else 128"},
)


@option_group("Sampling")
class SamplingOptions(_SAMPLING):  # type: ignore[misc]
    """How the next token is sampled: `SamplingParams`, and what the model says of them."""

    generation_config: str = option(
        "auto (the model's defaults and rules), none, or a folder with another "
        "generation_config.json.",
        default="auto",
    )

    OTHERWISE: ClassVar[Mapping[str, Any]] = {"temperature": 0.0, "max_tokens": 128}
    """For what neither a flag nor the model says."""

    def params_for(self, model: str, **more: Any) -> SamplingParams:
        """The sampling parameters for a model, which is fetched or converted if needed."""
        from tokenleap.models.generation import defaults_of
        from tokenleap.models.resolver import gguf_file

        fields = self._fields(more)
        hot = {"temperature": 1.0} if fields.get("n", 1) > 1 else {}
        SamplingParams(**{**self.OTHERWISE, **hot, **fields})  # what is wrong with any model
        if gguf_file(model) is None:
            resolve(model)
        defaults = {**self.OTHERWISE, **defaults_of(model, self.generation_config)}
        if fields.get("beam_width", 1) > 1:
            defaults["temperature"] = 0.0
        params = SamplingParams.parse(fields, defaults)
        for name in ("top_k", "top_p", "min_p"):
            if name in fields and params.greedy and self.temperature is None:
                raise UsageError(
                    f"{flag(name)} changes nothing in greedy decoding: add --temperature 1"
                )
        return params

    def _fields(self, more: Mapping[str, Any]) -> dict[str, Any]:
        given = {**asdict(self), **more}
        del given["generation_config"]
        least = 1 if more.get("prompt_logprobs") is None else 0  # nothing else would be shown
        if self.max_tokens is not None and self.max_tokens < least:
            raise UsageError(f"--max-tokens: must be at least {least}, got {self.max_tokens}")
        return {name: _read(name, value) for name, value in given.items() if value is not None}


def _read(name: str, value: Any) -> Any:
    """A parameter from its form in a shell."""
    form = _form(SamplingParams, name)
    if form == JSON:
        return parse_object(flag(name), value)
    if form == IDS:
        return numbers(value, int, f"{flag(name)} takes token ids, as in 1,2,3")
    return value


# Options of commands that can run on a Ray cluster.


@option_group("Ray")
class RayOptions:
    """How many replicas, and where."""

    replicas: str | None = option(
        "Copies of the model, each in a process of its own on a Ray cluster; MIN:MAX lets load "
        "decide.",
        metavar="N",
        show_default="no cluster",
    )
    ray_address: str | None = option(
        "Cluster to join, or auto for the one on this machine.",
        metavar="HOST:PORT",
        show_default="one on this machine, for this command only",
    )

    def wanted(self) -> Replicas | None:
        """How many replicas; None without Ray."""
        if self.replicas is None:
            if self.ray_address is not None:
                raise UsageError("--ray-address is for replicas: add --replicas N")
            return None
        from tokenleap.ray.cluster import Replicas

        return Replicas.parse(self.replicas)


def arguments_for_replicas(
    options: ModelOptions, config: SpeculativeConfig | None, **engine: Any
) -> dict[str, Any]:
    """`llm_arguments` for a process that may be in another folder: paths are absolute."""
    found = llm_arguments(options, config, **engine)
    if config is not None:
        found["speculative_config"] = type(config)(**_changed(_given_fields(config), _absolute))
    if "generation_config" in found:
        found["generation_config"] = _absolute(found["generation_config"])
    return {**found, "model": _absolute(options.model)}


def as_given(settings: Mapping[str, Any], config: SpeculativeConfig | None) -> dict[str, Any]:
    """Settings of another process with paths as the user wrote them, so that runs can resume."""
    if config is None:
        return dict(settings)
    given: dict[str, str] = {}

    def note(path: str) -> str:
        given[_absolute(path)] = path
        return path

    _changed(_given_fields(config), note)

    def back(path: str) -> str:
        for absolute, relative in given.items():
            if path == absolute:
                return relative
            if path.startswith(f"{absolute}/"):  # of a set of drafters
                return str(Path(relative) / path[len(absolute) + 1 :])
        return path

    return {**settings, "speculative_config": _changed(settings["speculative_config"], back)}


def _given_fields(config: SpeculativeConfig) -> dict[str, Any]:
    own = type(config).model_fields.keys() & config.model_fields_set
    return {name: getattr(config, name) for name in own} | (config.model_extra or {})


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """A configuration with other paths, also in drafters that it combines."""
    from tokenleap.drafters.registry import file_fields

    if isinstance(value, Mapping):
        paths = {"model", "drafters", *file_fields()}
        return {
            name: change(str(each))
            if name in paths and isinstance(each, str | Path) and str(each)
            else _changed(each, change)
            for name, each in value.items()
        }
    return [_changed(each, change) for each in value] if isinstance(value, list | tuple) else value


def _absolute(path: str) -> str:
    there = Path(path).expanduser()
    return str(there.absolute()) if there.exists() else path
