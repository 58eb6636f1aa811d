"""Controllers decide how much is guessed, never what comes out; each keeps its own promise."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch

from foretoken import SamplingParams
from foretoken.acceptance import Accepted
from foretoken.analysis import expected_tokens
from foretoken.control import CONTROLLERS, Budget, Controller, CostCurve
from foretoken.control.batch import BatchTable
from foretoken.control.confidence import Confidence
from foretoken.control.cost_model import CostModel
from foretoken.control.heuristic import Heuristic
from foretoken.decode import Outcome, StepTimes
from foretoken.request import Request
from foretoken.sampling import Laws
from foretoken.tree import Draft, chain
from tests.matrix import ON_CHAINS, PROMPTS, tiny_llm
from tests.tiny import tiny_model

TIMES = StepTimes(draft=0.001, verify=0.010, accept=0.0)


@pytest.mark.parametrize("controller", list(CONTROLLERS))
@pytest.mark.parametrize("method", ON_CHAINS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_output_is_the_same_under_all(controller: str, method: str, dtype: torch.dtype) -> None:
    model = tiny_model(dtype=dtype)
    plain, steered = tiny_llm(model), tiny_llm(model, method, gamma=6, controller=controller)
    for params in (
        SamplingParams(temperature=0, max_tokens=30, logprobs=1),
        SamplingParams(temperature=0.8, seed=2, max_tokens=30, logprobs=1),
    ):
        expected = [(o.token_ids, o.logprobs) for o in plain.generate(PROMPTS, params)]
        assert [(o.token_ids, o.logprobs) for o in steered.generate(PROMPTS, params)] == expected


@pytest.mark.parametrize("controller", list(CONTROLLERS))
def test_state_is_released(controller: str) -> None:
    llm = tiny_llm(tiny_model(), "ngram", controller=controller)
    llm.generate(PROMPTS, SamplingParams(max_tokens=12))
    for name, value in vars(llm._engine._controller).items():
        if isinstance(value, dict):
            assert not value, name


def request_of(max_tokens: int = 1000) -> Request:
    return Request([1, 2], SamplingParams(max_tokens=max_tokens), vocab_size=9, max_model_len=10**6)


def outcome(request: Request, drafted: int, accepted: int) -> Outcome:
    """A chain of which the first tokens were kept."""
    draft = Draft.deterministic(chain([0] * (drafted + 1)))
    logits = torch.zeros(drafted + 1, 9)
    laws = Laws(logits, draft.tree, request.sampler, request.output_ids)
    rejected = (accepted + 1,) if accepted < drafted else ()
    decision = Accepted(tuple(range(1, accepted + 1)), 0, rejected, "rejected" if rejected else "")
    return Outcome(request, draft, decision, (), logits, laws)


def length(controller: Controller, batch: Sequence[Request]) -> int:
    return controller.budgets(batch)[0].chain


@pytest.mark.parametrize("controller", list(CONTROLLERS))
def test_the_end_of_the_output_cuts_every_budget(controller: str) -> None:
    for remaining in (1, 2, 3):
        (budget,) = CONTROLLERS[controller](8).budgets([request_of(remaining)])
        assert budget.depth <= remaining - 1


def test_heuristic_grows_and_shrinks() -> None:
    controller = Heuristic(5, Heuristic.Options(max_length=8))
    request = request_of()
    lengths = [length(controller, [request])]
    for accepted in ("all", "all", "all", "none", "none"):
        drafted = lengths[-1]
        kept = drafted if accepted == "all" else 0
        controller.observe([outcome(request, drafted, kept)], TIMES)
        lengths.append(length(controller, [request]))
    assert lengths == [5, 7, 8, 8, 7, 6]
    for _ in range(20):
        controller.observe([outcome(request, 1, 0)], TIMES)
    assert length(controller, [request]) == 1
    controller.observe([outcome(request, 0, 0)], TIMES)  # nothing drafted teaches nothing
    assert length(controller, [request]) == 1


def test_confidence_thresholds_adapt() -> None:
    controller = Confidence(5, Confidence.Options(threshold=0.5, step=0.1))
    request = request_of()
    controller.observe([outcome(request, 3, 0)], TIMES)
    assert controller.budgets([request])[0].min_token_prob == pytest.approx(0.6)
    for _ in range(20):
        controller.observe([outcome(request, 3, 3)], TIMES)
    assert controller.budgets([request])[0].min_token_prob == pytest.approx(0.01)
    paths = Confidence(5, Confidence.Options(of="path"))
    assert paths.budgets([request])[0].min_path_prob == 0.4


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


# Cost model


def steered(costs: dict[int, float], accepted: int, drafted: int = 4) -> int:
    """The length chosen after many drafts with this outcome."""
    controller = CostModel(8, costs=CostCurve(costs))
    request = request_of()
    for _ in range(40):
        seconds = controller.costs(drafted + 1)
        times = StepTimes(draft=0.0005 * drafted, verify=seconds, accept=0)
        controller.observe([outcome(request, drafted, accepted)], times)
    return length(controller, [request])


def test_cost_model_drafts_all_it_may_when_guesses_are_free_and_right() -> None:
    assert steered({1: 0.01, 16: 0.01}, accepted=4) == 8


def test_cost_model_drafts_nothing_when_guesses_are_wrong() -> None:
    assert steered({1: 0.01, 16: 0.02}, accepted=0) == 0


def test_cost_model_drafts_nothing_when_verifying_costs_as_much_as_decoding() -> None:
    assert steered({1: 0.01, 16: 0.16}, accepted=2) == 0


def test_cost_model_finds_the_best_length() -> None:
    """By trying them all with the estimate it has."""
    controller = CostModel(8, costs=CostCurve({1: 0.010, 4: 0.011, 9: 0.020}))
    request = request_of()
    for _ in range(60):
        controller.observe([outcome(request, 4, 3)], StepTimes(0.004, controller.costs(5), 0))
    alpha = controller.alpha(request)
    assert alpha == pytest.approx(0.75, abs=0.05)
    rates = [expected_tokens(alpha, n) / (0.001 * n + controller.costs(n + 1)) for n in range(9)]
    assert length(controller, [request]) == rates.index(max(rates))


def test_cost_model_probes_now_and_then() -> None:
    controller = CostModel(8, CostModel.Options(probe_every=10), CostCurve({1: 0.01, 9: 0.09}))
    request = request_of()
    for _ in range(30):
        controller.observe([outcome(request, 4, 0)], TIMES)
    lengths = [length(controller, [request]) for _ in range(100)]
    assert lengths.count(0) == 90
    assert lengths.count(1) == 10


def test_cost_model_gives_the_nodes_to_those_who_use_them() -> None:
    """Verifying is dear: only what is nearly sure pays, and only one of the two is."""
    controller = CostModel(4, costs=CostCurve({1: 0.01, 2: 0.011, 12: 0.031}))
    good, bad = request_of(), request_of()
    for _ in range(60):
        outcomes = [outcome(good, 4, 4), outcome(bad, 4, 0)]
        controller.observe(outcomes, StepTimes(0.0, controller.costs(10, 2), 0))
    assert controller.alpha(good) > 0.9
    assert controller.alpha(bad) < 0.2
    lengths = [budget.chain for budget in controller.budgets([good, bad])]
    assert lengths == [4, 0]


def test_cost_model_is_near_the_best_rate_of_all_lengths_of_two_requests() -> None:
    """By trying them all: tokens per second as the module's docstring has it.

    Near, because the order of worth does not know that a second row of the same depth is drafted
    for nothing.
    """
    controller = CostModel(5, costs=CostCurve({1: 0.010, 4: 0.012, 8: 0.017, 12: 0.024}))
    batch = [request_of(), request_of()]
    for accepted in (4, 3, 4, 4, 2) * 8:
        controller.observe([outcome(batch[0], 4, accepted)], TIMES)
        controller.observe([outcome(batch[1], 4, accepted // 2)], TIMES)
    controller._draft_cost = 0.0005
    alphas = [controller.alpha(request) for request in batch]
    drafts = [controller.drafts(request) for request in batch]

    def rate(lengths: tuple[int, ...]) -> float:
        parts = list(zip(alphas, drafts, lengths, strict=True))
        tokens = sum(1 + d * (expected_tokens(alpha, n) - 1) for alpha, d, n in parts)
        expected = sum(d * n for _, d, n in parts)
        low = int(expected)
        below, above = controller.costs(2 + low, 2), controller.costs(3 + low, 2)
        seconds = below + (expected - low) * (above - below)
        return tokens / (max(lengths) * 0.0005 + seconds)

    chosen = tuple(budget.chain for budget in controller.budgets(batch))
    best = max(rate(lengths) for lengths in product(range(6), repeat=2))
    assert rate(chosen) == pytest.approx(best, rel=0.05)


def test_cost_model_probes_each_request_by_itself() -> None:
    """Others that draft do not keep a request from being tried again."""
    controller = CostModel(
        4, CostModel.Options(probe_every=10), CostCurve({1: 0.01, 2: 0.011, 12: 0.031})
    )
    good, bad = request_of(), request_of()
    for _ in range(60):
        outcomes = [outcome(good, 4, 4), outcome(bad, 4, 0)]
        controller.observe(outcomes, StepTimes(0.0, controller.costs(10, 2), 0))
    lengths = [controller.budgets([good, bad])[1].chain for _ in range(50)]
    assert lengths.count(1) == 5
    assert lengths.count(0) == 45


def test_cost_model_knows_that_a_drafter_often_has_no_guess() -> None:
    controller = CostModel(4, costs=CostCurve({1: 0.01, 9: 0.01}))
    request = request_of()
    for step in range(100):
        controller.budgets([request])
        controller.observe([outcome(request, 0 if step % 4 else 4, 0 if step % 4 else 4)], TIMES)
    assert controller.drafts(request) == pytest.approx(0.25, abs=0.1)
    assert controller.alpha(request) > 0.8


def test_cost_curve() -> None:
    curve = CostCurve({1: 1.0, 4: 1.0, 8: 2.0})
    assert [curve(n) for n in (1, 2, 4, 6, 8, 16)] == [1, 1, 1, 1.5, 2, 4]
    curve.observe(8, 3.0)
    assert curve(8) == pytest.approx(2.1)
    assert CostCurve()(5) == 1.0
    assert len(curve) == 3


def test_a_new_point_of_the_curve_begins_with_what_the_curve_said() -> None:
    curve = CostCurve({1: 1.0, 8: 2.0})
    curve.observe(8 * 2, 40.0)
    assert curve(16) == pytest.approx(4.0 + 0.1 * 36.0)
    empty = CostCurve()
    empty.observe(3, 0.5)
    assert empty(3) == 0.5


def test_rows_cost_more_than_nodes_of_one_row() -> None:
    curve = CostCurve({1: 1.0, 16: 2.0})
    assert curve(16, rows=16) == 2.0  # nothing known yet
    for _ in range(60):
        curve.observe(16, 5.0, rows=16)
    assert curve(16, rows=16) == pytest.approx(5.0, rel=0.01)
    assert curve(16) == 2.0
    assert curve(16, rows=12) == pytest.approx(5.0, rel=0.01)  # the nearest that is known
    assert curve(16, rows=3) == 2.0


def test_costs_are_measured_on_the_target() -> None:
    llm = tiny_llm(tiny_model(), "ngram", controller="cost_model")
    controller = llm._engine._controller
    assert isinstance(controller, CostModel)
    assert len(controller.costs) > 3
    assert all(controller.costs(n) > 0 for n in (1, 3, 9, 40))
    assert not llm._target._keys
