"""Forms that llguidance cannot take are refused, and none of them ends the process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.tiny import VOCAB_SIZE, tiny_tokenizer
from tokenleap import ConfigError, SamplingParams, StructuredOutputsParams
from tokenleap.core import structured, trial
from tokenleap.core.grammar import Grammars
from tokenleap.core.structured import MAX_LENGTH

EOS = 95
REFUSED = "at most .*: make it smaller|at most 128 levels|too complex"


def rules(count: int) -> str:
    return "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(count)) + f'r{count}: "a"\n'


def terminals(count: int) -> str:
    chain = "".join(f'T{i}: T{i + 1} "b"\n' for i in range(count))
    return f'start: T0\n{chain}T{count}: "a"\n'


def references(count: int, wrapped: bool = False) -> dict[str, Any]:
    def definition(i: int) -> dict[str, Any]:
        next_one = {"$ref": f"#/$defs/d{i + 1}"}
        if not wrapped:
            return next_one
        return {"type": "object", "properties": {"a": next_one}, "required": ["a"]}

    chain = {f"d{i}": definition(i) for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**chain, f"d{count}": {"type": "integer"}}}


def nested(levels: int) -> str:
    return '{"items":' * levels + "{}" + "}" * levels


def endless() -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array"}
    schema["items"] = schema
    return schema


DEEP: dict[str, Any] = {"json": references(900, wrapped=True)}
"""Within the limits of size, and too much for the stack of a trial."""

HOSTILE: dict[str, dict[str, Any]] = {
    "rules": {"grammar": rules(3000)},
    "terminals": {"grammar": terminals(3000)},
    "references": {"json": references(3000)},
    "references of objects": {"json": references(3000, wrapped=True)},
    "deep": DEEP,
    "nested": {"json": json.loads(nested(300))},
    "nested text": {"json": nested(20_000)},
    "a schema in itself": {"json": endless()},
    "required": {"json": {"required": [f"name{number}" for number in range(20_000)]}},
    "repeats": {"regex": "a{1000000}"},
    "repeated choices": {"regex": "(a?){5000}a{5000}"},
    "pattern": {"json": {"type": "string", "pattern": "^(a?){5000}a{5000}$"}},
    "choice": {"choice": ["x" * 2**20]},
    "long choice": {"choice": ["x" * 200_000]},
    "choices": {"choice": [f"{number:0100}" for number in range(10_500)]},
    "regex": {"regex": "[ab]" * MAX_LENGTH},
    "grammar": {"grammar": f'start: "{"a" * MAX_LENGTH}"'},
}


@pytest.mark.parametrize("fields", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_form_is_refused_in_one_line(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=REFUSED) as refused:
        SamplingParams(structured_outputs=fields)
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith(f"structured_outputs: {next(iter(fields))}: ")


@pytest.mark.parametrize(
    "fields",
    [
        {"json": {"enum": {1}}},
        {"json": {"const": "\ud800"}},
        {"json": {"maximum": 10**5000}},
        {"regex": "\ud800"},
        {"grammar": 'start: "\ud800"'},
    ],
)
def test_what_is_no_text_and_no_json(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"structured_outputs: {next(iter(fields))}: "):
        SamplingParams(structured_outputs=fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"grammar": rules(900)},
        {"grammar": terminals(900)},
        {"json": references(900)},
        {"json": references(250, wrapped=True)},
        {"json": json.loads(nested(60))},
        {"json": {"required": [f"name{number}" for number in range(2000)]}},
        {"json": {"properties": {f"name{n}": {"type": "integer"} for n in range(480)}}},
        {"choice": [f"a choice of some length, number {number}" for number in range(3000)]},
    ],
)
def test_large_forms_of_real_use_are_compiled(fields: dict[str, Any]) -> None:
    grammar = Grammars(tiny_tokenizer(), VOCAB_SIZE, [EOS]).compile(
        StructuredOutputsParams(**fields)
    )
    allowed = grammar.allowed([])
    assert allowed is not None
    assert allowed.any()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The ids of the processes that were asked; no answer is known before."""
    found: list[int] = []
    ask = structured._Process.ask

    def counted(self: Any, grammar: str) -> str | None:
        found.append(self._popen.pid)
        return ask(self, grammar)

    structured.what_is_wrong.cache_clear()
    monkeypatch.setattr(structured._Process, "ask", counted)
    yield found
    structured.what_is_wrong.cache_clear()


def test_a_trial_is_made_once(asked: list[int]) -> None:
    for _ in range(3):
        SamplingParams(structured_outputs={"regex": "[ab]c"})
        with pytest.raises(ConfigError, match="not valid"):
            SamplingParams(structured_outputs={"regex": "[ab"})
    assert len(asked) == 2
    SamplingParams(structured_outputs={"json_object": True})
    SamplingParams(structured_outputs={"choice": ["yes", "no"]})
    assert len(asked) == 2


def test_a_process_that_crashed_is_replaced(asked: list[int]) -> None:
    for _ in range(2):  # the answer is kept, too
        with pytest.raises(ConfigError, match="overflows its stack"):
            StructuredOutputsParams(**DEEP)
    StructuredOutputsParams(regex="[ab]d")
    StructuredOutputsParams(regex="[ab]e")
    assert len(asked) == 3
    assert asked[0] != asked[1] == asked[2]


def test_a_process_that_was_ended_by_others_is_replaced(asked: list[int]) -> None:
    StructuredOutputsParams(regex="[ab]f")
    (process,) = structured._trials._idle
    process._popen.kill()
    process._popen.wait()
    StructuredOutputsParams(regex="[ab]g")
    assert asked[0] != asked[1]


def test_a_trial_ends(asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    StructuredOutputsParams(regex="[ab]h")
    monkeypatch.setattr(structured, "_PATIENCE", 0.01)
    with pytest.raises(ConfigError, match=r"it took more than 0\.01 s to try it out"):
        StructuredOutputsParams(regex="a{90000}")
    monkeypatch.undo()
    StructuredOutputsParams(regex="[ab]i")


def test_time_is_limited_where_the_process_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "MAX_SECONDS", 0)
    found = trial.wrong('{"grammars": [{"lark_grammar": "start: /[ab]+/"}]}')
    assert found == "too complex: it takes more than 2 s to compile"


def test_an_answer_that_was_not_waited_for_is_nobody_elses(
    asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    StructuredOutputsParams(regex="[ab]j")

    def interrupted(_: Any) -> bytes | None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(structured._Process, "_answer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            StructuredOutputsParams(regex="[ab")
    StructuredOutputsParams(regex="[ab]k")
    assert asked[-1] != asked[0]


def test_compiled_grammars_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(tiny_tokenizer(), VOCAB_SIZE, [EOS])
    form = StructuredOutputsParams(regex="(ab|cd)e")
    first = grammars.compile(form)
    monkeypatch.setattr(grammars, "_compiled", None)
    second = grammars.compile(form)
    a, b = 65, 66
    moved, fresh = first.allowed([a]), second.allowed([])
    assert moved is not None
    assert fresh is not None
    assert moved.nonzero().flatten().tolist() == [b]
    assert fresh.nonzero().flatten().tolist() == [a, 67]


FORKING = """
import os
from tokenleap import StructuredOutputsParams

StructuredOutputsParams(regex="[ab]")
child = os.fork()
StructuredOutputsParams(regex="[cd]")
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
StructuredOutputsParams(regex="[ef]")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_fork_has_processes_of_its_own() -> None:
    command = [sys.executable, "-W", "error", "-c", FORKING]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
