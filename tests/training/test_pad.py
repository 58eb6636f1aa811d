"""Training of `pad`: what padding learns is what it is read for, with a token of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.conftest import END, ascii_tokenizer
from tests.tiny import VOCAB_SIZE, tiny_tokenizer
from tests.training.world import computed, cycles, new_trainee, parts_of, tiny_target
from tokenleap import LLM, ConfigError, SamplingParams
from tokenleap.config import SpeculativeConfig
from tokenleap.drafters.padding import block_size
from tokenleap.training.features import collate
from tokenleap.training.method import training_method
from tokenleap.training.tuned import padding_token

PADS = 3


@torch.no_grad()
def test_padding_behind_every_root_is_computed_as_if_it_were_alone(tmp_path: Path) -> None:
    """In several passes over many blocks, with a shorter conversation beside it."""
    target = tiny_target()
    made: Any = new_trainee(training_method("pad", {"num_pads": PADS}), target).eval()
    talks = [*cycles(1, length=17), *cycles(1, length=24, seed=5, prompt=9)]
    cache = computed(target, talks, (), tmp_path)
    batch = collate([cache[0], cache[1]], PADS)
    found = [made.logits(out, k) for k, out in enumerate(made.outputs(batch, PADS))]
    for row, talk in enumerate(talks):
        for place in (0, 4, 7):
            root = int(batch.roots[row, place])
            text = torch.tensor([[*talk.tokens[: root + 1], *[made.pad] * PADS]])
            expected = made.lm(input_ids=text).logits[0, -PADS:]
            for level in range(PADS):
                torch.testing.assert_close(
                    found[level][row, place], expected[level], atol=1e-4, rtol=1e-4
                )


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
    with pytest.raises(ConfigError, match=r"pad_token_id: .* choose a token") as caught:
        padding_token(tokenizer, size)
    assert "\n" not in str(caught.value)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|a|>", "<|b|>"]})
    assert padding_token(tokenizer, size + 2) == tokenizer.convert_tokens_to_ids("<|b|>")
    assert padding_token(tokenizer, size + 1) == tokenizer.convert_tokens_to_ids("<|a|>")
    tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
    assert padding_token(tokenizer, size + 3) == tokenizer.convert_tokens_to_ids("<|mask|>")
    assert padding_token(tokenizer, size + 3) != end
    assert padding_token(tiny_tokenizer(), VOCAB_SIZE) == VOCAB_SIZE - 1
    assert padding_token(None, 50) == 49
