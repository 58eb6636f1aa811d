"""`Config`: the base class of everything a user may configure.

`SamplingParams`, `SpeculativeConfig` and the options of methods, rules and controllers derive from
it. It turns a pydantic error into one line that names the field and the range. For an unknown field
the line suggests the nearest known name.
"""

from __future__ import annotations

import ctypes
import difflib
import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import entry_points
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from tokenleap.errors import ConfigError


def plugin_names(group: str) -> list[str]:
    """Names of all entry points of a group, in alphabetical order."""
    return sorted(entry_points(group=group).names)


def registered(
    kind: str, name: str, known: Mapping[str, Any], group: str, base: type, *, classes: bool = True
) -> Any:
    """What `known`, or an entry point of the group, has under this name.

    It has to be a subclass of `base`, or an instance of it if these are not classes.
    """
    found = known.get(name) or _plugin(group, name)
    if found is None:
        names = [*known, *plugin_names(group)]
        raise ConfigError(f"unknown {kind} '{name}': {nearest(name, names)}")
    a_subclass = isinstance(found, type) and issubclass(found, base)
    if not (a_subclass if classes else isinstance(found, base)):
        wanted = f"a subclass of {base.__name__}" if classes else f"a {base.__name__}"
        raise ConfigError(
            f"{kind} '{name}': the entry point in {group} has to name {wanted}, not {found!r}."
        )
    return found


def _plugin(group: str, name: str) -> Any | None:
    """Load the object that an entry point names; None if there is no such entry point."""
    for point in entry_points(group=group, name=name):
        try:
            return point.load()
        except Exception as error:  # importing it runs its package's code
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise ConfigError(
                f"'{name}' is an entry point in {group} that cannot be loaded "
                f"({point.value}: {reason}): fix or remove the package it comes from."
            ) from error
    return None


_CLOSE = 0.75
"""Similarity of a typing error. Less similar names, such as "eagle" and "regex", mean other
things: then all names are listed."""


def nearest(name: str, known: list[str]) -> str:
    """The end of a message about an unknown name: the closest known name, or all of them."""
    name = name[:200]  # the time grows with it
    longer = [each for each in known if each.startswith(name)] if len(name) > 2 else []
    close = difflib.get_close_matches(name, known, n=1, cutoff=_CLOSE)
    close = close or sorted(longer, key=len)
    if close:
        return f"did you mean '{close[0]}'?"
    return f"known: {', '.join(sorted(known))}."


class Config(BaseModel):
    """Base of all configurations: immutable, without extra fields, with errors of one line."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    foreign_names: ClassVar[Mapping[str, str]] = {}
    """Names that other libraries use, and what to write here instead."""

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            wrong = self._explain(error)
        else:
            return
        # Not in the handler: pydantic's error would be this one's context. It keeps the frames of
        # validators, and a cycle through it is never collected.
        raise ConfigError(wrong)

    @classmethod
    def _explain(cls, error: ValidationError) -> str:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):  # raised by a configuration nested in this one
            return f"{name}: {cause}" if name else str(cause)
        if first["type"] == "extra_forbidden":
            return f"{cls.__name__} has no field '{name}': {cls.advice(name, cls.field_names())}"
        reason = first["msg"].removeprefix("Value error, ")
        if not name:
            return reason
        return f"{name}: {reason[0].lower()}{reason[1:]}, got {first['input']!r:.200}."

    @classmethod
    def advice(cls, name: str, known: list[str]) -> str:
        """The advice on an unknown name; arguments as in `nearest`."""
        return cls.foreign_names.get(name) or nearest(name, known)

    @classmethod
    def field_names(cls) -> list[str]:
        """Names of the fields as users write them."""
        return [field.alias or name for name, field in cls.model_fields.items()]


def _path_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


PathText = Annotated[str, BeforeValidator(_path_text)]
"""The type of an option that names a file: accepts text or a path, and stores text."""


# Amounts of memory as users write them: a number of bytes, or text such as "2GiB".
#
# `return_freed` gives memory back. `LLM` reads `kv_cache_memory` and `prefix_cache_memory` with it.


MIB = 2**20

UNITS = {
    "": 1,
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}


def num_bytes(name: str, value: int | str) -> int:
    """Convert an amount of memory to bytes."""
    amount: float | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        amount = value
    elif isinstance(value, str) and (
        parts := re.fullmatch(r"\s*([\d.]+)\s*([a-z]*)\s*", value, re.I)
    ):
        amount = _amount(parts[1], parts[2].lower())
    if amount is None or amount == math.inf:
        raise ConfigError(f"{name}: expected bytes or text such as '2GiB', got {value!r}.")
    if amount < 1:
        raise ConfigError(f"{name}: must be above 0, got {value!r}.")
    return int(amount)


def return_freed() -> None:
    """Give freed memory back to the system.

    After a model was loaded and packed, glibc keeps what is free between the weights that stay.
    Other C libraries have no such call, or do it by themselves.
    """
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def _amount(number: str, unit: str) -> float | None:
    try:
        return float(number) * UNITS[unit]
    except (ValueError, KeyError):
        return None
