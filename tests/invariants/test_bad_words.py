"""Bad words belong to p: forbidden over each node's own path, with the bits of plain decoding."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    GenerationConfig,
    NoBadWordsLogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tests.matrix import ON_CHAINS, PROMPTS, SPECULATIVE, speculative_config, tiny_llm
from tests.tiny import tiny_model, tiny_tokenizer
from tokenleap import LLM, ConfigError, PromptError, RequestError, SamplingParams
from tokenleap.control import Budget
from tokenleap.core.sampler import BadWords, Sampler, TreeDistributions
from tokenleap.core.tree import Draft, TokenTree
from tokenleap.drafters.base import Drafter, DrafterTraits
from tokenleap.engine import jobs
from tokenleap.engine.jobs import JobSpec
from tokenleap.request import Request

V = 12
WORDS = [(5,), (7, 8), (6, 7, 8), (6, 6, 7), (9, 8), (11, 11)]
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=14, logprobs=2),
    "seeded": SamplingParams(temperature=1.1, top_p=0.9, seed=3, max_tokens=14, logprobs=2),
}
QUICK = ("ngram", "draft_model", "cascade", "eagle", "hybrid", "lookahead", "recycle", "medusa")
"""Every kind of drafter: lookups, models, heads, chains and trees."""


def sampler_of(params: SamplingParams) -> Sampler:
    marked = params.model_copy(update={"bad_words": ("any",)})
    return Sampler(marked, V, [1, 6, 7], bad_words=BadWords(WORDS))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_logits_are_those_of_transformers(temperature: float) -> None:
    """Bit by bit at every node of a tree, after the node's own path."""
    process: Any = NoBadWordsLogitsProcessor([list(word) for word in WORDS])
    tree = TokenTree((5, 6, 7, 6, 9, 7, 11), (-1, 0, 0, 1, 1, 3, 0))
    dice, changed = random.Random(1), 0
    for round in range(40):
        logits = 3 * torch.randn(7, V, generator=torch.Generator().manual_seed(round))
        output = dice.choices(range(5, V), k=dice.randrange(5))
        sampler = sampler_of(SamplingParams(temperature=temperature))
        p = TreeDistributions(logits, tree, sampler, output)
        for node in range(7):
            path = [*output, *tree.path_tokens(node)]
            ids = torch.tensor([path], dtype=torch.long)
            expected = process(ids, logits[node][None].clone())[0]
            assert torch.equal(sampler.shaped(logits[node], path), expected)
            changed += int(expected.argmax()) != int(logits[node].argmax())
            if temperature:
                dense = (expected / temperature).softmax(-1)
                assert torch.equal(p[node].dense(V), dense)
            else:
                assert p[node].certain == int(expected.argmax())
    assert changed > 20


def test_only_the_output_counts() -> None:
    """As in vLLM: a word that the prompt has begun may be completed."""
    logits = torch.zeros(V)
    sampler = sampler_of(SamplingParams())  # its prompt ends with 6, 7
    assert sampler.shaped(logits, [])[8] == 0
    assert sampler.shaped(logits, [7])[8] == -torch.inf


# Whole outputs


@cache
def model() -> PreTrainedModel:
    """One that the native runtime takes."""
    return tiny_model(num_attention_heads=2, num_key_value_heads=2, head_dim=32)


def llm_of(method: str, **fields: Any) -> LLM:
    llm = tiny_llm(model(), method, **fields)
    llm.engine._maker.tokenizer = tiny_tokenizer()
    return llm


@cache
def expected(name: str) -> tuple[list[str], Any]:
    """Words of one to three tokens that plain outputs have, and the plain outputs without them."""
    llm, params = llm_of("none"), PARAMS[name]
    words, places = [], ((2, 4), (1, 4), (5, 6))
    for (first, last), free in zip(places, llm.generate(PROMPTS, params), strict=False):
        words.append(free.text[first:last])
        assert words[-1].strip() == words[-1] != ""
    allowed = params.model_copy(update={"bad_words": tuple(words)})
    outputs = llm.generate(PROMPTS, allowed)
    assert not any(word in output.text for word in words for output in outputs)
    return words, [(output.token_ids, output.logprobs) for output in outputs]


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, marks=[] if method in QUICK else pytest.mark.slow)
        for method in SPECULATIVE
    ],
)
def test_every_drafter_has_the_bits_of_plain_decoding(method: str, name: str) -> None:
    words, plain = expected(name)
    params = PARAMS[name].model_copy(update={"bad_words": tuple(words)})
    llm = llm_of(method)
    outputs = llm.generate(PROMPTS, params)
    if llm.engine.target.exact_trees or method in ON_CHAINS:
        assert [(output.token_ids, output.logprobs) for output in outputs] == plain
    else:  # with PyTorch's operations, trees do not keep the last bit
        assert [output.token_ids for output in outputs] == [tokens for tokens, _ in plain]


class _Tempting(Drafter):
    """Drafts a forbidden word beside what is allowed, at every node of a tree."""

    traits = DrafterTraits(drafts_trees=True)

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def propose(self, batch: list[Request], budgets: list[Budget]) -> list[Draft]:  # type: ignore[override]
        a, b = self._tokens
        return [
            Draft.deterministic(TokenTree((r.root, a, b, b, a, 3), (-1, 0, 0, 1, 1, 3)))
            if budget.depth > 2
            else r.undrafted()
            for r, budget in zip(batch, budgets, strict=True)
        ]


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_a_drafted_word_is_not_accepted(name: str, rule: str) -> None:
    llm = tiny_llm(tiny_model("lean"))
    llm.engine._maker.tokenizer = tiny_tokenizer()
    bias = {65: 60.0, 66: 60.0}  # "a" and "b": the output is made of them
    params = PARAMS[name].model_copy(update={"logit_bias": bias})
    drafts = {**speculative_config("ngram", rule), "method": _Tempting([65, 66])}
    for field in set(drafts) - {"method", "acceptance", "controller", "num_speculative_tokens"}:
        del drafts[field]
    (free,) = llm.generate([[1]], params, speculative_config=drafts)
    assert "ab" in free.text
    assert free.metrics.num_accepted_tokens > 0
    banned = params.model_copy(update={"bad_words": ("ab",)})
    (plain,) = llm.generate([[1]], banned)
    (output,) = llm.generate([[1]], banned, speculative_config=drafts)
    for each in (plain, output):
        assert "ab" not in each.text
        assert set(each.text) <= {"a", "b"}
    if name == "greedy" or rule == "coupled":
        assert output.token_ids == plain.token_ids


def by_generate(words: list[str], prompt: list[int], **fields: Any) -> list[list[int]]:
    ids, encode = torch.tensor([prompt]), tiny_tokenizer().encode
    config: Any = GenerationConfig
    found = model().generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=config(
            max_new_tokens=14,
            do_sample=False,
            pad_token_id=0,
            bad_words_ids=[encode(word, add_special_tokens=False) for word in words],
            **fields,
        ),
    )
    return [each[len(prompt) :].tolist() for each in found]


def test_greedy_outputs_are_those_of_generate() -> None:
    words, plain = expected("greedy")
    for prompt, (tokens, _) in zip(PROMPTS, plain, strict=True):
        assert [list(tokens)] == by_generate(words, prompt)


def test_beams_are_those_of_generate() -> None:
    words, _ = expected("greedy")
    params = SamplingParams(temperature=0, max_tokens=14, beam_width=3, bad_words=words)
    for prompt in PROMPTS[:2]:
        (result,) = llm_of("none").generate([prompt], params)
        found = [list(beam.token_ids) for beam in result.outputs[0].beams]
        assert found == by_generate(words, prompt, num_beams=3, num_return_sequences=3)


# Words


def spaced_tokenizer() -> PreTrainedTokenizerFast:
    """Knows 'Ġab' and 'ab' as tokens of their own."""
    vocab = {"Ġ": 0, "a": 1, "b": 2, "Ġa": 3, "Ġab": 4, "ab": 5, "c": 6}
    model = BPE(vocab=vocab, merges=[("a", "b"), ("Ġ", "ab"), ("Ġ", "a")])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("word", "output", "forbidden"),
    [
        ("ab", [], {4, 5}),
        (" ab", [], {4, 5}),
        ("abc", [], set()),
        ("abc", [5], {6}),
        ("abc", [4], {6}),
        ("abc", [3], set()),
        ("ca", [6], {1}),
    ],
)
def test_a_word_is_forbidden_with_and_without_a_space(
    word: str, output: list[int], forbidden: set[int]
) -> None:
    llm = LLM(tiny_model(), tokenizer=spaced_tokenizer())
    (request,) = llm.engine.make_requests(JobSpec([1], SamplingParams(bad_words=[word])))
    shaped = request.sampler.shaped(torch.zeros(96), output)
    assert set((shaped == -torch.inf).nonzero()[:, 0].tolist()) == forbidden


def test_the_words_of_several_prompts_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[str]()
    llm = LLM(tiny_model(), tokenizer=tiny_tokenizer())

    def tokens(_: Any, text: str, **__: Any) -> list[int]:
        read.append(text)
        return [5, 6]

    monkeypatch.setattr(jobs, "tokens_of", tokens)
    llm.generate([[1], [2], [3]], SamplingParams(bad_words=["ab"], max_tokens=2, n=2))
    assert read == ["ab", " ab"]


def test_errors() -> None:
    for words in ([""], ["a", " "]):
        with pytest.raises(ConfigError, match="bad_words: a bad word cannot be empty"):
            SamplingParams(bad_words=words)
    with pytest.raises(ConfigError, match="bad_words: "):
        SamplingParams(bad_words="ab")
    assert SamplingParams(bad_words=None) == SamplingParams()
    llm = tiny_llm(tiny_model())
    with pytest.raises(ConfigError, match="bad_words: words need a tokenizer"):
        llm.generate([[1]], SamplingParams(bad_words=["a"]))
    llm.engine._maker.tokenizer = tiny_tokenizer()
    with pytest.raises(PromptError, match="bad_words: half of a character"):
        llm.generate([[1]], SamplingParams(bad_words=["\ud800"]))
    every = [chr(code) for code in range(33, 127)]
    params = SamplingParams(bad_words=every, allowed_token_ids=[1, 2, 3])
    with pytest.raises(RequestError, match="no token that can be drawn"):
        llm.generate([[1]], params)
