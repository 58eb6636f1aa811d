"""How many threads a pass has."""

from __future__ import annotations

import os

import torch

from tokenleap.runtime.cores import available_cores

__all__ = ["num_threads", "set_num_threads"]

_default: int | None = torch.get_num_threads()
"""PyTorch does not tell whether somebody has set it, so this counts as its own number."""
_CORES = available_cores()


def num_threads() -> int:
    """PyTorch's number; but the one it had when this module was imported is cut to the cores.

    PyTorch chooses by the cores of the machine and does not know the quotas of containers. More
    threads than that would use up the quota by waiting for each other. To have more than the
    quota, set `OMP_NUM_THREADS` or call `set_num_threads`.
    """
    asked = torch.get_num_threads()
    if asked != _default or "OMP_NUM_THREADS" in os.environ:
        return asked
    return min(asked, _CORES)


def set_num_threads(count: int) -> None:
    """Let this process compute with so many threads, whatever its quota."""
    global _default
    torch.set_num_threads(count)
    _default = None
