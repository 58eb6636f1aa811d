"""`kv_cache_memory`: one amount of memory for the KV of the target and of its draft models.

A draft model has the rows of the target's requests, with slightly more tokens each. So every model
gets the same number of positions, and its share of the bytes follows from that.
"""

from __future__ import annotations

from foretoken.core.memory import MIB
from foretoken.errors import ConfigError
from foretoken.runtime.attention import KEY_BLOCK
from foretoken.runtime.target import Target

__all__ = ["KVBudget"]


class KVBudget:
    """Limits the KV memory of the models added to it.

    Args:
        num_bytes: for all of them together; None is no limit.
    """

    def __init__(self, num_bytes: int | None) -> None:
        self._num_bytes = num_bytes
        self._models: list[Target] = []  # that memory is to be shared between
        self._positions: int | None = None  # of every model, once it has been

    def add(self, model: Target) -> None:
        """Count a model in; one that comes after `share` gets as much as the others, on top."""
        if self._positions is not None:
            model.limit_memory(self._positions * model.cell_bytes)
        elif self._num_bytes is not None:
            self._models.append(model)

    def share(self) -> None:
        """Divide the memory between the models there are, once.

        Raises:
            ConfigError: not even one sequence would fit.
        """
        if self._num_bytes is None or self._positions is not None:
            return
        each = sum(model.cell_bytes for model in self._models)
        self._positions = self._num_bytes // each
        if self._positions < KEY_BLOCK:
            drafting = " and its draft models" if len(self._models) > 1 else ""
            raise ConfigError(
                f"kv_cache_memory: one sequence of this model{drafting} takes "
                f"{KEY_BLOCK * each / MIB:.1f} MiB at least, got {self._num_bytes / MIB:.1f} MiB."
            )
        while self._models:
            self.add(self._models.pop())
