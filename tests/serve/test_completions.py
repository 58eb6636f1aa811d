"""`/v1/completions`: text, log-probabilities and streams are those of the library."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serve.support import Served, served, tiny_parts
from tokenleap import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8)


def events(response: Any) -> list[Any]:
    """The JSON values of a stream, which ends as it has to."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_a_text_and_its_usage(server: Served) -> None:
    (expected,) = server.llm.generate("hello", GREEDY)
    response = server.complete("hello")
    assert response["object"] == "text_completion"
    assert response["model"] == "tiny"
    (choice,) = response["choices"]
    assert choice["text"] == expected.text
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    usage = response["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 8)
    assert usage["total_tokens"] == 13


def test_token_ids_and_several_prompts(server: Served) -> None:
    ids = server.llm.encode("hello")
    both = [server.llm.generate(each, GREEDY)[0].text for each in ("hello", "other")]
    for prompt in (["hello", "other"], [ids, server.llm.encode("other")]):
        choices = server.complete(prompt)["choices"]
        assert [choice["text"] for choice in choices] == both
        assert [choice["index"] for choice in choices] == [0, 1]
    assert server.complete(ids)["choices"][0]["text"] == both[0]


def test_sampling_is_that_of_the_library(server: Served) -> None:
    fields: dict[str, Any] = {
        "temperature": 0.9,
        "top_p": 0.8,
        "top_k": 20,
        "min_p": 0.01,
        "seed": 5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.2,
        "min_tokens": 2,
        "n": 3,
        "max_tokens": 6,
        "stop": ["~"],
        "ignore_eos": True,
        "bad_words": ["x"],
    }
    params = SamplingParams(**fields, logit_bias={7: 2.5})
    (expected,) = server.llm.generate("hello", params)
    choices = server.complete("hello", **fields, logit_bias={"7": 2.5})["choices"]
    assert [choice["text"] for choice in choices] == [each.text for each in expected.outputs]


def test_the_default_is_sixteen_tokens(server: Served) -> None:
    response = server.complete(max_tokens=None, ignore_eos=True)
    assert response["usage"]["completion_tokens"] == 16


def test_a_stop_string(server: Served) -> None:
    text = server.complete(max_tokens=12)["choices"][0]["text"]
    choice = server.complete(max_tokens=12, stop=text[4:6])["choices"][0]
    assert choice["text"] == text[:4]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", text[4:6])


def test_log_probabilities(server: Served) -> None:
    (expected,) = server.llm.generate("hello", GREEDY.model_copy(update={"logprobs": 2}))
    assert expected.logprobs is not None
    found = server.complete("hello", logprobs=2)["choices"][0]["logprobs"]
    assert found["token_logprobs"] == [
        each[token].logprob
        for each, token in zip(expected.logprobs, expected.token_ids, strict=True)
    ]
    assert "".join(found["tokens"]) == expected.text
    assert found["text_offset"] == list(range(8))
    for token, top, value in zip(
        found["tokens"], found["top_logprobs"], found["token_logprobs"], strict=True
    ):
        assert top[token] == value == max(top.values())
        assert len(top) == 2


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_scores_the_prompt(server: Served, max_tokens: int, stream: bool) -> None:
    """Log-probabilities of a given text, as lm-eval reads them."""
    fields = {"echo": True, "logprobs": 1, "max_tokens": max_tokens, "stream": stream}
    wanted = SamplingParams(temperature=0, max_tokens=max_tokens, prompt_logprobs=1)
    (expected,) = server.llm.generate("hello", wanted)
    response = server.post("/v1/completions", prompt="hello", temperature=0, **fields)
    chunks = events(response) if stream else [response.json()]
    choice = chunks[0]["choices"][0]
    found = choice["logprobs"]
    assert choice["text"][:5] == "hello"
    assert found["tokens"][:5] == list("hello")
    assert found["token_logprobs"][0] is None
    assert found["text_offset"] == list(range(5 + max_tokens))
    assert expected.prompt_logprobs is not None
    for position, token in enumerate(expected.prompt_token_ids[1:], 1):
        scores = expected.prompt_logprobs[position]
        assert scores is not None
        assert found["token_logprobs"][position] == scores[token].logprob
    assert server.complete(**fields | {"stream": None})["choices"][0]["text"] == choice["text"]


def test_echo_has_what_was_read(server: Served) -> None:
    fields = {"echo": True, "logprobs": 0, "max_tokens": 1}
    for prompt in ("hello", server.post("/tokenize", prompt="hello").json()["tokens"]):
        choice = server.complete(prompt, **fields, truncate_prompt_tokens=2)["choices"][0]
        assert choice["text"][:2] == "lo"
        assert choice["logprobs"]["text_offset"] == [0, 1, 2]
        assert len(choice["logprobs"]["tokens"]) == 3


def test_echo_with_log_probabilities_and_a_form(server: Served) -> None:
    fields = {"guided_json": {"type": "boolean"}, "echo": True, "logprobs": 1, "max_tokens": 9}
    choice = server.complete("hello", **fields)["choices"][0]
    assert choice["text"] in ("hellotrue", "hellofalse")
    assert choice["logprobs"]["token_logprobs"][1] is not None


def test_echo_of_a_prompt_that_was_not_cut(server: Served) -> None:
    text = f"{tiny_parts()[1].eos_token} hello"
    for most in (None, -1, 50):
        fields = {"echo": True, "max_tokens": 1, "truncate_prompt_tokens": most}
        assert server.complete(text, **fields)["choices"][0]["text"].startswith(text)


def test_the_pieces_of_a_stream(server: Served) -> None:
    fields = {"prompt": ["hello", "other"], "n": 2, "seed": 3, "max_tokens": 7, "logprobs": 1}
    whole = server.post("/v1/completions", **fields).json()
    options = {"include_usage": True}
    streamed = server.post("/v1/completions", **fields, stream=True, stream_options=options)
    *chunks, last = events(streamed)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert last["choices"] == []
    expected, found = whole["usage"], last["usage"]
    assert {**found, "prompt_tokens_details": None} == {**expected, "prompt_tokens_details": None}
    for choice in whole["choices"]:
        pieces = [c for x in chunks for c in x["choices"] if c["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert [p["finish_reason"] for p in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1]["finish_reason"] == choice["finish_reason"]
        for name in ("tokens", "token_logprobs", "text_offset"):
            joined = [value for piece in pieces for value in piece["logprobs"][name]]
            assert joined == choice["logprobs"][name]


def test_usage_in_every_chunk(server: Served) -> None:
    options = {"continuous_usage_stats": True, "include_usage": True}
    response = server.post("/v1/completions", prompt="hi", stream=True, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in events(response)]
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2]


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({"guided_choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"guided_regex": "[ab]{3}"}, lambda text: len(text) == 3 and set(text) <= {"a", "b"}),
        ({"guided_grammar": 'start: "x" "y"'}, lambda text: text == "xy"),
        ({"structured_outputs": {"choice": ["u"]}}, lambda text: text == "u"),
        ({"guided_json": {"type": "boolean"}}, lambda text: text in ("true", "false")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": [4]}}}},
            lambda text: json.loads(text) == 4,
        ),
    ],
)
def test_forms(server: Served, fields: Any, fits: Any) -> None:
    choice = server.complete(max_tokens=20, **fields)["choices"][0]
    assert fits(choice["text"])
    assert choice["finish_reason"] == "stop"


def test_what_vllm_returns_on_demand(server: Served) -> None:
    choice = server.complete("hello", return_token_ids=True, prompt_logprobs=0)["choices"][0]
    assert choice["prompt_token_ids"] == server.llm.encode("hello")
    assert len(choice["token_ids"]) == 8
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    assert [next(iter(each.values()))["decoded_token"] for each in rest] == list("ello")
    cut = server.complete("hello", truncate_prompt_tokens=2, return_token_ids=True)
    assert cut["choices"][0]["prompt_token_ids"] == server.llm.encode("lo")


def test_what_speculation_did(server: Served) -> None:
    wanted = {"tokens": True, "metrics": True, "trace": True}
    response = server.post("/v1/completions", prompt="aaaa", stream=True, tokenleap=wanted)
    choices = [choice for chunk in events(response) for choice in chunk["choices"]]
    tokens = [token for choice in choices for token in choice["tokenleap"]["tokens"]]
    assert "".join(token["text"] for token in tokens) == "".join(c["text"] for c in choices)
    assert {token["origin"] for token in tokens} <= {"draft", "correction", "bonus", "plain"}
    assert all("trace" not in choice["tokenleap"] for choice in choices[:-1])
    last = choices[-1]["tokenleap"]
    assert sum(step["committed"] for step in last["trace"]["steps"]) == len(tokens)
    assert last["metrics"]["generated_tokens"] == len(tokens)
    drafted = [step for step in last["trace"]["steps"] if step["drafted"]]
    assert drafted
    assert None not in drafted[0]["p"]


def test_another_speculation_has_the_same_text(server: Served) -> None:
    fields = {"tokenleap": {"metrics": True}, "seed": 4, "temperature": 1}
    with_drafts = server.complete("aaaa", **fields)["choices"][0]
    config = {"method": "none"}
    without = server.complete("aaaa", **fields, speculative_config=config)["choices"][0]
    assert without["text"] == with_drafts["text"]
    assert without["tokenleap"]["metrics"]["num_drafts"] == 0
    assert with_drafts["tokenleap"]["metrics"]["num_drafts"] > 0
    trees = {"method": "ensemble", "drafters": [{"method": "ngram"}, {"method": "suffix"}]}
    other = server.complete("aaaa", **fields, speculative_config=trees)["choices"][0]
    assert other["text"] == with_drafts["text"]


def test_fields_that_are_not_sent_are_the_models_own() -> None:
    """And OpenAI's, where its generation config has none; it is vLLM's `--generation-config`."""
    model, tokenizer = tiny_parts()
    assert model.generation_config is not None
    model.generation_config.top_k = 1
    model.generation_config.max_new_tokens = 5
    model.generation_config.temperature = 0.3
    llm = LLM(model, tokenizer=tokenizer)
    (expected,) = llm.generate("hello", SamplingParams(temperature=0, max_tokens=20))
    with served(llm) as server:
        for given, number in (({}, 5), ({"max_tokens": 7}, 7)):
            text = server.post("/v1/completions", model="tiny", prompt="hello", **given).json()
            assert text["choices"][0]["text"] == expected.text[:number]
        fields = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
        chat = server.post("/v1/chat/completions", **fields).json()
        assert chat["usage"]["completion_tokens"] == 5
        answer = server.post("/v1/responses", model="tiny", input="hello").json()
        assert answer["usage"]["output_tokens"] == 5
        assert answer["temperature"] == 0.3
        assert answer["top_p"] == 1
    with served(LLM(model, tokenizer=tokenizer, generation_config="vllm")) as server:
        text = server.post("/v1/completions", model="tiny", prompt="hello", seed=3).json()
        assert text["usage"]["completion_tokens"] == 16
        assert text["choices"][0]["text"] != expected.text[:16]  # drawn
