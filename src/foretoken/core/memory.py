"""Amounts of memory, as people write them: bytes, or text such as "2GiB"."""

from __future__ import annotations

import re

from foretoken.errors import ConfigError

__all__ = ["MIB", "num_bytes"]

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
    """Bytes of an amount of memory.

    Args:
        name: what to call it in a message.
        value: bytes, or a number with one of `UNITS`.

    Raises:
        ConfigError: it is neither, or not above 0.
    """
    amount: float | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        amount = value
    elif isinstance(value, str) and (
        parts := re.fullmatch(r"\s*([\d.]+)\s*([a-z]*)\s*", value, re.I)
    ):
        amount = _amount(parts[1], parts[2].lower())
    if amount is None:
        raise ConfigError(f"{name}: expected bytes or text such as '2GiB', got {value!r}.")
    if amount < 1:
        raise ConfigError(f"{name}: must be above 0, got {value!r}.")
    return int(amount)


def _amount(number: str, unit: str) -> float | None:
    try:
        return float(number) * UNITS[unit]
    except (ValueError, KeyError):
        return None
