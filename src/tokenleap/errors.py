"""Every error a user can cause, as one small tree.

    TokenleapError
    ├── ConfigError         a parameter is unknown, out of range or contradicts another
    ├── CompatibilityError  two parts that cannot work together (model, drafter, rule)
    ├── PromptError         a prompt that cannot be served (empty, too long, bad ids)
    ├── ModelError          a model cannot be found, fetched, read or converted
    ├── DataError           data to train on cannot be read, or is of no use
    ├── TrainingError       training cannot go on
    └── RequestError        a request ended with an error while it ran

All are `ValueError`s: the caller passed something that has to change. Each message is one line. It
says what is wrong and what to do. Our own mistakes are `AssertionError`s. One that is raised while
a request's own data is processed ends that request. All others are never caught.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = [
    "CompatibilityError",
    "ConfigError",
    "DataError",
    "ModelError",
    "PromptError",
    "RequestError",
    "TokenleapError",
    "TrainingError",
]

_MOST = 2000
"""Characters of a message."""


class TokenleapError(ValueError):
    """Base of all errors that a user can cause and fix.

    Messages quote files and requests: what would act on a terminal is shown as an escape, and of a
    long message the middle is left out.
    """

    def __init__(self, message: object = "") -> None:
        text = str(message)
        if len(text) > _MOST:
            text = f"{text[: _MOST // 2]} [...] {text[-_MOST // 4 :]}"
        super().__init__("".join(map(_shown, text)))


def _shown(letter: str) -> str:
    return (
        letter
        if letter.isprintable() or letter == "\n"
        else letter.encode("unicode_escape").decode()
    )


class ConfigError(TokenleapError):
    """A parameter is unknown, out of range, or contradicts another one."""


class CompatibilityError(TokenleapError):
    """Two parts cannot work together. Raised at construction, before any work is done."""


class PromptError(TokenleapError):
    """A prompt cannot be served: it is empty, too long, or has ids outside the vocabulary."""


class ModelError(TokenleapError):
    """A model cannot be found, fetched, read or converted."""


class DataError(TokenleapError):
    """Data to train on cannot be read, or is of no use."""


class TrainingError(TokenleapError):
    """Training cannot go on; what was reached so far is kept."""


class RequestError(TokenleapError):
    """A request ended with `finish_reason` "error" while it ran; others are not affected.

    Attributes:
        outputs: results of all prompts of the call, with the tokens generated so far.
        by_parameters: whether the request's own sampling parameters made it fail.
    """

    def __init__(
        self, message: str, outputs: Sequence[Any] = (), *, by_parameters: bool = False
    ) -> None:
        super().__init__(message)
        self.outputs = outputs
        self.by_parameters = by_parameters


def in_one_line(error: BaseException) -> str:
    """Any error as one line: its class name and the first line of its message."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def is_failure(error: BaseException) -> bool:
    """Whether it is an error, and no signal to end: a panic of Rust's code is no `Exception`."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def told(error: BaseException) -> str:
    """Any error as one line for users: without the class name if the message is for them."""
    line = in_one_line(error)
    if isinstance(error, TokenleapError):
        return line.removeprefix(f"{type(error).__name__}: ")
    return line
