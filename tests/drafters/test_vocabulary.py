"""Draft models with other tokens than the target's: what is drafted, and that it stays lossless."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import WordPiece as WordPieceDecoder
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.drafting import draft_of, drafter_of, tokens_of
from tests.invariants.test_statistics import p_value
from tests.tiny import CONTEXT, tiny_model
from tests.vocabularies import END, OTHER_TEXT, TEXT, bpe, permuted, small, words
from tokenleap import (
    LLM,
    CompatibilityError,
    ConfigError,
    SamplingParams,
    SpeculativeConfig,
    TokenleapError,
)
from tokenleap.core.sampler import Sampler
from tokenleap.core.tree import Draft, chain
from tokenleap.drafters.base import VocabularyOverlap
from tokenleap.drafters.model_drafter import ModelDrafter
from tokenleap.drafters.models import OwnModel
from tokenleap.drafters.vocabulary import (
    INCOMPLETE,
    LONGEST_PIECE,
    Script,
    Splitter,
    TextDrafter,
    Translator,
)
from tokenleap.llm import Prompt
from tokenleap.request import Request

TARGET = bpe()
DRAFT = bpe(OTHER_TEXT, 80)
ALL_BYTES = "".join(map(chr, [*range(33, 127), *range(161, 173), *range(174, 256)])) + "".join(
    map(chr, range(256, 324))
)
PROMPT = "the cat sat on the water"
GREEDY = SamplingParams(temperature=0, max_tokens=24)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=5, max_tokens=24, presence_penalty=0.3)
WAYS = ("intersection", "text")


def model_for(tokenizer: PreTrainedTokenizerBase, seed: int = 0, **fields: Any) -> PreTrainedModel:
    return tiny_model(seed=seed, vocab_size=len(tokenizer.get_vocab()), **fields)


def llm_for(
    target: PreTrainedTokenizerBase = TARGET,
    draft: PreTrainedTokenizerBase = DRAFT,
    rule: str = "coupled",
    **fields: Any,
) -> LLM:
    """A tiny target with a tiny draft model of another seed."""
    config = {
        "model": model_for(draft, seed=1),
        "draft_tokenizer": draft,
        "acceptance": rule,
        "controller": "fixed",
        "num_speculative_tokens": 4,
        **fields,
    }
    return LLM(model_for(target), tokenizer=target, speculative_config=config)


def request_of(tokens: list[int], params: SamplingParams = GREEDY, size: int = 0) -> Request:
    size = size or len(TARGET.get_vocab())
    return Request(tokens, params, vocab_size=size, max_model_len=CONTEXT)


def translator_of(llm: LLM) -> Translator:
    drafter = drafter_of(llm)
    if isinstance(drafter, TextDrafter):
        return drafter._translator
    assert isinstance(drafter, ModelDrafter)
    translator: Translator = drafter._scorer._translator  # type: ignore[attr-defined]
    return translator


# Which way


def test_auto_takes_the_closest_way_there_is() -> None:
    same = llm_for(TARGET, TARGET).vocabulary_overlap
    size = len(TARGET.get_vocab())
    assert same == VocabularyOverlap("same", size, size, size)
    half = llm_for(TARGET, DRAFT).vocabulary_overlap
    shared = len(set(TARGET.get_vocab()) & set(DRAFT.get_vocab()))
    assert half == VocabularyOverlap("intersection", shared, size, len(DRAFT.get_vocab()))
    assert str(half).startswith(f"{shared} of the target's {size} tokens")
    none = llm_for(TARGET, words("the cat sat")).vocabulary_overlap
    assert none == VocabularyOverlap("text", 0, size, 4)
    few = small("abc")
    assert llm_for(TARGET, few).vocabulary_overlap == VocabularyOverlap("text", 3, size, 3)
    assert LLM(model_for(TARGET), tokenizer=TARGET).vocabulary_overlap is None


@pytest.mark.parametrize(
    ("draft", "fields", "message"),
    [
        (DRAFT, {"vocabulary": "same"}, "set vocabulary to 'intersection' or 'text'"),
        (words("the cat"), {"vocabulary": "intersection"}, "no token in common"),
        (words("the cat"), {"tree": [2, 1]}, "tree: with vocabulary 'text' drafts are greedy"),
        (DRAFT, {"vocabulary": "text", "tree": [2]}, "tree: with vocabulary 'text'"),
        (DRAFT, {"vocabulary": "text", "expansion": "top_k"}, "expansion: with vocabulary"),
        (DRAFT, {"vocabulary": "text", "draft_temperature": 1}, "draft_temperature: with"),
        (DRAFT, {"vocabulary": "token"}, "vocabulary: input should be 'auto', 'same'"),
        (DRAFT, {"draft_tokenizer": 3}, "draft_tokenizer: "),
        (DRAFT, {"draft_tokenizer": None}, "give draft_tokenizer=..., or use a draft model"),
        (DRAFT, {"draft_tokenizer": "no-such-model"}, "no model 'no-such-model'"),
        (DRAFT, {"draft_tokenizer": ""}, "no model ''"),
    ],
)
def test_what_cannot_be(
    draft: PreTrainedTokenizerBase, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(TokenleapError) as caught:
        llm_for(TARGET, draft, **fields)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no tokenizer in"):
        llm_for(draft_tokenizer=str(tmp_path))
    DRAFT.save_pretrained(tmp_path)
    overlap = llm_for(draft_tokenizer=tmp_path).vocabulary_overlap
    assert overlap == llm_for().vocabulary_overlap


def test_the_target_has_no_tokenizer() -> None:
    config = {"model": model_for(DRAFT), "draft_tokenizer": DRAFT}
    with pytest.raises(CompatibilityError, match=r"give LLM\(tokenizer=\.\.\.\)"):
        LLM(model_for(TARGET), speculative_config=config)


def test_a_tokenizer_in_json_is_its_class_name() -> None:
    config = SpeculativeConfig.parse({"model": "x", "draft_tokenizer": DRAFT}).as_dict()
    assert config["draft_tokenizer"] == type(DRAFT).__name__
    assert config["vocabulary"] == "auto"


def test_special_tokens_are_shared_only_if_both_have_them() -> None:
    plain, ending = bpe(), bpe(eos_token=END)
    size = len(plain.get_vocab())
    both = llm_for(ending, bpe(OTHER_TEXT, 80, eos_token=END), vocabulary="intersection")
    one = llm_for(ending, DRAFT, vocabulary="intersection")
    named = bpe()
    named.add_tokens([END])  # the same text, but an ordinary token
    ordinary = llm_for(ending, named, vocabulary="intersection")
    end = ending.get_vocab()[END]
    assert end == size
    assert translator_of(both)._to_draft[end] == len(DRAFT.get_vocab())
    assert translator_of(one)._to_draft[end] == -1
    assert translator_of(ordinary)._to_draft[end] == -1
    assert translator_of(ordinary)._to_draft[:size] == list(range(size))


def test_the_same_name_for_another_text_is_not_shared() -> None:
    """In a byte-level vocabulary these letters are a space and a byte, elsewhere letters."""
    target, draft = bpe(alphabet=ALL_BYTES, vocab_size=300), small("ab\u0120\u00e9")
    table = translator_of(llm_for(target, draft, vocabulary="intersection"))._to_draft
    ids = target.get_vocab()
    assert [table[ids[name]] for name in "ab\u0120\u00e9"] == [0, 1, -1, -1]


# Lossless


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_the_output_is_that_of_none(way: str, params: SamplingParams) -> None:
    prompts: list[Prompt] = [PROMPT, "a", "where they were going, over and over", [7, 1, 33]]
    plain = LLM(model_for(TARGET), tokenizer=TARGET).generate(prompts, params)
    outputs = llm_for(vocabulary=way).generate(prompts, params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert sum(o.metrics.num_draft_tokens for o in outputs) > 20


@pytest.mark.parametrize("way", WAYS)
def test_inside_an_ensemble(way: str) -> None:
    """Where drafts are merged with others', and it is the ensemble's model that is reported."""
    model = {"model": model_for(DRAFT, seed=1), "draft_tokenizer": DRAFT, "vocabulary": way}
    config = {
        "method": "ensemble",
        "controller": "fixed",
        "drafters": [{"method": "draft_model", **model}, {"method": "ngram_table"}],
    }
    llm = LLM(model_for(TARGET), tokenizer=TARGET, speculative_config=config)
    assert llm.vocabulary_overlap == llm_for(vocabulary=way).vocabulary_overlap
    plain = LLM(model_for(TARGET), tokenizer=TARGET).generate([PROMPT, "over"], SAMPLED)
    outputs = llm.generate([PROMPT, "over"], SAMPLED)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]


@pytest.mark.parametrize("tree", [[3, 2], "dynamic"])
def test_trees_of_shared_tokens(tree: Any) -> None:
    plain = LLM(model_for(TARGET), tokenizer=TARGET).generate([PROMPT], GREEDY)[0]
    llm = llm_for(tree=tree, num_speculative_tokens=None)
    output = llm.generate([PROMPT], GREEDY)[0]
    assert output.token_ids == plain.token_ids
    assert output.metrics.num_draft_tokens > 50


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_the_same_tokens_in_another_order(rule: str) -> None:
    """Then q is p in other words, so that every draft is accepted."""
    letters = "abcdefghijklmnopqrstuvwxyz ."
    order = random.Random(0).sample(range(len(letters)), len(letters))
    target, draft = small(letters), small("".join(letters[i] for i in order))
    model = permuted(model_for(target), order)
    for way in WAYS:
        llm = llm_for(target, draft, rule, model=model, vocabulary=way)
        sampled = SamplingParams(temperature=1.0, top_k=9, seed=3, max_tokens=25)
        for params in (GREEDY, sampled) if way == "intersection" else (GREEDY,):
            metrics = llm.generate(["the cat"], params)[0].metrics
            assert metrics.acceptance_rate == 1.0
            assert metrics.num_accepted_tokens >= 18


def test_q_is_the_restricted_distribution() -> None:
    """As computed from the draft model's own logits, at every depth."""
    llm = llm_for(rule="rejection")
    request = request_of(TARGET.encode(PROMPT), SAMPLED)
    drafter = drafter_of(llm)
    draft = draft_of(drafter, request, 4)
    assert draft.tree.num_drafted == 4
    translator, model = translator_of(llm), model_for(DRAFT, seed=1)
    read = translator.translate(request_of(TARGET.encode(PROMPT)))
    assert DRAFT.decode(read) == PROMPT
    assert isinstance(drafter, ModelDrafter)
    assert isinstance(drafter._scorer, OwnModel)
    assert drafter._scorer._cached[request.key] == read  # nothing is computed twice
    for depth in range(4):
        drafted = list(draft.tree.tokens[1 : 1 + depth])
        ids = torch.tensor([[*read, *(translator._to_draft[token] for token in drafted)]])
        with torch.inference_mode():
            logits = model(input_ids=ids).logits[0, -1]
        distribution = draft.q_of(depth + 1).dense(len(TARGET.get_vocab()))
        shared = torch.full((len(TARGET.get_vocab()),), -torch.inf)
        for token, own in enumerate(translator._to_draft):
            if own >= 0:
                shared[token] = logits[own]
        expected = request.sampler.distribution(shared, drafted).dense(len(shared))
        torch.testing.assert_close(distribution, expected)
        plain = Sampler(SamplingParams(), len(shared), []).distribution(shared, [])
        kept = [token for token, own in enumerate(translator._to_draft) if own >= 0]
        own_ids = [translator._to_draft[token] for token in kept]
        mass = logits.softmax(-1)[own_ids]
        torch.testing.assert_close(plain.dense(len(shared))[kept], mass / mass.sum())


VOCAB = "abcdef"
SAMPLES, LENGTH = 400, 2
ALARM = 1e-6


@pytest.mark.parametrize("way", WAYS)
def test_output_distribution(way: str) -> None:
    """Counts over fixed seeds against the exact distribution, by a chi-square test.

    If the distribution holds, both cases together fail with probability below `ALARM`.
    """
    target, draft = small(VOCAB), small("xfabcy")
    prompt = target.encode("abcabdab")
    model = tiny_model(vocab_size=6, initializer_range=0.12)
    config = {
        "model": tiny_model(seed=1, vocab_size=6, initializer_range=0.12),
        "draft_tokenizer": draft,
        "vocabulary": way,
        "acceptance": "rejection",
        "num_speculative_tokens": 2,
    }
    llm = LLM(model, tokenizer=target, speculative_config=config, max_num_seqs=64)
    overlap = llm.vocabulary_overlap
    assert overlap is not None
    assert overlap.shared == 4
    all_params = [SamplingParams(seed=seed, max_tokens=LENGTH + 2) for seed in range(SAMPLES)]
    outputs = llm.generate([prompt] * SAMPLES, all_params)
    drafted = sum(output.metrics.num_draft_tokens for output in outputs)
    assert drafted > SAMPLES / 2
    distribution = {}
    for output in product(range(6), repeat=LENGTH):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([[*prompt, *output]])).logits[0]
        probs = logits[len(prompt) - 1 :].softmax(-1)
        distribution[output] = float(probs[0, output[0]] * probs[1, output[1]])
    counts = Counter(output.token_ids[:LENGTH] for output in outputs)
    assert p_value(counts, distribution) > ALARM / len(WAYS)


# State


@pytest.mark.parametrize("way", WAYS)
def test_a_drafter_catches_up_from_the_committed_tokens(way: str) -> None:
    """Whatever tokens came, and also after some were taken back, a fresh one drafts the same."""
    dice = random.Random(0)
    target, draft = bpe(vocab_size=330, alphabet=ALL_BYTES), bpe(OTHER_TEXT, 60)
    used = llm_for(target, draft, vocabulary=way)
    size = len(target.get_vocab())
    drafted = 0
    request = request_of(target.encode(PROMPT), size=size)
    for step in range(12):
        ours = draft_of(drafter_of(used), request, 4)
        fresh = llm_for(target, draft, vocabulary=way) if step % 3 == 0 else used
        alike = request_of(list(request.token_ids), size=size)
        assert ours.tree == draft_of(drafter_of(fresh), alike, 4).tree
        drafted += ours.tree.num_drafted
        if step % 4 == 3:
            del request.token_ids[-3:]
        kept = list(ours.tree.tokens[1 : 1 + step % 3])
        text = dice.choice([" the", " na\u00efve", "ing", " \U0001f63b", " over"])
        request.token_ids += [*kept, *target.encode(text)]
    assert drafted > 10


def test_a_translation_does_not_depend_on_the_steps_it_came_in() -> None:
    """Nor does it lose or add anything: here the target has halves of characters as tokens."""
    dice = random.Random(1)
    chinese = "\u4e2d\u6587 \u4e2e\u6588 \u4e2f\u6589 \u4e30\u658a"
    target = bpe([*TEXT, chinese], vocab_size=330, alphabet=ALL_BYTES)
    draft = bpe(OTHER_TEXT, 300, alphabet=ALL_BYTES)
    translator = translator_of(llm_for(target, draft, vocabulary="intersection"))
    text = "the na\u00efve cat \U0001f63b sat: \u4e2d\u6587\u6587\u4e2d in there\n\n  and remains "
    tokens = target.encode(text * 3)
    halves = [t for t in tokens if len(target.convert_ids_to_tokens([t])[0]) > 1]
    assert any(INCOMPLETE in target.decode([token]) for token in halves)
    request = request_of(tokens[:1], size=400)
    for _ in range(600):
        end = dice.randrange(1, len(tokens) + 1)
        request.token_ids = tokens[:end]
        if spoilt := dice.random() < 0.5:
            request.token_ids = [*tokens[: end // 2], *dice.choices(tokens, k=3)]
        read = list(translator.translate(request))
        afresh = request_of(request.token_ids, size=400)
        assert translator.translate(afresh) == read
        if not spoilt:
            assert (text * 3).startswith(str(draft.decode(read)).rstrip(INCOMPLETE))
            assert read[-3:] != draft.encode(INCOMPLETE)
        translator.release(afresh)
    request.token_ids = tokens
    assert draft.decode(translator.translate(request)) == text * 3


def test_long_words_are_translated_in_parts() -> None:
    target, draft = bpe(), bpe(OTHER_TEXT, 60)
    translator = translator_of(llm_for(target, draft, vocabulary="text"))
    missing = [t for t, own in enumerate(translator._to_draft) if own < 0]
    tokens = [t for t in missing if str(target.decode([t])).isalpha()] * 30
    request = request_of(tokens)
    assert draft.decode(translator.translate(request)) == target.decode(tokens)
    pieces = translator._translations[request.key].pieces
    assert [start for start, _ in pieces] == list(range(0, len(tokens), LONGEST_PIECE))


def test_a_character_is_read_when_it_is_whole() -> None:
    target, draft = bpe(alphabet=ALL_BYTES, vocab_size=300), bpe(OTHER_TEXT, 60)
    draft.add_tokens(["\U0001f63b"])
    llm = llm_for(target, draft, vocabulary="text")
    translator = translator_of(llm)
    tokens = target.encode("cat \U0001f63b")
    request = request_of(tokens[:-3], size=300)
    for end in range(len(tokens) - 3, len(tokens)):
        request.token_ids = tokens[:end]
        assert str(draft.decode(translator.translate(request))).strip() == "cat"
        assert tokens_of(drafter_of(llm), request, 4) == []
    request.token_ids = tokens
    assert draft.decode(translator.translate(request)) == "cat \U0001f63b"


def test_words_of_another_kind_keep_their_spaces() -> None:
    """Across the two ways to write a space, and with words that the draft model does not know."""
    draft = words("the cat sat on mat matstone")
    translator = translator_of(llm_for(TARGET, draft))
    assert len(TARGET.encode(" matstone")) > 1
    read = translator.translate(request_of(TARGET.encode("the matstone sat and the cat")))
    assert draft.convert_ids_to_tokens(read) == [
        *("\u2581the", "\u2581matstone", "\u2581sat", "<unk>", "\u2581the", "\u2581cat")
    ]
    back = translator_of(llm_for(draft, TARGET))
    read = back.translate(request_of(draft.encode("the cat sat on the mat"), size=9))
    assert TARGET.decode(read) == "the cat sat on the mat"


def test_the_draft_model_gets_its_own_opening() -> None:
    draft = bpe(OTHER_TEXT, 80, bos_token="<s>")
    bos = draft.get_vocab()["<s>"]
    draft.backend_tokenizer.post_processor = TemplateProcessing("<s> $A", None, [("<s>", bos)])
    translator = translator_of(llm_for(TARGET, draft))
    read = translator.translate(request_of(TARGET.encode(PROMPT)))
    assert read[0] == bos
    assert draft.decode(read[1:]) == PROMPT
    # A target that has the same token says it itself.
    target = bpe(bos_token="<s>")
    read = translator_of(llm_for(target, draft)).translate(
        request_of([target.get_vocab()["<s>"], *target.encode(PROMPT)], size=100)
    )
    assert read.count(bos) == 1


@pytest.mark.parametrize("way", ["same", *WAYS])
def test_state_is_released(way: str) -> None:
    llm = llm_for(TARGET, TARGET if way == "same" else DRAFT, vocabulary=way)
    llm.generate([PROMPT, "a"], GREEDY)
    drafter = drafter_of(llm)
    writer = drafter._writer if isinstance(drafter, TextDrafter) else drafter
    assert isinstance(writer, ModelDrafter)
    scorer = writer._scorer
    assert isinstance(scorer, OwnModel)
    holders: list[object] = [drafter, scorer]
    if way != "same":
        holders.append(translator_of(llm))
    for holder in holders:
        for name, value in vars(holder).items():
            assert not isinstance(value, dict) or not value, name
    assert not scorer._model._keys


def test_nothing_shared_is_allowed() -> None:
    """Where the request allows only tokens that the draft model lacks, nothing is drafted."""
    llm = llm_for(tree=[2, 2], num_speculative_tokens=None)
    missing = [t for t, own in enumerate(translator_of(llm)._to_draft) if own < 0]
    for temperature in (0, 1):
        params = SamplingParams(
            temperature=temperature, seed=1, max_tokens=9, allowed_token_ids=missing
        )
        output = llm.generate([PROMPT], params)[0]
        assert set(output.token_ids) <= set(missing)
        assert output.metrics.num_draft_tokens == 0


def test_nothing_to_read() -> None:
    """A prompt of one byte of a character says nothing to the draft model."""
    target = bpe(alphabet=ALL_BYTES, vocab_size=300)
    byte = target.encode("\U0001f63b")[0]
    for way in WAYS:
        llm = llm_for(target, DRAFT, vocabulary=way)
        assert tokens_of(drafter_of(llm), request_of([byte], size=300), 4) == []


def test_the_context_of_the_draft_model_is_counted_in_its_tokens() -> None:
    """It needs more of them for the same text, and stops drafting where its context ends."""
    target, draft = bpe(), small("abcdefghijklmnopqrstuvwxyz ")
    model = model_for(draft, max_position_embeddings=40)
    for way in WAYS:
        llm = llm_for(target, draft, model=model, vocabulary=way)
        tokens = target.encode(PROMPT)
        assert len(tokens) < len(PROMPT) < 40
        for repeats in (1, 2):
            request = request_of(tokens * repeats)
            assert bool(tokens_of(drafter_of(llm), request, 4)) == (repeats == 1)


# Text


def test_text_continues_where_the_committed_tokens_end() -> None:
    drafter = drafter_of(llm_for(TARGET, words("cat mat")))
    assert isinstance(drafter, TextDrafter)
    split = drafter._splitter.split
    tokens = TARGET.encode("the cat sat on")
    assert split(tokens, " the mat") == TARGET.encode(" the mat")
    assert split(tokens, "") == []
    # The committed tokens are single letters, which splitting would join.
    letters = [TARGET.get_vocab()[letter] for letter in ("t", "h", "e")]
    assert TARGET.encode("the cat")[0] not in letters
    assert split([*tokens, *letters], " cat") == TARGET.encode(" cat")
    # A token that would reach across the end of what is committed cannot be drafted any more.
    assert len(TARGET.encode("the")) == 1
    assert split([*tokens, *letters[:2]], "e cat") == TARGET.encode("e cat")


def test_pieces_of_words_stay_pieces() -> None:
    """A tokenizer with a sign for the inside of words: the draft goes on inside the word."""
    names = ["[UNK]", ".", "u", "##n", "un", "##able", "able", "cat"]
    tokenizer = Tokenizer(WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.decoder = WordPieceDecoder()
    target = PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]
    splitter = Splitter(Script(target), Script(target).pieces(range(len(names))))
    split = [names.index(name) for name in ("cat", "u", "##n")]
    assert splitter.split(split, "able cat") == [names.index("##able"), names.index("cat")]


def test_text_is_drafted_in_whole_characters_up_to_the_end() -> None:
    draft = bpe(alphabet=ALL_BYTES, vocab_size=300, eos_token=END)
    drafter = drafter_of(llm_for(TARGET, draft, vocabulary="text"))
    assert isinstance(drafter, TextDrafter)

    def text_of(tokens: list[int]) -> str:
        return drafter._text(Draft.deterministic(chain([0, *tokens])))

    written = draft.encode("a cat \U0001f63b")
    assert text_of(written) == "a cat \U0001f63b"
    assert text_of(written[:-1]) == "a cat "
    assert text_of([*written, draft.get_vocab()[END], *written]) == "a cat \U0001f63b"


def test_tokens_that_the_target_has_no_logits_for_are_not_drafted() -> None:
    target = bpe()
    model = model_for(target)
    target.add_tokens(["<x>"])
    config = {"model": model_for(DRAFT), "draft_tokenizer": DRAFT, "vocabulary": "text"}
    drafter = drafter_of(LLM(model, tokenizer=target, speculative_config=config))
    assert isinstance(drafter, TextDrafter)
    request = request_of(target.encode(PROMPT))
    draft = drafter._draft(request, " the<x> cat", 9)
    assert list(draft.tree.tokens[1:]) == target.encode(" the")


def test_scripts_read_inside_a_text() -> None:
    for tokenizer in (TARGET, words("the cat sat"), small("abcehst ")):
        script = Script(tokenizer)
        tokens = script.encode("the cat sat")
        inside = script.decode_inside(tokens)
        assert inside.strip() == "the cat sat"
        assert script.encode_inside(inside) == tokens
        texts = script.pieces(tokens)
        assert "".join(texts) == inside


# Padding


@pytest.mark.parametrize("size", [96, 128])
@pytest.mark.parametrize("method", ["draft_model", "cascade"])
def test_vocabularies_that_differ_by_padding(tmp_path: Path, method: str, size: int) -> None:
    """The draft model has more or fewer logits than the target; the tokens are the same."""
    model = tiny_model(vocab_size=112)
    assert len(TARGET.get_vocab()) < 96
    permuted(model, [i % 112 for i in range(size)]).save_pretrained(tmp_path)
    TARGET.save_pretrained(tmp_path)
    inner = {"drafter": {"method": "ngram"}} if method == "cascade" else {}
    config = {"method": method, "model": tmp_path, "controller": "fixed", **inner}
    llm = LLM(model, tokenizer=TARGET, speculative_config=config)
    for params in (GREEDY, SAMPLED):
        prompts: list[Prompt] = [PROMPT, [111, 3, 105]]
        plain = LLM(model, tokenizer=TARGET).generate(prompts, params)
        outputs = llm.generate(prompts, params)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
        assert all(o.metrics.num_accepted_tokens > 0 for o in outputs)


def test_more_logits_than_the_target_has_are_cut() -> None:
    """The draft is that of the draft model without its padding, drawn from the same q."""
    draft = tiny_model(seed=1, vocab_size=len(TARGET.get_vocab()))
    size = len(TARGET.get_vocab())
    drafts = []
    for order in (range(size), [*range(size), 0, 1, 2]):
        llm = llm_for(TARGET, TARGET, model=permuted(draft, order), vocabulary="same")
        request = request_of(TARGET.encode(PROMPT), SAMPLED)
        drafts.append(draft_of(drafter_of(llm), request, 4))
    assert drafts[0].tree == drafts[1].tree
    assert drafts[0].tree.num_drafted == 4
    for ours, theirs in zip(drafts[0].q, drafts[1].q, strict=True):
        torch.testing.assert_close(ours.dense(size), theirs.dense(size))


def test_a_cascade_takes_no_other_tokens(tmp_path: Path) -> None:
    model_for(DRAFT).save_pretrained(tmp_path)
    DRAFT.save_pretrained(tmp_path)
    config = {"method": "cascade", "model": tmp_path, "drafter": {"method": "ngram"}}
    size = len(DRAFT.get_vocab())
    with pytest.raises(
        CompatibilityError, match=f"method 'cascade': the draft model has a vocabulary of {size}"
    ):
        LLM(model_for(TARGET), tokenizer=TARGET, speculative_config=config)


@pytest.mark.parametrize("vocabulary", ["intersection", "text"])
def test_beams_whose_tokens_the_draft_model_lacks(vocabulary: str) -> None:
    params = SamplingParams(temperature=0, beam_width=4, max_tokens=24, ignore_eos=True)
    (plain,) = LLM(model_for(TARGET), tokenizer=TARGET).generate([PROMPT], params)
    (output,) = llm_for(vocabulary=vocabulary).generate([PROMPT], params)
    assert output.token_ids == plain.token_ids
    assert output.metrics.drafter_failure is None
    assert output.metrics.num_drafts
