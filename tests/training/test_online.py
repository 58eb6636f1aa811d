"""Drafters that learn while they serve: same output, better drafts, and nothing out of hand."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.heads import feature_config, random_head, random_state_head, state_config, tiny_config
from tests.invariants.test_statistics import (
    ALARM,
    LENGTH,
    PROMPT,
    exact_distribution,
    p_value,
    params,
)
from tests.tiny import VOCAB_SIZE, tiny_model
from tests.training.world import computed, refused
from tokenleap import LLM, CompatibilityError, ConfigError, SamplingParams
from tokenleap.drafters.online import OnlineOptions, OnlineReport
from tokenleap.engine.scheduler import Scheduler
from tokenleap.training.conversations import Conversation
from tokenleap.training.online import Buffer, OnlineLearner, Pace, Window

ONLINE: dict[str, Any] = {
    "every": 1,
    "window": 32,
    "batch_size": 16,
    "swap_every": 2,
    "learning_rate": 1e-2,
}
"""Learns after every step, so that nothing depends on the clock."""
METHODS = [
    *("eagle", "hydra", "draft_model"),
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("medusa", "blockwise", "mlp_speculator")
    ),
]
"""The slow ones run the same code as `hydra`."""
GREEDY = SamplingParams(temperature=0, max_tokens=40)


def target(**fields: Any) -> PreTrainedModel:
    """A target whose head size the native runtime takes."""
    return tiny_model(head_dim=32, **fields)


def drafting(method: str = "eagle", vocab_size: int = VOCAB_SIZE) -> dict[str, Any]:
    """A drafter with random weights that can draft every token."""
    model: Any
    if method == "draft_model":
        model = tiny_model(seed=1, vocab_size=vocab_size, num_hidden_layers=1)
    elif method == "eagle":
        model = random_head(tiny_config(vocab_size, draft_vocab_size=vocab_size))
    elif method == "eagle1":
        method, model = "eagle", random_head(feature_config(vocab_size))
    else:
        config = state_config(method, vocab_size, draft_vocab_size=vocab_size)
        model = random_state_head(method, config)
    length = {"num_speculative_tokens": 3, "controller": "fixed"}
    return {"method": method, "model": model, **length}


def learning_llm(drafter: Mapping[str, Any], model: Any = None, **options: Any) -> LLM:
    config = {**drafter, "online": {**ONLINE, **options}}
    return LLM(target() if model is None else model, speculative_config=config)


def topic(seed: int, size: int = 1) -> list[list[int]]:
    """Prompts over a few tokens of their own."""
    dice = random.Random(seed)
    words = dice.sample(range(VOCAB_SIZE), 4)
    return [[dice.choice(words) for _ in range(6)] for _ in range(size)]


def learnt(llm: LLM) -> OnlineReport:
    report = llm.online_report
    assert report is not None
    assert report.failure is None
    return report


def learner_of(llm: LLM) -> OnlineLearner:
    learner = llm.engine._speculation.default.learner
    assert isinstance(learner, OnlineLearner)
    return learner


def acceptance(llm: LLM, prompts: Sequence[list[int]]) -> float:
    """Accepted tokens per draft."""
    outputs = llm.generate(prompts, GREEDY)
    assert all(output.metrics.drafter_failure is None for output in outputs)
    drafts = sum(output.metrics.num_drafts for output in outputs)
    return sum(output.metrics.num_accepted_tokens for output in outputs) / drafts


# What it brings


@pytest.mark.parametrize("method", METHODS)
def test_drafts_get_better_and_the_output_stays_the_same(method: str) -> None:
    model = target()
    llm, prompts = learning_llm(drafting(method), model), topic(1)
    plain = LLM(model).generate(prompts, GREEDY)
    first = acceptance(llm, prompts)
    for _ in range(4):
        last = acceptance(llm, prompts)
    assert last > first + 0.2
    assert learnt(llm).swaps > 5
    outputs = llm.generate(prompts, GREEDY)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]


def test_an_eagle1_head_learns() -> None:
    """Its loss falls. With random weights and no norms, its drafts need longer to get better."""
    model = target()
    llm, losses = learning_llm(drafting("eagle1"), model, learning_rate=1e-3), []
    for _ in range(4):
        outputs = llm.generate(topic(1), GREEDY)
        losses.append(learnt(llm).loss or 1e9)
    assert losses[-1] < 0.7 * losses[1]
    assert [o.token_ids for o in outputs] == [
        o.token_ids for o in LLM(model).generate(topic(1), GREEDY)
    ]
    assert all(weight.grad is None for weight in model.parameters())


def test_a_shift_of_topic() -> None:
    """Acceptance falls when the topic changes, and rises again."""
    llm = learning_llm(drafting())
    known, new = topic(1), topic(2)
    for _ in range(5):
        before = acceptance(llm, known)
    first = acceptance(llm, new)
    for _ in range(4):
        after = acceptance(llm, new)
    assert first < before - 0.2
    assert after > first + 0.2


def test_runs_without_a_clock_are_reproducible() -> None:
    runs = []
    for _ in range(2):
        llm = learning_llm(drafting())
        outputs = [output for _ in range(2) for output in llm.generate(topic(1), GREEDY)]
        runs.append([output.metrics.num_accepted_tokens for output in outputs])
    assert runs[0] == runs[1]


def test_seeded_samples_stay_the_same() -> None:
    model = target()
    llm, plain = learning_llm(drafting(), model), LLM(model)
    params = [SamplingParams(temperature=0.8, seed=seed, max_tokens=40) for seed in range(2)]
    for _ in range(2):
        outputs, expected = (each.generate(topic(1, 2), params) for each in (llm, plain))
        assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert learnt(llm).swaps > 2


@pytest.mark.parametrize("method", ["eagle", pytest.param("draft_model", marks=pytest.mark.slow)])
def test_samples_have_the_exact_distribution_across_swaps(method: str) -> None:
    """Under a rule that reads q: it has to be that of the weights that drafted."""
    model = tiny_model(vocab_size=6, initializer_range=0.12)
    config = {**drafting(method, 6), "acceptance": "rejection", "num_speculative_tokens": 2}
    online = {**ONLINE, "swap_every": 1, "batch_size": 1}
    llm = LLM(model, speculative_config={**config, "online": online}, max_num_seqs=16)
    drawn = llm.generate([PROMPT] * 200, [params(seed, 1.0) for seed in range(200)])
    counts = Counter(output.token_ids[:LENGTH] for output in drawn)
    assert p_value(counts, exact_distribution(model, 1.0)) > ALARM / 2
    assert learnt(llm).swaps > 5


def test_hybrid_teaches_its_head() -> None:
    head = drafting()
    drafter = {"method": "hybrid", "model": head["model"], "controller": "fixed"}
    llm = learning_llm(drafter)
    llm.generate(topic(1), GREEDY)
    assert learnt(llm).swaps > 0


# What is learnt


def test_windows_hold_what_the_target_says(tmp_path: Path) -> None:
    """Against the features of the whole texts, computed as for `tokenleap train`."""
    model = target()
    config = {**drafting(), "online": {**ONLINE, "every": 10_000}}
    llm = LLM(model, speculative_config=config, max_num_batched_tokens=5)
    prompts = [*topic(1, 2), list(range(50))]
    outputs = llm.generate(prompts, [*[GREEDY] * 2, SamplingParams(temperature=1, max_tokens=60)])
    texts = [
        Conversation((*prompt, *output.token_ids), (), seed=number)
        for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]
    cache = computed(llm.engine.target, texts, (0, 1, 2), tmp_path)
    windows = [window for window, _ in learner_of(llm)._buffer._windows]
    assert len(windows) >= 5
    marks = 0
    for window in windows:
        assert len(window) <= ONLINE["window"]
        number, first = place(window.tokens.tolist(), texts)
        features = cache[number]
        stop = first + len(window.hidden)
        assert torch.equal(window.hidden, features.hidden[first:stop])
        assert torch.equal(window.scales, features.scales[first:stop])
        at = first + window.roots + 1 + window.levels
        torch.testing.assert_close(
            window.top_logprobs, features.top_logprobs[at].log_softmax(-1), atol=1e-2, rtol=0
        )
        assert torch.equal(window.top_tokens[:, 0], features.top_tokens[at][:, 0])
        marks += len(at)
    report = learnt(llm)
    assert 0.9 * report.positions <= marks <= report.positions
    assert report.updates == 0


def place(tokens: list[int], texts: Sequence[Conversation]) -> tuple[int, int]:
    """The number of the text that holds these tokens, and where they begin in it."""
    found = [
        (number, first)
        for number, text in enumerate(texts)
        for first in range(len(text.tokens) - len(tokens) + 1)
        if list(text.tokens[first : first + len(tokens)]) == tokens
    ]
    assert len(found) == 1
    return found[0]


def test_the_buffer_is_bounded() -> None:
    llm = learning_llm(drafting(), buffer_size=64, every=10_000)
    llm.generate(topic(1, 8), GREEDY)
    assert 32 < learnt(llm).kept_tokens <= 64


def test_windows_are_dropped_after_some_passes() -> None:
    window = Window(*[torch.zeros(5)] * 7)
    buffer = Buffer(11, passes=2, seed=0)
    for _ in range(3):
        buffer.add(window)
    assert buffer.num_tokens == 10
    assert [buffer.draw() is window for _ in range(4)] == [True] * 4
    assert buffer.draw() is None
    assert buffer.num_tokens == 0


def test_aborted_requests_leave_nothing_behind() -> None:
    llm = learning_llm(drafting(), every=10_000)
    stream = llm.stream(topic(1)[0], GREEDY)
    next(stream)
    next(stream)
    assert learner_of(llm)._recorder._texts
    stream.close()
    assert not learner_of(llm)._recorder._texts
    assert learnt(llm).kept_tokens > 0


# What it costs


def test_the_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every slice takes 3 seconds, and every step 10."""
    now = count(step=3.0)
    monkeypatch.setattr("tokenleap.core.clock.now", lambda: next(now))
    pace = Pace(OnlineOptions(share=0.2))
    for _ in range(1000):
        pace.served(10.0)
        while pace.take():
            with pace.timed():
                pass
    assert 0.199 < pace.learning / (pace.learning + pace.serving) < 0.201


def test_an_idle_share_is_not_made_up_for() -> None:
    pace = Pace(OnlineOptions(share=0.5))
    for _ in range(100):
        pace.served(1.0)
        pace.waive()
    pace.served(1e-9)
    assert pace.take()
    with pace.timed():
        pass
    assert not pace.take()


# What it leaves alone


def test_the_users_model_is_not_changed() -> None:
    config = drafting("draft_model")
    before = {name: weight.clone() for name, weight in config["model"].state_dict().items()}
    llm = learning_llm(config)
    llm.generate(topic(1), GREEDY)
    assert learnt(llm).swaps > 0
    for name, weight in config["model"].state_dict().items():
        assert torch.equal(weight, before[name])
        assert weight.grad is None


@pytest.mark.parametrize(
    "method", ["eagle", "draft_model", pytest.param("hydra", marks=pytest.mark.slow)]
)
def test_what_was_learnt_is_saved_and_forgotten(method: str, tmp_path: Path) -> None:
    model, prompts = target(), topic(1)
    llm = learning_llm(drafting(method), model, save=str(tmp_path / "learnt"))
    first = acceptance(llm, prompts)
    for _ in range(3):
        acceptance(llm, prompts)
    assert learnt(llm).swaps > 0
    saved = {**drafting(method), "model": str(tmp_path / "learnt")}
    assert acceptance(LLM(model, speculative_config=saved), prompts) > first + 0.1
    llm.reset_drafter_memory()
    assert learnt(llm) == OnlineReport(0, 0, 0, 0, None, 0.0, 0.0, None)
    assert learner_of(llm)._options.every == 1
    llm.engine._speculation.default.learner.work = lambda _: None  # type: ignore[union-attr, method-assign]
    assert acceptance(llm, prompts) == first


def test_a_failure_ends_learning_and_nothing_else() -> None:
    model = target()
    llm = learning_llm(drafting(), model, learning_rate=1e30)
    outputs = llm.generate(topic(1), GREEDY)
    report = llm.online_report
    assert report is not None
    assert report.failure == (
        "TrainingError: the loss is not a finite number: lower learning_rate (1e+30)."
    )
    assert report.swaps == 0
    assert all(output.metrics.drafter_failure is None for output in outputs)
    plain = LLM(model).generate(topic(1), GREEDY)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]


# Wrong use


INNER = [{"method": "ngram", "online": {}}, {"method": "ngram"}]


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (ConfigError, {"online": {"share": 1.0}}, "^online: .*share"),
        (ConfigError, {"online": {"shares": 0.1}}, "^online: .*did you mean 'share'"),
        (
            ConfigError,
            {"online": {"share": 0.1, "every": 2}},
            "^online: every: 'share' also says how much to learn",
        ),
        (
            ConfigError,
            {"online": {"buffer_size": 100}},
            "^online: buffer_size: it has to hold a window of 128 tokens",
        ),
        (ConfigError, {"online": {"loss": "mse"}}, "^online: .*loss"),
        (CompatibilityError, {"method": "ngram"}, "^online: method 'ngram' has nothing"),
        (
            CompatibilityError,
            {"method": "draft_model", "model": "gpt2"},
            "^online: .* embedding for each position",
        ),
        (
            ConfigError,
            {"method": "ensemble", "drafters": INNER, "online": None},
            "online belongs to the outer speculative_config",
        ),
    ],
)
def test_what_cannot_learn(kind: type[Exception], fields: dict[str, Any], message: str) -> None:
    given = fields if "method" in fields else {**drafting(), **fields}
    config = {"online": {}, **given}
    if config.get("model") == "gpt2":
        config["model"] = tiny_model("gpt2")
    with refused(kind, match=message):
        LLM(target(), speculative_config=config)


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_the_clock_does_not_decide_the_bits(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where drafts change the bits, learning goes by steps."""
    if rule == "coupled":
        monkeypatch.setattr("tokenleap.runtime.target.probe", lambda *_, **__: False)
    config = {**drafting("hydra"), "acceptance": rule}
    with refused(ConfigError, match=r"^online: .* clock: set 'every'"):
        LLM(target(), speculative_config={**config, "online": {}})
    LLM(target(), speculative_config={**config, "online": {"every": 2}})


@pytest.mark.parametrize("method", ["hydra", "draft_model"])
def test_steps_that_only_read_prompts_count(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**drafting(method), "online": ONLINE}
    llm = LLM(target(), speculative_config=config, max_num_batched_tokens=16)
    steps: list[None] = []
    served: list[float] = []
    step, work = Scheduler.step, OnlineLearner.work

    def counted_step(self: Scheduler) -> None:
        steps.append(None)
        step(self)

    def counted_work(self: OnlineLearner, seconds: float) -> None:
        served.append(seconds)
        work(self, seconds)

    monkeypatch.setattr(Scheduler, "step", counted_step)
    monkeypatch.setattr(OnlineLearner, "work", counted_work)
    llm.generate([[1 + place % 7 for place in range(70)]], SamplingParams(max_tokens=2))
    assert len(served) == len(steps) > 4


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"save: .* cannot be written"):
        learning_llm(drafting(), save=str(tmp_path / "file" / "head"))
