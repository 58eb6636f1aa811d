"""Every drafter with every rule: what the law suite runs over."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from foretoken import LLM
from foretoken.acceptance import RULES
from foretoken.drafters.registry import METHODS
from tests.tiny import tiny_model

SPECULATIVE = [name for name in METHODS if name != "none"]
LOSSLESS = [name for name, rule in RULES.items() if rule.lossless]

# Short suffixes, so that n-gram drafters find something in random text.
METHOD_FIELDS: dict[str, dict[str, Any]] = {
    "ngram": {"prompt_lookup_min": 1},
    "copy": {"copy_min_match": 1},
}


def speculative_config(
    method: str, rule: str = "coupled", num_speculative_tokens: int | None = 4, **fields: Any
) -> dict[str, Any]:
    """A configuration of this method for tiny models."""
    config = {
        "method": method,
        "acceptance": rule,
        "num_speculative_tokens": num_speculative_tokens,
        **METHOD_FIELDS.get(method, {}),
        **fields,
    }
    if METHODS[method].takes_model:
        config.setdefault("model", tiny_model(seed=1))
    return config


def tiny_llm(
    model: PreTrainedModel,
    /,
    method: str = "none",
    rule: str = "coupled",
    gamma: int | None = 4,
    **fields: Any,
) -> LLM:
    """An LLM over a tiny model; the draft model has the target's dtype and vocabulary."""
    if METHODS[method].takes_model and "model" not in fields:
        vocab_size = model.config.get_text_config().vocab_size
        fields["model"] = tiny_model(seed=1, dtype=model.dtype, vocab_size=vocab_size)
    return LLM(model, speculative_config=speculative_config(method, rule, gamma, **fields))


# Prompts with repetitions, of very different lengths.
PROMPTS = [
    [3, 5, 7, 3, 5, 7, 3, 5, 9, 1],
    [11],
    [2, 4, 2, 4, 2, 4, 2],
    list(range(1, 60)) + list(range(1, 20)),
    [8, 8, 8],
]
