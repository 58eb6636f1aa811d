"""Controllers decide how much is guessed, never what comes out; each keeps its own promise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.control.worlds import outcome as outcome_of_tree
from tests.control.worlds import request_of
from tests.matrix import ON_CHAINS, PROMPTS, SPECULATIVE, tiny_llm
from tests.tiny import tiny_model
from tokenleap import LLM, RequestOutput, SamplingParams, speculation
from tokenleap.control import CONTROLLERS, Budget, Controller, CostCurve
from tokenleap.control.base import BatchTable, Confidence, Heuristic
from tokenleap.decode import Outcome
from tokenleap.request import Request


@cache
def llama(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return tiny_model(dtype=dtype)


def outputs(llm: LLM) -> list[RequestOutput]:
    """Greedy and seeded."""
    bits: dict[str, Any] = {"max_tokens": 16, "logprobs": 1, "detokenize": False}
    greedy = SamplingParams(temperature=0, **bits)
    seeded = SamplingParams(temperature=1.2, seed=2, **bits)
    return [output for params in (greedy, seeded) for output in llm.generate(PROMPTS, params)]


@cache
def plain_outputs(dtype: torch.dtype = torch.float32) -> list[RequestOutput]:
    return outputs(tiny_llm(llama(dtype)))


UNDER_ALL = ("ngram", "draft_model", "eagle", "hybrid", "cascade")
"""They differ in what they ask of a controller. The other methods are drafted with `cost_model` by
the next test, and here in the dtype that it leaves out."""


def is_quick(method: str, dtype: torch.dtype, controller: str) -> bool:
    return dtype == torch.bfloat16 or (method in UNDER_ALL and controller != "cost_model")


@pytest.mark.parametrize(
    ("method", "dtype", "controller"),
    [
        pytest.param(*case, marks=() if is_quick(*case) else pytest.mark.slow)
        for method in ON_CHAINS
        for case in (
            *((method, torch.float32, name) for name in CONTROLLERS),
            (method, torch.bfloat16, "cost_model"),
        )
    ],
)
def test_the_output_is_the_same_under_all(controller: str, method: str, dtype: torch.dtype) -> None:
    llm = tiny_llm(llama(dtype), method, gamma=6, controller=controller)
    expected = [(o.token_ids, o.logprobs) for o in plain_outputs(dtype)]
    assert [(o.token_ids, o.logprobs) for o in outputs(llm)] == expected


class WildCosts(CostCurve):
    """Every look at them shows others, up to a thousand times as high."""

    def __init__(self) -> None:
        super().__init__({1: 1.0})
        self._dice = np.random.default_rng(1)

    def __call__(self, positions: float, rows: int = 1, longest: float = 1) -> float:
        return float(10 ** self._dice.uniform(-1, 2))


class Depths:
    """Watches which depths a controller allows: those of lookups and of trained drafts alike."""

    def __init__(self, controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: set[int] = set()
        for name in ("budgets", "choose"):
            if hasattr(controller, name):
                monkeypatch.setattr(controller, name, self._watched(getattr(controller, name)))

    def _watched(self, decide: Callable[..., list[Budget]]) -> Callable[..., list[Budget]]:
        def watched(*args: Any) -> list[Budget]:
            found = decide(*args)
            self.seen.update(budget.depth for budget in found)
            return found

        return watched


@pytest.mark.parametrize("method", SPECULATIVE)
def test_whatever_is_timed_the_bits_are_the_same(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cost_model` chooses by time: a mad clock makes it jump between depths, and nothing else."""
    llm = tiny_llm(llama(), method, gamma=6, controller="cost_model")
    controller = llm.engine._speculation.default.controller
    controller.costs = WildCosts()
    controller.setup()  # parts of it that keep the costs get the mad ones too
    depths = Depths(controller, monkeypatch)
    expected, found = plain_outputs(), outputs(llm)
    assert [o.token_ids for o in found] == [o.token_ids for o in expected]
    if method in ON_CHAINS:
        assert [o.logprobs for o in found] == [o.logprobs for o in expected]
    assert len(depths.seen) >= 3


@pytest.mark.parametrize("controller", list(CONTROLLERS))
def test_state_is_released(controller: str) -> None:
    llm = tiny_llm(tiny_model(), "ngram", controller=controller)
    llm.generate(PROMPTS, SamplingParams(max_tokens=12))
    for name, value in vars(llm.engine._speculation.default.controller).items():
        if isinstance(value, dict):
            assert not value, name


def outcome(request: Request, drafted: int, accepted: int) -> Outcome:
    """A chain of which the first tokens were kept."""
    return outcome_of_tree(request, [1] * drafted, accepted)


def length(controller: Controller, batch: Sequence[Request]) -> int:
    return controller.budgets(batch, len(batch))[0].chain


@pytest.mark.parametrize("controller", list(CONTROLLERS))
def test_the_end_of_the_output_cuts_every_budget(controller: str) -> None:
    for remaining in (1, 2, 3):
        (budget,) = CONTROLLERS[controller](8).budgets([request_of(remaining)], 1)
        assert budget.depth <= remaining - 1


def test_many_rows_have_shorter_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step computes is bounded, whatever its requests ask for."""
    monkeypatch.setattr(speculation, "_MOST_LOGITS", 0)
    monkeypatch.setattr(speculation, "MAX_NODES", 7)
    long = {"method": "random", "num_speculative_tokens": 64, "controller": "fixed"}
    llm = LLM(llama(), speculative_config=long)
    for prompts in PROMPTS[:1], PROMPTS[:3]:
        for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16)):
            sizes = [len(step.drafted) for step in output.trace.steps]
            assert max(sizes) == 7 // len(prompts)


def test_heuristic_grows_and_shrinks() -> None:
    controller = Heuristic(5, Heuristic.Options(max_length=8))
    request = request_of()
    lengths = [length(controller, [request])]
    for accepted in ("all", "all", "all", "none", "none"):
        drafted = lengths[-1]
        kept = drafted if accepted == "all" else 0
        controller.observe([outcome(request, drafted, kept)], 0.001)
        lengths.append(length(controller, [request]))
    assert lengths == [5, 7, 8, 8, 7, 6]
    for _ in range(20):
        controller.observe([outcome(request, 1, 0)], 0.001)
    assert length(controller, [request]) == 1
    controller.observe([outcome(request, 0, 0)], 0.001)  # nothing drafted teaches nothing
    assert length(controller, [request]) == 1


def test_heuristic_never_exceeds_its_longest_draft() -> None:
    controller = Heuristic(12, Heuristic.Options(max_length=8))
    request = request_of()
    assert length(controller, [request]) == 8
    controller.observe([outcome(request, 8, 8)], 0.001)
    assert length(controller, [request]) == 8


def test_confidence_thresholds_adapt() -> None:
    controller = Confidence(5, Confidence.Options(threshold=0.5, step=0.1))
    request = request_of()
    controller.observe([outcome(request, 3, 0)], 0.001)
    assert controller.budgets([request], 1)[0].min_token_prob == pytest.approx(0.6)
    for _ in range(20):
        controller.observe([outcome(request, 3, 3)], 0.001)
    assert controller.budgets([request], 1)[0].min_token_prob == pytest.approx(0.01)
    paths = Confidence(5, Confidence.Options(of="path"))
    assert paths.budgets([request], 1)[0].min_path_prob == 0.4


def test_a_budget_stops_below_a_token_never_at_it() -> None:
    budget = Budget(9, 9, min_token_prob=0.3, min_path_prob=0.1)
    assert not budget.stops_below(0.3, 0.1)
    assert budget.stops_below(0.29, 0.2)
    assert budget.stops_below(0.9, 0.09)


def test_confident_drafts_are_longer() -> None:
    """With a threshold nothing reaches, every draft is one token: the first is always kept."""
    lengths = []
    for threshold in (0.0, 1.0):
        controller = {"rule": "confidence", "threshold": threshold, "step": 0}
        llm = tiny_llm(tiny_model(), "draft_model", controller=controller)
        params = SamplingParams(seed=1, temperature=1.5, max_tokens=30)
        (output,) = llm.generate([PROMPTS[0]], params)
        lengths.append(max(len(step.drafted) for step in output.trace))
    assert lengths[0] > lengths[1] == 1


def test_batch_table() -> None:
    controller = BatchTable(5, BatchTable.Options(lengths={1: 9, 3: 2, 8: 0}))
    sizes = {1: 5, 2: 5, 3: 2, 7: 2, 8: 0, 30: 0}
    for size, expected in sizes.items():
        assert length(controller, [request_of() for _ in range(size)]) == expected
