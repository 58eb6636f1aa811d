from __future__ import annotations

from typing import Any

import pytest

from foretoken.drafters.draft_model import OwnModel
from foretoken.drafters.learnable import LearnableModel
from foretoken.runtime import choose
from foretoken.runtime.target import Target
from tests.tiny import tiny_model


def test_what_it_learnt_is_packed_beside_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights with the same bits are in memory once, after it has learnt, too."""
    beside = list[object]()

    def network_for(*args: Any) -> Any:
        beside.append(args[3])
        return original(*args)

    original = choose.network_for
    monkeypatch.setattr("foretoken.drafters.learnable.network_for", network_for)
    target, module = Target(tiny_model()), tiny_model(seed=1)
    model = Target(module, beside=target)
    learner = LearnableModel(OwnModel(model), module, model, target)
    learner.use(learner.net())
    assert beside == [target.network]
