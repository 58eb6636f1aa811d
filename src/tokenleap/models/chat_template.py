"""Chat templates: programs that come with a model, which Jinja's sandbox bounds only in part.

The sandbox keeps them from files and attributes. It does not keep them from multiplying a text to
gigabytes, or from loops in loops. Within `rendered`, the environment that Transformers compiles
them with counts what they make: every repetition of a loop, call, filter and operator is charged
before it is done. Elsewhere that environment is as it was.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import wraps
from typing import Any

from jinja2 import Environment, nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

_MOST = 1 << 25
"""Characters of a value, written out; a prompt of a million tokens has a fifth of them."""

_MOST_IN_ALL = 1 << 30  # characters that are made in all, those of discarded values included

_SECONDS = 10.0

_ITEM = 64
"""Characters that an item of a list counts besides its own, so that lists of lists have a limit."""

_PADDING = {"center", "ljust", "rjust", "zfill"}
_SPREADING = {"batch", "expandtabs", "indent", "slice", "tojson", "wordwrap"}
"""Methods and filters whose numbers are widths: of the whole, or of each of its parts."""

_budget: ContextVar[_Budget | None] = ContextVar("_budget", default=None)


def rendered(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], **arguments: Any
) -> str:
    """The text of a conversation (see `apply_chat_template`)."""
    token = _budget.set(_Budget())
    try:
        listed: Any = list(messages)
        text = tokenizer.apply_chat_template(listed, tokenize=False, **arguments)
    except (MemoryError, RecursionError):
        raise SecurityError("it takes too much memory") from None
    finally:
        _budget.reset(token)
    assert isinstance(text, str)
    return text


_TOOLS = """You may call functions. These are all of them, as JSON schemas:
<tools>
{tools}
</tools>
To call one, answer with its name and arguments, and nothing else, in this form:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>"""
"""The system message for models whose chat template has no tools."""


def knows_tools(template: Any) -> bool:
    """Whether a chat template, or one of several by name, writes tools."""
    return "tools" in (str(sorted(template)) if isinstance(template, dict) else str(template))


def without_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """A conversation for a template that has only text: tools, calls and results become text."""
    plain = [_as_text(message) for message in messages]
    if tools:
        told = _TOOLS.format(tools="\n".join(json.dumps(tool) for tool in tools))
        if plain and plain[0]["role"] == "system":
            plain[0]["content"] += f"\n\n{told}"
        else:
            plain.insert(0, {"role": "system", "content": told})
    return plain


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without calls, whose content has them."""
    content, calls = message["content"], message.get("tool_calls") or ()
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    written = [f"<tool_call>\n{json.dumps(call['function'])}\n</tool_call>" for call in calls]
    others = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**others, "content": "\n".join(part for part in (content, *written) if part)}


class _Budget:
    """Limits the characters and the time of a template."""

    def __init__(self) -> None:
        self._left, self._end = _MOST_IN_ALL, time.monotonic() + _SECONDS

    def charge(self, size: int) -> None:
        """Allow a value of this size, or refuse it."""
        self._left -= size
        if size > _MOST or self._left < 0:
            raise SecurityError("it makes a text that is too large")
        if time.monotonic() > self._end:
            raise SecurityError(f"it takes more than {_SECONDS:.0f} seconds")


def _charge(size: int) -> None:
    if (budget := _budget.get()) is not None:
        budget.charge(size)


def _size(value: Any) -> int:
    """Characters of a value when it is written; no more is counted than is too much."""
    if isinstance(value, str):
        return len(value)
    total, left = 0, [value]
    while left and total <= _MOST:
        each = left.pop()
        if isinstance(each, str | bytes):
            total += len(each)
        elif isinstance(each, int):
            total += 1 + each.bit_length() // 3
        elif isinstance(each, Mapping):
            left += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple | set | frozenset):
            left += each
        total += _ITEM
    return total


def _made(name: str, values: Sequence[Any]) -> int:
    """Most characters that a method or a filter makes of its object and its arguments."""
    total = sum(map(_size, values))
    first, texts = values[0] if values else "", [x for x in values[1:] if isinstance(x, str)]
    if name == "replace" and isinstance(first, str) and len(texts) == 2:
        return total + (first.count(texts[0]) if texts[0] else len(first) + 1) * len(texts[1])
    if name == "join":
        items, marks = (first, texts) if not isinstance(first, str) else (values[-1], [first])
        count = len(items) if isinstance(items, Sequence) else 1
        return total + count * max(map(len, marks), default=0)
    if name == "translate":
        return (1 + len(str(first))) * total
    if name == "format" and isinstance(first, str):
        stars = len(re.findall(r"\*|\{[^{}]*\{", first))  # whose widths are arguments
        return total + stars * _width(values[1:]) + sum(map(int, re.findall(r"\d{1,9}", first)))
    if name in _PADDING:
        return total + _width(values[1:])
    if name in _SPREADING:
        return total * (1 + _width(values[1:]))
    return total


def _width(values: Iterable[Any]) -> int:
    flat = (x for each in values for x in (each if isinstance(each, tuple) else (each,)))
    return max((abs(x) for x in flat if isinstance(x, int)), default=0)


_JINJA = (Environment, Context, nodes.EvalContext)
"""Types that Jinja passes to some filters as their first argument."""


class _Filters(dict[str, Any]):
    """Filters that are charged for what they make; tests of their attributes see their own."""

    def get(self, name: str, default: Any = None) -> Any:
        """Called where Jinja computes constants while it compiles."""
        return self[name] if super().get(name) else default

    def __getitem__(self, name: str) -> Any:
        function: Callable[..., Any] = super().__getitem__(name)

        @wraps(function)
        def charged(*args: Any, **kwargs: Any) -> Any:
            if _budget.get() is None:
                return function(*args, **kwargs)
            values = [x for x in (*args, *kwargs.values()) if not isinstance(x, _JINJA)]
            _charge(_made(name, values))
            return _checked(function(*args, **kwargs))

        return charged


def _checked(value: Any) -> Any:
    if _budget.get() is not None:
        _charge(_size(value))
    return value


class _Bounded(ImmutableSandboxedEnvironment):
    """Transformers' environment, with a budget where there is one."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.filters = _Filters(self.filters)
        del self.globals["lipsum"]  # which writes as much as it is told
        self.finalize = _checked

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = self._calls("repeated", loop.iter, nodes.Const(_text_in(loop)))
        for macro in list(tree.find_all(nodes.Macro)):
            text = self._calls("written", nodes.Const(_text_in(macro)))
            macro.body.insert(0, nodes.ExprStmt(text, lineno=macro.lineno))
        for parent in [tree, *tree.find_all(nodes.Node)]:
            for field, value in parent.iter_fields():
                if isinstance(value, nodes.Concat):
                    setattr(parent, field, self._calls("joined", *value.nodes))
                elif isinstance(value, list):
                    value[:] = [
                        self._calls("joined", *each.nodes)
                        if isinstance(each, nodes.Concat)
                        else each
                        for each in value
                    ]
        tree.set_environment(self)
        return tree

    @staticmethod
    def _calls(name: str, *arguments: Any) -> nodes.Call:
        function = nodes.EnvironmentAttribute(name)
        call = nodes.Call(function, list(arguments), [], None, None)
        call.set_lineno(getattr(arguments[0], "lineno", None) or 1)
        return call

    @staticmethod
    def repeated(items: Iterable[Any], size: int) -> Iterator[Any]:
        """The items of a loop, each charged for the text in the loop's body."""
        for item in items:
            _charge(size)
            yield item

    @staticmethod
    def written(size: int) -> str:
        """Nothing, charged for the text in a macro's body."""
        _charge(size)
        return ""

    @staticmethod
    def joined(*parts: Any) -> str:
        """The operator `~`."""
        _charge(sum(map(_size, parts)))
        return "".join(map(str, parts))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        if _budget.get() is None:
            return super().call(__context, __obj, *args, **kwargs)
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps `format`
        values = (getattr(method, "__self__", ""), *args, *kwargs.values())
        _charge(_made(getattr(method, "__name__", ""), values))
        return _checked(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if _budget.get() is not None:
            size = _size(left) + _size(right)
            if operator == "*":
                times = min((abs(x) for x in (left, right) if isinstance(x, int)), default=1)
                size = size if isinstance(left, int) and isinstance(right, int) else size * times
            elif operator == "**":
                size *= min(abs(right), _MOST) if isinstance(right, int) else 1
            elif operator == "%" and isinstance(left, str):
                size = _made("format", (left, right))
            _charge(size)
        return super().call_binop(context, operator, left, right)


def _text_in(node: nodes.Node) -> int:
    return 1 + sum(len(each.data) for each in node.find_all(nodes.TemplateData))


vars(chat_template_utils)[ImmutableSandboxedEnvironment.__name__] = _Bounded
chat_template_utils._compile_jinja_template.cache_clear()
