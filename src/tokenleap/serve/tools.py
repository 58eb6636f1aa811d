"""Calls of functions: the form that forces one, and how calls are found in what a model writes.

Models write calls in the form that their template showed them. Three forms are read:
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen, SmolLM2), and an object
or a list of such objects as the whole answer (Llama 3, Mistral), with `parameters` for `arguments`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenleap.serve.errors import invalid
from tokenleap.serve.fields import ChatBody
from tokenleap.serve.messages import NamedTool, Tool

__all__ = ["Call", "CallFinder", "forced_form", "forced_name", "tools_of"]

BEGIN, END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class Call:
    """A call that the model made: a function's name, and its arguments as JSON."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def as_dict(self) -> dict[str, Any]:
        """As OpenAI's API has it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


def tools_of(body: ChatBody) -> list[Tool]:
    """The tools that the model is shown.

    Raises:
        APIError: `tool_choice` asks for one that is not there, or names are not unique.
    """
    tools, choice = body.tools or [], body.tool_choice
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise invalid("tools", "tools: two functions have the same name.")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise invalid("tool_choice", f"tool_choice: no tool is named '{choice.function.name}'.")
    if choice not in (None, "none") and not tools:
        raise invalid("tool_choice", "tool_choice needs tools: send them, or leave it out.")
    return [] if choice == "none" else tools


def forced_name(body: ChatBody) -> str | None:
    """The function that has to be called, if there is only one choice."""
    choice = body.tool_choice
    return choice.function.name if isinstance(choice, NamedTool) else None


def forced_form(body: ChatBody) -> dict[str, Any] | None:
    """The form of an output that has to be a call; None if the model may answer with text.

    A named function's output is its arguments. With `required`, it is a list of names and
    arguments.
    """
    choice, tools = body.tool_choice, body.tools or []
    if isinstance(choice, NamedTool):
        (tool,) = [each for each in tools if each.function.name == choice.function.name]
        return {"json": _parameters(tool), "disable_any_whitespace": True}
    if choice != "required":
        return None
    shared: dict[str, Any] = {}
    calls = [_call_schema(tool, shared) for tool in tools]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if body.parallel_tool_calls is False:
        schema["maxItems"] = 1
    if shared:
        schema["$defs"] = shared
    return {"json": schema, "disable_any_whitespace": True}


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}}


def _call_schema(tool: Tool, shared: dict[str, Any]) -> dict[str, Any]:
    """The schema of a call; references lead to the root, so definitions go to `shared`."""
    parameters = dict(_parameters(tool))
    definitions = parameters.pop("$defs", {})
    if not isinstance(definitions, dict):
        raise invalid("tools", "tools: '$defs' of a function's parameters must be an object.")
    for name, schema in definitions.items():
        if shared.setdefault(name, schema) != schema:
            raise invalid("tools", f"tools: two functions define '{name}' in different ways.")
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


class CallFinder:
    """Finds calls in text that comes in pieces, and holds back what may become one.

    Args:
        tools: the functions that may be called.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._names = {tool.function.name for tool in tools}
        self._held = ""
        self._begun = False  # whether text has been given out

    def add(self, text: str) -> tuple[str, list[Call]]:
        """The text that is certainly no call, and the calls that are complete."""
        if not self._names:
            return text, []
        self._held += text
        if not self._begun and self._held.lstrip()[:1] in ("", "{", "["):
            return "", []  # the whole answer may be a call
        given, calls = "", list[Call]()
        while True:
            before, begin, rest = self._held.partition(BEGIN)
            if not begin:
                kept = _overlap(self._held, BEGIN)
                given += self._held[: len(self._held) - kept]
                self._held = self._held[len(self._held) - kept :]
                break
            inside, end, after = rest.partition(END)
            if not end:
                given, self._held = given + before, begin + rest
                break
            found = self._calls(inside)
            given += before if found else before + begin + inside + end
            self._held = after
            calls += found
        if calls:
            given = given.rstrip() if not given.strip() else given
        self._begun = self._begun or bool(given.strip())
        return given, calls

    def finish(self) -> tuple[str, list[Call]]:
        """What was held back, at the end of the output."""
        if found := self._calls(self._held):
            self._held = ""
            return "", found
        self._begun = True
        text, calls = self.add("")
        held, self._held = self._held, ""
        cut = self._calls(held.removeprefix(BEGIN)) if held.startswith(BEGIN) else []
        return (text, calls + cut) if cut else (text + held, calls)

    def _calls(self, text: str) -> list[Call]:
        """The calls that a JSON text describes; empty if it is anything else."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return []
        listed = value if isinstance(value, list) else [value]
        calls = [self._call(each) for each in listed]
        return [call for call in calls if call] if calls and all(calls) else []

    def _call(self, value: Any) -> Call | None:
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str) or name not in self._names:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):
            return Call(name, arguments)
        return Call(name, json.dumps(arguments, ensure_ascii=False))


def _overlap(text: str, word: str) -> int:
    """How many characters at the end of the text may begin the word."""
    lengths = range(min(len(word) - 1, len(text)), 0, -1)
    return next((n for n in lengths if text.endswith(word[:n])), 0)
