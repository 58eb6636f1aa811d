"""One request cannot stop the others: whatever fails for it ends it alone, with an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.engine.serving import assert_empty, bits, run
from tests.matrix import PROMPTS
from tests.tiny import VOCAB_SIZE, tiny_model, tiny_tokenizer
from tokenleap import LLM, RequestOutput, SamplingParams
from tokenleap import decode as decode_module
from tokenleap.core import noise as noises
from tokenleap.core.acceptance import RULES
from tokenleap.core.detokenizer import Detokenizer
from tokenleap.core.grammar import Grammar
from tokenleap.core.noise import Noise
from tokenleap.core.sampler import Sampler, TreeDistributions
from tokenleap.errors import ConfigError, PromptError, RequestError, TokenleapError
from tokenleap.request import Request
from tokenleap.runtime.network import PassOutput
from tokenleap.runtime.target import Target

EOS = 95
SEED = 666
"""Of the request that fails; the others have other seeds."""
VICTIM = SamplingParams(
    temperature=0.9,
    seed=SEED,
    max_tokens=24,
    logprobs=1,
    stop="never so",
    structured_outputs={"regex": "[a-z]{60}"},
)
OTHERS = [
    SamplingParams(temperature=0.8, seed=1, max_tokens=24, logprobs=1),
    SamplingParams(temperature=0, max_tokens=24, logprobs=1, repetition_penalty=1.2),
]
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "controller": "fixed"}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    model = tiny_model(num_attention_heads=2, num_key_value_heads=2, head_dim=32)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = EOS
    return model


@pytest.fixture(scope="module", params=[None, NGRAM], ids=["plain", "ngram"])
def llm(model: PreTrainedModel, request: pytest.FixtureRequest) -> LLM:
    return LLM(model, tokenizer=tiny_tokenizer(), speculative_config=request.param)


@pytest.fixture(scope="module")
def drafting(model: PreTrainedModel) -> LLM:
    return LLM(model, tokenizer=tiny_tokenizer(), speculative_config=NGRAM)


# Faults


def is_victims(owner: Any) -> bool:
    """Whether a sampler, noise, request, distributions or detokenizer is the victim's."""
    if isinstance(owner, TreeDistributions):
        return is_victims(owner._sampler)
    if isinstance(owner, Sampler | Request):
        return owner.params.seed == SEED
    if isinstance(owner, Noise):
        return owner.seed == SEED
    return isinstance(owner, Grammar) or "never so" in owner._stop


Patch = Callable[[pytest.MonkeyPatch, Callable[[], None]], None]


def method(kind: type, name: str, place: int = 0) -> Patch:
    """Fails in this method where the argument in this place (0 is self) is the victim's."""

    def patch(monkeypatch: pytest.MonkeyPatch, fail: Callable[[], None]) -> None:
        original = getattr(kind, name)

        def failing(*args: Any, **fields: Any) -> Any:
            if is_victims(args[place]):
                fail()
            return original(*args, **fields)

        monkeypatch.setattr(kind, name, failing)

    return patch


def recording(monkeypatch: pytest.MonkeyPatch, fail: Callable[[], None]) -> None:
    original: Callable[..., Any] = vars(decode_module)["record"]

    def failing(draft: Any, p: Any, *rest: Any, **fields: Any) -> Any:
        if is_victims(p):
            fail()
        return original(draft, p, *rest, **fields)

    monkeypatch.setattr(decode_module, "record", failing)


def only_p(patch: Patch) -> Patch:
    """The same where nothing is drawn from logits."""

    def without(monkeypatch: pytest.MonkeyPatch, fail: Callable[[], None]) -> None:
        monkeypatch.setattr(noises, "_faster", None)
        patch(monkeypatch, fail)

    return without


PLACES: dict[str, Patch] = {
    "distribution": only_p(method(Sampler, "distribution")),
    "shaped": method(Sampler, "shaped"),
    "grammar": method(Grammar, "allowed"),
    "noise": method(Noise, "draw"),
    "noise at": method(Noise, "at"),
    "rule": method(RULES["coupled"], "accept", 2),
    "p": method(TreeDistributions, "__getitem__"),
    "logprobs": method(TreeDistributions, "log_probs"),
    "extend": method(Request, "extend"),
    "append": method(Request, "_append"),
    "stop": method(Request, "_check_stop"),
    "detokenizer": method(Detokenizer, "add"),
    "record": recording,
}


def at_call(number: int, error: Exception) -> Callable[[], None]:
    """Raises at this call and ever after."""
    calls = 0

    def fail() -> None:
        nonlocal calls
        calls += 1
        if calls > number:
            raise error

    return fail


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel) -> tuple[RequestOutput, list[Any]]:
    """The victim's whole output, and the bits of the others, each alone; however they draft."""
    llm = LLM(model, tokenizer=tiny_tokenizer())
    (victim,) = llm.generate([PROMPTS[0]], VICTIM)
    assert len(victim.token_ids) == 24
    others = [bits(llm.generate([PROMPTS[i]], p)[0]) for i, p in enumerate(OTHERS, 1)]
    return victim, others


def is_beginning(output: Any, whole: RequestOutput) -> bool:
    """Whether everything the output says of its tokens agrees with the whole output."""
    count = len(output.token_ids)
    assert count < len(whole.token_ids)
    assert output.metrics.generated_tokens == count
    assert len(output.origins) == count
    tokens, logprobs = bits(whole)
    return bool(bits(output) == (tokens[:count], logprobs[:count]))


@pytest.mark.parametrize("calls", [0, 9])
@pytest.mark.parametrize("place", PLACES)
def test_a_fault_ends_its_request_alone(
    llm: LLM,
    expected: tuple[RequestOutput, list[Any]],
    place: str,
    calls: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, others = expected
    PLACES[place](monkeypatch, at_call(calls, OSError("no disk\nin two lines")))
    with pytest.raises(RequestError) as caught:
        llm.generate(PROMPTS[:3], [VICTIM, *OTHERS])
    assert str(caught.value) == "OSError: no disk"
    assert isinstance(caught.value.__cause__, OSError)
    victim, *good = caught.value.outputs
    assert victim.finish_reason == "error"
    assert victim.outputs[0].error == victim.outputs[0].as_dict()["error"] == "OSError: no disk"
    assert is_beginning(victim.outputs[0], whole)
    assert [bits(output) for output in good] == others
    assert all(output.outputs[0].error is None for output in good)
    assert_empty(llm)
    monkeypatch.undo()
    assert bits(llm.generate([PROMPTS[0]], VICTIM)[0]) == bits(whole)


@pytest.mark.parametrize("place", ["rule", "detokenizer"])
def test_the_engine_reports_the_error_in_the_last_chunk(
    llm: LLM,
    expected: tuple[RequestOutput, list[Any]],
    place: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, others = expected
    PLACES[place](monkeypatch, at_call(9, OSError("no disk")))
    params = [VICTIM, *OTHERS]
    ids = [llm.engine.add_request(*each) for each in zip(PROMPTS, params, strict=False)]
    outputs = run(llm.engine)
    assert [outputs[i].finish_reason for i in ids] == ["error", "length", "length"]
    assert outputs[ids[0]].error == "OSError: no disk"
    assert is_beginning(outputs[ids[0]], whole)
    assert [bits(outputs[i]) for i in ids[1:]] == others
    assert_empty(llm)


@pytest.mark.parametrize("place", ["rule", "detokenizer"])
def test_a_stream_raises_after_its_last_token(
    llm: LLM,
    expected: tuple[RequestOutput, list[Any]],
    place: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, others = expected
    PLACES[place](monkeypatch, at_call(9, OSError("no disk")))
    ids = [llm.engine.add_request(p, q) for p, q in zip(PROMPTS[1:], OTHERS, strict=False)]
    tokens: list[int] = []

    def read(chunks: Iterator[Any]) -> None:
        for chunk in chunks:
            tokens.extend(token.token_id for token in chunk.tokens)

    with pytest.raises(RequestError, match="OSError: no disk") as caught:
        read(llm.stream(PROMPTS[0], VICTIM))
    (result,) = caught.value.outputs
    assert tuple(tokens) == result.token_ids
    assert is_beginning(result.outputs[0], whole)
    outputs = run(llm.engine)
    assert [bits(outputs[i]) for i in ids] == others
    assert_empty(llm)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (TokenleapError("too much\nof it"), "too much"),
        (KeyError(), "KeyError"),
        (ValueError("a\nb"), "ValueError: a"),
        (AssertionError("ours"), "AssertionError: ours"),
    ],
    ids=["ours to explain", "no words", "two lines", "an assertion"],
)
def test_errors_in_one_line(
    llm: LLM, error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    PLACES["rule"](monkeypatch, at_call(3, error))
    with pytest.raises(RequestError) as caught:
        llm.generate(PROMPTS[:1], VICTIM)
    assert str(caught.value) == message


def test_an_error_at_the_very_end_is_not_lost(
    llm: LLM, expected: tuple[RequestOutput, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output is known to have ended when the rest of its text is asked for."""
    whole, others = expected
    method(Detokenizer, "finish")(monkeypatch, at_call(0, OSError("no disk")))
    with pytest.raises(RequestError, match="OSError: no disk") as caught:
        llm.generate(PROMPTS[:3], [VICTIM, *OTHERS])
    victim, *good = caught.value.outputs
    assert victim.finish_reason == "error"
    assert is_beginning(victim.outputs[0], whole)
    assert [bits(output) for output in good] == others
    assert_empty(llm)


def test_a_tokenizer_that_cannot_decode_what_was_drafted(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trace has no text for such a token, and the output is complete."""
    tokenizer = tiny_tokenizer()
    config = {"method": "random", "controller": "fixed"}
    whole, llm = (LLM(model, tokenizer=tokenizer, speculative_config=config) for _ in range(2))
    (expected,) = whole.generate([PROMPTS[0]], OTHERS[0])
    unknown = expected.trace.tokens() - set(expected.token_ids)
    assert unknown
    original = tokenizer.decode

    def decode(token_ids: Any, *args: Any, **fields: Any) -> Any:
        if unknown & set(token_ids):
            raise IndexError("no such token")
        return original(token_ids, *args, **fields)

    monkeypatch.setattr(tokenizer, "decode", decode)
    (output,) = llm.generate([PROMPTS[0]], OTHERS[0])
    assert output.token_ids == expected.token_ids
    assert all(output.trace.pieces[token] == "" for token in unknown)
    assert all(output.trace.pieces[token] for token in set(output.token_ids) - {0})


def test_the_first_of_several_errors_is_raised(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    PLACES["rule"](monkeypatch, at_call(3, OSError("no disk")))
    with pytest.raises(RequestError) as caught:
        llm.generate(PROMPTS[:3], VICTIM)
    assert [output.finish_reason for output in caught.value.outputs] == ["error"] * 3
    assert_empty(llm)


# Parameters at the ends of their ranges


@pytest.mark.parametrize("top_p", [1e-50, 1e-300, 5e-324, 1e-45, 1e-9])
def test_a_tiny_nucleus_is_the_greedy_token(llm: LLM, top_p: float) -> None:
    (greedy,) = llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=20))
    params = SamplingParams(temperature=1, top_p=top_p, seed=3, max_tokens=20)
    (output,) = llm.generate([PROMPTS[0]], params)
    assert output.token_ids == greedy.token_ids


EXTREMES: list[dict[str, Any]] = [
    {"temperature": 3.4e38},
    {"temperature": 1e-5},
    {"temperature": 1e-5, "repetition_penalty": 1.2e-38},
    {"repetition_penalty": 1.2e-38},
    {"repetition_penalty": 3.4e38},
    {"temperature": 0, "repetition_penalty": 1.2e-38},
    {"logit_bias": {3: 3.4e38}},
    {"logit_bias": {3: -3.4e38}},
    {"temperature": 0.5, "logit_bias": {3: 3.4e38}},
    {"temperature": 0, "logit_bias": dict.fromkeys(range(VOCAB_SIZE), -3.4e38)},
    {"logit_bias": dict.fromkeys(range(VOCAB_SIZE), 3.4e38)},
    {"min_p": 1.0, "top_p": 1e-50, "top_k": 1},
    {"min_p": 1.0},
    {"top_k": 10**9},
]


@pytest.mark.parametrize("fields", EXTREMES, ids=str)
def test_extreme_parameters_draw_allowed_tokens_or_end_their_request(
    llm: LLM, expected: tuple[RequestOutput, list[Any]], fields: dict[str, Any]
) -> None:
    _, others = expected
    allowed = [3, 4, 5]
    params = SamplingParams(**{"seed": 2, "max_tokens": 9, "allowed_token_ids": allowed, **fields})
    ids = [llm.engine.add_request(*each) for each in zip(PROMPTS, [params, *OTHERS], strict=False)]
    outputs = run(llm.engine)
    extreme = outputs[ids[0]]
    assert set(extreme.token_ids) <= set(allowed)
    if extreme.finish_reason == "length":
        assert len(extreme.token_ids) == 9
    else:
        assert extreme.finish_reason == "error"
        assert "logit" in str(extreme.error)
    assert [bits(outputs[i]) for i in ids[1:]] == others
    assert_empty(llm)


# Logits that are no numbers


def spoilt(values: str, logits: torch.Tensor) -> torch.Tensor:
    logits = logits.clone()
    match values:
        case "nan":
            logits.fill_(torch.nan)
        case "one nan":
            logits[:, 7] = torch.nan
        case "forbidden nan":
            logits[:, 50] = torch.nan
        case "inf":
            logits[:, 4] = torch.inf
        case "forbidden inf":
            logits[:, 50] = torch.inf
        case "-inf":
            logits.fill_(-torch.inf)
    return logits


@pytest.mark.parametrize(
    "values", ["nan", "one nan", "forbidden nan", "inf", "forbidden inf", "-inf"]
)
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 0, "presence_penalty": 0.5},
        {"temperature": 0.9},
        {"temperature": 0.9, "top_k": 5},
        {"temperature": 0.9, "top_p": 0.9},
        {"temperature": 0.9, "min_p": 0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("restricted", [False, True])
def test_logits_that_are_no_numbers_end_their_request(
    drafting: LLM,
    expected: tuple[RequestOutput, list[Any]],
    values: str,
    fields: dict[str, Any],
    restricted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And none of them is ever turned into a token that is not allowed."""
    _, others = expected
    allowed = [3, 4, 5, 7]
    if restricted:
        fields = {**fields, "allowed_token_ids": allowed}
    params = SamplingParams(seed=5, max_tokens=9, **fields)
    original = Target.verify
    passes = 0

    def verify(self: Target, keys: Sequence[int], *args: Any, **rest: Any) -> list[PassOutput]:
        nonlocal passes
        passes += 1
        outputs = original(self, keys, *args, **rest)
        if passes > 3 and victim.key in keys:
            place = list(keys).index(victim.key)
            logits = spoilt(values, outputs[place].scores)
            outputs[place] = PassOutput(logits, None, outputs[place].hidden)
        return outputs

    monkeypatch.setattr(Target, "verify", verify)
    ids = [
        drafting.engine.add_request(*each) for each in zip(PROMPTS, [params, *OTHERS], strict=False)
    ]
    (victim,) = drafting.engine._added.jobs[ids[0]].requests
    outputs = run(drafting.engine)
    ended = outputs[ids[0]]
    assert ended.finish_reason == "error"
    assert "logit" in str(ended.error)
    assert 0 < len(ended.token_ids) < 9
    if restricted:
        assert set(ended.token_ids) <= set(allowed)
    assert [bits(outputs[i]) for i in ids[1:]] == others
    assert_empty(drafting)


@pytest.mark.parametrize("runtime", ["native", "torch"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_model_that_overflows_ends_the_request_and_spoils_no_other(
    runtime: str, temperature: float, value: float
) -> None:
    """Neither those beside it nor those that get its row in the KV slab afterwards."""
    model = tiny_model(num_attention_heads=2, num_key_value_heads=2, head_dim=32)
    embedding: torch.Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
    with torch.no_grad():
        embedding[90] = value
    prompts = [PROMPTS[0], [3, 5, 90, 4] * 20, PROMPTS[2]]
    params = SamplingParams(
        temperature=temperature,
        seed=1,
        max_tokens=20,
        logprobs=1,
        allowed_token_ids=range(90),
    )
    clean = LLM(model, runtime=runtime)
    expected = [bits(clean.generate([prompt], params)[0]) for prompt in (prompts[0], prompts[2])]
    llm = LLM(model, runtime=runtime)
    for _ in range(2):
        with pytest.raises(RequestError, match="logit") as caught:
            llm.generate(prompts, params)
        good, bad, other = caught.value.outputs
        assert bad.token_ids == ()
        assert [bits(good), bits(other)] == expected
        assert_empty(llm)
        again = llm.generate([prompts[0], prompts[2]], params)
        assert [bits(output) for output in again] == expected


# Before the engine


def test_a_request_that_is_refused_does_not_touch_the_others(
    llm: LLM, expected: tuple[RequestOutput, list[Any]]
) -> None:
    _, others = expected
    ids = [llm.engine.add_request(p, q) for p, q in zip(PROMPTS[1:], OTHERS, strict=False)]
    llm.engine.step()
    refused: list[tuple[type[TokenleapError], Any, Any]] = [
        (PromptError, [], None),
        (PromptError, [VOCAB_SIZE], None),
        (ConfigError, [1], SamplingParams(logit_bias={VOCAB_SIZE: 1.0})),
    ]
    for kind, prompt, params in refused:
        with pytest.raises(kind):
            llm.engine.add_request(prompt, params)
    outputs = run(llm.engine)
    assert [bits(outputs[i]) for i in ids] == others
    assert_empty(llm)
