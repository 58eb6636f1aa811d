"""LayerSkip: the schedules are the paper's, layers are left out, and exits are what serves."""

from __future__ import annotations

from math import exp, log
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import tiny_model
from tests.training.world import computed, cycles, parts_of, tiny_target
from tokenleap.runtime.cpu import decoder_layers
from tokenleap.runtime.network import Need
from tokenleap.training.features import collate, passes
from tokenleap.training.method import training_method
from tokenleap.training.tuned import Schedule, _dropped, _recorded

LAYERS, STEPS = 8, 50


def schedule(**fields: Any) -> Schedule:
    given = {"max_dropout": 0.2, "grows": False, "exit_scale": 0.2, "rotation": 3}
    return Schedule(LAYERS, **{**given, **fields})


@pytest.mark.parametrize("grows", [False, True])
def test_dropout_is_that_of_the_paper(grows: bool) -> None:
    """p(l, t) = S(t) D(l) p_max."""
    for step in (0, 7, STEPS - 1):
        found = schedule(grows=grows).dropout(step, STEPS).tolist()
        over_time = exp(step * log(2) / (STEPS - 1)) - 1 if grows else 1
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
    made = schedule()
    for step in range(7):
        enabled = [(step + n) % 3 == 0 or n == LAYERS - 1 for n in range(LAYERS)]
        assert made.exits(step, STEPS) == pytest.approx(paper_weights(enabled, 0.2))


def test_exits_come_one_by_one() -> None:
    """From the last layer down, every T / (2 L) steps; all of them in the second half."""
    made = schedule(rotation=None, exit_scale=1.0)
    total = 4 * LAYERS  # so that there is a new one every two steps
    for step in range(total):
        first = max(0, LAYERS - 1 - step // 2)
        enabled = [n >= first for n in range(LAYERS)]
        assert made.exits(step, total) == pytest.approx(paper_weights(enabled, 1.0))


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
    wanted = schedule().dropout(0, 1)
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
