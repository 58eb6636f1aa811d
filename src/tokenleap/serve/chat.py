"""`/v1/chat/completions`: the next message of a conversation."""

from __future__ import annotations

import inspect
import json
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from tokenleap.engine.jobs import JobSpec
from tokenleap.engine.prompts import checked_text, conversation_ids, needed, tokens_of
from tokenleap.outputs import CompletionOutput, RequestOutput, StreamChunk
from tokenleap.serve.body import invalid, read, takes
from tokenleap.serve.fields import (
    ChatBody,
    Message,
    NamedTool,
    Templated,
    Tool,
    form_field,
    form_of,
    params_of,
)
from tokenleap.serve.running import (
    Choices,
    Run,
    ServerState,
    all_outputs,
    answered,
    chat_logprobs,
    data,
    prompt_logprobs,
    refuse_stream_options,
    state_of,
    usage_of,
)
from tokenleap.serve.text_limit import TextLimit

router = APIRouter()


@router.post("/v1/chat/completions", **takes(ChatBody))
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    state = state_of(request)
    body = await read(request, ChatBody, state.settings)
    tools = tools_of(body)
    _check(body)
    return await answered(
        request,
        body,
        partial(_prepared, body, tools, state),
        lambda run: _Answer(body, run, state, tools),
        prompt_field="messages",
        sequences=body.n or 1,
    )


def _check(body: ChatBody) -> None:
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise invalid("max_tokens", "max_tokens and max_completion_tokens mean the same: send one.")
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", 'top_logprobs need "logprobs": true.')
    refuse_stream_options(body)
    if body.parallel_tool_calls is not None and not body.tools:
        raise invalid("parallel_tool_calls", "parallel_tool_calls needs tools.")
    refuse_special_tokens(given=body.add_special_tokens)


def _prepared(body: ChatBody, tools: Sequence[Tool], state: ServerState) -> list[JobSpec]:
    tokenizer = state.llm.llm.tokenizer
    form, forced = form_of(body, body.response_format), forced_form(body)
    if form is not None and tools:
        field = form_field(body)
        raise invalid(field, f"{field} and tools contradict each other: send one of them.")
    params = params_of(
        body,
        state.settings,
        state.llm.llm.engine.sampling_defaults,
        max_tokens=body.max_tokens
        if body.max_completion_tokens is None
        else body.max_completion_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        form=forced or form,
    )
    ids = chat_ids(
        body.messages,
        tokenizer,
        tools=tools,
        asked=body,
        limit=state.limit_of(body),
    )
    if body.prediction is not None:
        state.text_limit.check(body.prediction.text, "prediction")
    spec = JobSpec(
        ids,
        params,
        body.speculative_config,
        prediction=None if body.prediction is None else body.prediction.text,
        trace=body.wants_trace,
    )
    return [spec]


class _Answer(Choices):
    def __init__(self, body: ChatBody, run: Run, state: ServerState, tools: Sequence[Tool]) -> None:
        super().__init__(body, run, state)
        self._tools, self._forced = tools, forced_name(body)
        self._writers = [self._writer() for _ in range(body.n or 1)]
        self._head = {
            "id": run.named("chatcmpl-"),
            "created": int(time.time()),
            "model": state.settings.model,
            "object": "chat.completion.chunk",
        }

    def whole(self, results: Sequence[RequestOutput]) -> dict[str, Any]:
        outputs = all_outputs(results)
        response = {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(output) for output in outputs],
            "usage": usage_of(self._run, outputs),
        }
        if self._body.prompt_logprobs is not None:
            response["prompt_logprobs"] = prompt_logprobs(results[0].prompt_logprobs)
        return response | self._prompt_tokens(results[0].prompt_token_ids)

    def _prompt_tokens(self, ids: Sequence[int]) -> dict[str, Any]:
        return {"prompt_token_ids": list(ids)} if self._body.return_token_ids else {}

    def _choice(self, output: CompletionOutput) -> dict[str, Any]:
        writer = self._writer()
        text, calls = writer.add(output.text, ends=True)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:  # the text of a forced call is its arguments
            message["content"] = None if self._forced else text.strip() or None
            message["tool_calls"] = [call.as_dict() for call in calls]
        return {
            "index": output.index,
            "message": message,
            "logprobs": self._logprobs(output.logprobs),
            **self._end(
                output.tokens, output, "tool_calls" if calls and self._forced is None else None
            ),
        }

    def _writer(self) -> _Writer:
        one = self._body.parallel_tool_calls is False
        return _Writer(self._tools, self._forced, most=1 if one else None)

    def _logprobs(self, found: Any) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(found or (), self._body.top_logprobs or 0, self._state.pieces)

    # In pieces

    def _begun(self) -> Iterator[bytes]:
        prompt = self._prompt_tokens(self._run.requests[0].job.requests[0].prompt_ids)
        for index in range(len(self._writers)):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            yield data({**self._head, "choices": [choice], **({} if index else prompt)})

    def _is_large(self, index: int, chunk: StreamChunk) -> bool:
        return super()._is_large(index, chunk) or chunk.prompt_logprobs is not None

    def _chunk_data(self, index: int, chunk: StreamChunk) -> dict[str, Any]:
        found: dict[str, Any] = {"choices": [self._chunk_choice(chunk)]}
        if chunk.prompt_logprobs is not None:
            found["prompt_logprobs"] = prompt_logprobs(chunk.prompt_logprobs)
        return found

    def _chunk_choice(self, chunk: StreamChunk) -> dict[str, Any]:
        writer = self._writers[chunk.index]
        text, calls = writer.add(chunk.text, ends=chunk.finished)
        delta: dict[str, Any] = {"content": text} if text or not calls else {}
        if self._forced is not None:
            delta = {"tool_calls": [writer.forced_delta(text)]}
        elif calls:
            first = writer.num_calls - len(calls)
            numbered = enumerate(calls, first)
            delta["tool_calls"] = [{"index": i, **call.as_dict()} for i, call in numbered]
        made = writer.num_calls and self._forced is None
        return {
            "index": chunk.index,
            "delta": delta,
            "logprobs": self._logprobs(chunk.logprobs),
            **self._end(chunk.tokens, chunk.output, "tool_calls" if made else None),
        }


class _Writer:
    """One output's text, as text and calls; or as the arguments of the function `forced`."""

    def __init__(self, tools: Sequence[Tool], forced: str | None, most: int | None) -> None:
        self._most = most
        self._finder = CallFinder(tools)
        self._call = None if forced is None else Call(forced, "")
        self._told = False
        self.num_calls = 0

    def add(self, text: str, *, ends: bool) -> tuple[str, list[Call]]:
        """New text and calls; a forced call is complete at the end only (see `forced_delta`)."""
        if self._call is not None:
            calls = [Call(self._call.name, text, self._call.id)] if ends else []
            return text, calls
        given, calls = self._finder.add(text)
        if ends:
            rest, more = self._finder.finish()
            given, calls = given + rest, calls + more
        if self._most is not None:
            calls = calls[: self._most - self.num_calls]
        self.num_calls += len(calls)
        return given, calls

    def forced_delta(self, arguments: str) -> dict[str, Any]:
        """The next piece of a forced call's arguments; the first one has its name and id."""
        assert self._call is not None
        if self._told:
            return {"index": 0, "function": {"arguments": arguments}}
        self._told = True
        first = self._call.as_dict()
        return {"index": 0, **first, "function": {"name": self._call.name, "arguments": arguments}}


# From the messages and tools of a request to its prompt's token ids. Call it off the loop.


_GENERIC = """You may call functions. These are all of them, as JSON schemas:
<tools>
{tools}
</tools>
To call one, answer with its name and arguments, and nothing else, in this form:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>"""
"""The system message for models whose chat template has no tools."""


def text_ids(
    prompt: str,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    add_special_tokens: bool,
    limit: TextLimit,
) -> list[int]:
    tokenizer = needed(tokenizer)
    limit.check(prompt)
    if not add_special_tokens:
        return tokens_of(tokenizer, checked_text("prompt", prompt), in_output=False)
    return list(tokenizer.encode(checked_text("prompt", prompt)))


def chat_ids(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    limit: TextLimit,
    tools: Sequence[Tool] = (),
    asked: Templated | None = None,
) -> list[int]:
    """Token ids of a conversation.

    A chat template that has no tools gets them in a system message, and calls and their results as
    text. A text that is too long is refused before it is split into tokens.
    """
    tokenizer = needed(tokenizer)
    listed = [_message(message) for message in messages]
    template: dict[str, Any] = dict(asked.chat_template_kwargs or {}) if asked else {}
    _check_template_arguments(template, tokenizer)
    if any(_uses_tools(message) for message in messages) or tools:
        if _knows_tools(tokenizer):
            if tools:
                template["tools"] = [tool.model_dump(exclude_none=True) for tool in tools]
        else:
            listed = _without_tools(listed, tools)
    goes_on = asked is not None and bool(asked.continue_final_message)
    wanted = None if asked is None else asked.add_generation_prompt
    generates = not goes_on if wanted is None else wanted
    if goes_on:
        if generates:
            raise invalid(
                "continue_final_message",
                "continue_final_message and add_generation_prompt contradict each other.",
            )
        template["continue_final_message"] = True
    try:
        return conversation_ids(
            listed,
            tokenizer,
            add_generation_prompt=generates,
            check_text=limit.check,
            **template,
        )
    except RecursionError:  # a template writes the JSON of calls and tools
        raise invalid("messages", "messages or tools are nested too deeply.") from None


def refuse_special_tokens(*, given: bool | None) -> None:
    """Refuse to add special tokens to a conversation."""
    if given:
        raise invalid("add_special_tokens", "add_special_tokens: the chat template writes them.")


def _check_template_arguments(given: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    functions = (tokenizer.apply_chat_template, conversation_ids, render_jinja_template)
    own = {"self", *(name for each in functions for name in inspect.signature(each).parameters)}
    if taken := sorted(own & set(given)):
        raise invalid(
            "chat_template_kwargs", f"chat_template_kwargs: '{taken[0]}' is not a template's."
        )


def _message(message: Message) -> dict[str, Any]:
    """A message for chat templates: arguments of calls are objects, and developers are systems."""
    fields = message.model_dump(exclude_none=True)
    if message.role == "developer":
        fields["role"] = "system"
    if message.content is None:
        fields["content"] = ""
    for call in fields.get("tool_calls", ()):
        try:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        except (ValueError, RecursionError):
            continue  # as the model wrote it
    return fields


def _uses_tools(message: Message) -> bool:
    return message.role == "tool" or bool(message.tool_calls)


def _knows_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    template = tokenizer.chat_template
    return "tools" in (str(sorted(template)) if isinstance(template, dict) else str(template))


def _without_tools(messages: list[dict[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The conversation for a template that has only text."""
    plain: list[dict[str, Any]] = []
    if tools:
        listed = "\n".join(json.dumps(tool.model_dump(exclude_none=True)) for tool in tools)
        plain.append({"role": "system", "content": _GENERIC.format(tools=listed)})
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            content = f"<tool_response>\n{_text(content)}\n</tool_response>"
            plain.append({"role": "user", "content": content})
        elif role == "system" and plain and plain[0]["role"] == "system" and len(plain) == 1:
            plain[0] = {"role": "system", "content": f"{_text(content)}\n\n{plain[0]['content']}"}
        else:
            calls = [
                f"<tool_call>\n{json.dumps(call['function'])}\n</tool_call>"
                for call in message.get("tool_calls", ())
            ]
            parts = [part for part in (_text(content), *calls) if part]
            plain.append({"role": role, "content": "\n".join(parts)})
    return plain


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


# Calls of functions: the form that forces one, and how calls are found in what a model writes.
#
# Models write calls in the form that their template showed them. Three forms are read:
# `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen, SmolLM2), and an object
# or a list of such objects as the whole answer (Llama 3, Mistral), with `parameters` for
# `arguments`.


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
    """Finds calls in text that comes in pieces, and holds back what may become one."""

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
        """The text and calls that were held back, at the end of the output."""
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
