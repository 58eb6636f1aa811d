"""Whatever one process alone knows comes in through `Peers`: a second process decides alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, TypeVar

import pytest

from tests.heads import tiny_head
from tests.tiny import tiny_model
from tokenleap import LLM
from tokenleap.core.peers import Peers
from tokenleap.runtime import target as target_module

T = TypeVar("T")

PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [5, 6, 7, 8]]
CONFIGS: list[dict[str, Any]] = [
    {"method": "ngram", "prompt_lookup_min": 1},
    {"method": "hybrid", "lookup": {"method": "ngram", "prompt_lookup_min": 1}},
    {"method": "switch", "drafters": [{"method": "ngram"}, {"method": "ngram_table"}]},
]


class First(Peers):
    """The first of two processes: tells what it measured, drew or read."""

    def __init__(self, told: list[Any]) -> None:
        self.size, self.told = 2, told

    def agreed(self, number: float) -> float:
        self.told.append(number)
        return number

    def from_first(self, make: Callable[[], T]) -> T:
        self.told.append(make())
        made: T = self.told[-1]
        return made


class Second(Peers):
    """The other one, which takes what the first one told."""

    def __init__(self, told: Iterator[Any]) -> None:
        self.rank, self.size, self.told = 1, 2, told

    def agreed(self, number: float) -> float:
        del number
        heard: float = next(self.told)
        return heard

    def from_first(self, make: Callable[[], T]) -> T:
        del make
        heard: T = next(self.told)
        return heard


def steps_with(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Drafts and accepted tokens, without seeds, of controllers that choose by costs."""
    monkeypatch.setattr(target_module, "peers_of", lambda _: peers)
    model = tiny_model("lean")  # heads read its weights
    llm = LLM(model, runtime="torch", speculative_config=CONFIGS[0])
    assert llm.controller == "cost_model"
    steps: list[Any] = []
    for config in CONFIGS:
        head = {"model": tiny_head()} if config["method"] == "hybrid" else {}
        params = {"temperature": 0.7, "max_tokens": 24}
        for result in llm.generate(PROMPTS, params, speculative_config={**config, **head}):
            steps += [
                (s.drafted, s.parents, s.accepted, s.token) for s in result.outputs[0].trace.steps
            ]
    return steps


def test_two_processes_decide_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one has a clock that means nothing, and draws other seeds."""
    told: list[Any] = []
    expected = steps_with(First(told), monkeypatch)
    assert len(told) > 50
    ticks = count()
    monkeypatch.setattr("tokenleap.core.clock.now", lambda: (next(ticks) * 7919 % 1000) * 1e-3)
    heard = iter(told)
    assert steps_with(Second(heard), monkeypatch) == expected
    assert next(heard, None) is None  # both have asked as often
