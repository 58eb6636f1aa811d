"""Faults of memory, passes and drafters, from a review: no request hangs, nothing is mixed up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.drafting import Reader
from tests.engine.serving import GREEDY, alone, assert_empty, bits
from tests.tiny import tiny_model
from tokenleap import LLM, RequestError, SamplingParams, SpeculativeConfig
from tokenleap.control import Budget
from tokenleap.core.tree import Draft, TokenTree
from tokenleap.decode import Outcome, StepTimes
from tokenleap.drafters.base import Drafter
from tokenleap.engine.prefix_cache import BLOCK, PrefixCache
from tokenleap.request import Request
from tokenleap.runtime.kv_slab import OverBudget
from tokenleap.runtime.target import Target

LONG = [(7 * i * i + 3 * i) % 96 for i in range(3 * BLOCK)]


class Faulty(Drafter):
    """Drafts nothing, and fails where it is told to.

    Args:
        observe: raised by the first `observe`.
    """

    def __init__(self, observe: Exception) -> None:
        self._error: Exception | None = observe

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        return [Draft.empty(request.root) for request in batch]

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


class Branching(Drafter):
    """Drafts trees without saying so."""

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        return [Draft.deterministic(TokenTree((r.root, 1, 2), (-1, 0, 0))) for r in batch]


def test_a_prefix_that_does_not_fit_leaves_an_empty_row(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny_model())
    cache = PrefixCache(target, 2**20)
    target.add(0)
    target.prefill(0, LONG)
    cache.store(0, LONG)
    target.add(1)
    append, calls = target.append, [0]

    def full_at_the_second(key: int, block: Any) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise OverBudget("as the test wants it")
        append(key, block)

    monkeypatch.setattr(target, "append", full_at_the_second)
    with pytest.raises(OverBudget):
        cache.restore(1, LONG)
    assert target.cached(1) == 0


def test_hidden_states_that_were_not_all_seen_are_not_kept() -> None:
    """A drafter that fails in the middle of a prompt leaves the cache without its states."""

    class Quits(Reader):
        def observe_prefill(self, request: Request, start: int, hidden: Any) -> None:
            if start:
                raise RuntimeError("enough")

    llm = LLM(tiny_model(), speculative_config={"method": Quits()}, max_num_batched_tokens=BLOCK)
    (first,) = llm.generate([LONG], GREEDY)
    assert first.metrics.drafter_failure == "RuntimeError: enough"
    reader = Reader()
    (second,) = llm.generate([LONG], GREEDY, speculative_config={"method": reader})
    assert second.metrics.drafter_failure is None
    assert bits(second) == bits(first) == alone(tiny_model(), LONG)


def test_a_prefill_that_fails_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(tiny_model(), enable_prefix_caching=False)
    prefill = llm.engine.target.prefill

    def failing(key: int, tokens: Sequence[int], *rest: Any) -> Any:
        if 66 in tokens:
            raise RuntimeError("a broken pass")
        return prefill(key, tokens, *rest)

    monkeypatch.setattr(llm.engine.target, "prefill", failing)
    with pytest.raises(RequestError, match="a broken pass") as told:
        llm.generate([[1, 66, 3], [1, 2, 3]], GREEDY)
    assert [o.finish_reason for o in told.value.outputs] == ["error", "length"]
    assert bits(told.value.outputs[1]) == alone(tiny_model(), [1, 2, 3])
    assert_empty(llm)


def test_out_of_memory_in_a_pass_is_an_error_of_the_last_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = LLM(tiny_model(), enable_prefix_caching=False)

    def failing(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.target, "verify", failing)
        with pytest.raises(RequestError, match="out of memory"):
            llm.generate([[1, 2, 3], [4, 5]], GREEDY)
    assert_empty(llm)
    assert bits(llm.generate([[1, 2, 3]], GREEDY)[0]) == alone(tiny_model(), [1, 2, 3])


@pytest.mark.parametrize("error", [OverBudget("full"), RuntimeError("broken")], ids=repr)
def test_a_drafter_that_fails_after_the_pass_changes_no_output(error: Exception) -> None:
    llm = LLM(tiny_model(), speculative_config={"method": Faulty(error)})
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=1)
    (output,) = llm.generate([[1, 2, 3]], params)
    assert len(output.token_ids) == 3
    assert bits(output) == alone(tiny_model(), [1, 2, 3], params)
    assert output.metrics.drafter_failure is not None


@pytest.mark.parametrize("rule", ["block", "coupled", "rejection"])
def test_undeclared_trees_are_a_fault_of_the_drafter(rule: str) -> None:
    llm = LLM(tiny_model(), speculative_config={"method": Branching(), "acceptance": rule})
    (output,) = llm.generate([[1, 2, 3]], GREEDY)
    assert bits(output) == alone(tiny_model(), [1, 2, 3])
    assert "drafts_trees" in str(output.metrics.drafter_failure)


def test_an_ensemble_survives_a_step_without_room_for_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`lookahead` and `switch` are shown no step that they did not draft for."""
    parts = [{"method": "ngram", "prompt_lookup_min": 1}, {"method": "lookahead"}]
    for method in ("ensemble", "switch"):
        config = {"method": method, "drafters": parts, "controller": "fixed"}
        llm = LLM(tiny_model(), speculative_config=config)
        drafter = llm.engine._speculation.default.drafter
        propose, calls = drafter.propose, [0]

        def full_at_first(*arguments: Any, propose: Any = propose, calls: Any = calls) -> Any:
            calls[0] += 1
            if calls[0] == 1:
                raise OverBudget("as the test wants it")
            return propose(*arguments)

        monkeypatch.setattr(drafter, "propose", full_at_first)
        (output,) = llm.generate([[1, 2, 1, 2]], GREEDY)
        assert output.metrics.drafter_failure is None
        assert output.token_ids == alone(tiny_model(), [1, 2, 1, 2])[0]


def test_a_request_with_the_default_configuration_has_the_default_strategy() -> None:
    draft = tiny_model(seed=1)
    config = SpeculativeConfig(model=draft)
    strategies = LLM(tiny_model(), speculative_config=config).engine.strategies
    assert strategies.strategy(SpeculativeConfig(model=draft)) is None
    other = SpeculativeConfig(model=draft, num_speculative_tokens=2)
    assert strategies.strategy(other) is not None


def test_strategies_that_were_used_lately_are_kept() -> None:
    strategies = LLM(tiny_model()).engine.strategies
    strategies.most_kept = 2
    one, two, three = (
        SpeculativeConfig(method="ngram", num_speculative_tokens=n) for n in (1, 2, 3)
    )
    first, second = strategies.strategy(one), strategies.strategy(two)
    assert strategies.strategy(one) is first
    third = strategies.strategy(three)
    assert strategies.kept() == [first, third]
    assert strategies.strategy(two) is not second


def test_combined_methods_want_steady_drafts_at_any_depth() -> None:
    inner = [{"method": "lookahead"}, {"method": "ngram"}]
    outer = [{"method": "ensemble", "drafters": inner}, {"method": "ngram"}]
    llm = LLM(tiny_model(), speculative_config={"method": "switch", "drafters": outer})
    assert llm.speculative_config.controller_name == "fixed"


def test_a_preempted_request_that_is_given_up_leaves_no_hidden_states() -> None:
    llm = LLM(tiny_model(), speculative_config={"method": Reader()}, max_num_batched_tokens=BLOCK)
    llm.engine.add_request(LONG, GREEDY, request_id="long")
    llm.engine.step()
    (request,) = llm.engine._scheduler._running
    llm.engine._scheduler._preempt(request)
    llm.engine.abort("long")
    assert_empty(llm)
