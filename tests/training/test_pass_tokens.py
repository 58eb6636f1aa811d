"""Look-ahead embeddings: what is trained is what serves, they learn, and nothing else changes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.test_trainer import Run
from tests.training.world import World, computed, cycles, new_trainee, parts_of, tiny_target
from tokenleap import ConfigError
from tokenleap.core.tree import chain
from tokenleap.drafters.padding import read_pass_tokens
from tokenleap.runtime.target import Target
from tokenleap.training.batches import TrainingSet, collate
from tokenleap.training.conversations import Conversation
from tokenleap.training.methods import training_method
from tokenleap.training.pad import PassTrainee
from tokenleap.training.settings import TrainingSettings

LEVELS = 4


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def served(target: Target, folder: Path, tokens: list[int]) -> Tensor:
    """[L, V] what the target says at the look-ahead tokens after a text."""
    rows = read_pass_tokens(folder, target)
    first = target.network.extend(rows)
    target.add(0)
    target.prefill(0, tokens[:-1])
    tree = chain([tokens[-1], *range(first, first + len(rows))])
    (output,) = target.verify([0], [tree])
    found = output.scores[1:].clone()
    target.remove(0)
    return found


@torch.inference_mode()
def test_training_and_serving_have_the_same_logits(target: Target, tmp_path: Path) -> None:
    method = training_method("pass", {})
    trainee = new_trainee(method, target, spread=0.3)
    talks = cycles(2, length=24)
    cache = computed(target, talks, (), tmp_path / "cache")
    batch = collate([cache[0], cache[1]], LEVELS)
    trainee.eval()
    found = [trainee.logits(outputs, 0) for outputs in trainee.outputs(batch, LEVELS)]
    method.write(trainee, parts_of(target), tmp_path / "head", {})
    for row, talk in enumerate(talks):
        for place, root in enumerate(batch.roots[row].tolist()):
            if place % 7:
                continue
            # The next token is not known yet where its look-ahead tokens are computed.
            expected = served(target, tmp_path / "head", list(talk.tokens[: root + 1]))
            for level in range(int(batch.levels.valid[row, :, place].sum())):
                logits = found[level][row, place]
                torch.testing.assert_close(logits, expected[level], atol=2e-3, rtol=1e-3)


def texts(count: int, seed: int) -> list[Conversation]:
    """Four of five tokens are 7, wherever they stand."""
    dice = random.Random(seed)
    return [
        Conversation(
            tuple(7 if dice.random() < 0.8 else dice.randrange(30) for _ in range(24)),
            ((4, 24),),
            seed=number,
        )
        for number in range(count)
    ]


def test_they_learn_and_the_target_stays(tmp_path: Path) -> None:
    """A frozen target of random weights can be told by them what comes most often."""
    world = World(tmp_path, "pass", count=1, loss="ce")
    world.training, world.held_out = (
        TrainingSet(computed(world.target, texts(count, seed), (), tmp_path / str(seed)), 64)
        for count, seed in ((12, 1), (4, 2))
    )
    settings = TrainingSettings(
        epochs=30, batch_tokens=192, vector_learning_rate=0.03, mixed_precision="no"
    )
    run = Run(world, tmp_path / "run", settings)
    trainer = run.trainer()
    trainee: Any = run.trainee
    before = {name: x.clone() for name, x in trainee._lm[0].named_parameters()}
    events = list(trainer.run())
    found = trainer.history[-1]
    assert len(found.by_position) == LEVELS
    assert all(0.5 < rate < 0.9 for rate in found.by_position)
    assert found.mean_lengths[-1] > 2
    steps = [event for event in events if hasattr(event, "losses")]
    for level in range(LEVELS):
        assert steps[-1].losses[level] < steps[0].losses[level] / 2
    assert [name for name, _ in trainee.named_parameters()] == ["rows"]
    for name, weight in trainee._lm[0].named_parameters():
        assert torch.equal(weight, before[name]) != name.endswith("embed_tokens.rows"), name
    assert sum(x.numel() for x in run.saved[-1][1].values()) < 2 * 64 * LEVELS + 300
    world.method.write(trainee, parts_of(world.target), tmp_path / "head", {})
    guesses = served(world.target, tmp_path / "head", [7, 3, 7]).argmax(-1)
    assert guesses.tolist() == [7] * LEVELS


def test_settings_that_it_cannot_follow_are_refused() -> None:
    method = training_method("pass", {"num_tokens": 3})
    for name in ("levels", "first_level_share"):
        with pytest.raises(ConfigError, match=f"{name}: .* set num_tokens"):
            method.adapted(TrainingSettings.model_validate({name: 1}))
    adapted = method.adapted(TrainingSettings())
    assert (adapted.levels, adapted.first_level_share) == (3, 0)
    with pytest.raises(ConfigError, match="num_tokens"):
        training_method("pass", {"num_tokens": 16})
    for name, value in (("optimizer", "adamw"), ("learning_rate", 0.1), ("weight_decay", 0)):
        with pytest.raises(ConfigError, match=f"{name}: .* set vector_learning_rate") as caught:
            method.adapted(TrainingSettings.model_validate({name: value}))
        assert "\n" not in str(caught.value)


def test_the_copy_of_the_target_is_frozen(target: Target) -> None:
    trainee = new_trainee(training_method("pass", {}), target)
    assert isinstance(trainee, PassTrainee)
    assert not any(
        weight.requires_grad
        for name, weight in trainee._lm[0].named_parameters()
        if not name.endswith("rows")
    )
    assert trainee.matrices == []
