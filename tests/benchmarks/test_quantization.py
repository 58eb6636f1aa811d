from __future__ import annotations

import pytest
import torch
from benchmarks.quantization import Shift, logits_of, shift

from tests.tiny import tiny_model
from tokenleap.runtime.target import Target


def test_equal_distributions_do_not_differ() -> None:
    logits = torch.randn(5, 9)
    found = shift(logits, logits + 3)
    assert found.kl == pytest.approx([0] * 5, abs=1e-6)
    assert found.agrees == (True,) * 5


def test_the_divergence_of_two_coins() -> None:
    found = shift(torch.log(torch.tensor([[0.5, 0.5]])), torch.log(torch.tensor([[0.25, 0.75]])))
    assert found.kl == pytest.approx([0.5 * torch.log(torch.tensor(4 / 3)).item()], abs=1e-6)


def test_shifts_add_up() -> None:
    both = Shift((0.1, 0.3), (True, False)) + Shift((0.2,), (True,))
    assert both.cells() == ["3", "0.20000 ± 0.05774", "66.67%"]


def test_every_position_is_read_once() -> None:
    model = tiny_model()
    tokens = [i % 90 for i in range(150)]
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([tokens])).logits[0]
    assert torch.allclose(logits_of(Target(model), tokens), expected, atol=2e-4)
