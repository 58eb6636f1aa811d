"""Every drafter with every rule: what the law suite runs over."""

from __future__ import annotations

import atexit
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from foretoken import LLM
from foretoken.acceptance import RULES
from foretoken.drafters.registry import METHODS
from foretoken.ngrams import count_ngrams
from tests.tiny import tiny_model

SPECULATIVE = [name for name in METHODS if name != "none"]
LOSSLESS = [name for name, rule in RULES.items() if rule.lossless]
BRANCHING = ("ensemble",)
"""Methods whose drafts are trees whatever their options."""
ON_CHAINS = [name for name in SPECULATIVE if name not in BRANCHING]
"""Methods that law 7 promises the very bits for: the others promise the tokens."""


def tiny_corpus() -> str:
    """A file of n-grams of tokens 0 to 5, which every tiny vocabulary has."""
    folder = Path(tempfile.mkdtemp(prefix="foretoken-tests-"))
    atexit.register(shutil.rmtree, folder)
    dice = random.Random(0)
    texts = [[dice.randrange(6) for _ in range(40)] for _ in range(5)]
    count_ngrams(texts, vocab_size=6).save(folder / "tiny.ngrams")
    return str(folder / "tiny.ngrams")


# Short suffixes, so that n-gram drafters find something in random text.
METHOD_FIELDS: dict[str, dict[str, Any]] = {
    "ngram": {"prompt_lookup_min": 1},
    "copy": {"copy_min_match": 1},
    "corpus_ngram": {"corpus": tiny_corpus()},
    "cascade": {"drafter": {"method": "ngram", "prompt_lookup_min": 1}},
    "ensemble": {
        "drafters": [{"method": "ngram", "prompt_lookup_min": 1}, {"method": "ngram_table"}]
    },
    "switch": {
        "drafters": [{"method": "ngram", "prompt_lookup_min": 1}, {"method": "ngram_table"}],
        "try_every": 2,
    },
}


def fits(method: str, rule: str) -> bool:
    """Whether the rule takes what the method drafts."""
    return method not in BRANCHING or RULES[rule].takes_branches


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
