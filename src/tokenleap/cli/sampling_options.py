"""Options of sampling that several commands share: `SamplingParams` as flags (see `flat`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from tokenleap.cli.advice import flag
from tokenleap.cli.flat import in_panel
from tokenleap.cli.options import parse_object
from tokenleap.cli.root import UsageError

if TYPE_CHECKING:
    from tokenleap.core.params import SamplingParams

__all__ = ["SamplingOptions"]


def _sampling(text: str, *names: str, **settings: Any) -> Any:
    return in_panel("Sampling", text, *names, **settings)


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is sampled: `SamplingParams`, and what the model says of them."""

    temperature: Annotated[
        float | None,
        _sampling(
            "0 is greedy; 1 is the model's own distribution.", show_default="the model's, else 0"
        ),
    ] = None
    top_k: Annotated[int | None, _sampling("Keep the k most probable tokens.")] = None
    top_p: Annotated[float | None, _sampling("Keep the most probable tokens with this mass.")] = (
        None
    )
    min_p: Annotated[float | None, _sampling("Drop tokens below this fraction of the top one.")] = (
        None
    )
    repetition_penalty: Annotated[
        float | None, _sampling("Penalty factor for tokens in prompt or output.")
    ] = None
    presence_penalty: Annotated[
        float | None, _sampling("Penalty for every token in the output.")
    ] = None
    frequency_penalty: Annotated[
        float | None, _sampling("Penalty per occurrence in the output.")
    ] = None
    logit_bias: Annotated[
        str | None, _sampling('Add to logits: {"token id": bias, ...}.', metavar="JSON")
    ] = None
    allowed_token_ids: Annotated[
        str | None, _sampling("Sample only these tokens.", metavar="ID,ID,...")
    ] = None
    min_tokens: Annotated[int | None, _sampling("Minimum tokens to generate.")] = None
    max_tokens: Annotated[
        int | None,
        _sampling("Maximum tokens to generate.", show_default="the model's, else 128"),
    ] = None
    seed: Annotated[int | None, _sampling("Makes sampling reproducible, whatever the drafter.")] = (
        None
    )
    stop: Annotated[
        list[str] | None, _sampling("Stop at this text. May be repeated.", metavar="TEXT")
    ] = None
    stop_token_ids: Annotated[
        str | None, _sampling("Stop after these tokens.", metavar="ID,ID,...")
    ] = None
    bad_words: Annotated[
        list[str] | None,
        _sampling("Keep this text out of the output. May be repeated.", metavar="TEXT"),
    ] = None
    structured_outputs: Annotated[
        str | None,
        _sampling(
            'Constrain the output: {"json": schema}, {"regex": ...}, {"choice": [...]}, ...',
            metavar="JSON",
        ),
    ] = None
    ignore_eos: Annotated[
        bool, _sampling("Continue past the end-of-sequence token.", "--ignore-eos")
    ] = False
    generation_config: Annotated[
        str,
        _sampling(
            "auto (the model's defaults and rules), none, or a folder with another "
            "generation_config.json."
        ),
    ] = "auto"

    OTHERWISE: ClassVar[Mapping[str, Any]] = {"temperature": 0.0, "max_tokens": 128}
    """For what neither a flag nor the model says."""

    def params_for(self, model: str, **more: Any) -> SamplingParams:
        """The sampling parameters for a model, which is fetched or converted if needed.

        Args:
            model: its name.
            **more: further fields of theirs.

        Raises:
            UsageError: a flag cannot be read or would have no effect, or there is no such model.
            ConfigError: a value is out of range or contradicts another.
            ModelError: the model cannot be fetched or read.
        """
        from tokenleap.cli.session import resolve
        from tokenleap.core.params import SamplingParams
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
        """The fields that were given."""
        given = {**asdict(self), **more}
        del given["generation_config"]
        fields = {name: value for name, value in given.items() if value is not None}
        least = 1 if more.get("prompt_logprobs") is None else 0  # nothing else would be shown
        if self.max_tokens is not None and self.max_tokens < least:
            raise UsageError(f"--max-tokens: must be at least {least}, got {self.max_tokens}")
        if self.logit_bias is not None:
            fields["logit_bias"] = parse_object("--logit-bias", self.logit_bias)
        if self.structured_outputs is not None:
            fields["structured_outputs"] = parse_object(
                "--structured-outputs", self.structured_outputs
            )
        for name in ("allowed_token_ids", "stop_token_ids"):
            if name in fields:
                fields[name] = _parse_ids(flag(name), fields[name])
        return fields


def _parse_ids(flag_name: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{flag_name} takes token ids, as in 1,2,3, got {text}") from None
