"""Amounts of memory as users write them: a number of bytes, or text such as "2GiB".

`return_freed` gives memory back. `LLM` reads `kv_cache_memory` and `prefix_cache_memory` with it.
"""

from __future__ import annotations

import ctypes
import math
import re
from contextlib import suppress

from tokenleap.errors import ConfigError

__all__ = ["MIB", "num_bytes", "return_freed"]

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
    """Convert an amount of memory to bytes.

    Args:
        name: the parameter's name, for error messages.
        value: a number of bytes, or text: a number and one of `UNITS`.

    Raises:
        ConfigError: the value is neither, or is not above 0.
    """
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
