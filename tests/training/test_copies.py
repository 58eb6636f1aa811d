"""Copies of the target that learn: early exits, padding and look-ahead embeddings."""

from __future__ import annotations

import random
from math import exp, log
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cli.conftest import END, ascii_tokenizer
from tests.tiny import VOCAB_SIZE, tiny_model, tiny_tokenizer
from tests.training.world import (
    Run,
    World,
    computed,
    cycles,
    new_trainee,
    parts_of,
    refused,
    tiny_target,
)
from tokenleap import LLM, ConfigError, SamplingParams
from tokenleap.config import SpeculativeConfig
from tokenleap.core.tree import chain
from tokenleap.drafters.padding import block_size, read_pass_tokens
from tokenleap.runtime.cpu import decoder_layers
from tokenleap.runtime.network import Need
from tokenleap.runtime.target import Target
from tokenleap.training.conversations import Conversation
from tokenleap.training.features import collate, passes
from tokenleap.training.method import TrainingSettings, training_method
from tokenleap.training.tuned import EarlyExitTraining, _dropped, _recorded, padding_token

LAYERS, STEPS = 8, 50


def early_exit(**fields: Any) -> EarlyExitTraining:
    return EarlyExitTraining(max_dropout=0.2, **fields)


@pytest.mark.parametrize("growth", ["constant", "exponential"])
def test_dropout_is_that_of_the_paper(growth: str) -> None:
    """p(l, t) = S(t) D(l) p_max."""
    for step in (0, 7, STEPS - 1):
        found = early_exit(dropout_growth=growth).dropout(LAYERS, step, STEPS).tolist()
        over_time = exp(step * log(2) / (STEPS - 1)) - 1 if growth == "exponential" else 1
        expected = [
            over_time * (exp(layer * log(2) / (LAYERS - 1)) - 1) * 0.2 for layer in range(LAYERS)
        ]
        assert found == pytest.approx(expected, abs=1e-6)
    assert found[0] == 0
    assert found[-1] == pytest.approx(0.2)


def paper_weights(enabled: list[bool], scale: float) -> dict[int, float]:
    """w(t, l) of the exits that are enabled, term by term."""
    of_layer = [scale * sum(range(layer + 1)) for layer in range(LAYERS - 1)]
    of_layer.append(LAYERS - 1 + scale * sum(range(LAYERS - 1)))
    chosen = {n: weight for n, weight in enumerate(of_layer) if enabled[n] and weight}
    return {n: weight / sum(chosen.values()) for n, weight in chosen.items()}


def test_exits_rotate() -> None:
    """Each is learnt once in `rotation` steps, the last one always."""
    made = early_exit(rotation=3)
    for step in range(7):
        enabled = [(step + n) % 3 == 0 or n == LAYERS - 1 for n in range(LAYERS)]
        assert made.learnt_exits(LAYERS, step, STEPS) == pytest.approx(paper_weights(enabled, 0.2))


def test_exits_come_one_by_one() -> None:
    """From the last layer down, every T / (2 L) steps; all of them in the second half."""
    made = early_exit(exits="gradual", exit_scale=1.0)
    total = 4 * LAYERS  # so that there is a new one every two steps
    for step in range(total):
        first = max(0, LAYERS - 1 - step // 2)
        enabled = [n >= first for n in range(LAYERS)]
        assert made.learnt_exits(LAYERS, step, total) == pytest.approx(paper_weights(enabled, 1.0))


@torch.no_grad()
def test_layers_are_left_out_for_some_conversations() -> None:
    model = tiny_model(num_hidden_layers=3)
    shorter = tiny_model(num_hidden_layers=3)
    layers = decoder_layers(shorter)
    del layers[1]
    shorter.config.num_hidden_layers = 2
    tokens = torch.arange(24).reshape(2, 12)
    dropped = torch.tensor([[False, False], [True, False], [False, False]])
    run: Any = model
    with _recorded(decoder_layers(model), dropped) as found:
        logits = run(input_ids=tokens, use_cache=False).logits
    without: Any = shorter
    torch.testing.assert_close(logits[:1], without(input_ids=tokens[:1], use_cache=False).logits)
    torch.testing.assert_close(logits[1:], run(input_ids=tokens[1:], use_cache=False).logits)
    assert len(found) == 3
    assert torch.equal(found[0][0], found[1][0])
    assert not torch.equal(found[0][1], found[1][1])
    assert not any(layer._forward_hooks for layer in decoder_layers(model))


def test_how_often_they_are_left_out() -> None:
    """20,000 draws for each layer are five standard deviations off with a chance below 1e-5."""
    torch.manual_seed(0)
    wanted = early_exit().dropout(LAYERS, 0, 1)
    drawn = _dropped(wanted, 20_000)
    assert drawn is not None
    for rate, expected in zip(drawn.float().mean(1).tolist(), wanted.tolist(), strict=True):
        assert abs(rate - expected) <= 5 * (expected * (1 - expected) / 20_000) ** 0.5
    assert _dropped(None, 3) is None


@torch.no_grad()
def test_drafts_of_training_are_those_of_serving(tmp_path: Path) -> None:
    """The first layers of the network that serves, at the places of every level."""
    target = tiny_target(num_hidden_layers=4)
    method = training_method("early_exit", {"exit_layer": 3})
    assert method.serving(Path("new")) == {"method": "early_exit", "exit_layer": 3}
    trainee = method.trainee(parts_of(target)).eval()
    (talk,) = cycles(1, length=20)
    batch = collate([computed(target, [talk], (), tmp_path)[0]], 3)
    drafting = target.with_network(target.network.first_layers(3))
    (output,) = passes(drafting, talk.tokens, Need())
    for level, outputs in enumerate(trainee.outputs(batch, 3)):
        valid = batch.levels.valid[0, level]
        expected = output.scores[(batch.roots[0] + 1 + level)[valid]]
        logits = trainee.logits(outputs[0][valid], level)
        torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)


PADS = 3


def test_a_step_learns_some_blocks_and_the_text(tmp_path: Path) -> None:
    """Those of every third root; and every weight learns."""
    target = tiny_target()
    made: Any = new_trainee(training_method("pad", {"num_pads": PADS}), target).train()
    batch = collate([computed(target, cycles(1), (), tmp_path)[0]], PADS)
    learnt = made(batch, PADS)
    total = int(batch.levels.valid[0, 0].sum())
    assert int(learnt.counts[0]) in {total // PADS, -(-total // PADS)}
    learnt.losses.sum().backward()
    assert all(weight.grad is not None for weight in made.parameters())


def test_the_token_is_in_the_folder(tmp_path: Path) -> None:
    """`pad` uses it unless it is told another one."""
    method = training_method("pad", {"pad_token_id": 91, "num_pads": PADS})
    parts = parts_of(tiny_target())
    method.trainee(parts).write(parts, tmp_path, {})
    llm = LLM(str(tmp_path), speculative_config={**method.serving(tmp_path), "controller": "fixed"})
    params = SamplingParams(temperature=0, max_tokens=8)
    (output,) = llm.generate([[1, 2, 3]], params, trace=True)
    assert output.trace is not None
    assert output.trace.steps[0].drafted == (91,) * PADS


@pytest.mark.parametrize(("name", "option"), [("pad", "num_pads"), ("pass", "num_tokens")])
def test_blocks_are_as_long_as_those_that_were_learnt(name: str, option: str) -> None:
    for size, nodes in ((1, 3), (4, 24), (15, 255)):
        served = training_method(name, {option: size}).serving(Path("made"))
        assert SpeculativeConfig.parse(served).gamma == nodes
        assert block_size(nodes) == size > block_size(nodes - 1)


def test_which_token_it_is() -> None:
    tokenizer = ascii_tokenizer()
    end = tokenizer.convert_tokens_to_ids(END)
    size = len(tokenizer.get_vocab())
    tokenizer.pad_token = END
    with refused(ConfigError, match=r"pad_token_id: .* choose a token"):
        padding_token(tokenizer, size)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|a|>", "<|b|>"]})
    assert padding_token(tokenizer, size + 2) == tokenizer.convert_tokens_to_ids("<|b|>")
    assert padding_token(tokenizer, size + 1) == tokenizer.convert_tokens_to_ids("<|a|>")
    tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
    assert padding_token(tokenizer, size + 3) == tokenizer.convert_tokens_to_ids("<|mask|>")
    assert padding_token(tokenizer, size + 3) != end
    assert padding_token(tiny_tokenizer(), VOCAB_SIZE) == VOCAB_SIZE - 1
    assert padding_token(None, 50) == 49


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
    trainee.write(parts_of(target), tmp_path / "head", {})
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
    world = World(tmp_path, "pass", learnt=(texts(12, 1), texts(4, 2)), loss="ce")
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
    assert trainee.matrices == []
    for name, weight in trainee._lm[0].named_parameters():
        assert torch.equal(weight, before[name]) != name.endswith("embed_tokens.rows"), name
    assert sum(x.numel() for x in run.saved[-1][1].values()) < 2 * 64 * LEVELS + 300
    trainee.write(parts_of(world.target), tmp_path / "head", {})
    guesses = served(world.target, tmp_path / "head", [7, 3, 7]).argmax(-1)
    assert guesses.tolist() == [7] * LEVELS
