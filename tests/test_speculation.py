"""Each request with its own strategy; a drafter's fault is its request's alone, and is reported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.control.worlds import outcome as outcome_of
from tests.matrix import PROMPTS, tiny_llm
from tests.tiny import CONTEXT, VOCAB_SIZE, tiny_model
from tokenleap import LLM, SamplingParams
from tokenleap.control import Budget, Controller, CostCurve, Fixed
from tokenleap.control.base import BatchTable
from tokenleap.control.cost_model import CostModel
from tokenleap.core.acceptance import RULES
from tokenleap.core.distribution import Distribution, LazyDistribution
from tokenleap.core.tree import Draft, TokenTree, chain
from tokenleap.decode import Outcome, StepTimes
from tokenleap.drafters.base import Drafter, DrafterTraits
from tokenleap.drafters.lookups import NoDrafter
from tokenleap.engine.scheduler import Scheduler
from tokenleap.request import Request
from tokenleap.runtime.kv_slab import OverBudget, SlabFull
from tokenleap.runtime.target import Target
from tokenleap.speculation import Speculation, Strategy

if TYPE_CHECKING:
    from collections.abc import Callable


def strategy_of(
    drafter: Drafter, controller: Controller | None = None, rule: str = "coupled"
) -> Strategy:
    return Strategy(drafter, controller or Fixed(3), RULES[rule]())


def request_of(prompt: Sequence[int], max_tokens: int = 20) -> Request:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return Request(prompt, params, vocab_size=VOCAB_SIZE, max_model_len=CONTEXT)


def test_lookups_are_not_asked_where_nobody_may_draft() -> None:
    """Others are: some take their next guesses from what they drafted last."""
    drafter = Faulty()
    batch = [request_of([1, 2]), request_of([3])]
    for looks_up in (False, True):
        drafter.state.clear()
        drafter.traits = DrafterTraits(looks_up=looks_up)
        drafts = Speculation(strategy_of(drafter, Fixed(0))).draft(batch)
        assert [draft.tree.tokens for draft in drafts] == [(2,), (3,)]
        assert len(drafter.state) == (0 if looks_up else 2)


def test_a_controller_that_rests_asks_and_learns_nothing() -> None:
    class Resting(Fixed):
        needs_costs = True
        learnt = 0

        def observe(self, outcomes: Sequence[Outcome], draft_seconds: float) -> None:
            self.learnt += len(outcomes)

    drafter, controller = Faulty(), Resting(3)
    speculation = Speculation(strategy_of(drafter, controller))
    request = request_of([1, 2])
    for resting in (True, False):
        controller.resting = resting
        (draft,) = speculation.draft([request])
        assert draft.tree.num_drafted == (0 if resting else 3)
        speculation.observe([outcome_of(request, [1, 1, 1], 0)], StepTimes(0.1, 0.2, 0.3))
        assert controller.learnt == (0 if resting else 1)
        assert bool(controller.costs) is not resting  # whether the pass was timed
    assert drafter.observed == [request.key] * 2  # it sees every token


class Faulty(Drafter):
    """Repeats the root, keeps a state, and fails where it is told to."""

    def __init__(
        self, fails: Callable[[Request], bool] = lambda _: False, error: Exception | None = None
    ) -> None:
        self.fails = fails
        self.error = error or RuntimeError("it broke")
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
    drafters: Sequence[Drafter], rule: str = "coupled", *, trace: bool = False
) -> tuple[list[Request], Speculation]:
    """Every prompt with one of the drafters, in one batch, to the end."""
    target = Target(tiny_model())
    speculation = Speculation(strategy_of(NoDrafter()))
    scheduler = Scheduler(target, speculation)
    strategies = {id(drafter): strategy_of(drafter, rule=rule) for drafter in drafters}
    requests = [request_of(prompt) for prompt in PROMPTS]
    for request in requests:
        request._trace_all = trace
    for request, drafter in zip(requests, drafters, strict=True):
        scheduler.add(request, strategies[id(drafter)])
    while scheduler.busy:
        scheduler.step()
    assert not target._keys
    return requests, speculation


@pytest.fixture(scope="module")
def plain() -> list[tuple[int, ...]]:
    outputs = tiny_llm(tiny_model()).generate(PROMPTS, SamplingParams(temperature=0, max_tokens=20))
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("error", [RuntimeError("it broke\nin two lines"), AssertionError("x")])
@pytest.mark.parametrize("at", ["propose", "observe", "release"])
def test_a_fault_stays_with_its_request(
    at: str, error: Exception, plain: list[tuple[int, ...]]
) -> None:
    drafter = Faulty(lambda request: request.prompt_ids == tuple(PROMPTS[2]), error)
    drafter.at = at
    requests, speculation = outputs_of([drafter] * len(PROMPTS))
    assert [tuple(request.output_ids) for request in requests] == plain
    failures = [request.metrics.drafter_failure for request in requests]
    told = f"{type(error).__name__}: {error}".splitlines()[0]
    assert failures == [None, None, told, None, None]
    assert not drafter.state
    drafted = [request.metrics.num_drafts for request in requests]
    drafted_for = [i for i in range(5) if i != 2 or at == "release"]
    assert all(drafted[i] > 5 for i in drafted_for)
    assert at == "release" or drafted[2] == {"propose": 0, "observe": 1}[at]
    assert not speculation._guard.failed
    assert not speculation._assigned


MALFORMED: dict[str, tuple[Callable[[int], Any], str]] = {
    "float tokens": (lambda root: Draft.deterministic(chain([root, 1.0])), "type int"),  # type: ignore[list-item]
    "bool tokens": (lambda root: Draft.deterministic(chain([root, True])), "type int"),
    "tensors": (lambda root: Draft.deterministic(chain([root, torch.tensor(1)])), "type int"),  # type: ignore[list-item]
    "float parents": (
        lambda root: Draft.deterministic(TokenTree((root, 1), (-1, 0.0))),  # type: ignore[arg-type]
        "type int",
    ),
    "a cycle": (lambda root: Draft.deterministic(TokenTree((root, 1), (-1, 1))), "parent"),
    "q": (lambda root: Draft(chain([root, 1]), (0.5,)), "Distribution"),  # type: ignore[arg-type]
    "no q": (lambda root: Draft(chain([root, 1]), ()), "has a distribution"),
    "nothing": (lambda root: None, "not NoneType"),
    "tokens only": (lambda root: [1, 2], "not list"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_draft_is_a_fault_of_the_drafter(
    name: str, plain: list[tuple[int, ...]]
) -> None:
    make, message = MALFORMED[name]

    class Malformed(Faulty):
        def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
            drafts = super().propose(batch, budgets)
            bad = tuple(PROMPTS[2])
            pairs = zip(batch, drafts, strict=True)
            return [make(r.root) if r.prompt_ids == bad else draft for r, draft in pairs]

    requests, _ = outputs_of([Malformed()] * len(PROMPTS))
    assert [tuple(request.output_ids) for request in requests] == plain
    failures = [str(request.metrics.drafter_failure) for request in requests]
    assert message in failures.pop(2)
    assert set(failures) == {"None"}


def no_numbers() -> Distribution:
    return Distribution.of(torch.full((VOCAB_SIZE,), torch.nan))


UNREADABLE: dict[str, Callable[[int], Distribution]] = {
    "computed of NaN": lambda _: LazyDistribution(no_numbers),
    "NaN": lambda _: Distribution(torch.full((VOCAB_SIZE,), torch.nan)),
    "never drawn": lambda token: Distribution.one_hot((token + 1) % VOCAB_SIZE),
}


@pytest.mark.parametrize(
    ("q", "rule", "trace"),
    [
        *((q, rule, False) for q in UNREADABLE for rule in ("rejection", "block", "k_sequential")),
        ("computed of NaN", "coupled", True),
    ],
)
def test_a_q_that_cannot_be_read_is_a_fault_of_the_drafter(
    q: str, rule: str, trace: bool, plain: list[tuple[int, ...]]
) -> None:
    """Long after the drafter has proposed it: the rule reads it, or the trace."""

    class Unreadable(Faulty):
        def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
            drafts = super().propose(batch, budgets)
            for index, (request, draft) in enumerate(zip(batch, drafts, strict=True)):
                if request.prompt_ids == tuple(PROMPTS[2]) and len(request.output_ids) > 5:
                    of_nodes = tuple(UNREADABLE[q](token) for token in draft.tree.tokens[1:])
                    drafts[index] = Draft(draft.tree, of_nodes)
            return drafts

    drafter = Unreadable()
    requests, _ = outputs_of([drafter] * len(PROMPTS), rule, trace=trace)
    assert [tuple(request.output_ids) for request in requests] == plain
    failures = [request.metrics.drafter_failure for request in requests]
    assert failures.pop(2) is not None
    assert set(failures) == {None}
    assert not drafter.state


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
    assert all("ValueError: 0 drafts for 1" in str(r.metrics.drafter_failure) for r in requests)


def test_each_request_asks_its_own_drafter(plain: list[tuple[int, ...]]) -> None:
    first, second = Faulty(), Faulty()
    requests, _ = outputs_of([first, second, first, second, NoDrafter()])
    assert [tuple(request.output_ids) for request in requests] == plain
    keys = [request.key for request in requests]
    assert set(first.observed) == {keys[0], keys[2]}
    assert set(second.observed) == {keys[1], keys[3]}
    assert requests[4].metrics.num_drafts == 0


@pytest.mark.parametrize(
    "error",
    [OverBudget("the engine's"), SlabFull("the machine's")],
    ids=["budget", "machine"],
)
def test_what_is_no_fault_of_the_drafter_comes_through(error: Exception) -> None:
    drafter = Faulty(lambda _: True, error)
    request = request_of([1, 2])
    with pytest.raises(type(error)):
        Speculation(strategy_of(drafter)).draft([request])
    assert request.metrics.drafter_failure is None


def test_an_interrupt_comes_through() -> None:
    class Interrupted(Faulty):
        def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Speculation(strategy_of(Interrupted())).draft([request_of([1])])


def test_an_error_without_words() -> None:
    request = request_of([1, 2])
    (draft,) = Speculation(strategy_of(Faulty(lambda _: True, KeyError()))).draft([request])
    assert draft.tree.num_drafted == 0
    assert request.metrics.drafter_failure == "KeyError"


def test_a_drafter_without_a_rewind_starts_afresh() -> None:
    drafter = Faulty()
    request = request_of([1, 2])
    drafter.propose([request], [Budget(3, 3)])
    drafter.rewind(request)
    assert not drafter.state


def test_the_user_sees_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"method": "ngram", "prompt_lookup_min": 1}
    llm = LLM(tiny_model(), speculative_config=config)

    def broken(*_: object) -> None:
        raise OSError("the index is gone")

    monkeypatch.setattr(llm.engine._speculation.default.drafter, "propose", broken)
    (output,) = llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=5))
    assert len(output.token_ids) == 5
    metrics = output.outputs[0].as_dict()["metrics"]
    assert metrics["drafter_failure"] == "OSError: the index is gone"


# Controllers


def test_each_request_asks_its_own_controller() -> None:
    speculation = Speculation(strategy_of(Faulty(), Fixed(2)))
    requests = [request_of([1]) for _ in range(4)]
    table = BatchTable(8, BatchTable.Options(lengths={1: 7, 4: 5}))  # by all of the step's rows
    speculation.assign(requests[1], strategy_of(Faulty(), Fixed(4)))
    shared = strategy_of(Faulty(), table)
    for request in requests[2:]:
        speculation.assign(request, shared)

    def lengths(count: int) -> list[int]:
        return [draft.tree.num_drafted for draft in speculation.draft(requests[:count])]

    assert lengths(4) == [2, 4, 5, 5]
    assert lengths(3) == [2, 4, 7]
    for request in requests:
        speculation.release(request)
    assert lengths(4) == [2] * 4


def test_each_request_has_its_own_rule() -> None:
    speculation = Speculation(strategy_of(NoDrafter()))
    requests = [request_of([1]), request_of([2])]
    other = RULES["rejection"]()
    speculation.assign(requests[1], Strategy(NoDrafter(), Fixed(0), other))
    assert [speculation.rule(request).name for request in requests] == ["coupled", "rejection"]
    assert speculation.rule(requests[1]) is other
    speculation.release(requests[1])
    assert speculation.rule(requests[1]).name == "coupled"


class Clock:
    """Time that passes where a test says so, and a little whenever someone looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("tokenleap.core.clock.now", clock)
    return clock


class Slow(Faulty):
    """Takes so long for a batch."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        self.clock.now += self.seconds
        return super().propose(batch, budgets)


class Watching(Fixed):
    """Keeps what it is shown."""

    seconds: float | None = None
    rows = 0

    def budgets(self, batch: Sequence[Request], rows: int) -> list[Budget]:
        self.rows = rows
        return super().budgets(batch, rows)

    def observe(self, outcomes: Sequence[Outcome], draft_seconds: float) -> None:
        self.seconds = draft_seconds


def test_each_controller_is_told_the_seconds_of_its_own_drafter(clock: Clock) -> None:
    controllers = [Watching(1), Watching(2)]
    strategies = [
        strategy_of(Slow(clock, seconds), controller)
        for seconds, controller in zip((3.0, 0.25), controllers, strict=True)
    ]
    scheduler = Scheduler(Target(tiny_model()), Speculation(strategies[0]))
    requests = [request_of(prompt) for prompt in ([1], [2], [3], [4])]
    for request, index in zip(requests, (0, 1, 1, 0), strict=True):
        scheduler.add(request, strategies[index])
    scheduler.step()
    assert [controller.seconds for controller in controllers] == [
        pytest.approx(3.0, abs=1e-3),
        pytest.approx(0.25, abs=1e-3),
    ]
    assert [controller.rows for controller in controllers] == [4, 4]
    scheduler.abort(requests)


@pytest.mark.parametrize("layers", [(), (1,)], ids=str)
def test_a_step_without_drafts_is_for_readers_of_hidden_states(layers: tuple[int, ...]) -> None:
    """It was not the controller's decision, and drafters were not asked."""
    controller, drafter = Watching(2), Faulty()
    drafter.traits = DrafterTraits(hidden_layers=layers)
    speculation = Speculation(strategy_of(drafter, controller))
    request = request_of([1, 2])
    with speculation.without_drafts():
        (draft,) = speculation.draft([request])
        assert draft.tree.num_drafted == 0
        speculation.observe([outcome_of(request, (), 0)], StepTimes(0.0, 0.5, 0.0))
    assert controller.seconds is None
    assert drafter.observed == [request.key] * len(layers)


def test_beside_a_dear_drafter_a_cheap_one_goes_on(clock: Clock) -> None:
    """Drafts of one cost three hundred times those of the other, and both are always right."""
    costs = CostCurve({1: 0.01, 2: 0.010, 8: 0.011})
    seconds = CostCurve({1: 0.01, 2: 0.010, 8: 0.011})  # which learns nothing
    cheap, dear = (CostModel(3, costs=costs) for _ in range(2))
    speculation = Speculation(strategy_of(Slow(clock, 0.0001), cheap))
    requests = [request_of([1], 10**6), request_of([2], 10**6)]
    speculation.assign(requests[1], strategy_of(Slow(clock, 0.03), dear))
    lengths = []
    for _ in range(40):
        began = clock.now
        drafts = speculation.draft(requests)
        sizes = [draft.tree.num_drafted for draft in drafts]
        lengths.append(sizes)
        outcomes = [outcome_of(r, [1] * n, n) for r, n in zip(requests, sizes, strict=True)]
        verify = seconds(2 + sum(sizes), 2)
        speculation.observe(outcomes, StepTimes(clock.now - began, verify, 0.0))
    late = lengths[10:]
    assert sum(own > 0 for own, _ in late) >= 0.8 * len(late)
    assert sum(own > 0 for _, own in late) <= 0.2 * len(late)


def test_a_pass_is_noted_once_for_all_controllers_with_one_curve() -> None:
    seen: list[tuple[str, float]] = []

    class Noting(CostCurve):
        def __init__(self, name: str) -> None:
            super().__init__({1: 0.01, 8: 0.02})
            self.name = name

        def observe(
            self, positions: float, seconds: float, rows: int = 1, longest: float = 1
        ) -> None:
            seen.append((self.name, positions))

    shared, own = Noting("shared"), Noting("own")
    blind = Fixed(2, costs=shared)  # which looks at no costs, and so notes none
    others = [CostModel(2, costs=curve) for curve in (shared, shared, own)]
    speculation = Speculation(strategy_of(NoDrafter(), blind))
    requests = [request_of([1]) for _ in range(4)]
    for request, controller in zip(requests[1:], others, strict=True):
        speculation.assign(request, strategy_of(NoDrafter(), controller))
    outcomes = [outcome_of(request, (), 0) for request in requests]
    speculation.draft(requests)
    speculation.observe(outcomes, StepTimes(0.0, 0.5, 0.0))
    assert seen == [("shared", 4), ("own", 4)]
    speculation.draft(requests)
    speculation.observe(outcomes[1:], StepTimes(0.0, 0.5, 0.0))  # one failed after the pass
    assert len(seen) == 2


class Misdrafting(Drafter):
    """Drafts what no target may be shown."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        return [Draft.deterministic(chain([r.root, *self._tokens])) for r in batch]


@pytest.mark.parametrize("tokens", [[VOCAB_SIZE], [-1], [3, 10**9]], ids=str)
def test_a_draft_outside_the_vocabulary_never_reaches_the_target(tokens: list[int]) -> None:
    llm = LLM(tiny_model(), speculative_config={"method": Misdrafting(tokens)})
    expected = LLM(tiny_model()).generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=6))
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=6))
    assert output.token_ids == expected[0].token_ids
    assert "vocabulary" in str(output.metrics.drafter_failure)
