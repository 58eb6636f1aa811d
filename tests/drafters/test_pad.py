"""Padding: the logits below it are the next draft, wherever acceptance ends."""

from __future__ import annotations

import pytest
import torch

from tests.drafting import draft_of, drafter_of, request_of, tokens_of
from tests.matrix import PROMPTS, tiny_llm
from tests.tiny import CONTEXT, VOCAB_SIZE, tiny_model
from tokenleap import ConfigError, SamplingParams
from tokenleap.control import Budget
from tokenleap.drafters.padding import PadDrafter, block_size
from tokenleap.request import Request

GREEDY = SamplingParams(temperature=0, max_tokens=40)
PAD = 90


@pytest.mark.parametrize(("nodes", "size"), [(0, 0), (2, 0), (3, 1), (7, 1), (8, 2), (15, 3)])
def test_the_longest_block_that_fits(nodes: int, size: int) -> None:
    assert block_size(nodes) == size
    assert size + (size + 1) * size <= nodes


def test_padding_stands_below_every_drafted_token() -> None:
    drafter = PadDrafter(PAD)
    request = request_of([1, 2, 3])
    assert draft_of(drafter, request, 8).tree.tokens == (3, PAD, PAD)
    drafter._guesses[request.key] = (3, [5, 6])
    draft = draft_of(drafter, request, 8)
    assert draft.tree.tokens == (3, 5, 6, PAD, PAD, PAD, PAD, PAD, PAD)
    assert draft.tree.parents == (-1, 0, 1, 0, 3, 1, 5, 2, 7)
    assert max(draft_of(drafter, request, 8, 1).tree.depths) == 1


def test_the_next_draft_is_what_the_model_says_at_the_padding() -> None:
    model = tiny_model()
    llm = tiny_llm(model, "pad", gamma=8, pad_token_id=PAD)
    request = Request(PROMPTS[0], GREEDY, vocab_size=VOCAB_SIZE, max_model_len=CONTEXT)
    llm.engine._scheduler.add(request)
    llm.engine._scheduler.step()
    (draft,) = drafter_of(llm).propose([request], [Budget(8, 8)])
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*PROMPTS[0], PAD, PAD]])).logits[0]
    assert draft.tree.tokens[1:3] == tuple(logits[-2:].argmax(-1).tolist())
    llm.engine._scheduler.abort([request])


def test_guesses_of_another_text_are_not_drafted() -> None:
    drafter = PadDrafter(PAD)
    request = request_of([1, 2, 3])
    drafter._guesses[request.key] = (2, [5, 6])
    assert set(tokens_of(drafter, request, 8)) == {PAD}


def test_the_default_padding_and_a_wrong_one() -> None:
    llm = tiny_llm(tiny_model(), "pad")
    drafter = drafter_of(llm)
    assert isinstance(drafter, PadDrafter)
    assert drafter._pad == 0
    with pytest.raises(ConfigError, match="pad_token_id: must be 0 to 95 for this model, got 96"):
        tiny_llm(tiny_model(), "pad", pad_token_id=96)
