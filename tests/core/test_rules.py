"""`DecodingRules`: what they do to the logits is what `generate()` does."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

from tests.tiny import tiny_tokenizer
from tests.tiny_seq2seq import tiny_seq2seq
from tokenleap import CompatibilityError, ConfigError, SamplingParams
from tokenleap.core.grammar import Grammars
from tokenleap.core.references import Source
from tokenleap.core.rules import DecodingRules
from tokenleap.core.sampler import Sampler, TreeDistributions
from tokenleap.core.tree import TokenTree
from tokenleap.errors import RequestError

V = 12
EOS = (2,)
START = 3
MAX_TOKENS = 7
GREEDY = SamplingParams(temperature=0)

RULES: dict[str, dict[str, Any]] = {
    "bad words": {"bad_words_ids": [[5], [2], [7, 8], [6, 7, 8], [3, 4]]},
    "suppressed": {"suppress_tokens": [5, 9]},
    "suppressed outside": {"suppress_tokens": [5, V + 3, -1]},
    "first suppressed": {"begin_suppress_tokens": [5, 9, 2]},
    "forced first": {"forced_bos_token_id": 6, "begin_suppress_tokens": [5]},
    "forced last": {"forced_eos_token_id": 2},
    "forced last, two": {"forced_eos_token_id": [4, 2]},
    "least length": {"min_length": 4},
    "least new": {"min_new_tokens": 3, "min_length": 9},
    "1-gram": {"no_repeat_ngram_size": 1},
    "2-gram": {"no_repeat_ngram_size": 2},
    "3-gram": {"no_repeat_ngram_size": 3},
    "source 1-gram": {"encoder_no_repeat_ngram_size": 1},
    "source 2-gram": {"encoder_no_repeat_ngram_size": 2},
    "source 4-gram": {"encoder_no_repeat_ngram_size": 4},
    "repetition": {"repetition_penalty": 1.7},
    "source repetition": {"encoder_repetition_penalty": 1.7},
    "biases": {"sequence_bias": [[[5], 2.0], [[7, 8], -1.5], [[6, 8], 9.0], [[3], -0.5]]},
    "biases as a mapping": {"sequence_bias": {(1,): 3.0, (0, 1): -float("inf"), (2, 3, 1): 1.0}},
    "hurry": {"exponential_decay_length_penalty": (1, 1.3)},
    "BART": {"forced_bos_token_id": 0, "forced_eos_token_id": 2, "no_repeat_ngram_size": 3},
    "all": {
        "bad_words_ids": [[5], [7, 8]],
        "suppress_tokens": [9],
        "begin_suppress_tokens": [10],
        "forced_bos_token_id": 6,
        "forced_eos_token_id": 2,
        "min_length": 3,
        "no_repeat_ngram_size": 2,
        "encoder_no_repeat_ngram_size": 3,
        "encoder_repetition_penalty": 1.2,
        "repetition_penalty": 0.8,
        "sequence_bias": [[[2], 1.0], [[0, 1], 2.0]],
        "exponential_decay_length_penalty": [2, 1.5],
    },
}


@cache
def model() -> Any:
    return tiny_seq2seq("bart", vocab_size=V, decoder_layers=1, encoder_layers=1)


def config_of(**fields: Any) -> Any:
    own: Any = GenerationConfig
    return own(eos_token_id=list(EOS), decoder_start_token_id=START, **fields)


def generates(
    logits: Tensor, text: list[int], prompt: int, source: Source, **fields: Any
) -> Tensor:
    """[V] the logits as `generate()` processes them, after a text whose first tokens are given."""
    config = config_of(max_length=prompt + MAX_TOKENS, **fields)
    if fields.get("min_new_tokens"):  # as generate() prepares it
        config.min_length = prompt + fields["min_new_tokens"]
    model()._prepare_special_tokens(config, kwargs_has_attention_mask=True, device="cpu")
    processors = model()._get_logits_processor(
        config, prompt, torch.tensor([source.tokens]), device="cpu"
    )
    processed: Tensor = processors(torch.tensor([text]), logits[None].clone())[0]
    return processed


def sampler_of(
    prompt: list[int], source: Source, params: SamplingParams = GREEDY, **fields: Any
) -> Sampler:
    rules = DecodingRules.of(config_of(**fields), EOS, V)
    return Sampler(params, V, prompt, EOS, rules=rules.for_output(prompt, source, MAX_TOKENS))


@pytest.mark.parametrize("fields", RULES.values(), ids=RULES)
def test_the_logits_are_those_of_generate(fields: dict[str, Any]) -> None:
    """Bit by bit at every length of the output; greedy requests take the same token from them."""
    dice, changed = random.Random(1), 0
    for round in range(60):
        prompt = [START, *dice.choices(range(4), k=round % 3)]
        source = Source(tuple(dice.choices(range(4), k=dice.randrange(1, 40))))
        output = dice.choices(range(4) if round % 2 else range(5, 9), k=dice.randrange(MAX_TOKENS))
        logits = torch.randn(V, generator=torch.Generator().manual_seed(round))
        sampler = sampler_of(prompt, source, **fields)
        expected = generates(logits, [*prompt, *output], len(prompt), source, **fields)
        assert torch.equal(sampler.shaped(logits, output), expected)
        changed += not torch.equal(logits, expected)
        p = TreeDistributions(logits[None], TokenTree((1,), (-1,)), sampler, output)
        if expected.max() > -torch.inf:
            assert p[0].certain == int(expected.argmax())
            assert p.prob(0, int(expected.argmax())) == 1
        else:
            with pytest.raises(RequestError, match="no token can be drawn"):
                p[0]
    assert changed > 3  # else the rule would not be tested


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_rules_see_the_path_above_a_node(temperature: float) -> None:
    """At every node of a tree p is what it is after the node's own text."""
    tree = TokenTree((5, 6, 7, 5, 8), (-1, 0, 0, 1, 2))
    paths = [[5], [5, 6], [5, 7], [5, 6, 5], [5, 7, 8]]
    source, params = Source((5, 7, 4, 8, 9)), SamplingParams(temperature=temperature)
    fields = {"no_repeat_ngram_size": 1, "encoder_no_repeat_ngram_size": 2, "min_length": 4}
    for seed in range(12):
        logits = torch.randn(5, V, generator=torch.Generator().manual_seed(seed))
        sampler = sampler_of([START], source, params, **fields)
        p = TreeDistributions(logits, tree, sampler, output_ids=[5])
        for node, path in enumerate(paths):
            expected = generates(logits[node], [START, *path], 1, source, **fields)
            if temperature:
                dense = (expected / temperature).softmax(-1)
                torch.testing.assert_close(p[node].dense(V), dense)
            else:
                assert p[node].certain == int(expected.argmax())


def test_only_what_is_read_is_computed_under_rules() -> None:
    """Rules look at the whole text, so that reading p of every node would cost time."""
    tree, logits = TokenTree((5, 6), (-1, 0)), torch.randn(2, V)
    p = TreeDistributions(logits, tree, sampler_of([START], Source(), no_repeat_ngram_size=2), [5])
    assert not p.reached(0)
    assert p.prob(0, p[0].certain or 0) == 1
    assert p.reached(0)
    assert not p.reached(1)
    free = TreeDistributions(logits, tree, Sampler(GREEDY, V, [START]), [5])
    assert free.reached(1)


def test_the_requests_own_parameters_come_first() -> None:
    """Its repetition penalty replaces the model's; a forced token comes whatever is allowed."""
    logits = torch.ones(V)
    own = SamplingParams(repetition_penalty=4.0)
    sampler = sampler_of([START], Source(), own, repetition_penalty=2.0)
    assert sampler.shaped(logits, [])[START] == 0.25
    none = sampler_of([START], Source(), SamplingParams(), repetition_penalty=2.0)
    assert none.shaped(logits, [])[START] == 0.5
    neutral = SamplingParams(repetition_penalty=1.0)
    sampler = sampler_of([START], Source(), neutral, repetition_penalty=2.0)
    assert sampler.shaped(logits, [])[START] == 1.0
    allowed = SamplingParams(allowed_token_ids=[4, 5])
    sampler = sampler_of([START], Source(), allowed, forced_bos_token_id=6)
    assert sampler.distribution(logits, []).certain == 6
    assert set(sampler.distribution(logits, [6]).tokens.tolist()) == {4, 5}


def test_rules_without_effect_cost_nothing() -> None:
    for config in (None, config_of(), config_of(min_length=1, bad_words_ids=None)):
        assert DecodingRules.of(config, EOS, V).for_output([START], None, 5) is None
    given = DecodingRules.of(config_of(forced_bos_token_id=4), EOS, V)
    assert given.for_output([START, 4], None, 5) is None  # the prompt holds it already
    assert given.for_output([START], None, 5) is not None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"guidance_scale": 1.5}, "sets guidance_scale, which is not applied here"),
        ({"stop_strings": ["x"]}, "stop_strings"),
        ({"do_sample": True, "typical_p": 0.5}, "typical_p"),
        ({"sequence_bias": [[[4, V], 2.0]]}, "sequence_bias to token id 12"),
        ({"sequence_bias": [[[4], float("nan")]]}, "a wrong value of sequence_bias"),
        ({"no_repeat_ngram_size": "three"}, "a wrong value of no_repeat_ngram_size, three"),
        ({"repetition_penalty": 0.0}, "a wrong value of repetition_penalty, 0.0"),
        ({"forced_bos_token_id": V}, "forced_bos_token_id to token id 12, .* vocabulary"),
        ({"forced_eos_token_id": [2, V + 1]}, "forced_eos_token_id to token id 13"),
        ({"bad_words_ids": [[1], [1, V]]}, "bad_words_ids to token id 12"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CompatibilityError, match=message) as caught:
        DecodingRules.of(config_of(**fields), EOS, V)
    assert "\n" not in str(caught.value)


def test_a_form_cannot_begin_with_a_forced_token() -> None:
    params = SamplingParams(structured_outputs={"regex": "[0-9]+"})
    assert params.form is not None
    grammar = Grammars(tiny_tokenizer(), 96, [95]).compile(params.form)
    forced = DecodingRules(forced_bos_token_id=6)
    with pytest.raises(ConfigError, match="begins with token 6"):
        Sampler(params, 96, [1], [95], grammar, forced.for_output([1], None, 5))
    Sampler(params, 96, [1, 6], [95], grammar, forced.for_output([1, 6], None, 5))
