from __future__ import annotations

import gc

from tokenleap.engine.scheduler import KVBudget
from tokenleap.runtime.kv_slab import KVSlab
from tokenleap.runtime.passes import Rows


def test_models_that_are_gone_are_forgotten() -> None:
    """Requests may name any number of draft models, one after the other."""
    budget = KVBudget(None)
    target = Rows(KVSlab(), 99)
    budget.add(target)
    for _ in range(3):
        budget.add(Rows(KVSlab(), 99))
        gc.collect()
    budget.add(target)
    assert len(budget._slabs) == len(budget.held_bytes) == 1
