"""Options of the model, the engine and speculation that several commands share.

They are dataclasses, which commands take as parameters (see `flat`). Those of sampling are in
`sampling_options`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenleap.cli.advice import flag
from tokenleap.cli.flat import in_panel
from tokenleap.cli.root import UsageError
from tokenleap.core.memory import num_bytes

if TYPE_CHECKING:
    from tokenleap.config import SpeculativeConfig

__all__ = [
    "CachingOptions",
    "EngineOptions",
    "MaxNumSeqs",
    "ModelOptions",
    "SpeculationOptions",
    "amount",
]

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_METHOD = "ngram"
"""The default method: it needs no second model, and costs nothing where it finds no match."""


def _model(text: str, *names: str, **settings: Any) -> Any:
    return in_panel("Model", text, *names, **settings)


def _speculation(text: str, *names: str, **settings: Any) -> Any:
    return in_panel("Speculation", text, *names, **settings)


def _engine(text: str, *names: str, **settings: Any) -> Any:
    return in_panel("Engine", text, *names, **settings)


def _quantizations() -> list[str]:
    from tokenleap.runtime.choices import QUANTIZATION_OPTIONS

    return list(QUANTIZATION_OPTIONS)


def _known_quantization(name: str) -> str:
    """Refuse an unknown format before the model is fetched."""
    if name not in (known := _quantizations()):
        raise UsageError(f"--quantization: must be one of {', '.join(known)}, got {name}")
    return name


def _known_runtime(name: str) -> str:
    """Refuse an unknown runtime before the model is fetched."""
    from tokenleap.runtime.choices import RUNTIMES

    if name not in RUNTIMES:
        raise UsageError(f"--runtime: must be one of {', '.join(RUNTIMES)}, got {name}")
    return name


def amount(param: typer.CallbackParam, text: str | None) -> str | None:
    """Refuse an invalid amount of memory before the model is fetched."""
    if text is not None:
        num_bytes(str(param.name), text)
    return text


@dataclass(frozen=True)
class ModelOptions:
    """The target and how it runs."""

    model: Annotated[
        str,
        _model(
            "Hugging Face folder or id (ORG/NAME), .gguf file, or a name from `tokenleap models`.",
            "--model",
            "-m",
        ),
    ] = DEFAULT_MODEL
    dtype: Annotated[str, _model("auto, float32, bfloat16 or float16 (GPU).")] = "auto"
    device: Annotated[str, _model("auto, cpu, cuda, ...")] = "auto"
    max_model_len: Annotated[
        int | None,
        _model("Limit of prompt and output tokens together.", show_default="the model's"),
    ] = None
    quantization: Annotated[
        str,
        _model(
            "auto (a GGUF file in its own numbers), none, or smaller weights: int8, int4 (CPU).",
            callback=_known_quantization,
            autocompletion=_quantizations,
        ),
    ] = "auto"
    runtime: Annotated[
        str,
        _model(
            "auto, native (C++ on a CPU), torch, cuda or compiled; or a name that was shown.",
            callback=_known_runtime,
        ),
    ] = "auto"
    threads: Annotated[
        int | None,
        _model("Threads on a CPU.", min=1, show_default="OMP_NUM_THREADS, else all cores"),
    ] = None

    def __post_init__(self) -> None:
        """Take the model, quantization and dtype that a name of packed weights stands for."""
        from tokenleap.models.packed_names import as_packed

        known = as_packed(self.model, self.quantization, self.dtype)
        for name, value in zip(("model", "quantization", "dtype"), known, strict=True):
            object.__setattr__(self, name, value)

    def set_threads(self) -> None:
        """Let this process compute with `threads`, if they were given."""
        if self.threads is not None:
            from tokenleap.runtime.native.threads import set_num_threads

            set_num_threads(self.threads)


MaxNumSeqs = Annotated[int | None, _engine("Maximum sequences at once.", show_default="16")]


@dataclass(frozen=True)
class EngineOptions:
    """Memory limits and chunked prefill: arguments of `LLM`."""

    kv_cache_memory: Annotated[
        str | None,
        _engine(
            "Memory limit of the KV cache, such as 512MiB.",
            show_default="as needed",
            metavar="AMOUNT",
            callback=amount,
        ),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None, _engine("Maximum prompt tokens prefilled between steps.", show_default="512")
    ] = None

    def arguments(self) -> dict[str, Any]:
        """The options that were given."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class CachingOptions(EngineOptions):
    """Engine options of commands whose prompts may share a beginning."""

    prefix_cache_memory: Annotated[
        str | None,
        _engine(
            "Memory limit of the prefix cache.",
            show_default="256MiB",
            metavar="AMOUNT",
            callback=amount,
        ),
    ] = None
    no_enable_prefix_caching: Annotated[
        bool, _engine("Turn the prefix cache off.", "--no-enable-prefix-caching")
    ] = False

    def __post_init__(self) -> None:
        """Refuse a size of a prefix cache that is off."""
        if self.prefix_cache_memory is not None and self.no_enable_prefix_caching:
            raise UsageError("--prefix-cache-memory: --no-enable-prefix-caching keeps nothing")

    def arguments(self) -> dict[str, Any]:
        """The options that were given, as `LLM` takes them."""
        given = super().arguments()
        return {"enable_prefix_caching": not given.pop("no_enable_prefix_caching"), **given}


@dataclass(frozen=True)
class SpeculationOptions:
    """How tokens are drafted and verified."""

    method: Annotated[
        str | None,
        _speculation(
            "Drafter (`tokenleap methods`).",
            show_default=f"{DEFAULT_METHOD}; hybrid where a head comes with the package",
        ),
    ] = None
    num_speculative_tokens: Annotated[
        int | None, _speculation("Maximum tokens drafted per step.", show_default="the method's")
    ] = None
    draft_model: Annotated[
        str | None,
        _speculation(
            "Folder, id (ORG/NAME), .gguf file or alias, for --method draft_model; the folder of a "
            "trained head or Spec-Drafter."
        ),
    ] = None
    acceptance: Annotated[
        str | None, _speculation("Acceptance rule.", show_default="coupled, lossless")
    ] = None
    controller: Annotated[
        str | None,
        _speculation(
            "Chooses how much to draft at each step.",
            show_default="cost_model; fixed unless the rule is coupled",
        ),
    ] = None
    speculative_config: Annotated[
        str | None,
        _speculation(
            "All of this as a JSON object, with more fields of the method.", metavar="JSON"
        ),
    ] = None

    def config_for(self, model: str, *, beams: bool = False) -> SpeculativeConfig | None:
        """See `config`; the default method of a model with a head of ours is to use it.

        Args:
            model: the model's name.
            beams: whether it searches with beams; the default method is then `none`.

        Returns:
            None, `LLM`'s own default, if nothing was chosen for such a model.
        """
        from tokenleap.drafters.heads.shipped import shipped_config

        if beams and not self._fields():
            return _speculative_config({"method": "none"})
        fields, shipped = self._fields(), shipped_config(model, trees=True)
        if shipped is None or {"method", "model"} & fields.keys():
            return _speculative_config(fields)
        return _speculative_config({**shipped, **fields}) if fields else None

    def config(self) -> SpeculativeConfig:
        """The configuration that flags and JSON describe together.

        Raises:
            UsageError: the JSON is not an object, or a flag contradicts it.
            ConfigError: a value is unknown or out of range.
        """
        return _speculative_config(self._fields())

    def _fields(self) -> dict[str, Any]:
        fields = parse_object("--speculative-config", self.speculative_config)
        flags = {
            "method": self.method,
            "num_speculative_tokens": self.num_speculative_tokens,
            "model": self.draft_model,
            "acceptance": self.acceptance,
            "controller": self.controller,
        }
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
    """The JSON object that a flag has as its value; empty for None.

    Raises:
        UsageError: the text is not a JSON object.
    """
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


def _speculative_config(fields: dict[str, Any]) -> SpeculativeConfig:
    from tokenleap.config import SpeculativeConfig

    if not isinstance(fields.get("model"), str | None):
        raise UsageError("model in --speculative-config must be a path, an id or an alias")
    if "model" not in fields:
        fields.setdefault("method", DEFAULT_METHOD)
    return SpeculativeConfig.parse(fields)
