"""Options that several commands share, as dataclasses that commands take as parameters (`flat`)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.advice import flag
from foretoken.cli.flat import in_panel
from foretoken.cli.root import UsageError
from foretoken.core.memory import num_bytes

if TYPE_CHECKING:
    from foretoken.config import SpeculativeConfig
    from foretoken.core.params import SamplingParams

__all__ = [
    "CachingOptions",
    "EngineOptions",
    "MaxNumSeqs",
    "ModelOptions",
    "SamplingOptions",
    "SpeculationOptions",
]

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_METHOD = "ngram"
"""It needs no second model, and costs nothing where it has no guess."""


def _model(text: str, *names: str, **settings: Any) -> Any:
    return in_panel("Model", text, *names, **settings)


def _speculation(text: str, *names: str, **settings: Any) -> Any:
    return in_panel("Speculation", text, *names, **settings)


def _engine(text: str, *names: str, **settings: Any) -> Any:
    return in_panel("Engine", text, *names, **settings)


def _sampling(text: str, *names: str, **settings: Any) -> Any:
    return in_panel("Sampling", text, *names, **settings)


def _quantizations() -> list[str]:
    from foretoken.runtime.choices import QUANTIZATIONS

    return list(QUANTIZATIONS)


def _known_quantization(name: str | None) -> str | None:
    """Refuse others before a model is fetched for them."""
    if name is not None and name not in (known := _quantizations()):
        raise UsageError(f"--quantization: must be {' or '.join(known)}, got {name}")
    return name


def _known_runtime(name: str) -> str:
    """Refuse others, likewise."""
    from foretoken.runtime.choices import RUNTIMES

    if name not in RUNTIMES:
        raise UsageError(f"--runtime: must be one of {', '.join(RUNTIMES)}, got {name}")
    return name


def _amount(param: typer.CallbackParam, text: str | None) -> str | None:
    """Refuse what is no amount of memory, likewise."""
    if text is not None:
        num_bytes(str(param.name), text)
    return text


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and how it runs."""

    model: Annotated[
        str,
        _model("Hugging Face folder, .gguf file or alias (`foretoken models`).", "--model", "-m"),
    ] = DEFAULT_MODEL
    dtype: Annotated[str, _model("auto, float32, bfloat16 or float16 (GPU).")] = "auto"
    device: Annotated[str, _model("auto, cpu, cuda, ...")] = "auto"
    max_model_len: Annotated[
        int | None, _model("Most tokens of prompt and output together.", show_default="the model's")
    ] = None
    quantization: Annotated[
        str | None,
        _model(
            "Smaller weights: int8 or int4 (CPU).",
            show_default="the weights as they are",
            callback=_known_quantization,
            autocompletion=_quantizations,
        ),
    ] = None
    runtime: Annotated[
        str,
        _model("auto, native (C++ on a CPU), torch, cuda or compiled.", callback=_known_runtime),
    ] = "auto"


MaxNumSeqs = Annotated[int | None, _engine("Most sequences at once.", show_default="16")]


@dataclass(frozen=True)
class EngineOptions:
    """How memory and prompts are portioned: arguments of `LLM`."""

    kv_cache_memory: Annotated[
        str | None,
        _engine(
            "Most memory for KV, such as 512MiB.",
            show_default="as needed",
            metavar="AMOUNT",
            callback=_amount,
        ),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None, _engine("Prompt tokens computed between two steps.", show_default="512")
    ] = None

    def arguments(self) -> dict[str, Any]:
        """What was given."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class CachingOptions(EngineOptions):
    """The same, where prompts may begin alike."""

    prefix_cache_memory: Annotated[
        str | None,
        _engine(
            "Most memory for the KV of earlier prompts.",
            show_default="256MiB",
            metavar="AMOUNT",
            callback=_amount,
        ),
    ] = None
    no_enable_prefix_caching: Annotated[
        bool, _engine("Keep no KV of earlier prompts.", "--no-enable-prefix-caching")
    ] = False

    def __post_init__(self) -> None:
        """Refuse what would have no effect."""
        if self.prefix_cache_memory is not None and self.no_enable_prefix_caching:
            raise UsageError("--prefix-cache-memory: --no-enable-prefix-caching keeps nothing")

    def arguments(self) -> dict[str, Any]:
        """What was given, as `LLM` takes it."""
        given = super().arguments()
        return {"enable_prefix_caching": not given.pop("no_enable_prefix_caching"), **given}


@dataclass(frozen=True)
class SpeculationOptions:
    """How to guess and how to check."""

    method: Annotated[
        str | None,
        _speculation("Drafter (`foretoken methods`).", show_default=DEFAULT_METHOD),
    ] = None
    num_speculative_tokens: Annotated[
        int | None, _speculation("Most tokens drafted per step.", show_default="the method's")
    ] = None
    draft_model: Annotated[
        str | None, _speculation("Folder, .gguf file or alias, for --method draft_model.")
    ] = None
    acceptance: Annotated[
        str | None, _speculation("Acceptance rule.", show_default="coupled, lossless")
    ] = None
    controller: Annotated[
        str | None,
        _speculation(
            "How much to draft at each step.",
            show_default="cost_model; fixed where the rule is not coupled",
        ),
    ] = None
    speculative_config: Annotated[
        str | None,
        _speculation(
            "The same as a JSON object, with the own fields of each method.", metavar="JSON"
        ),
    ] = None

    def config(self) -> SpeculativeConfig:
        """The configuration that flags and JSON describe together.

        Raises:
            UsageError: the JSON is not an object, or a flag contradicts it.
            ConfigError: a value is unknown or out of range.
        """
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
        return _speculative_config(fields)


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is drawn: `SamplingParams`, with defaults for the command line."""

    temperature: Annotated[
        float | None, _sampling("0 is greedy; 1 is the model's own distribution.", show_default="0")
    ] = None
    top_k: Annotated[int | None, _sampling("Keep the k most probable tokens.")] = None
    top_p: Annotated[float | None, _sampling("Keep the most probable with this mass.")] = None
    min_p: Annotated[
        float | None, _sampling("Drop what is less probable than this times the best.")
    ] = None
    repetition_penalty: Annotated[
        float | None, _sampling("Divides logits of tokens in prompt or output.")
    ] = None
    presence_penalty: Annotated[
        float | None, _sampling("Taken off the logit of every token in the output.")
    ] = None
    frequency_penalty: Annotated[float | None, _sampling("The same, once per occurrence.")] = None
    logit_bias: Annotated[
        str | None, _sampling('Added to logits: {"token id": bias, ...}.', metavar="JSON")
    ] = None
    allowed_token_ids: Annotated[
        str | None, _sampling("Only these may be drawn.", metavar="ID,ID,...")
    ] = None
    min_tokens: Annotated[int | None, _sampling("No end before this many tokens.")] = None
    max_tokens: Annotated[int, _sampling("Most tokens to generate.")] = 128
    seed: Annotated[int | None, _sampling("Makes sampling reproducible, whatever the drafter.")] = (
        None
    )
    stop: Annotated[
        list[str] | None, _sampling("Stop at this text. May be repeated.", metavar="TEXT")
    ] = None
    stop_token_ids: Annotated[
        str | None, _sampling("Stop after these tokens.", metavar="ID,ID,...")
    ] = None
    structured_outputs: Annotated[
        str | None,
        _sampling(
            'Only outputs of a form: {"json": schema}, {"regex": ...}, {"choice": [...]}, ...',
            metavar="JSON",
        ),
    ] = None
    ignore_eos: Annotated[
        bool, _sampling("Go on past the end-of-sequence token.", "--ignore-eos")
    ] = False

    def params(self, **more: Any) -> SamplingParams:
        """The sampling parameters, with further fields of theirs.

        Raises:
            UsageError: a flag cannot be read, or would have no effect.
            ConfigError: a value is out of range or contradicts another.
        """
        from foretoken.core.params import SamplingParams

        fields = {name: value for name, value in asdict(self).items() if value is not None}
        if self.temperature is None:
            fields["temperature"] = 0.0
            for name in ("top_k", "top_p", "min_p"):
                if name in fields:
                    raise UsageError(
                        f"{flag(name)} changes nothing in greedy decoding: add --temperature 1"
                    )
        if self.logit_bias is not None:
            fields["logit_bias"] = parse_object("--logit-bias", self.logit_bias)
        if self.structured_outputs is not None:
            fields["structured_outputs"] = parse_object(
                "--structured-outputs", self.structured_outputs
            )
        for name in ("allowed_token_ids", "stop_token_ids"):
            if name in fields:
                fields[name] = _parse_ids(flag(name), fields[name])
        return SamplingParams(**fields, **more)


def parse_object(flag_name: str, text: str | None) -> dict[str, Any]:
    """The JSON object a flag was given; empty for None.

    Raises:
        UsageError: it is not one.
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


def _parse_ids(flag_name: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{flag_name} takes token ids, as in 1,2,3, got {text}") from None


def _agree(flag_value: Any, field: Any) -> bool:
    """Whether a flag and a JSON field say the same; a name may come with its options."""
    return bool(flag_value == (field.get("rule") if isinstance(field, dict) else field))


def _speculative_config(fields: dict[str, Any]) -> SpeculativeConfig:
    from foretoken.config import SpeculativeConfig

    if not isinstance(fields.get("model"), str | None):
        raise UsageError("model in --speculative-config must be a path or an alias")
    if "model" not in fields:
        fields.setdefault("method", DEFAULT_METHOD)
    return SpeculativeConfig.parse(fields)
