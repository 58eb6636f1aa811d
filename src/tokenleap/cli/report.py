"""Results as text: a line of statistics for people, a JSON object for programs.

Commands that generate use the former, every command with --json the latter.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from rich.text import Text

from tokenleap.cli.console import display, errors, plain
from tokenleap.runtime.choices import TORCH_RUNTIMES

if TYPE_CHECKING:
    from collections import Counter

    from tokenleap.cli.writer import TokenWriter
    from tokenleap.llm import LLM
    from tokenleap.metrics import Metrics
    from tokenleap.outputs import CompletionOutput

__all__ = [
    "as_json",
    "as_json_line",
    "legend",
    "show_summary",
    "show_what_ran",
    "summary",
    "what_ran",
]


def legend(origins: Counter[str]) -> Text:
    """The colours of the origins, and how many tokens have each."""
    line = Text()
    labels = {
        "draft": "drafted and accepted",
        "correction": "correction",
        "bonus": "bonus",
        "plain": "without draft",
    }
    for name, label in labels.items():
        line.append(f"\u25a0 {label} {origins[name]}", name).append("   ")
    line.rstrip()
    return line


def summary(metrics: Metrics, finish_reason: str | None) -> str:
    """Speed and acceptance of one output."""
    cut = " (cut short)" if finish_reason == "length" else ""
    parts = [
        f"{metrics.generated_tokens} tokens{cut}, {metrics.tokens_per_second:.1f}/s",
        f"{metrics.target_passes} passes",
    ]
    if metrics.num_drafts:
        parts.append(f"{metrics.mean_acceptance_length:.2f} tokens per drafting pass")
    return " \u00b7 ".join(parts)


def show_summary(output: CompletionOutput, writer: TokenWriter) -> None:
    """Print the legend and the statistics on stderr, if that is a terminal."""
    console = errors()
    if not console.is_terminal:
        return
    console.print()
    if display().is_terminal:
        console.print(legend(writer.origins))
    console.print(plain(summary(output.metrics, output.finish_reason), "note"))


def what_ran(llm: LLM) -> dict[str, Any]:
    """What a result depends on besides its prompt, for JSON; nothing is "auto"."""
    config = llm.speculative_config.as_dict()
    if config["controller"]["rule"] != llm.controller:
        config["controller"] = {"rule": llm.controller}
    return {
        "dtype": _dtype(llm),
        "device": str(llm.device),
        "runtime": llm.runtime,
        "bit_exact": llm.bit_exact,
        "speculative_config": config,
    }


def show_what_ran(llm: LLM) -> None:
    """Print method, controller and runtime on stderr, if that is a terminal."""
    console = errors()
    if console.is_terminal:
        meaning = TORCH_RUNTIMES.get(llm.runtime)
        parts = [
            f"method {llm.speculative_config.method_name}",
            f"controller {llm.controller}",
            f"runtime {llm.runtime}{f' ({meaning})' if meaning else ''}",
            _dtype(llm),
            "bit-exact" if llm.bit_exact else "not bit-exact",
        ]
        console.print(plain(" \u00b7 ".join(parts), "note"))


def _dtype(llm: LLM) -> str:
    return str(llm.dtype).removeprefix("torch.")


def as_json(value: dict[str, Any]) -> str:
    """One JSON object with a line per field, for programs and people."""
    lines = [f"  {json.dumps(name)}: {as_json_line(field)}" for name, field in value.items()]
    return "{\n" + ",\n".join(lines) + "\n}"


def as_json_line(value: Any) -> str:
    """JSON on one line."""
    # Where the encoding lacks a character, JSON has an escape for it.
    return json.dumps(value, ensure_ascii="utf" not in (sys.stdout.encoding or "").lower())
