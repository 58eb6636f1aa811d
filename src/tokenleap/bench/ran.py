"""What ran: the settings with what `auto` stood for, and how each contestant computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenleap.bench.contestants import BASELINE
from tokenleap.bench.summary import Results

__all__ = ["contestants_table", "facts_line", "settings_that_ran"]

_HIDDEN = (
    *("contestants", "max_num_seqs", "max_num_batched_tokens", "batch_sizes"),
    *("max_prompt_tokens", "control"),
)


def settings_that_ran(settings: Mapping[str, Any], results: Results) -> dict[str, Any]:
    """The settings, with the dtype, device, runtime and threads of the baseline for `auto`.

    Args:
        settings: the journal's header.
        results: what was measured.
    """
    facts = results.facts[BASELINE.label]
    names = ("dtype", "device", "runtime", "threads")
    return {**settings, **{name: facts[name] for name in names if name in facts}}


def facts_line(settings: Mapping[str, Any], results: Results) -> str:
    """The settings and the machine that the figures depend on, in one line."""
    ran = settings_that_ran(settings, results)
    shown = {name: value for name, value in ran.items() if name not in _HIDDEN}
    return ", ".join(f"{name} {value}" for name, value in shown.items() if value is not None)


def contestants_table(results: Results) -> tuple[Sequence[str], list[list[str]]]:
    """Header and rows: how each contestant computed."""
    header = ("contestant", "runtime", "weights", "device", "threads", "controller", "bit-exact")
    rows = []
    for label in results.labels:
        facts = results.facts[label]
        exact = facts.get("bit_exact")
        cells = [facts.get(name) for name in ("device", "threads", "controller")]
        rows.append(
            [
                label,
                facts.get("runtime", "its own"),
                facts.get("quantization") or facts["dtype"],
                *("-" if cell is None else str(cell) for cell in cells),
                "-" if exact is None else "yes" if exact else "no",
            ]
        )
    return header, rows
