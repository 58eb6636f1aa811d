"""Targets with windows, with capped or scaled logits, and with contexts of another name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.tiny import CONTEXT, GROUPED, VOCAB_SIZE
from tests.training.world import computed, cycles, new_trainee, parts_of, tiny_target
from tests.windowed import WINDOW, windowed_config, windowed_model
from tokenleap import CompatibilityError
from tokenleap.runtime.target import Target
from tokenleap.training.distill import new_lm
from tokenleap.training.features import collate
from tokenleap.training.method import training_method
from tokenleap.training.tuned import copy_of_target

PADS = 3


def target_of(model: PreTrainedModel) -> Target:
    return Target(model, reload=lambda: model)


@pytest.mark.parametrize("method", ["pad", "pass"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "gemma3", "cohere2"])
@torch.no_grad()
def test_blocks_are_computed_as_if_they_were_alone(name: str, method: str, tmp_path: Path) -> None:
    """In several passes over many blocks, within windows, with a shorter conversation beside it."""
    unscaled: dict[str, Any] = {"logit_scale": 1.0} if name == "cohere2" else {}
    target = tiny_target() if name == "llama" else target_of(windowed_model(name, **unscaled))
    option = {"pad": "num_pads", "pass": "num_tokens"}[method]
    made: Any = new_trainee(training_method(method, {option: PADS}), target).eval()
    talks = [*cycles(1, length=3 * WINDOW), *cycles(1, length=24, seed=5, prompt=9)]
    cache = computed(target, talks, (), tmp_path)
    batch = collate([cache[0], cache[1]], PADS)
    found = [made.logits(out, k) for k, out in enumerate(made.outputs(batch, PADS))]
    lm = made.lm if method == "pad" else made._lm[0]
    padding = [made.pad] * PADS if method == "pad" else made._tokens(PADS).tolist()
    for row, place in ((0, 0), (0, 9), (0, 18), (1, 0), (1, 7)):
        text = [*talks[row].tokens[: int(batch.roots[row, place]) + 1], *padding]
        expected = lm(input_ids=torch.tensor([text])).logits[0, -PADS:]
        for level in range(PADS):
            torch.testing.assert_close(
                found[level][row, place], expected[level], atol=1e-4, rtol=1e-4
            )


SCALED: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 16, "final_logit_softcapping": 1.5},
    "granite": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.25},
}


def scaled_model(name: str) -> PreTrainedModel:
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    fields = {**GROUPED, **special, **SCALED[name]}
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, vocab_size=VOCAB_SIZE, **fields)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.train(False)
    return model


@pytest.mark.parametrize("name", SCALED)
@torch.no_grad()
def test_heads_learn_the_distribution_that_is_served(name: str, tmp_path: Path) -> None:
    """Caps and scales of the logits are a part of it."""
    model: Any = scaled_model(name)
    (talk,) = cycles(1)
    features = computed(target_of(model), [talk], (), tmp_path)[0]
    tokens = torch.tensor([talk.tokens])
    served = model(input_ids=tokens).logits[0].log_softmax(-1)
    bare = model.get_output_embeddings()(model.get_decoder()(input_ids=tokens)[0])
    expected = served.gather(1, features.top_tokens)
    torch.testing.assert_close(features.top_logprobs, expected, atol=5e-3, rtol=5e-3)
    assert (bare[0].log_softmax(-1).gather(1, features.top_tokens) - expected).abs().max() > 0.1


@pytest.mark.parametrize("name", SCALED)
def test_a_copy_of_such_a_target_is_not_trained(name: str) -> None:
    """Its own logits are computed by the output layer alone."""
    with pytest.raises(CompatibilityError, match="changes the logits of its output layer"):
        copy_of_target(parts_of(target_of(scaled_model(name))))


@pytest.mark.parametrize(("name", "limit"), [("bloom", 2**31 - 1), ("mpt", CONTEXT)])
def test_targets_that_name_their_context_otherwise(name: str, limit: int) -> None:
    config = windowed_config(name)
    lm: Any = new_lm(config)
    assert lm.config.max_position_embeddings == limit
    trainee: Any = new_trainee(training_method("eagle", {}), target_of(windowed_model(name)))
    assert trainee.net.config.max_position_embeddings == limit
