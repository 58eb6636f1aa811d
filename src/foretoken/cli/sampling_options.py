"""Options of sampling that several commands share: `SamplingParams` as flags (see `flat`)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

from foretoken.cli.advice import flag
from foretoken.cli.flat import in_panel
from foretoken.cli.options import parse_object
from foretoken.cli.root import UsageError

if TYPE_CHECKING:
    from foretoken.core.params import SamplingParams

__all__ = ["SamplingOptions"]


def _sampling(text: str, *names: str, **settings: Any) -> Any:
    return in_panel("Sampling", text, *names, **settings)


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is sampled: `SamplingParams` with defaults for the command line."""

    temperature: Annotated[
        float | None, _sampling("0 is greedy; 1 is the model's own distribution.", show_default="0")
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
    max_tokens: Annotated[int, _sampling("Maximum tokens to generate.")] = 128
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

    def params(self, **more: Any) -> SamplingParams:
        """The sampling parameters; `more` has further fields of theirs.

        Raises:
            UsageError: a flag cannot be read, or would have no effect.
            ConfigError: a value is out of range or contradicts another.
        """
        from foretoken.core.params import SamplingParams

        fields = {name: value for name, value in asdict(self).items() if value is not None}
        least = 1 if more.get("prompt_logprobs") is None else 0  # nothing else would be shown
        if self.max_tokens < least:
            raise UsageError(f"--max-tokens: must be at least {least}, got {self.max_tokens}")
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


def _parse_ids(flag_name: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{flag_name} takes token ids, as in 1,2,3, got {text}") from None
