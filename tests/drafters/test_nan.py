"""A failed request's computations in a draft model do not spread to later requests."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tiny import tiny_model
from tests.vocabularies import OTHER_TEXT, bpe
from tokenleap import LLM, SamplingParams

TARGET, OTHER = bpe(), bpe(OTHER_TEXT, 80)
LONG, SHORT = "the cat sat on the water and the cat sat", "the cat sat"

WAYS = ["draft_model", "cascade", "inner model of a cascade", "intersection", "text"]


def config_of(way: str, model: Any) -> dict[str, Any]:
    """A method that drafts with this model."""
    if way == "draft_model":
        return {"model": model}
    if way == "cascade":
        return {"method": way, "model": model, "drafter": {"method": "ngram"}}
    if way in ("intersection", "text"):
        return {"model": model, "vocabulary": way, "draft_tokenizer": OTHER}
    return {"method": "cascade", "model": tiny_target(), "drafter": {"model": model}}


def tiny_target() -> Any:
    return tiny_model(vocab_size=len(TARGET.get_vocab()))


@pytest.mark.parametrize(
    ("way", "temperature"), [*((way, 0.8) for way in WAYS), ("draft_model", 0), ("text", 0)]
)
def test_a_nan_does_not_outlive_its_request(way: str, temperature: float) -> None:
    """Masked positions still enter PyTorch's products, and a NaN times zero is one."""
    own = OTHER if way in ("intersection", "text") else TARGET
    model: Any = tiny_model(vocab_size=len(own.get_vocab()))
    config = {**config_of(way, model), "controller": "fixed"}
    llm = LLM(tiny_target(), tokenizer=TARGET, speculative_config=config, runtime="torch")
    norm = model.model.layers[0].input_layernorm.weight.data
    weight = norm.clone()
    norm.fill_(torch.nan)
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=12)
    (poisoned,) = llm.generate([LONG], params)
    assert "nan" in (poisoned.metrics.drafter_failure or "").lower()
    norm.copy_(weight)
    (next_one,) = llm.generate([SHORT], params)
    assert next_one.metrics.drafter_failure is None
    assert next_one.metrics.num_drafts > 0
