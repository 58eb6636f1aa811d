"""Steps of traces, made by hand."""

from __future__ import annotations

from typing import Any

from tokenleap import Origin, StepTrace

PIECES = {1: " the", 2: " cat", 3: " sat", 4: "\n", 5: " dog", 6: "\t"}


def step(drafted: tuple[int, ...], accepted: tuple[int, ...], **fields: Any) -> StepTrace:
    """A step that drafted a chain, of which a bonus token follows the accepted ones."""
    size = len(drafted)
    defaults: dict[str, Any] = {
        "parents": tuple(range(-1, size - 1)),
        "q": (1.0,) * size,
        "p": (0.5,) * size,
        "rejected": (),
        "reason": "",
        "token": 5,
        "origin": Origin.BONUS,
        "committed": len(accepted) + 1,
    }
    return StepTrace(drafted=drafted, accepted=accepted, **{**defaults, **fields})
