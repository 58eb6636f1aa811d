"""The processes of one training, as `accelerate launch` starts them; usually there is only one."""

from __future__ import annotations

from datetime import timedelta

from accelerate import PartialState

__all__ = ["processes"]

_PATIENCE = timedelta(days=30)
"""How long processes wait for the one that writes the data."""


def processes(*, on_cpu: bool) -> PartialState:
    """The state that Accelerate keeps of them; the first call joins them.

    Args:
        on_cpu: whether they compute on a CPU. Else each makes its own GPU the current one.
    """
    return PartialState(cpu=on_cpu, timeout=_PATIENCE)
