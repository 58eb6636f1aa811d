"""Each request with its own drafter; a drafter's fault is its request's alone, and is reported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

from foretoken import LLM, SamplingParams
from foretoken.acceptance import RULES
from foretoken.cache import OverBudget
from foretoken.control import Budget, Fixed
from foretoken.control.batch import BatchTable
from foretoken.control.per_request import PerRequestController
from foretoken.decode import Outcome, StepTimes
from foretoken.drafters.base import Drafter
from foretoken.drafters.none import NoDrafter
from foretoken.drafters.per_request import PerRequest
from foretoken.engine import Engine, Speculation
from foretoken.request import Request
from foretoken.target import Target
from foretoken.tree import Draft, chain
from tests.matrix import PROMPTS, tiny_llm
from tests.tiny import CONTEXT, VOCAB_SIZE, tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable

BUDGET = Budget(3, 3)


def request_of(prompt: Sequence[int], max_tokens: int = 20) -> Request:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return Request(prompt, params, vocab_size=VOCAB_SIZE, max_model_len=CONTEXT)


class Faulty(Drafter):
    """Repeats the root, keeps a state, and fails where it is told to."""

    def __init__(
        self, fails: Callable[[Request], bool] = lambda _: False, error: Exception | None = None
    ) -> None:
        self.fails = fails
        self.error = error or RuntimeError("it broke\nin two lines")
        self.at = "propose"
        self.state: dict[int, int] = {}
        self.observed: list[int] = []

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        for request in batch:
            self.state[request.key] = len(request.token_ids)
            self._fail_at("propose", request)
        return [
            Draft.deterministic(chain([request.root] * (1 + budget.chain)))
            for request, budget in zip(batch, budgets, strict=True)
        ]

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> None:
        for outcome in outcomes:
            self._fail_at("observe", outcome.request)
            self.observed.append(outcome.request.key)

    def release(self, request: Request) -> None:
        self.state.pop(request.key, None)
        self._fail_at("release", request)

    def _fail_at(self, place: str, request: Request) -> None:
        if self.at == place and self.fails(request):
            raise self.error


def outputs_of(
    drafters: Sequence[Drafter], default: Drafter | None = None
) -> tuple[list[Request], Engine]:
    """Every prompt with one of the drafters, in one batch, to the end."""
    target = Target(tiny_model())
    default = default or NoDrafter()
    engine = Engine(target, default, RULES["coupled"](), Fixed(3))
    requests = [request_of(prompt) for prompt in PROMPTS]
    for request, drafter in zip(requests, drafters, strict=True):
        engine.add(request, Speculation(drafter, Fixed(3)))
    while engine.busy:
        engine.step()
    assert not target._keys
    return requests, engine


@pytest.fixture(scope="module")
def plain() -> list[tuple[int, ...]]:
    outputs = tiny_llm(tiny_model()).generate(PROMPTS, SamplingParams(temperature=0, max_tokens=20))
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("at", ["propose", "observe", "release"])
def test_a_fault_stays_with_its_request(at: str, plain: list[tuple[int, ...]]) -> None:
    drafter = Faulty(lambda request: request.prompt_ids == tuple(PROMPTS[2]))
    drafter.at = at
    requests, engine = outputs_of([drafter] * len(PROMPTS))
    assert [tuple(request.output_ids) for request in requests] == plain
    failures = [request.metrics.drafter_failure for request in requests]
    assert failures == [None, None, "RuntimeError: it broke", None, None]
    assert not drafter.state
    drafted = [request.metrics.num_drafts for request in requests]
    assert all(drafted[i] > 5 for i in (0, 1, 3, 4))
    assert drafted[2] == {"propose": 0, "observe": 1}.get(at, drafted[0])
    assert not engine._drafters._failed
    assert not engine._drafters._assigned


def test_it_fails_later_and_for_good(plain: list[tuple[int, ...]]) -> None:
    drafter = Faulty(lambda request: len(request.output_ids) == 9 and request.key % 2 == 0)
    requests, _ = outputs_of([drafter] * len(PROMPTS))
    assert [tuple(request.output_ids) for request in requests] == plain
    for request in requests:
        failed = request.metrics.drafter_failure is not None
        assert failed == (request.key % 2 == 0)
        assert (request.metrics.num_drafts < 12) == failed


def test_the_wrong_number_of_drafts_is_a_fault(plain: list[tuple[int, ...]]) -> None:
    class Short(Faulty):
        def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
            return super().propose(batch, budgets)[1:]

    requests, _ = outputs_of([Short()] * len(PROMPTS))
    assert [tuple(request.output_ids) for request in requests] == plain
    assert all("ValueError: zip()" in str(r.metrics.drafter_failure) for r in requests)


def test_each_request_asks_its_own_drafter(plain: list[tuple[int, ...]]) -> None:
    first, second = Faulty(), Faulty()
    requests, _ = outputs_of([first, second, first, second, NoDrafter()])
    assert [tuple(request.output_ids) for request in requests] == plain
    keys = [request.key for request in requests]
    assert set(first.observed) == {keys[0], keys[2]}
    assert set(second.observed) == {keys[1], keys[3]}
    assert requests[4].metrics.num_drafts == 0


@pytest.mark.parametrize("error", [AssertionError("ours"), OverBudget("the engine's")])
def test_what_is_no_fault_of_the_drafter_comes_through(error: Exception) -> None:
    drafter = Faulty(lambda _: True, error)
    router = PerRequest(drafter)
    request = request_of([1, 2])
    with pytest.raises(type(error)):
        router.propose([request], [BUDGET])
    assert request.metrics.drafter_failure is None


def test_an_interrupt_comes_through() -> None:
    class Interrupted(Faulty):
        def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        PerRequest(Interrupted()).propose([request_of([1])], [BUDGET])


def test_an_error_without_words() -> None:
    router = PerRequest(Faulty(lambda _: True, KeyError()))
    request = request_of([1, 2])
    (draft,) = router.propose([request], [BUDGET])
    assert draft.tree.num_drafted == 0
    assert request.metrics.drafter_failure == "KeyError"


def test_rewind_goes_to_the_drafter() -> None:
    drafter = Faulty()
    router = PerRequest(drafter)
    request = request_of([1, 2])
    router.propose([request], [BUDGET])
    router.rewind(request)
    assert not drafter.state


def test_the_user_sees_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"method": "ngram", "prompt_lookup_min": 1}
    llm = LLM(tiny_model(), speculative_config=config)

    def broken(*_: object) -> None:
        raise OSError("the index is gone")

    monkeypatch.setattr(llm._engine._drafter, "propose", broken)
    (output,) = llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=5))
    assert len(output.token_ids) == 5
    metrics = output.outputs[0].as_dict()["metrics"]
    assert metrics["drafter_failure"] == "OSError: the index is gone"


# Controllers


def test_each_request_asks_its_own_controller() -> None:
    router = PerRequestController(Fixed(2))
    requests = [request_of([1]) for _ in range(4)]
    table = BatchTable(8, BatchTable.Options(lengths={1: 7, 2: 5}))
    router.assign(requests[1], Fixed(4))
    for request in requests[2:]:
        router.assign(request, table)
    assert [budget.chain for budget in router.budgets(requests)] == [2, 4, 5, 5]
    assert [budget.chain for budget in router.budgets(requests[:3])] == [2, 4, 7]
    for request in requests:
        router.release(request)
    assert [budget.chain for budget in router.budgets(requests)] == [2] * 4


def test_seconds_of_drafting_are_shared_out_and_the_pass_is_told_whole() -> None:
    class Watching(Fixed):
        seen: StepTimes | None = None

        def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> None:
            self.seen = times

    controllers = [Watching(1), Watching(2)]
    target = Target(tiny_model())
    engine = Engine(target, Faulty(), RULES["coupled"](), controllers[0])
    requests = [request_of(prompt) for prompt in ([1], [2])]
    engine.add(requests[0])
    engine.add(requests[1], Speculation(Faulty(), controllers[1]))
    engine.step()
    first, second = (controller.seen for controller in controllers)
    assert first is not None
    assert second is not None
    assert second.draft == pytest.approx(first.draft * 3 / 2)  # 3 positions and 2
    assert second.verify == first.verify > 0
    assert (first.rows, first.positions) == (second.rows, second.positions) == (2, 5)
    assert [controller.others for controller in controllers] == [1, 1]
    engine.abort(requests)
    assert controllers[0].others == 0
