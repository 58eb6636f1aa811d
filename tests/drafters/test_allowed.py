"""Trees that grow in one call, for models whose generation config forbids tokens."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GenerationConfig

from tests.spec_drafters import random_spec_drafter
from tests.tiny_seq2seq import tiny_seq2seq, tiny_source
from tokenleap import LLM, SamplingParams
from tokenleap.core.rules import DecodingRules
from tokenleap.drafters.blocks import BlockScorer
from tokenleap.drafters.growth import allowed_part
from tokenleap.request import Request
from tokenleap.runtime.network import GrownTree


def request_of(**fields: Any) -> Request:
    own: Any = GenerationConfig
    rules = DecodingRules.of(own(**fields), [2], 40)
    params = SamplingParams(temperature=0, max_tokens=50)
    return Request([3], params, vocab_size=40, max_model_len=99, rules=rules)


TREE = GrownTree([5, 6, 7, 8, 9], [-1, -1, 0, 1, 3], [0.5, 0.4, 0.9, 0.8, 0.7])


@pytest.mark.parametrize(
    ("rules", "tokens", "parents"),
    [
        ({}, [5, 6, 7, 8, 9], [-1, -1, 0, 1, 3]),
        ({"suppress_tokens": [6]}, [5, 7], [-1, 0]),
        ({"bad_words_ids": [[7], [9]]}, [5, 6, 8], [-1, -1, 1]),
        ({"bad_words_ids": [[6, 8]]}, [5, 6, 7], [-1, -1, 0]),
        ({"begin_suppress_tokens": [5, 8]}, [6, 8, 9], [-1, 0, 1]),
        ({"forced_bos_token_id": 6}, [6, 8, 9], [-1, 0, 1]),
        ({"forced_bos_token_id": 4}, [], []),
    ],
)
def test_forbidden_tokens_and_what_is_below_them_are_left_out(
    rules: dict[str, Any], tokens: list[int], parents: list[int]
) -> None:
    left = allowed_part(request_of(**rules), TREE)
    assert (list(left.tokens), list(left.parents)) == (tokens, parents)
    odds = dict(zip(TREE.tokens, TREE.probabilities, strict=True))
    assert list(left.probabilities) == [odds[token] for token in tokens]


def test_rules_on_the_text_see_what_was_generated_and_drafted() -> None:
    request = request_of(no_repeat_ngram_size=2)
    request.token_ids += [6, 8, 5]
    left = allowed_part(request, TREE)
    assert (left.tokens, left.parents) == ([5, 6, 7], [-1, -1, 0])


def test_a_block_grows_at_once_under_the_rules_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing its levels one by one takes as long as the pass."""
    grown = []

    def grow(self: BlockScorer, *args: Any) -> Any:
        grown.append(found := original(self, *args))
        return found

    original = BlockScorer.grow
    monkeypatch.setattr(BlockScorer, "grow", grow)
    model = tiny_seq2seq("bart", eos_bias=2.0)
    model.generation_config.bad_words_ids = [[20], [21, 22]]
    config = {
        "method": "spec_drafter",
        "model": random_spec_drafter("bart", 5),
        "num_speculative_tokens": 5,
        "controller": "fixed",
    }
    params = SamplingParams(temperature=0, max_tokens=9)
    source = list(tiny_source(length=9, seed=9).tokens)
    llm = LLM(model, speculative_config=config)
    (drafted,) = llm.generate(source, params)
    (plain,) = llm.generate(source, params, speculative_config={"method": "none"})
    assert grown
    assert drafted.token_ids == plain.token_ids
