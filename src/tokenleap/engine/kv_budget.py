"""`kv_cache_memory`: one limit on the KV memory of the target and its draft models together.

A draft model holds KV for the requests of the target, with slightly more tokens each. So every
model gets the same number of positions. Its share of the bytes follows from that.
"""

from __future__ import annotations

import weakref

from tokenleap.core.memory import MIB
from tokenleap.errors import ConfigError
from tokenleap.runtime.attention import KEY_BLOCK
from tokenleap.runtime.kv_slab import KVSlab
from tokenleap.runtime.rows import Rows

__all__ = ["KVBudget"]


class KVBudget:
    """Limits the KV memory of the models added to it.

    Args:
        num_bytes: the limit for all of them together; None is no limit.
    """

    def __init__(self, num_bytes: int | None) -> None:
        self._num_bytes = num_bytes
        # Of all models, in order; a draft model may be dropped.
        self._slabs: list[weakref.ref[KVSlab]] = []
        self._models: list[Rows] = []  # waiting for `share`
        self._positions: int | None = None  # for each model, set by `share`

    def add(self, model: Rows) -> None:
        """Count a model in.

        A model that comes after `share` gets as many positions as the others, in addition to the
        limit.
        """
        assert model.cell_bytes or self._num_bytes is None, "its first pass tells the size"
        self._slabs = [each for each in self._slabs if each() is not None]
        if all(each() is not model.slab for each in self._slabs):
            self._slabs.append(weakref.ref(model.slab))
        if self._positions is not None:
            model.limit_memory(self._positions * model.cell_bytes)
        elif self._num_bytes is not None:
            self._models.append(model)

    @property
    def held_bytes(self) -> list[int]:
        """Bytes that each model's slab takes at the moment, the target's first."""
        return [slab.held_bytes for each in self._slabs if (slab := each()) is not None]

    def share(self) -> None:
        """Divide the memory among the models added so far; later calls have no effect.

        Raises:
            ConfigError: the memory is too small for one sequence.
        """
        if self._num_bytes is None or self._positions is not None:
            return
        position_bytes = sum(model.cell_bytes for model in self._models)
        self._positions = self._num_bytes // position_bytes
        if self._positions < KEY_BLOCK:
            drafting = " and its draft models" if len(self._models) > 1 else ""
            raise ConfigError(
                f"kv_cache_memory: one sequence of this model{drafting} takes at least "
                f"{KEY_BLOCK * position_bytes / MIB:.1f} MiB, got {self._num_bytes / MIB:.1f} MiB."
            )
        while self._models:
            self.add(self._models.pop())
