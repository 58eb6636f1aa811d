"""The trainer learns, and a run that is stopped anywhere ends with the same weights."""

from __future__ import annotations

import csv
import math
import shutil
import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from torch import Tensor

from tests.training.world import SHORT, Run, World, assert_alike, assert_same, refused, weights
from tokenleap import ConfigError
from tokenleap.errors import TrainingError
from tokenleap.training import trainer as trainers
from tokenleap.training.method import TrainingSettings, training_methods
from tokenleap.training.report import save_curves
from tokenleap.training.trainer import (
    Acceptance,
    Checkpoints,
    Evaluation,
    Progress,
    Step,
    Trainer,
    checkpoints_in,
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("eagle"), count=10)


# Learning


LEARNING: dict[str, dict[str, Any]] = {
    "eagle": {},
    # Noise on features is as wide as they are in texts of 24 tokens.
    "eagle1": {"noise": 0.02},
    "parallel": {"depths": 3, "num_layers": 1},
    "medusa": {"num_heads": 2},
    "hydra": {"num_heads": 2},
    "blockwise": {"num_heads": 2, "inner_size": 64},
    "mlp_speculator": {"num_heads": 2},
    "distill": {"hidden_size": 64, "num_heads": 2},
}
"""The options with which methods learn here; `boost` trains the drafters of `distill`."""


def test_no_method_is_left_out() -> None:
    tested = {"pass", "boost", *LEARNING}
    for name, kind in training_methods().items():
        assert (name in tested) is not (kind.tunes_target or kind.for_sources), name


@pytest.mark.parametrize(
    ("method", "precision"),
    [
        # Precision is the trainer's business, and the same for all methods.
        pytest.param(
            *(name, precision),
            marks=() if (precision == "bf16") == (name == "eagle") else pytest.mark.slow,
        )
        for name in LEARNING
        for precision in ("no", "bf16")
    ],
)
def test_every_method_learns(method: str, precision: Any, tmp_path: Path) -> None:
    """Every method learns a rule that follows from the last token, whatever the target thinks.

    A head that has not understood this is right as often as the most frequent token occurs. `pass`
    leaves a target as it is that has not understood it: see `test_copies.py`.
    """
    world = World(tmp_path, method, tokens=16, loss="ce", **LEARNING[method])
    run = Run(
        world,
        tmp_path / "run",
        TrainingSettings(
            epochs={"eagle": 6, "medusa": 24, "distill": 16}.get(method, 12),
            batch_tokens=128,
            learning_rate=2e-2,
            vector_learning_rate=1e-2,
            mixed_precision=precision,
        ),
    )
    events = run.whole()
    tokens = Counter(
        token
        for number in range(len(world.held_out))
        for token in world.held_out[number].tokens.tolist()
    )
    chance = max(tokens.values()) / tokens.total()
    best = run.made.history[-1]
    assert best.by_position[0] > 0.5 > 4 * chance
    assert best.mean_lengths[0] > 1.5
    steps = [event for event in events if isinstance(event, Step)]
    assert steps[-1].losses[0] < steps[0].losses[0] / 2
    assert len(steps[-1].losses) == len(steps[-1].accuracy) == run.settings.levels


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_the_weights_of_the_target_stay(optimizer: str, world: World, tmp_path: Path) -> None:
    run = Run(world, tmp_path, SHORT.model_copy(update={"optimizer": optimizer}))
    before = weights(world.trainee())
    run.whole()
    after = weights(run.trainee)
    target = world.target.vocabulary_weights
    assert target is not None
    net: Any = run.trainee.net
    assert net.embedding.data_ptr() == target[0].data_ptr()
    assert torch.equal(net.head, target[1])
    trained = {name for name, _ in run.trainee.named_parameters()}
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor) != (name in trained), name
    assert not any(buffer.requires_grad for buffer in run.trainee.buffers())


def test_what_is_reported(world: World, tmp_path: Path) -> None:
    run = Run(world, tmp_path)
    events = run.whole()
    steps = [event for event in events if isinstance(event, Step)]
    found = [event for event in events if isinstance(event, Evaluation)]
    total = run.made.total_steps
    assert [step.step for step in steps] == list(range(1, total + 1))
    assert {step.total for step in steps} == {total}
    assert [each.step for each in found] == sorted({*range(4, total + 1, 4), total})
    assert found == list(run.made.history)
    alone = [len(step.losses) == 1 for step in steps]
    assert alone == [n < 0.4 * total for n in range(total)]
    per_epoch = total // 3
    pairs = sum(size - 1 for size in world.training.sizes)
    for epoch in range(3):
        part = steps[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sum(step.tokens for step in part) == pairs
    for each in found:
        assert len(each.by_position) == len(each.mean_lengths) == 5
        assert each.score == each.mean_lengths[3]
        ends = [step for step in steps if each.step - 4 < step.step <= each.step]
        if each.step % 4 == 0:
            assert math.isclose(each.loss, sum(step.losses[0] for step in ends) / 4, rel_tol=1e-5)


# Stopping and continuing


@pytest.mark.parametrize(
    ("method", "stops"),
    [
        # Where it stops matters to the loop, and hardly to the method.
        ("hydra", [1] * 12),
        ("hydra", [5]),
        ("eagle", [2, 2, 3]),
        ("distill", [3, 1, 1, 1, 1]),
        *((method, [2, 5]) for method in ("early_exit", "pad", "medusa_2", "blockwise_tuned")),
    ],
    ids=str,
)
def test_a_run_that_was_stopped_ends_with_the_same_weights(
    method: str, stops: list[int], tmp_path: Path
) -> None:
    """Before an evaluation and after it, at the end of an epoch, and after the last step.

    Dropped layers, drawn heads and drawn blocks are the same, too.
    """
    smaller: dict[str, Any] = {"inner_size": 64} if "blockwise" in method else {}
    world = World(tmp_path, method, **smaller)
    whole = Run(world, tmp_path / "whole")
    events = whole.whole()
    assert len(events) == 12
    assert isinstance(events[4], Evaluation)
    stopped = Run(world, tmp_path / "stopped")
    stopped.interrupt(*stops)
    assert len(stopped.whole()) <= len(events)
    assert_alike(stopped, whole)


@pytest.fixture(scope="module")
def whole(world: World, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run in one go; beside it is a copy of its folder after each event."""
    run = Run(world, tmp_path_factory.mktemp("whole") / "run")
    for at, _ in enumerate(run.trainer().run(), 1):
        run.folder.mkdir(exist_ok=True)
        shutil.copytree(run.folder, run.folder.with_name(str(at)))
    return run


def test_ctrl_c_in_the_middle_of_a_step(
    world: World, whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = Run(world, tmp_path / "stopped")
    learn, left = Trainer._learn, [3, 2, 4]

    def interrupting(self: Trainer, *arguments: Any) -> Any:
        if left:
            left[0] -= 1
            if left[0] == 0:
                left.pop(0)
                signal.raise_signal(signal.SIGINT)
        return learn(self, *arguments)

    monkeypatch.setattr(Trainer, "_learn", interrupting)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            stopped.whole()
    stopped.whole()
    assert_alike(stopped, whole)


@pytest.mark.parametrize("at", [1, 5, 8])
def test_a_kill_at_any_time(at: int, world: World, whole: Run, tmp_path: Path) -> None:
    """A killed process leaves the last checkpoint, and half of a next one."""
    killed = Run(world, tmp_path / "killed")
    shutil.copytree(whole.folder.with_name(str(at)), killed.folder)
    (killed.folder / "saving").mkdir()
    (killed.folder / "saving" / "model.safetensors").write_bytes(b"half")
    killed.whole()
    assert_same(weights(killed.trainee), weights(whole.trainee))
    assert not (killed.folder / "saving").exists()
    assert len(list(killed.folder.iterdir())) == 1


def test_a_finished_run_stays(world: World, tmp_path: Path) -> None:
    run = Run(world, tmp_path)
    assert run.whole()
    first = weights(run.trainee)
    assert run.whole() == []
    assert_same(weights(run.trainee), first)


# The loop


def test_two_halves_are_one_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same gradients, and so the same weights."""
    gradients: list[dict[str, Tensor]] = []
    update = Trainer._update

    def recording(self: Trainer) -> None:
        named = self._trainee.named_parameters()
        gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})
        update(self)

    monkeypatch.setattr(Trainer, "_update", recording)
    found = []
    world = World(tmp_path, count=2, noise=0.0)
    for name, changed in (
        ("one", {"batch_tokens": 48}),
        ("two", {"batch_tokens": 24, "accumulation": 2}),
        ("half", {"batch_tokens": 24}),
    ):
        settings = SHORT.model_copy(update={"epochs": 1, "optimizer": "adamw", **changed})
        run = Run(world, tmp_path / name, settings)
        steps = [event for event in run.whole() if isinstance(event, Step)]
        assert len(steps) == (2 if name == "half" else 1)
        assert sum(step.tokens for step in steps) == 46
        found.append((steps[0], weights(run.trainee)))
    (one, expected), (two, halves), (_, other) = found
    assert math.isclose(one.losses[0], two.losses[0], rel_tol=1e-5)
    assert one.accuracy == two.accuracy
    for name, tensor in expected.items():
        torch.testing.assert_close(halves[name], tensor, atol=2e-5, rtol=1e-4)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-5, rtol=1e-3)
    assert any(not torch.allclose(other[name], each, atol=1e-4) for name, each in expected.items())


class Scores:
    """Stands for evaluations with these mean lengths."""

    def __init__(self, *scores: float) -> None:
        self._scores = iter(scores)

    def __call__(self) -> Any:
        score = next(self._scores)
        return SimpleNamespace(by_position=lambda: [0.5] * 5, mean_length=lambda _: score)


def test_it_stops_when_nothing_gets_better_and_keeps_the_best(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = (1.5, 1.4, 1.6, 1.6, 1.5, 1.55)
    monkeypatch.setattr(Trainer, "_count", Scores(*scores, 9, 9, 9).__call__)
    settings = SHORT.model_copy(update={"epochs": 100, "evaluate_every": 2, "patience": 3})
    run = Run(world, tmp_path, settings)
    events = run.whole()
    assert sum(isinstance(event, Step) for event in events) == 2 * len(scores)
    assert [each.best for each in run.made.history] == [True, False, True, False, False, False]
    assert [found.score for found, _ in run.saved] == [1.5, 1.6]
    assert run.whole() == []


def test_the_precision_may_change_within_a_process(world: World, tmp_path: Path) -> None:
    for precision in ("bf16", "no"):
        settings = SHORT.model_copy(update={"epochs": 1, "mixed_precision": precision})
        run = Run(world, tmp_path / precision, settings)
        assert run.whole()


def test_without_patience_it_never_stops_early(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "_count", Scores(*[1.0] * 99).__call__)
    settings = SHORT.model_copy(update={"evaluate_every": 1, "patience": 0})
    run = Run(world, tmp_path, settings)
    assert sum(isinstance(event, Step) for event in run.whole()) == run.made.total_steps


def test_a_loss_that_is_not_finite_stops_it(world: World, tmp_path: Path) -> None:
    run = Run(world, tmp_path, SHORT)
    trainee = world.trainee()
    loss = trainee._loss
    calls: list[bool] = []

    def failing(logits: Tensor, teacher: Any) -> Tensor:
        calls.append(trainee.training)
        return loss(logits, teacher) * (float("nan") if sum(calls) == 12 else 1.0)

    trainee._loss = failing
    events: list[Any] = []
    running = run.trainer(trainee).run()
    with refused(TrainingError, match=r"step \d+ is not a finite number"):
        events.extend(running)
    assert run.saved
    assert all(tensor.isfinite().all() for tensor in run.saved[-1][1].values())
    found = [event for event in events if isinstance(event, Evaluation)]
    assert [each.name for each in tmp_path.iterdir()] == [f"checkpoint-{found[-1].step}"]
    assert all(tensor.isfinite().all() for tensor in weights(trainee).values())


@pytest.mark.parametrize("moment", [1, 2])
def test_the_same_step_is_saved_twice(
    moment: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before either of two renames, it leaves a complete checkpoint."""
    module = torch.nn.Linear(2, 2)
    made = Checkpoints(Accelerator(cpu=True), tmp_path, module, [], [], Progress())
    made.save(3)
    left, rename = iter([True] * (moment - 1)), Path.rename

    def killed(self: Path, place: Path) -> Path:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return rename(self, place)

    with monkeypatch.context() as context:
        context.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            made.save(3)
    assert len(checkpoints_in(tmp_path)) == 1
    made.load()
    made.save(3)
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint-3"]


def test_a_checkpoint_that_cannot_be_written(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(world, tmp_path)
    run.interrupt(2)

    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("I/O error: no space left\non device")

    with monkeypatch.context() as patched:
        patched.setattr(trainers, "save_file", full)
        with pytest.raises(TrainingError, match="cannot be written: SafetensorError") as caught:
            list(run.trainer().run())
    assert "\n" not in str(caught.value)
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint-2"]


ACCELERATES_FILES = [
    "model.safetensors",
    "optimizer.bin",
    "optimizer_1.bin",
    "scheduler.bin",
    "random_states_0.pkl",
    "custom_checkpoint_0.pkl",
    "custom_checkpoint_1.pkl",
    "custom_checkpoint_2.pkl",
]


class Bomb:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return Path.touch, (self.place,)


@pytest.mark.parametrize("in_place_of", [None, "state.safetensors", "random-0.safetensors"])
def test_pickles_in_checkpoints_are_never_loaded(
    in_place_of: str | None, world: World, tmp_path: Path
) -> None:
    """Neither a checkpoint of Accelerate, nor a pickle under the name of one of our files."""
    run, proof = Run(world, tmp_path / "run"), tmp_path / "it ran"
    run.interrupt(2)
    (checkpoint,) = checkpoints_in(run.folder)
    names = [in_place_of] if in_place_of else ACCELERATES_FILES
    if in_place_of is None:
        shutil.rmtree(checkpoint)
        checkpoint.mkdir()
    for name in names:
        torch.save(Bomb(proof), checkpoint / name)
    expected = "cannot be read" if in_place_of else "older version: it has pickle files"
    with refused(TrainingError, match=f"{expected}.*; delete .* to begin"):
        list(run.trainer().run())
    assert not proof.exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("progress"),
        lambda state: state["progress"].update(step="many"),
        lambda state: state["progress"]["history"].append({}),
        lambda state: state["weights"].popitem(),
        lambda state: state["optimizers"].pop(),
        lambda state: state["optimizers"][0]["state"][0].update(momentum_buffer=torch.zeros(1)),
        lambda state: state["optimizers"][0]["state"].update({10**9: {}}),
        lambda state: state["schedules"][0].update(step=1),
    ],
)
def test_damaged_states_are_refused(change: Any, world: World, tmp_path: Path) -> None:
    run = Run(world, tmp_path)
    run.interrupt(2)
    (checkpoint,) = checkpoints_in(tmp_path)
    state = trainers._read(checkpoint / "state.safetensors")
    change(state)
    trainers._write(checkpoint / "state.safetensors", state)
    with refused(TrainingError, match="cannot be read"):
        list(run.trainer().run())


def test_half_precision_needs_a_gpu(world: World, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mixed_precision: fp16 needs a GPU"):
        Run(world, tmp_path, SHORT.model_copy(update={"mixed_precision": "fp16"})).trainer()


def learning_rates(settings: TrainingSettings, total: int) -> list[float]:
    """The learning rate of every step, relative to its highest value."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    (schedule,) = trainers.schedules([optimizer], total, settings)
    rates = []
    for _ in range(total):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def test_the_learning_rate() -> None:
    rates = learning_rates(TrainingSettings(warmup=0.1), 100)
    assert rates[0] == pytest.approx(0.1)
    assert rates[:9] == sorted(rates[:9])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert max(rates) > 0.97
    assert rates[-1] < 0.001
    assert learning_rates(TrainingSettings(warmup=0.0), 1) == [1]


def test_the_learning_rate_falls_as_one_over_the_root() -> None:
    settings = TrainingSettings(schedule="inverse_sqrt", warmup_steps=10)
    rates = learning_rates(settings, 90)
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert rates[39] == pytest.approx(0.5)
    assert rates[89] == pytest.approx(1 / 3)


# Curves


def test_curves(tmp_path: Path) -> None:
    history = [
        Evaluation(100 * n, 3.0 - n, (0.1 * n, 0.05 * n), (1 + 0.1 * n, 1.2 * n), best=n < 3)
        for n in range(1, 5)
    ]
    for count in (1, 4):
        save_curves(tmp_path, history[:count])
        with (tmp_path / "curves.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == count
        for row, each in zip(rows, history, strict=False):
            assert int(row.pop("step")) == each.step
            assert int(row.pop("best")) == each.best
            numbers = [each.loss, *each.by_position, *each.mean_lengths]
            assert [float(value) for value in row.values()] == pytest.approx(numbers, abs=1e-4)
            assert list(row) == [
                *("loss", "acceptance_1", "acceptance_2"),
                *("mean_acceptance_length_1", "mean_acceptance_length_2"),
            ]
        picture = (tmp_path / "curves.png").read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert picture.endswith(b"IEND\xaeB`\x82")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["curves.csv", "curves.png"]


LEVELS = 4


def decode(text: list[int], guesses: list[list[int]], length: int) -> tuple[int, int]:
    """Tokens and passes of decoding a text with drafts that are known for every place."""
    at = passes = 0
    while at < len(text):
        draft = guesses[at][:length]
        passes += 1
        for guess in draft:  # verification of a chain
            if at < len(text) and guess == text[at]:
                at += 1
            else:
                break
        at += 1  # the target's own token
    return len(text), passes


@st.composite
def worlds(draw: st.DrawFn) -> list[tuple[list[int], list[list[int]]]]:
    """Texts of two tokens, and the drafts at each of their places."""
    made = []
    for length in draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)):
        tokens = st.lists(st.integers(0, 1), min_size=length, max_size=length)
        text = draw(tokens)
        guesses = draw(
            st.lists(
                st.lists(st.integers(0, 1), min_size=LEVELS, max_size=LEVELS),
                min_size=length,
                max_size=length,
            )
        )
        made.append((text, guesses))
    return made


def tensors(world: list[tuple[list[int], list[list[int]]]]) -> tuple[Tensor, Tensor]:
    """As training shows it: [B, L, Q] whether a token is right, and whether there is one."""
    most = max(len(text) for text, _ in world)
    right, valid = torch.zeros(2, len(world), LEVELS, most, dtype=torch.bool)
    for row, (text, guesses) in enumerate(world):
        for at, guess in enumerate(guesses):
            for level in range(min(LEVELS, len(text) - at)):
                valid[row, level, at] = True
                right[row, level, at] = guess[level] == text[at + level]
    return right, valid


@given(worlds(), worlds())
@settings(max_examples=80, deadline=None)
def test_simulated_chains_are_those_of_decoding(first: list, second: list) -> None:  # type: ignore[type-arg]
    counts = Acceptance(LEVELS)
    for world in (first, second):
        counts.add(*tensors(world))
    for length in range(1, LEVELS + 1):
        runs = [decode(text, guesses, length) for text, guesses in (*first, *second)]
        tokens, passes = (sum(each) for each in zip(*runs, strict=True))
        assert counts.mean_length(length) == tokens / passes


@given(worlds())
@settings(max_examples=40, deadline=None)
def test_acceptance_by_position_is_given_those_before(world: list) -> None:  # type: ignore[type-arg]
    right, valid = tensors(world)
    counts = Acceptance(LEVELS)
    counts.add(right, valid)
    for level, rate in enumerate(counts.by_position()):
        reached = accepted = 0
        for row in range(len(world)):
            for at in range(right.shape[2]):
                if valid[row, level, at] and right[row, :level, at].all():
                    reached += 1
                    accepted += bool(right[row, level, at])
        assert abs(rate - accepted / max(1, reached)) < 1e-6


def test_all_right_and_all_wrong() -> None:
    valid = torch.ones(1, LEVELS, 60, dtype=torch.bool)
    for right, lengths in ((True, [2, 3, 4, 5]), (False, [1, 1, 1, 1])):
        counts = Acceptance(LEVELS)
        counts.add(torch.full_like(valid, right), valid)
        assert [counts.mean_length(n + 1) for n in range(LEVELS)] == lengths
    assert Acceptance(2).mean_length(2) == 0


def test_copies_of_checkpoints_are_none(tmp_path: Path) -> None:
    for name in ("checkpoint-2.bak", "checkpoint-", "checkpoint-7", "checkpoint-12-old"):
        (tmp_path / name).mkdir()
    assert [each.name for each in checkpoints_in(tmp_path)] == ["checkpoint-7", "checkpoint-12-old"]
