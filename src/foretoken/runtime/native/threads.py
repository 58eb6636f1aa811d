"""How many threads a pass has."""

from __future__ import annotations

import os

import torch

from foretoken.runtime.cores import available_cores

__all__ = ["num_threads"]

_DEFAULT = torch.get_num_threads()
_CORES = available_cores()


def num_threads() -> int:
    """PyTorch's number; if nobody has set it, no more than the process has cores.

    PyTorch does not know the quotas of containers. More threads than that would use up the quota
    by waiting for each other.
    """
    asked = torch.get_num_threads()
    if asked != _DEFAULT or "OMP_NUM_THREADS" in os.environ:
        return asked
    return min(asked, _CORES)
