"""Every error a user can cause, as one small tree.

    ForetokenError
    ├── ConfigError         a parameter is unknown, out of range or contradicts another
    ├── CompatibilityError  two parts that cannot work together (model, drafter, rule)
    ├── PromptError         a prompt that cannot be served (empty, too long, bad ids)
    ├── ModelError          a model cannot be found, fetched, read or converted
    └── RequestError        a request ended with an error while it ran

All are `ValueError`s: the caller passed something that has to change. Our own mistakes are
`AssertionError`s: one in a request's own data ends that request, any other is never caught. The
message is one line: what is wrong, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = [
    "CompatibilityError",
    "ConfigError",
    "ForetokenError",
    "ModelError",
    "PromptError",
    "RequestError",
]


class ForetokenError(ValueError):
    """Base of all errors a user can cause and mend."""


class ConfigError(ForetokenError):
    """A parameter is unknown, out of range, or contradicts another one."""


class CompatibilityError(ForetokenError):
    """Parts that cannot work together: refused at construction, before any work is done."""


class PromptError(ForetokenError):
    """A prompt that cannot be served: empty, longer than the context, ids out of range."""


class ModelError(ForetokenError):
    """A model that cannot be found, fetched, read or converted."""


class RequestError(ForetokenError):
    """A request ended with `finish_reason` "error" while it ran; others are not affected.

    Attributes:
        outputs: the outputs of all prompts of the call, as far as they came.
    """

    def __init__(self, message: str, outputs: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.outputs = outputs


def in_one_line(error: BaseException) -> str:
    """An error of any kind as one line: its class, and the first line of what it says."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
