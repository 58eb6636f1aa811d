"""Forms of outputs that clients send: hostile ones are their own mistake, and no one waits."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.core.test_trials import DEEP, HOSTILE, rules
from tests.serve.support import CONTEXT, Served
from tokenleap.core import structured
from tokenleap.core.grammar import Grammar
from tokenleap.errors import RequestError
from tokenleap.serve import text_limit

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
FORMS = {kind: form for fields in HOSTILE.values() for kind, form in fields.items()}
"""One of each kind; tests/core/test_trials.py has them all."""


@pytest.mark.parametrize("kind", FORMS)
def test_a_hostile_form_is_the_clients_mistake(server: Served, kind: str) -> None:
    form = FORMS[kind]
    error = server.refused(COMPLETIONS, prompt="a", **{f"guided_{kind}": form})
    assert error["param"] == f"guided_{kind}"
    assert "\n" not in error["message"]
    server.complete()


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_hostile_tool_is_the_clients_mistake(server: Served, choice: Any) -> None:
    function = {"name": "f", "parameters": DEEP["json"]}
    tools = [{"type": "function", "function": function}]
    error = server.refused(CHAT, messages=HELLO, tools=tools, tool_choice=choice)
    assert error["param"] == "tools"
    assert "\n" not in error["message"]


@pytest.mark.parametrize("definitions", [None, [1], "a"])
def test_definitions_of_a_tool_that_are_none(server: Served, definitions: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"$defs": definitions}}}]
    error = server.refused(CHAT, messages=HELLO, tools=tools, tool_choice="required")
    assert error["message"].startswith("tools: '$defs'")


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_choice": ["yes"], "bad_words": ["yes"]},
        {"guided_choice": ["yes"], "bad_words": ["yes"], "temperature": 0},
        {"allowed_token_ids": [5], "bad_words": ["a"], "logit_bias": {"5": -3.4e38}, "top_k": 3},
    ],
)
def test_parameters_that_leave_no_token(server: Served, fields: dict[str, Any]) -> None:
    if "guided_choice" not in fields:
        fields = {**fields, "repetition_penalty": 3e38, "prompt": [5]}
    error = server.refused(COMPLETIONS, **{"prompt": "a", **fields})
    assert "leave no token" in error["message"]


def test_values_at_the_end_of_their_range(server: Served) -> None:
    fields = {"temperature": 1e-5, "logit_bias": {"5": 3.4e38}, "return_token_ids": True}
    (choice,) = server.complete(**fields, top_p=0.9, min_p=0.1, ignore_eos=True)["choices"]
    assert set(choice["token_ids"]) == {5}


def test_a_form_that_proves_too_complex_later(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = Grammar.allowed

    def failing(self: Grammar, output_ids: Any) -> Any:
        if len(output_ids) > 3:
            raise RequestError("structured_outputs: too many items", by_parameters=True)
        return allowed(self, output_ids)

    monkeypatch.setattr(Grammar, "allowed", failing)
    error = server.refused(COMPLETIONS, prompt="a", guided_regex="[ab]{9}")
    assert "structured_outputs: too many items" in error["message"]


def test_others_do_not_wait_for_a_form(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, waiting = threading.Event(), threading.Semaphore(0)
    ask = structured.what_is_wrong

    def slow(grammar: str) -> str | None:
        waiting.release()
        assert gate.wait(60)
        return ask(grammar)

    monkeypatch.setattr(structured, "what_is_wrong", slow)
    with ThreadPoolExecutor(5) as clients:
        answers = [
            clients.submit(server.post, COMPLETIONS, prompt="a", guided_regex=f"[ab]{{{n}}}")
            for n in range(4, 8)
        ]
        try:
            for _ in range(2):
                assert waiting.acquire(timeout=60)
            server.complete()
            assert server.post("/tokenize", prompt="abc").json()["count"] == 3
            fields = {"tools": [{"type": "function", "function": {"name": "f"}}], "max_tokens": 4}
            assert server.post(CHAT, messages=HELLO, **fields).status_code == 200
            assert not any(answer.done() for answer in answers)
        finally:
            gate.set()
        assert [answer.result(60).status_code for answer in answers] == [200] * 4


def test_a_form_may_be_as_deep_as_a_stack_allows(server: Served) -> None:
    answer = server.complete(guided_grammar=rules(900))
    assert answer["choices"][0]["text"] == "a"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/tokenize", {"prompt": "7" * 7_000_000}),
        ("/tokenize", {"messages": [{"role": "user", "content": "7" * 7_000_000}]}),
        (COMPLETIONS, {"prompt": "7" * 7_000_000}),
        (COMPLETIONS, {"prompt": "7" * 7_000_000, "truncate_prompt_tokens": 5}),
        (CHAT, {"messages": [{"role": "user", "content": "7" * 7_000_000}]}),
        ("/v1/responses", {"input": "7" * 7_000_000}),
    ],
)
def test_long_texts_are_refused_before_they_are_split(
    server: Served, path: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    count, split = text_limit._count, list[int]()

    def counting(tokenizer: Any, text: str) -> int:
        split.append(len(text))
        return count(tokenizer, text)

    def whole(*_: Any, **__: Any) -> Any:
        raise AssertionError("the text was split into tokens")

    monkeypatch.setattr(text_limit, "_count", counting)
    monkeypatch.setattr(type(server.llm.tokenizer), "__call__", whole)
    monkeypatch.setattr(type(server.llm.tokenizer), "encode", whole)
    assert "shorten it" in server.refused(path, **fields)["message"]
    assert sum(split) < 50 * CONTEXT


def test_a_long_prediction_is_refused(server: Served) -> None:
    prediction = {"type": "content", "content": "7" * 100_000}
    error = server.refused(CHAT, messages=HELLO, prediction=prediction)
    assert error["message"].startswith("the prediction has")
