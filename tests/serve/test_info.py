"""Information about a server: metrics under vLLM's names, and its OpenAPI description."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import Request

from tests.serve.support import MODEL, Served, samples, served, until
from tokenleap import __version__
from tokenleap.serve.running import ServerState
from tokenleap.serve.settings import Settings


def test_metrics() -> None:
    with served() as running:
        before = samples(running)
        fields: Any = {"max_tokens": 40, "ignore_eos": True, "tokenleap": {"metrics": True}}
        prompt = "ab" * 80
        choices = [running.complete(prompt, **fields)["choices"][0] for _ in range(2)]
        after = samples(running)
        running.refused("/v1/completions", prompt="")
        assert samples(running)["vllm:request_success_total/length"] == 2

    metrics = [choice["tokenleap"]["metrics"] for choice in choices]

    def total(name: str) -> int:
        return sum(each[name] for each in metrics)

    expected = {
        "vllm:prompt_tokens_total": 320,
        "vllm:generation_tokens_total": 80,
        "vllm:prefix_cache_queries_total": 320,
        "vllm:prefix_cache_hits_total": total("cached_prompt_tokens"),
        "vllm:num_preemptions_total": 0,
        "vllm:request_success_total/length": 2,
        "vllm:spec_decode_num_drafts_total": total("num_drafts"),
        "vllm:spec_decode_num_draft_tokens_total": total("num_draft_tokens"),
        "vllm:spec_decode_num_accepted_tokens_total": total("num_accepted_tokens"),
        "vllm:time_to_first_token_seconds_count": 2,
        "vllm:e2e_request_latency_seconds_count": 2,
        "vllm:request_generation_tokens_sum": 80,
        "tokenleap:drafter_failures_total": 0,
        "tokenleap:requests_refused_total": 0,
    }
    assert {name: after[name] - before.get(name, 0) for name in expected} == expected
    assert expected["vllm:prefix_cache_hits_total"] > 0
    assert expected["vllm:spec_decode_num_drafts_total"] > 0
    positions = zip(*(each["accepted_per_position"] for each in metrics), strict=False)
    first = sum(next(positions))
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total/0"
    assert after.get(name, 0) == first
    assert after["tokenleap:step_seconds_total"] > 0
    assert after["tokenleap:goodput_tokens_per_second"] > 0
    assert "tokenleap:seconds_saved" in after


def test_apps_of_one_model_count_its_steps_each(server: Served) -> None:
    of_another = ServerState(server.state.llm, Settings(served_model_names=(MODEL,))).metrics
    before = samples(server)["vllm:generation_tokens_total"]
    server.complete(max_tokens=8)
    until(lambda: samples(server)["vllm:generation_tokens_total"] > before)
    assert (
        b'generation_tokens_total{engine="0",model_name="tiny"} 0.0'
        not in of_another.exposition()[0]
    )


def test_the_load_while_requests_run(server: Served) -> None:
    body = {"model": MODEL, "prompt": "a", "stream": True, "max_tokens": 900, "n": 2}
    body |= {"ignore_eos": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_text())
        load = server.llm.engine.load
        assert load.running == 2
        assert load.waiting == 0
        assert 0 < load.kv_usage < 1
    until(lambda: server.state.open_sequences == 0)


def test_the_openapi_description(server: Served) -> None:
    made = server.http.get("/openapi.json").json()
    post = made["paths"]["/v1/chat/completions"]["post"]
    schema = post["requestBody"]["content"]["application/json"]["schema"]
    schemas = made["components"]["schemas"]
    name = schema["$ref"].rpartition("/")[2]
    assert {"messages", "tools", "temperature"} <= set(schemas[name]["properties"])
    assert schemas[name]["additionalProperties"] is False
    references = set()

    def walk(value: Any) -> None:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if key == "$ref":
                references.add(item.removeprefix("#/components/schemas/"))
            elif isinstance(item, dict | list):
                walk(item)

    walk(made)
    assert references <= set(schemas)


def test_the_examples_of_the_description(server: Served) -> None:
    """Swagger UI fills them in."""
    made = server.http.get("/openapi.json").json()
    run = 0
    for path, methods in made["paths"].items():
        body = methods.get("post", {}).get("requestBody")
        if body is not None and path != "/v1/embeddings":  # this model has none
            name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
            (example,) = made["components"]["schemas"][name]["examples"]
            answer = server.http.post(path, json=example)
            assert answer.status_code == 200, answer.text
            run += 1
    assert run == 5


def test_a_request_can_choose_the_methods_that_are_listed(server: Served) -> None:
    (listed,) = server.http.get("/v1/models").json()["data"]
    assert listed["default_sampling_params"] == {}
    speculation = listed["speculation"]
    assert speculation["method"] == "ngram"
    assert {"none", "ngram", "suffix"} <= set(speculation["methods"])
    assert not {"draft_model", "eagle", "hybrid", "rest"} & set(speculation["methods"])
    texts = {
        server.complete(speculative_config={"method": name})["choices"][0]["text"]
        for name in speculation["methods"]
    }
    assert len(texts) == 1


def test_health_and_version(server: Served) -> None:
    """At the end of a server, too: tests/serve/test_robustness.py."""
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/version").json() == {"version": __version__}


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "CompletionBody": ("/v1/completions", {"prompt": "a"}),
    "ChatBody": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    "ResponseBody": ("/v1/responses", {"input": "a"}),
}


@pytest.mark.parametrize("kind", BODIES)
def test_the_bounds_in_the_description_are_those_of_the_server(server: Served, kind: str) -> None:
    schemas = server.http.get("/openapi.json").json()["components"]["schemas"]
    path, fields = BODIES[kind]
    with_bounds, found = schemas[kind]["properties"], 0
    for name, schema in with_bounds.items():
        for each in schema.get("anyOf", [schema]):
            step = 1 if each.get("type") == "integer" else 1e-3
            outside = [each[key] - step for key in ("minimum",) if key in each]
            outside += [each[key] for key in ("exclusiveMinimum",) if key in each]
            outside += [each[key] * 1.01 + 1 for key in ("maximum",) if key in each]
            more = {"logprobs": True} if kind == "ChatBody" and name == "top_logprobs" else {}
            for value in outside:
                sent = int(value) if each["type"] == "integer" else value
                error = server.refused(path, **fields, **more, **{name: sent})
                assert error["param"] == name, (name, sent, error)
                found += 1
    assert found >= 6
    assert with_bounds["model"]["anyOf"][0]["enum"] == [MODEL]
    assert {"minimum": 0, "maximum": 2**63 - 1, "type": "integer"} in with_bounds["seed"]["anyOf"]


@pytest.mark.parametrize(
    ("path", "fields"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})]
)
def test_clients_take_turns_at_counting_tokens(
    server: Served, path: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    clients, prepare = list[Any](), server.state.llm.prepare

    async def noting(act: Any, **settings: Any) -> Any:
        clients.append(settings.get("client"))
        return await prepare(act, **settings)

    monkeypatch.setattr(server.state.llm, "prepare", noting)
    assert server.post(path, **fields).status_code == 200
    assert clients == [(None, "127.0.0.1")]


def test_a_client_is_a_key_at_an_address() -> None:
    """Behind a proxy, all have its address; with one key for all, addresses tell them apart."""
    places = [("1.1.1.1", "a"), ("1.1.1.1", "b"), ("2.2.2.2", "a"), ("1.1.1.1", None), (None, "a")]
    found = set()
    for host, key in places:
        scope = {"client": host and (host, 5), "state": {"caller": key} if key else {}}
        found.add(ServerState.client_of(Request({"type": "http", **scope})))
    assert len(found) == len(places)
