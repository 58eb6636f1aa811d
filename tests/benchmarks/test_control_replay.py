from __future__ import annotations

import random

import pytest
from benchmarks.contract import HOT
from benchmarks.control_replay import BATCH_SIZES, DRAFTED, TOKENS, replay


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_what_repeats_is_faster_and_what_is_random_hardly_slower(method: str) -> None:
    """Passes of 100 ms, so that the time of the controller itself is nothing beside them."""
    dice = random.Random(0)
    noise = [dice.sample(range(10**5), 2 * TOKENS) for _ in range(16)]
    texts = {
        HOT: [(each[:TOKENS], each[TOKENS:]) for each in noise],
        "repeats": [(each[:8] * 4, each[:8] * (TOKENS // 8)) for each in noise],
    }
    cycle = [0.1 * (1 + drafted / 64) for drafted in DRAFTED]
    data = {"texts": texts, "passes": {str(rows): [cycle] * 40 for rows in BATCH_SIZES}}
    found = replay(data, method, 2, 1, 0.0)
    assert found["repeats"] > 2
    assert 0.9 < found[HOT] < 1.1
