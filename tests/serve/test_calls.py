"""Calls in what models write: three forms, whole and in pieces of any length."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenleap.serve.chat import Call, CallFinder
from tokenleap.serve.fields import Function, Tool

TOOLS = [Tool(type="function", function=Function(name=name)) for name in ("f", "g")]
HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'

TEXTS = {
    HERMES: ("", ["f"]),
    f"{HERMES}\n{HERMES.replace('f', 'g', 1)}": ("", ["f", "g"]),
    f"Let me see. {HERMES}": ("Let me see.", ["f"]),
    '{"name": "g", "parameters": {"a": 1}}': ("", ["g"]),
    '[{"name": "g", "arguments": {}}, {"name": "f", "arguments": {}}]': ("", ["g", "f"]),
    HERMES.removesuffix("</tool_call>"): ("", ["f"]),
    '{"name": "h", "arguments": {}}': ('{"name": "h", "arguments": {}}', []),
    "[1, 2] and <tool_call>": ("[1, 2] and <tool_call>", []),
    "<tool_call>no JSON</tool_call>": ("<tool_call>no JSON</tool_call>", []),
    '{"name": ["f"], "arguments": 1}': ('{"name": ["f"], "arguments": 1}', []),
    "plain text with < and {": ("plain text with < and {", []),
    "": ("", []),
}


def read(pieces: list[str]) -> tuple[str, list[Call]]:
    finder = CallFinder(TOOLS)
    parts = [*(finder.add(piece) for piece in pieces), finder.finish()]
    return "".join(text for text, _ in parts), [call for _, calls in parts for call in calls]


@pytest.mark.parametrize("text", TEXTS)
def test_the_calls_of_a_text(text: str) -> None:
    expected, names = TEXTS[text]
    found, calls = read([text])
    assert found.strip() == expected
    assert [call.name for call in calls] == names
    assert all(isinstance(json.loads(call.arguments), dict) for call in calls)
    assert len({call.id for call in calls}) == len(calls)


@given(st.sampled_from(list(TEXTS)), st.lists(st.integers(0, 80), max_size=8))
def test_the_borders_of_pieces_do_not_matter(text: str, cuts: list[int]) -> None:
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(borders)]
    whole, calls = read([text])
    found, same = read(pieces)
    assert found.strip() == whole.strip()
    assert [(c.name, c.arguments) for c in same] == [(c.name, c.arguments) for c in calls]


def test_without_tools_nothing_is_held_back() -> None:
    assert CallFinder(()).add("[<tool_call>") == ("[<tool_call>", [])
