"""Every drafter with every rule: what the invariant suite runs over."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel

from tests.heads import lasting_folder, tiny_head
from tests.tiny import VOCAB_SIZE, tiny_model, tiny_tokenizer
from tokenleap import LLM
from tokenleap.core.acceptance import RULES
from tokenleap.drafters.registry import METHODS
from tokenleap.drafters.text.datastore import Datastore, index_texts
from tokenleap.drafters.text.ngrams import NgramTables, count_ngrams

NEED_SOURCES = [name for name, spec in METHODS.items() if spec.needs_source]
"""Methods for encoder-decoders alone."""
SPECULATIVE = [name for name in METHODS if name != "none" and name not in NEED_SOURCES]
LOSSLESS = [name for name, rule in RULES.items() if rule.lossless]
BRANCHING = ("ensemble", "lookahead", "pad", "pass", "recycle")
"""Methods whose drafts are trees whatever their options."""
ON_CHAINS = [name for name in SPECULATIVE if name not in BRANCHING]
"""Methods whose bits invariant 7 promises; for the others it promises the tokens."""
FROM_TEXT = (
    *("regex", "ngram_table", "suffix", "copy", "prediction", "corpus_ngram", "rest", "random"),
    "switch",
)
"""Methods whose chains do not depend on the target but for its tokens."""
ON_SOURCES = [*(name for name in SPECULATIVE if not METHODS[name].takes_head), *NEED_SOURCES]
"""Methods for encoder-decoders: those that need no trained head, and those made for them."""


def tiny_texts() -> list[list[int]]:
    """Texts of tokens 0 to 5, which every tiny vocabulary has."""
    dice = random.Random(0)
    return [[dice.randrange(6) for _ in range(40)] for _ in range(5)]


def tiny_file(made: NgramTables | Datastore) -> str:
    """A file until the tests are over."""
    path = lasting_folder() / "tiny"
    made.save(path)
    return str(path)


WITH_TOKENIZER = ("regex",)
"""Methods that know tokens by their text."""
LEAST_NODES = {"pad": 3, "pass": 3}
"""Nodes without which a method drafts nothing."""

# Short suffixes, so that n-gram drafters find something in random text.
METHOD_FIELDS: dict[str, dict[str, Any]] = {
    "ngram": {"prompt_lookup_min": 1},
    "copy": {"copy_min_match": 1},
    "prediction": {"drafter": {"method": "ngram", "prompt_lookup_min": 1}},
    "corpus_ngram": {"corpus": tiny_file(count_ngrams(tiny_texts(), vocab_size=6))},
    "rest": {"datastore": tiny_file(index_texts(tiny_texts(), vocab_size=6)), "min_match": 1},
    "cascade": {"drafter": {"method": "ngram", "prompt_lookup_min": 1}},
    "ensemble": {
        "drafters": [{"method": "ngram", "prompt_lookup_min": 1}, {"method": "ngram_table"}]
    },
    "switch": {
        "drafters": [{"method": "ngram", "prompt_lookup_min": 1}, {"method": "ngram_table"}],
        "try_every": 2,
    },
    "hybrid": {"lookup": {"method": "ngram", "prompt_lookup_min": 1}},
    "horizontal_cascade": {
        "drafters": [{"method": "ngram", "prompt_lookup_min": 1}, {"method": "ngram_table"}],
        "tokens": [2, 3],
    },
    "regex": {"expected": {"regex": "(%){60}[0-9]*"}},
}


def takes_any_tree(rule: str) -> bool:
    """Whether the rule takes trees, however their siblings were chosen."""
    return RULES[rule].takes_trees and not RULES[rule].needs_independent_siblings


def fits(method: str, rule: str) -> bool:
    """Whether the rule takes what the method drafts."""
    return method not in BRANCHING or takes_any_tree(rule)


def speculative_config(
    method: str, rule: str = "coupled", num_speculative_tokens: int | None = 4, **fields: Any
) -> dict[str, Any]:
    """A configuration of this method for tiny models, with drafts of one length.

    On models without a pattern the default controller would leave most of them out.
    """
    config = {
        "method": method,
        "acceptance": rule,
        "controller": "fixed",
        "num_speculative_tokens": num_speculative_tokens,
        **METHOD_FIELDS.get(method, {}),
        **fields,
    }
    if METHODS[method].takes_model:
        config.setdefault("model", draft_model())
    if METHODS[method].takes_head:
        config.setdefault("model", tiny_head(method))
    return config


@cache
def draft_model(
    dtype: torch.dtype = torch.float32, vocab_size: int = VOCAB_SIZE
) -> PreTrainedModel:
    """A draft model for tiny models."""
    return tiny_model(seed=1, dtype=dtype, vocab_size=vocab_size)


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
        fields["model"] = draft_model(model.dtype, vocab_size)
    if METHODS[method].takes_head and "model" not in fields:
        fields["model"] = tiny_head(method, model.config.get_text_config().vocab_size)
    tokenizer = tiny_tokenizer() if method in WITH_TOKENIZER else None
    config = speculative_config(method, rule, gamma, **fields)
    return LLM(model, tokenizer=tokenizer, speculative_config=config)


# Prompts with repetitions, of very different lengths.
PROMPTS = [
    [3, 5, 7, 3, 5, 7, 3, 5, 9, 1],
    [11],
    [2, 4, 2, 4, 2, 4, 2],
    list(range(1, 60)) + list(range(1, 20)),
    [8, 8, 8],
]
