"""`blockwise`: the mathematics of a head, and its rules of acceptance on the whole loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tests.heads import save_state_head, state_config, state_net
from tests.tiny import tiny_model
from tokenleap import LLM, SamplingParams


def test_a_head_is_a_layer_with_a_residual_before_the_target_s_output_layer() -> None:
    model = tiny_model()
    net = state_net("blockwise", state_config("blockwise"), model)
    hidden = torch.randn(64)
    found = net(hidden, torch.zeros(4, dtype=torch.long))
    weights = net.state_dict()
    rows = model.get_output_embeddings().weight[::2]  # type: ignore[no-untyped-call]
    for depth in range(4):
        head = f"heads.{depth}"
        inner = weights[f"{head}.hidden.weight"] @ hidden + weights[f"{head}.hidden.bias"]
        outer = weights[f"{head}.output.weight"] @ F.relu(inner) + weights[f"{head}.output.bias"]
        torch.testing.assert_close(found[depth], rows @ (hidden + outer), atol=1e-3, rtol=1e-3)


def test_an_untrained_head_is_the_target_s_output_layer() -> None:
    model = tiny_model()
    net = state_net("blockwise", state_config("blockwise"), model)
    net.initialise()
    hidden = torch.randn(64)
    rows = model.get_output_embeddings().weight[::2]  # type: ignore[no-untyped-call]
    for logits in net(hidden, torch.zeros(4, dtype=torch.long)):
        torch.testing.assert_close(logits, rows @ hidden)


def test_predicting_and_verifying_are_one_pass(tmp_path: Path) -> None:
    """A step takes one pass of the target, and no step is spent on predicting alone."""
    output = drafted(tmp_path, "rejection")
    assert output.metrics.target_passes == len(output.trace)
    assert all(step.drafted for step in output.trace.steps[:-1])


def test_a_minimum_block_size(tmp_path: Path) -> None:
    """Every step commits so many tokens, whatever the head drafts."""
    output = drafted(tmp_path, {"rule": "distance", "epsilon": 0, "minimum_block": 3})
    lengths = [len(step.accepted) for step in output.trace.steps[:-1]]
    assert min(lengths) == 2
    exact = drafted(tmp_path, {"rule": "distance", "epsilon": 0})
    assert len(exact.trace) > len(output.trace)


def drafted(folder: Path, rule: str | dict[str, Any]) -> Any:
    model = tiny_model()
    save_state_head(folder, state_net("blockwise", state_config("blockwise"), model))
    config = {"method": "blockwise", "model": str(folder), "controller": "fixed"}
    llm = LLM(model, speculative_config=config | {"acceptance": rule})
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=60))
    return output
