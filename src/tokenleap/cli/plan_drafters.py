"""The drafters that `tokenleap plan --measure` measures: its options, and what they stand for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from tokenleap.cli.flat import in_panel
from tokenleap.cli.options import SpeculationOptions, parse_object
from tokenleap.cli.root import UsageError

if TYPE_CHECKING:
    from tokenleap.config import SpeculativeConfig

__all__ = ["DrafterOptions"]


@dataclass(frozen=True)
class DrafterOptions:
    """The drafters to measure: one, or with --lenience several."""

    method: Annotated[
        list[str] | None,
        in_panel(
            "Measure",
            "Drafter (`tokenleap methods`), or a JSON speculative_config. Repeatable with "
            "--lenience.",
            show_default="ngram",
        ),
    ] = None
    draft_model: Annotated[
        str | None,
        in_panel("Measure", "Folder, id (ORG/NAME), .gguf file or alias of a draft model."),
    ] = None
    speculative_config: Annotated[
        str | None,
        in_panel("Measure", "All of this as a JSON object, with more fields.", metavar="JSON"),
    ] = None

    def config(self) -> SpeculativeConfig:
        """The configuration of the only drafter.

        Raises:
            UsageError: there are several, or see `configs`.
            ConfigError: a value is unknown or out of range.
        """
        if len(self.method or ()) > 1:
            raise UsageError("--method: only --lenience measures several; give one")
        (config,) = self.configs().values()
        return config

    def configs(self) -> dict[str, SpeculativeConfig]:
        """The configurations by label.

        Their rule is the theory's, rejection, unless the JSON names another.

        Raises:
            UsageError: a JSON is not an object, contradicts a flag, or sets the draft length.
            ConfigError: a value is unknown or out of range.
        """
        found = {}
        texts: list[str | None] = list(self.method) if self.method else [None]
        for text in texts:
            config = self._config(text)
            if config.method_name == "none":
                raise UsageError("--method none drafts nothing: there is nothing to measure")
            found[_label(config, text or self.speculative_config)] = config
        return found

    def _config(self, method: str | None) -> SpeculativeConfig:
        """The configuration with this --method, which may be JSON."""
        is_json = method is not None and method.lstrip().startswith("{")
        if is_json and self.speculative_config is not None:
            raise UsageError("--speculative-config: --method has a JSON object already")
        name, text = ("--method", method) if is_json else ("", self.speculative_config)
        fields = parse_object(name or "--speculative-config", text)
        for field in ("num_speculative_tokens", "controller"):
            if field in fields:
                raise UsageError(
                    f"{field} in {name or '--speculative-config'}: --gammas says how much to draft"
                )
        return SpeculationOptions(
            method=None if is_json else method,
            draft_model=self.draft_model,
            acceptance=None if "acceptance" in fields else "rejection",
            speculative_config=text,
        ).config()


def _label(config: SpeculativeConfig, text: str | None) -> str:
    """The method's name, and the other fields of its JSON."""
    if text is None or not text.lstrip().startswith("{"):
        return config.method_name
    others = {name: value for name, value in json.loads(text).items() if name != "method"}
    return f"{config.method_name} {json.dumps(others)}" if others else config.method_name
