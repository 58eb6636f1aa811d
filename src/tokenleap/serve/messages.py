"""The parts of a conversation as requests have them: messages, tools, calls, a prediction."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias

from annotated_types import MaxLen, MinLen
from pydantic import Tag

from tokenleap.serve.body import Body, by_type
from tokenleap.serve.field_types import Items, JSONObject

__all__ = ["Content", "Function", "Message", "NamedTool", "Prediction", "Tool"]


class TextPart(Body):
    """A part of a message's content."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    only: ClassVar = {
        "annotations": ([],),
        "logprobs": ([],),
        "image_url": (),
        "input_audio": (),
        "file": (),
    }
    dropped: ClassVar = ("parsed",)


Content: TypeAlias = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Items[TextPart], Tag("<list>")],
    by_type(text="a string", items="a list of text parts"),
]


class FunctionCall(Body):
    """A function's name, and its arguments as JSON."""

    dropped: ClassVar = ("parsed_arguments",)

    name: str
    arguments: str


class ToolCall(Body):
    """A call that the model made in an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Body):
    """A message of a conversation."""

    only: ClassVar = {
        "refusal": (),
        "annotations": ([],),
        "audio": (),
        "function_call": (),
        "reasoning": (),
        "reasoning_content": (),
    }
    dropped: ClassVar = ("parsed",)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None


class Function(Body):
    """A function that the model may call."""

    name: Annotated[str, MinLen(1), MaxLen(64)]
    description: str | None = None
    parameters: JSONObject | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool; all are functions."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """The one tool that the model has to call."""

    type: Literal["function"]
    function: FunctionName


class Prediction(Body):
    """A text that the answer will mostly repeat."""

    type: Literal["content"]
    content: Content

    @property
    def text(self) -> str:
        """The text in one piece."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)
