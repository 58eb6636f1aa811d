from __future__ import annotations

from typing import Any

import pytest

from tests.tiny import tiny_model
from tokenleap.drafters.learnable import LearnableModel
from tokenleap.drafters.models import OwnModel
from tokenleap.runtime import choose
from tokenleap.runtime.target import Target


def test_what_it_learnt_is_packed_beside_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights with the same bits are in memory once, after it has learnt, too."""
    beside = list[object]()

    def network_for(*args: Any) -> Any:
        beside.append(args[3])
        return original(*args)

    original = choose.network_for
    monkeypatch.setattr("tokenleap.drafters.learnable.network_for", network_for)
    target, module = Target(tiny_model()), tiny_model(seed=1)
    model = Target(module, beside=target)
    learner = LearnableModel(OwnModel(model), module, model, target)
    learner.use(learner.net())
    assert beside == [target.network]
