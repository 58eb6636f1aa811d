"""Encoder-decoders in the engine: a source is read once, and outputs are those of generate()."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import NllbTokenizer, PreTrainedModel

from tests.engine.serving import assert_empty, bits, run, run_all
from tests.tiny import tiny_model, tiny_tokenizer
from tests.tiny_seq2seq import (
    BINS,
    CONTEXT,
    FRAMES,
    SEQ2SEQ,
    SOURCE_LIMIT,
    TEXT,
    reference_outputs,
    tiny_seq2seq,
    tiny_source,
)
from tokenleap import LLM, SamplingParams
from tokenleap.core.references import Source
from tokenleap.engine.jobs import JobSpec
from tokenleap.engine.prompts import languages
from tokenleap.errors import CompatibilityError, PromptError, RequestError, TokenleapError
from tokenleap.models.audio import AudioReader
from tokenleap.runtime.attention import KEY_BLOCK
from tokenleap.runtime.network import SourceNetwork

MAX_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=1)
SAMPLED = SamplingParams(temperature=0.9, seed=3, max_tokens=MAX_TOKENS, logprobs=1)
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "controller": "fixed"}
SOURCES = [list(tiny_source(length=length, seed=length).tokens) for length in (3, 9, 40, 150, 9, 1)]
SOURCES[4] = SOURCES[1]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_seq2seq("bart", eos_bias=2.0)


@pytest.fixture(scope="module")
def llm(model: PreTrainedModel) -> LLM:
    return LLM(model, tokenizer=tiny_tokenizer())


def encoded(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[Source]:
    """The sources that the encoder reads from now on."""
    network = llm.engine.target.source_network
    assert isinstance(network, SourceNetwork)
    sources: list[Source] = []
    encode = network.encode

    def counting(source: Source) -> Any:
        sources.append(source)
        return encode(source)

    monkeypatch.setattr(network, "encode", counting)
    return sources


def sound(seed: int, length: int = FRAMES * 160) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).uniform(-1, 1, length).astype(np.float32)


# Outputs


@pytest.mark.parametrize("name", TEXT)
def test_greedy_outputs_are_those_of_generate(name: str) -> None:
    model = tiny_seq2seq(name, eos_bias=3.0)
    llm = LLM(model)
    sources = [tiny_source(name, length, seed=length) for length in (4, 11, 140)]
    outputs = llm.generate([source.tokens for source in sources], GREEDY)
    expected = [reference_outputs(model, source, MAX_TOKENS) for source in sources]
    assert [list(output.token_ids) for output in outputs] == expected
    assert len({output.token_ids for output in outputs}) > 1  # sources matter
    assert_empty(llm)


@pytest.mark.parametrize("decoder", [[3], [3, 7, 9]])
def test_whisper_hears(decoder: list[int]) -> None:
    model = tiny_seq2seq("whisper")
    llm = LLM(model)
    reader = AudioReader(None, BINS, FRAMES)
    for samples in (sound(1), sound(2, 3000)):
        source = Source.of_audio(reader.features(samples))
        start = torch.tensor([decoder])
        expected = reference_outputs(model, source, MAX_TOKENS, decoder_input_ids=start)
        (output,) = llm.generate({"audio": samples, "decoder_prompt": decoder}, GREEDY)
        assert list(output.token_ids) == expected
        assert output.prompt_token_ids == tuple(decoder)
        assert output.metrics.source_tokens == FRAMES
        for given in ((samples, 16_000), samples.tolist()):
            (request,) = llm.engine.make_requests(JobSpec({"audio": given}, GREEDY))
            assert request.source == source
            assert request.prompt_ids == (3,)


def test_batches_do_not_show(model: PreTrainedModel, llm: LLM) -> None:
    """Sources of different lengths, few rows, and requests that come and go."""
    alone = [bits(llm.generate([source], SAMPLED)[0]) for source in SOURCES]
    assert [bits(output) for output in llm.generate(SOURCES, SAMPLED)] == alone
    few = LLM(
        model,
        tokenizer=tiny_tokenizer(),
        max_num_seqs=2,
        max_num_batched_tokens=5,
        speculative_config=NGRAM,
    )
    assert [bits(output) for output in few.generate(SOURCES, SAMPLED)] == alone
    engine = few.engine
    ids = [engine.add_request(source, SAMPLED) for source in SOURCES[:3]]
    chunks = [chunk for _ in range(4) for chunk in engine.step()]
    ids += [engine.add_request(source, SAMPLED) for source in SOURCES[3:]]
    outputs = {c.request_id: c.output for c in chunks if c.output is not None} | run(engine)
    assert [bits(outputs[request_id]) for request_id in ids] == alone
    assert_empty(few)


def test_streams(llm: LLM) -> None:
    (expected,) = llm.generate("a source", GREEDY)
    chunks = list(llm.stream("a source", GREEDY))
    assert tuple(t.token_id for chunk in chunks for t in chunk.tokens) == expected.token_ids
    assert "".join(chunk.text for chunk in chunks) == expected.text
    stream = llm.stream(SOURCES[2], SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    stream.close()
    assert_empty(llm)


@pytest.mark.parametrize("caching", [True, False])
def test_preemption_does_not_show(caching: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_seq2seq("bart", max_position_embeddings=2 * KEY_BLOCK)
    params = SAMPLED.model_copy(update={"max_tokens": 36, "ignore_eos": True})
    prompts = [{"encoder_prompt": s, "decoder_prompt": [7] * 480} for s in SOURCES[:2]]
    plain = LLM(model)
    alone = [bits(plain.generate(prompt, params)[0]) for prompt in prompts]
    target = plain.engine.target
    # There is room for both sources and for a key block of each, but not for their second blocks.
    states = sum(target.state_bytes(Source(tuple(source))) for source in SOURCES[:2])
    limit = (2 * KEY_BLOCK + 1) * target.cell_bytes + states
    llm = LLM(model, kv_cache_memory=limit, enable_prefix_caching=caching)
    read = encoded(llm, monkeypatch)
    outputs = llm.generate(prompts, params)
    assert [bits(output) for output in outputs] == alone
    preemptions = [output.metrics.preemptions for output in outputs]
    assert preemptions == [0, 1]
    assert len(read) == (2 if caching else 3)
    assert_empty(llm)


def test_sources_wait_until_there_is_memory(model: PreTrainedModel) -> None:
    target = LLM(model).engine.target
    sources = [list(tiny_source(length=200, seed=seed).tokens) for seed in range(4)]
    state = target.state_bytes(Source(tuple(sources[0])))
    limit = 4 * KEY_BLOCK * target.cell_bytes + 2 * state
    llm = LLM(model, kv_cache_memory=limit)
    outputs = llm.generate(sources, GREEDY)
    assert [o.metrics.preemptions for o in outputs] == [0] * 4
    expected = LLM(model).generate(sources, GREEDY)
    assert [bits(output) for output in outputs] == [bits(output) for output in expected]


# The encoder


def test_the_encoder_runs_once_a_request(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(model, enable_prefix_caching=False, speculative_config=NGRAM)
    read = encoded(llm, monkeypatch)
    outputs = llm.generate(SOURCES[:4], GREEDY)
    assert [list(source.tokens) for source in read] == SOURCES[:4]
    assert [output.metrics.source_tokens for output in outputs] == [3, 9, 40, 150]
    for metrics in (output.metrics for output in outputs):
        assert metrics.prompt_tokens == 1
        assert 0 < metrics.encode_seconds <= metrics.prefill_seconds < metrics.seconds
        assert metrics.cached_source_tokens == 0
    llm.generate(SOURCES[0], GREEDY)
    assert len(read) == 5  # nothing is kept


def test_samples_and_repeated_sources_share_it(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SAMPLED.model_copy(update={"n": 3})
    for caching in (True, False):
        llm = LLM(model, enable_prefix_caching=caching)
        read = encoded(llm, monkeypatch)
        (output,) = llm.generate(SOURCES[1], params)
        assert len(read) == 1
        assert len({each.token_ids for each in output.outputs}) == 3
        (again,) = llm.generate(SOURCES[1], params)
        assert [bits(each) for each in again.outputs] == [bits(each) for each in output.outputs]
        assert len(read) == (1 if caching else 2)
        assert again.metrics.cached_source_tokens == (len(SOURCES[1]) if caching else 0)
        assert_empty(llm)


def test_a_failing_encoder_ends_its_request_alone(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(model)
    expected = bits(llm.generate([SOURCES[0]], GREEDY)[0])
    network: Any = llm.engine.target.source_network
    encode = network.encode

    def failing(source: Source) -> Any:
        if len(source) == 9:
            raise OSError("no disk")
        return encode(source)

    monkeypatch.setattr(network, "encode", failing)
    with pytest.raises(RequestError, match="OSError: no disk") as caught:
        llm.generate(SOURCES[:2], GREEDY)
    good, bad = caught.value.outputs
    assert bits(good) == expected
    assert bad.finish_reason == "error"
    assert not bad.token_ids
    assert_empty(llm)


def test_an_aborted_request_that_never_read(llm: LLM) -> None:
    request_id = llm.engine.add_request(SOURCES[0], GREEDY)
    llm.engine.abort(request_id)
    assert not run_all(llm.engine)
    assert_empty(llm)


# Prompts


def test_forms_of_prompts(llm: LLM) -> None:
    text = "a b"
    ids = llm.encode(text)
    assert ids == tiny_tokenizer()(text).input_ids
    forms: list[Any] = [
        text,
        ids,
        {"prompt": text},
        {"prompt_token_ids": ids},
        {"encoder_prompt": text},
        {"encoder_prompt": ids, "decoder_prompt": None},
        {"encoder_prompt": {"prompt_token_ids": ids}, "decoder_prompt": []},
        {"encoder_prompt": {"prompt": text}, "decoder_prompt": [2]},
        {"encoder_prompt": text, "decoder_prompt": {"prompt_token_ids": [2]}},
    ]
    outputs = llm.generate(forms, GREEDY)
    assert len({output.token_ids for output in outputs}) == 1
    for form, output in zip(forms, outputs, strict=True):
        assert output.prompt_token_ids == (2,)
        assert output.encoder_prompt_token_ids == tuple(ids)
        assert output.encoder_prompt == (text if text in str(form) else None)
        assert output.prompt is None
    assert llm.generate(forms[4], GREEDY)[0].token_ids == outputs[0].token_ids


def test_the_output_continues_a_decoder_prompt(model: PreTrainedModel, llm: LLM) -> None:
    source = tiny_source()
    ids = llm.encode("yes")
    start = torch.tensor([[2, *ids]])
    expected = reference_outputs(model, source, MAX_TOKENS, decoder_input_ids=start)
    for decoder in ("yes", ids, [2, *ids], {"prompt": "yes"}):
        prompt = {"encoder_prompt": source.tokens, "decoder_prompt": decoder}
        (output,) = llm.generate(prompt, GREEDY)
        assert output.prompt_token_ids == (2, *ids)
        assert [*ids, *output.token_ids] == expected
        assert output.prompt == ("yes" if "yes" in str(decoder) else None)


@pytest.mark.parametrize("start", [2, 9], ids=["NLLB", "mBART"])
def test_languages(start: int) -> None:
    words = ["<s>", "<pad>", "</s>", "<unk>", "a", "b", "▁"]
    tokenizer: Any = NllbTokenizer(
        vocab={word: number for number, word in enumerate(words)},
        merges=[],
        src_lang="eng_Latn",
        extra_special_tokens=["eng_Latn", "deu_Latn"],
    )
    assert languages(tokenizer) == {"eng_Latn": 8, "deu_Latn": 9}
    assert languages(tiny_tokenizer()) == {}
    english, german = languages(tokenizer).values()
    llm = LLM(tiny_seq2seq("m2m_100", decoder_start_token_id=start), tokenizer=tokenizer)

    def read(**fields: Any) -> tuple[int, tuple[int, ...]]:
        (request,) = llm.engine.make_requests(JobSpec({"prompt": "ab", **fields}, GREEDY))
        assert request.source is not None
        return request.source.tokens[0], request.prompt_ids

    first = () if start == german else (2,)
    assert read() == (english, (start,))
    assert read(source_language="deu_Latn") == (german, (start,))
    assert read() == (english, (start,))  # the tokenizer has its own language again
    assert read(target_language="eng_Latn") == (english, (*first, english))
    assert read(target_language="eng_Latn", decoder_prompt=[4]) == (english, (*first, english, 4))
    with pytest.raises(PromptError, match=r"'eng' is unknown to this tok.*mean 'eng_Latn'"):
        read(target_language="eng")
    with pytest.raises(PromptError, match="source_language: the language 8 is unknown"):
        read(source_language=8)


# Bad input


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the source is empty"),
        (" \n", "the source is empty"),
        ([], "the source is empty"),
        ({"encoder_prompt": []}, "the source is empty"),
        ([5] * (SOURCE_LIMIT + 1), f"has {SOURCE_LIMIT + 1} tokens and the encoder takes"),
        ([5, 96], r"token id 96 of the source is outside the vocabulary \(0 to 95\)"),
        ([5, -1], "token id -1 of the source"),
        ({"encoder_prompt": [5], "decoder_prompt": [96]}, r"token id 96 is outside the vocabulary"),
        ({"encoder_prompt": [5], "decoder_prompt": [5] * CONTEXT}, "leaves no room in the context"),
        ({"encoder_prompt": [5], "decoder_prompt": 7}, "a prompt is text, a list of token ids"),
        ({"encoder_prompt": {5}}, "a prompt is text, a list of token ids"),
        ({"encoder_promt": [5]}, "no 'encoder_promt': did you mean 'encoder_prompt'"),
        ({"encoder_prompt": {"audio": 1, "x": 2}}, "no 'x'"),
        ({"decoder_prompt": [5]}, "one has none"),
        ({"prompt": "a", "prompt_token_ids": [5]}, "one has prompt and prompt_token_ids"),
        ({"prompt": [5]}, "token ids are 'prompt_token_ids'"),
        ({"prompt_token_ids": "a"}, "a prompt is text, a list of token ids"),
        ({"audio": [0.1]}, "this model reads text, not audio"),
        ({"prompt": "a", "source_language": "de"}, "source_language: this tokenizer has no tokens"),
        ({"prompt": "a", "target_language": "de"}, "target_language: this tokenizer has no tokens"),
        ({"encoder_prompt": [5], "source_language": "de"}, "this source is no text"),
        ([{"role": "user", "content": "a"}], "has no chat template"),
    ],
)
def test_bad_prompts(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message) as caught:
        llm.generate([prompt], GREEDY)
    assert "\n" not in str(caught.value)
    assert_empty(llm)


@pytest.mark.parametrize(
    ("audio", "message"),
    [
        ([], "the audio is empty"),
        (sound(1, FRAMES * 160 + 1), "takes 0.4 s and the encoder reads 0.4 s: cut it"),
        ((sound(1), 44_100), "takes 16000 samples per second, got 44100: resample it"),
        (np.zeros((2, 100)), "got 2 dimensions"),
        ([0.1, float("nan")], "not finite"),
        ("a.wav", "expected an array of samples"),
        (np.array([3, -400], np.int16), "got integers: divide 16-bit ones by 32768"),
    ],
)
def test_bad_audio(audio: Any, message: str) -> None:
    llm = WHISPER[0] if WHISPER else LLM(tiny_seq2seq("whisper"))
    WHISPER[:] = [llm]
    for prompt, expected in (({"audio": audio}, message), ([5], 'pass {"audio": samples}')):
        with pytest.raises(PromptError, match=expected):
            llm.generate([prompt], GREEDY)


WHISPER: list[LLM] = []


def no_room(model: PreTrainedModel) -> None:
    least = 512 * LLM(model).engine.target.cell_bytes
    llm = LLM(model, kv_cache_memory=least + 3000)
    llm.generate([5, 6], GREEDY)


def both_kinds(target: PreTrainedModel) -> None:
    LLM(target, speculative_config={"method": "draft_model", "model": tiny_model()})


def other_vocabulary(target: PreTrainedModel) -> None:
    draft = tiny_seq2seq(vocab_size=97)
    LLM(target, speculative_config={"method": "draft_model", "model": draft})


def reverse(target: PreTrainedModel) -> None:
    LLM(tiny_model(), speculative_config={"method": "draft_model", "model": target})


def no_encoder(_: PreTrainedModel) -> None:
    LLM(tiny_model()).generate({"encoder_prompt": [5]})


def no_start(_: PreTrainedModel) -> None:
    LLM(tiny_seq2seq(decoder_start_token_id=None, bos_token_id=None))


@pytest.mark.parametrize(
    ("act", "kind", "message"),
    [
        (no_room, PromptError, "kv_cache_memory has no room for a source of 2 tokens"),
        (both_kinds, CompatibilityError, "is a decoder-only model and the target is an encoder-d"),
        (reverse, CompatibilityError, "is an encoder-decoder and the target is a decoder-only"),
        (
            other_vocabulary,
            CompatibilityError,
            "a vocabulary of 97 tokens and the target",
        ),
        (
            no_encoder,
            PromptError,
            "this model has no encoder: a prompt is text, a list of token ids",
        ),
        (no_start, CompatibilityError, "has no decoder_start_token_id: set it in generation_con"),
    ],
)
def test_what_does_not_fit(
    model: PreTrainedModel,
    act: Callable[[PreTrainedModel], None],
    kind: type[TokenleapError],
    message: str,
) -> None:
    with pytest.raises(kind, match=message):
        act(model)


def test_all_kinds_are_covered() -> None:
    assert {*TEXT, "whisper"} == set(SEQ2SEQ)
