"""The face: prompts of every kind, endings of every kind, errors before any work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.core.test_detokenizer import TOKENIZER
from tests.matrix import PROMPTS, SPECULATIVE, tiny_llm
from tests.tiny import CONTEXT, VOCAB_SIZE, tiny_model, tiny_tokenizer
from tokenleap import LLM, ConfigError, ModelError, Origin, PromptError, SamplingParams
from tokenleap.engine.jobs import JobSpec
from tokenleap.llm import Prompt

GREEDY = SamplingParams(temperature=0, max_tokens=20)
BYTES = 256
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model(vocab_size=BYTES)


@pytest.fixture
def llm(model: PreTrainedModel) -> LLM:
    tokenizer = TOKENIZER.__class__(tokenizer_object=TOKENIZER.backend_tokenizer)
    tokenizer.chat_template = CHAT_TEMPLATE
    config = {"method": "ngram", "prompt_lookup_min": 1, "controller": "fixed"}
    return LLM(model, tokenizer=tokenizer, speculative_config=config)


def test_prompts_of_every_kind(llm: LLM) -> None:
    ids = llm.encode("hello")
    messages = [{"role": "user", "content": "hi"}]
    assert llm.generate("hello", GREEDY)[0].prompt_token_ids == tuple(ids)
    assert llm.generate(ids, GREEDY)[0].prompt_token_ids == tuple(ids)
    assert llm.generate([ids], GREEDY)[0].prompt is None
    assert llm.generate(["hello"], GREEDY)[0].prompt == "hello"
    assert llm.generate(messages, GREEDY)[0].prompt_token_ids == tuple(llm.encode("user: hi\n"))
    mixed: list[Any] = ["a", ids, messages]
    assert len(llm.generate(mixed, GREEDY)) == 3
    assert llm.generate([], GREEDY) == []
    (chat,) = llm.chat(messages, GREEDY)
    assert chat.token_ids == llm.generate("user: hi\n", GREEDY)[0].token_ids
    assert len(llm.chat([messages, messages], GREEDY)) == 2


def test_forms_that_others_take(llm: LLM) -> None:
    ids = llm.encode("hello")
    assert llm.generate({"prompt": "hello"}, GREEDY)[0].prompt_token_ids == tuple(ids)
    assert llm.generate([{"prompt_token_ids": ids}], GREEDY)[0].prompt_token_ids == tuple(ids)
    parts = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"text": "i"}]}]
    assert llm.chat(parts, GREEDY)[0].prompt_token_ids == tuple(llm.encode("user: hi\n"))
    params = {"temperature": 0, "max_tokens": 3}
    assert len(llm.generate("hello", params)[0].token_ids) == 3
    assert len(llm.generate(["a", "b"], [params, GREEDY])[0].token_ids) == 3
    assert sum(len(chunk.tokens) for chunk in llm.stream("hello", params)) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"max_tokens": 3},
            "`sampling_params`: use SamplingParams.max_tokens=...",
        ),
        ({"do_sample": True}, "do_sample in `sampling_params`: use 'temperature'"),
        ({"assistant_model": "x"}, "assistant_model in `speculative_config`: use 'model'"),
        ({"prompt_lookup_num_tokens": 3}, "in `speculative_config`: use method 'ngram'"),
        ({"use_cache": True}, "takes no argument 'use_cache'"),
        ({"input_ids": [[1]]}, "argument 'input_ids': give .* as its first argument"),
    ],
)
def test_generate_with_arguments_of_other_libraries(
    llm: LLM, arguments: dict[str, Any], message: str
) -> None:
    for call in (llm.generate, llm.stream):
        with pytest.raises(ConfigError, match=message):
            call("hello", **arguments)
    with pytest.raises(ConfigError, match=message):
        llm.chat([{"role": "user", "content": "hi"}], **arguments)


def test_a_call_without_prompts(llm: LLM) -> None:
    inputs: dict[str, Any] = {"input_ids": [[1]], "attention_mask": [[1]]}
    for call in (llm.generate, llm.stream, llm.chat):
        with pytest.raises(ConfigError, match="no argument 'input_ids': give "):
            call(**inputs)
        with pytest.raises(ConfigError, match=r"has no prompt: give .* as its first argument"):
            call()


def test_a_tokenizer_may_be_a_folder(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="tokenizer: there is none in"):
        LLM(model, tokenizer=tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    llm = LLM(model, tokenizer=tmp_path)
    assert llm.encode("hello") == list(TOKENIZER.encode("hello"))
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert LLM(model, tokenizer=f"~/{tmp_path.name}").tokenizer is not None
    for name in ("", "x" * 999):
        with pytest.raises(ModelError, match=f"no model '{name}'"):
            LLM(model, tokenizer=name)


def test_no_model_at_all() -> None:
    nothing: Any = None
    with pytest.raises(ConfigError, match=r"model: expected a folder.*, got NoneType"):
        LLM(nothing)
    draft: Any = {"method": "draft_model", "model": 5}
    with pytest.raises(ConfigError, match=r"model: expected a folder.*, got int"):
        LLM(tiny_model(), speculative_config=draft)


def test_text_is_the_decoded_tokens(llm: LLM) -> None:
    (output,) = llm.generate("hello", GREEDY)
    assert output.text == TOKENIZER.decode(list(output.token_ids))
    assert len(output.token_ids) == 20
    assert output.finish_reason == "length"


def test_one_params_per_prompt(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (1, 5, 9)]
    outputs = llm.generate(["a", "b", "c"], params)
    assert [len(o.token_ids) for o in outputs] == [1, 5, 9]
    with pytest.raises(ConfigError, match="3 given for 1 prompts"):
        llm.generate(["a"], params)


def test_defaults_are_vllms(llm: LLM) -> None:
    assert len(llm.generate("hello")[0].token_ids) == 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpu_memory_utilization": 0.9}, "use 'kv_cache_memory'"),
        ({"load_in_4bit": True}, "use quantization='int4'"),
        ({"torch_dtype": "float16"}, "use 'dtype'"),
        ({"speculative_model": "x"}, "it belongs in `speculative_config`: use 'model'"),
        ({"num_speculative_tokens": 3}, "write {'num_speculative_tokens': ...}"),
        ({"temperature": 0}, "give `SamplingParams` to generate()"),
        ({"max_model_length": 99}, "did you mean 'max_model_len'?"),
        ({"zzz": 1}, "known: batch_invariant, device, dtype, "),
    ],
)
def test_a_model_with_arguments_of_other_libraries(arguments: dict[str, Any], message: str) -> None:
    (name,) = arguments
    with pytest.raises(ConfigError, match=f"LLM.. takes no argument '{name}'") as caught:
        LLM("no such model", **arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([[]], "the prompt is empty"),
        ([BYTES], "token id 256 is outside the vocabulary (0 to 255)"),
        ([-1], "token id -1 is outside"),
        ([1] * CONTEXT, "leaves no room in the context of 256"),
        (3, "expected text or a list, got int"),
        (b"hi", "expected text or a list, got bytes: decode it first"),
        ([b"hi"], "a prompt is text, a list of token ids"),
        ("a\ud800", "prompt: half of a character at position 1 (a lone surrogate, U+D800)"),
        ([{"role": "user", "content": "\udc00"}], "a lone surrogate, U+DC00"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "of type 'image_url' is not text"),
        ({"prompt": [1]}, "prompt: expected text; token ids are 'prompt_token_ids'"),
        ({"messages": "hi"}, 'a conversation is a list of {"role": ..., "content": ...}'),
        ({"messages": [], "tool": 1}, "a prompt has no 'tool': did you mean 'tools'"),
        ({"input_ids": [1], "attention_mask": [1]}, "ids as {'prompt_token_ids': ids}"),
        ({"prompt": "a", "multi_modal_data": {}}, "this model takes text only"),
        (torch.tensor([1, 2]), "expected text or a list, got Tensor: call its tolist()"),
        ([3.5], "a prompt is text, a list of token ids, or a list of chat messages"),
        ([{"content": "no role"}], "a prompt is text"),
    ],
)
def test_bad_prompts(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(PromptError) as caught:
        llm.generate(prompt, GREEDY)
    assert message in str(caught.value)
    assert not llm.engine._scheduler.busy


def test_one_bad_prompt_among_good_ones_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(PromptError):
        llm.generate(["good", ""], GREEDY)
    assert not llm.engine._scheduler.busy
    assert not llm.engine.target._keys


def test_without_a_tokenizer(model: PreTrainedModel) -> None:
    llm = LLM(model)
    (output,) = llm.generate([[1, 2, 3]], GREEDY)
    assert output.text == ""
    assert len(output.token_ids) == 20
    with pytest.raises(PromptError, match="no tokenizer: pass token ids"):
        llm.generate("text")
    with pytest.raises(ConfigError, match="stop strings need a tokenizer"):
        llm.generate([1], SamplingParams(stop="x"))


def test_without_a_chat_template(model: PreTrainedModel) -> None:
    llm = LLM(model, tokenizer=TOKENIZER)
    with pytest.raises(PromptError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}])
    with pytest.raises(PromptError, match="a conversation is a list"):
        llm.chat(["hi"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [{"logit_bias": {BYTES: 1.0}}, {"allowed_token_ids": [999]}, {"stop_token_ids": [999]}],
)
def test_parameters_outside_the_vocabulary(llm: LLM, fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        llm.generate("x", SamplingParams(**fields))


def test_contradictory_parameters(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="100000 ids, and the vocabulary has"):
        llm.generate("x", SamplingParams(allowed_token_ids=[3] * 100_000))
    params = SamplingParams(allowed_token_ids=[3], stop_token_ids=[3], min_tokens=2)
    with pytest.raises(ConfigError, match="only tokens that end the output are allowed"):
        llm.generate("x", params)


def test_a_tiny_temperature_is_greedy(llm: LLM) -> None:
    greedy = llm.generate("hello", GREEDY)[0].token_ids
    for temperature in (1e-300, 1e-9, 2e-5):
        params = SamplingParams(temperature=temperature, max_tokens=20, seed=1)
        assert llm.generate("hello", params)[0].token_ids == greedy


def test_a_template_that_refuses(model: PreTrainedModel) -> None:
    tokenizer = TOKENIZER.__class__(tokenizer_object=TOKENIZER.backend_tokenizer)
    tokenizer.chat_template = "{{ raise_exception('no system messages, please') }}"
    with pytest.raises(PromptError, match="refuses this: no system messages, please"):
        LLM(model, tokenizer=tokenizer).chat([{"role": "system", "content": "hi"}])


# Endings, the same with and without speculation


ENDING = ("none", "ngram", "draft_model", "eagle", "hybrid", "cascade", "lookahead")
"""Chains and trees of every kind: an end is looked for in what was committed, of any drafter."""

DRAWING = ("medusa", "parallel", "corpus_ngram", "early_exit", "ensemble")
"""Others that draw their tokens, one of each kind."""

Methods = Sequence[str]


@pytest.fixture(
    params=[ENDING, pytest.param(("none", *SPECULATIVE), marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def methods(request: pytest.FixtureRequest) -> Methods:
    found: Methods = request.param
    return found


@cache
def ending_llm(method: str) -> LLM:
    llm = tiny_llm(tiny_model(vocab_size=BYTES), method)
    llm.engine._maker.tokenizer = TOKENIZER
    return llm


def ends(
    methods: Methods, prompt: Prompt, **fields: Any
) -> list[tuple[tuple[int, ...], str | None, Any, str]]:
    """(tokens, finish reason, stop reason, text) under these methods; all must agree."""
    results = []
    for method in methods:
        params = SamplingParams(**{"temperature": 0, **fields})
        (output,) = ending_llm(method).generate([prompt], params)
        completion = output.outputs[0]
        results.append(
            (output.token_ids, output.finish_reason, completion.stop_reason, output.text)
        )
    assert all(result == results[0] for result in results)
    return results


PROMPT = [3, 5, 7, 3, 5, 7, 3, 5, 9, 1]


def test_stop_token(methods: Methods) -> None:
    ((free, *_), *_) = ends(methods, PROMPT, max_tokens=20)
    stop = free[7]
    ((tokens, reason, stop_reason, _), *_) = ends(
        methods, PROMPT, max_tokens=20, stop_token_ids=[stop]
    )
    assert tokens == free[: free.index(stop) + 1]
    assert (reason, stop_reason) == ("stop", stop)


def test_the_text_of_a_stop_token_shows_only_on_request(methods: Methods) -> None:
    ((free, *_), *_) = ends(methods, PROMPT, max_tokens=20)
    stop = free[7]
    cut = free[: free.index(stop) + 1]
    ((_, _, _, hidden), *_) = ends(methods, PROMPT, max_tokens=20, stop_token_ids=[stop])
    ((_, _, _, shown), *_) = ends(
        methods, PROMPT, max_tokens=20, stop_token_ids=[stop], include_stop_str_in_output=True
    )
    assert hidden == TOKENIZER.decode(list(cut[:-1]))
    assert shown == TOKENIZER.decode(list(cut))


def test_stop_string(methods: Methods) -> None:
    ((_, _, _, text), *_) = ends(methods, PROMPT, max_tokens=30)
    stop = text[10:13]
    ((_, reason, stop_reason, cut), *_) = ends(methods, PROMPT, max_tokens=30, stop=[stop])
    assert (reason, stop_reason) == ("stop", stop)
    assert cut == text[: text.index(stop)]
    ((_, _, _, kept), *_) = ends(
        methods, PROMPT, max_tokens=30, stop=[stop], include_stop_str_in_output=True
    )
    assert kept == cut + stop


def test_end_of_sequence(model: PreTrainedModel, methods: Methods) -> None:
    free = LLM(model).generate([PROMPT], GREEDY)[0].token_ids
    eos = free[6]
    ending = tiny_model(vocab_size=BYTES)
    assert ending.generation_config is not None
    ending.generation_config.eos_token_id = eos
    for method in methods:
        llm = tiny_llm(ending, method)
        (output,) = llm.generate([PROMPT], GREEDY)
        assert output.token_ids == free[: free.index(eos) + 1]
        assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", None)
        (ignoring,) = llm.generate(
            [PROMPT], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        )
        assert ignoring.token_ids == free
        (late,) = llm.generate(
            [PROMPT], SamplingParams(temperature=0, max_tokens=20, min_tokens=20)
        )
        assert eos not in late.token_ids[:-1]


def test_logprobs_are_the_models_own(model: PreTrainedModel) -> None:
    """log_softmax of the raw logits, whatever the sampling parameters."""
    params = SamplingParams(temperature=0.7, top_k=3, seed=1, max_tokens=6, logprobs=2)
    (output,) = LLM(model).generate([PROMPT], params)
    assert output.logprobs is not None
    tokens = [*PROMPT, *output.token_ids]
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
    for i, (token, entry) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        row = expected[len(PROMPT) - 1 + i]
        assert next(iter(entry)) == token
        assert entry[token].logprob == pytest.approx(float(row[token]), abs=1e-4)
        best = {each.rank: t for t, each in entry.items()}
        assert [best[1], best[2]] == row.topk(2).indices.tolist()
    assert LLM(model).generate([PROMPT], GREEDY)[0].logprobs is None


# Streaming


def test_a_stream_is_the_output_in_pieces(llm: LLM) -> None:
    (whole,) = llm.generate("hello hello", GREEDY)
    chunks = list(llm.stream("hello hello", GREEDY))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    tokens = [token for chunk in chunks for token in chunk.tokens]
    assert tuple(token.token_id for token in tokens) == whole.token_ids
    assert all(chunk.output is None for chunk in chunks[:-1])
    assert chunks[-1].output is not None
    assert chunks[-1].output.token_ids == whole.token_ids
    assert tuple(token.origin for token in tokens) == chunks[-1].output.origins
    assert len(chunks) == whole.metrics.target_passes


def test_closing_a_stream_frees_its_row(llm: LLM) -> None:
    stream = llm.stream("hello", SamplingParams(max_tokens=100))
    next(stream)
    assert llm.engine.target._keys
    stream.close()
    assert not llm.engine.target._keys
    assert not llm.engine._scheduler.busy
    assert len(llm.generate("hello", GREEDY)[0].token_ids) == 20


def test_an_interrupt_frees_everything(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    original = llm.engine.target.verify

    def interrupted(*args: Any, **fields: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return original(*args, **fields)

    monkeypatch.setattr(llm.engine.target, "verify", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"], GREEDY)
    assert not llm.engine.target._keys
    assert not llm.engine._scheduler.busy
    monkeypatch.undo()
    assert len(llm.generate("hello", GREEDY)[0].token_ids) == 20


def test_an_interrupted_admission_does_not_spoil_the_other_request(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream waits; another call admits it and is interrupted in the middle of its prefill."""
    expected = llm.generate("a waiting prompt", GREEDY)[0].token_ids
    stream = llm.stream("a waiting prompt", GREEDY)
    original = llm.engine.target.prefill

    def interrupted(key: int, tokens: Any, *rest: Any) -> None:
        original(key, tokens[:3], *rest)
        raise KeyboardInterrupt

    (request,) = llm.engine.make_requests(JobSpec("a waiting prompt", GREEDY))
    llm.engine._scheduler.add(request)
    monkeypatch.setattr(llm.engine.target, "prefill", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("another", GREEDY)
    monkeypatch.undo()
    assert tuple(t.token_id for chunk in stream for t in chunk.tokens) == expected
    while not request.finished:
        llm.engine._scheduler.step()
    assert tuple(request.output_ids) == expected


def test_two_streams_at_once(llm: LLM) -> None:
    """They share the engine; neither loses a token of the other."""
    expected = [llm.generate(p, GREEDY)[0].token_ids for p in ("first", "second")]
    streams = [llm.stream(p, GREEDY) for p in ("first", "second")]
    got: list[list[int]] = [[], []]
    open_streams = [0, 1]
    while open_streams:
        for i in list(open_streams):
            chunk = next(streams[i], None)
            if chunk is None:
                open_streams.remove(i)
            else:
                got[i] += [token.token_id for token in chunk.tokens]
    assert [tuple(tokens) for tokens in got] == expected


def test_a_stream_that_another_one_finishes(llm: LLM) -> None:
    """Plain sampling takes a token per step, so that both end in the same one."""
    plain = LLM(tiny_model(vocab_size=BYTES), tokenizer=TOKENIZER)
    streams = [plain.stream(p, GREEDY) for p in ("first", "second")]
    chunks = [[next(stream) for _ in range(1)] for stream in streams]
    for _ in range(19):
        for stream, got in zip(streams, chunks, strict=True):
            got.append(next(stream))
    for stream, got in zip(streams, chunks, strict=True):
        assert next(stream, None) is None
        assert got[-1].output is not None
        assert got[-1].output.finish_reason == "length"


def test_generating_while_a_stream_is_open(llm: LLM) -> None:
    expected = llm.generate("first", GREEDY)[0].token_ids
    stream = llm.stream("first", GREEDY)
    got = [token.token_id for token in next(stream).tokens]
    assert len(llm.generate("second", GREEDY)[0].token_ids) == 20
    got += [token.token_id for chunk in stream for token in chunk.tokens]
    assert tuple(got) == expected


# Metrics and trace


@pytest.mark.parametrize(
    ("method", "rule", "temperature"),
    [
        pytest.param(method, rule, temperature, marks=[] if quick else pytest.mark.slow)
        for method in ("none", *SPECULATIVE)
        for rule, temperature, quick in (
            ("coupled", 0, True),
            ("rejection", 0.8, method in ENDING or method in DRAWING),
            ("coupled", 0.8, False),
            ("rejection", 0, False),
        )
    ],
)
def test_metrics_and_trace_agree(method: str, rule: str, temperature: float) -> None:
    llm = tiny_llm(tiny_model(), method, rule)
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=30)
    for output in llm.generate(PROMPTS, params, trace=True):
        metrics, steps = output.metrics, list(output.trace)
        assert metrics.generated_tokens == len(output.token_ids) == 30
        assert metrics.target_passes == len(steps)
        assert metrics.num_drafts == sum(bool(s.drafted) for s in steps)
        assert metrics.num_draft_tokens == sum(len(s.drafted) for s in steps)
        assert metrics.num_accepted_tokens == sum(min(len(s.accepted), s.committed) for s in steps)
        assert sum(metrics.accepted_per_position) == metrics.num_accepted_tokens
        assert metrics.seconds > 0
        if metrics.num_drafts:
            written = sum(step.committed for step in steps if step.drafted)
            assert metrics.mean_acceptance_length == pytest.approx(written / metrics.num_drafts)
        origins = output.outputs[0].origins
        assert origins.count(Origin.DRAFT) == metrics.num_accepted_tokens
        replayed = []
        for step in steps:
            tokens = [step.drafted[i] for i in step.accepted] + [step.token]
            replayed += tokens[: step.committed]
            assert all(q is not None and 0 < q <= 1 for q in step.q)
            assert all(p is not None and 0 <= p <= 1 for p in step.p)
            assert bool(step.reason) == (step.origin is Origin.CORRECTION)
        assert tuple(replayed) == output.token_ids


def test_without_trace_unreached_probabilities_are_left_out() -> None:
    llm = tiny_llm(tiny_model(), "draft_model", "rejection")
    params = SamplingParams(temperature=1.5, seed=4, max_tokens=30)
    (light,) = llm.generate([PROMPTS[0]], params)
    (full,) = llm.generate([PROMPTS[0]], params, trace=True)
    assert light.token_ids == full.token_ids
    assert any(p is None for step in light.trace for p in step.p)
    for ours, theirs in zip(light.trace, full.trace, strict=True):
        pairs = zip(ours.p, theirs.p, strict=True)
        assert all(p is None or p == q for p, q in pairs)


def test_metrics_of_known_numbers() -> None:
    from tokenleap import Metrics

    metrics = Metrics(
        generated_tokens=30,
        num_drafts=10,
        num_accepted_tokens=15,
        num_rejected_tokens=5,
        seconds=3.0,
        prefill_seconds=1.0,
    )
    assert metrics.mean_acceptance_length == 2.5
    assert metrics.acceptance_rate == 0.75
    assert metrics.tokens_per_second == 10.0
    assert metrics.decode_tokens_per_second == 15.0
    assert Metrics().mean_acceptance_length == 1.0
    assert Metrics().acceptance_rate == Metrics().tokens_per_second == 0.0
    assert not math.isnan(Metrics().decode_tokens_per_second)


def test_vocabulary_of_the_fixture() -> None:
    assert VOCAB_SIZE != BYTES  # the draft models of `tiny_llm` follow the target's size


def test_the_end_of_the_sequence_is_no_text() -> None:
    """Like a stop token, and as in vLLM."""
    tokenizer = tiny_tokenizer()
    model = tiny_model()
    (token,) = tokenizer.encode("x")
    model.generation_config.eos_token_id = token
    llm = LLM(model, tokenizer=tokenizer)
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 9, "skip_special_tokens": False}
    bias = {token: 1000.0}
    (hidden,) = llm.generate([[1, 2]], SamplingParams(logit_bias=bias, **fields))
    assert (hidden.outputs[0].text, hidden.outputs[0].finish_reason) == ("", "stop")
    shown = SamplingParams(logit_bias=bias, include_stop_str_in_output=True, **fields)
    assert llm.generate([[1, 2]], shown)[0].outputs[0].text == "x"
    (ignored,) = llm.generate([[1, 2]], SamplingParams(logit_bias=bias, ignore_eos=True, **fields))
    assert ignored.outputs[0].text == "x" * 9


def test_dynamic_rotary_frequencies_below_their_context() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    llm = LLM(tiny_model(rope_parameters=rope, max_position_embeddings=64))
    assert llm.generate([[1, 2]], SamplingParams(max_tokens=3))[0].outputs[0].token_ids
