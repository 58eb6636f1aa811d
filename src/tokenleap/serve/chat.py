"""`/v1/chat/completions`: the next message of a conversation."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import APIRouter, Request, Response
from transformers import PreTrainedTokenizerBase

from tokenleap.engine.jobs import JobSpec
from tokenleap.engine.prompts import checked_text, conversation_text, needed, tokens_of
from tokenleap.outputs import CompletionOutput, RequestOutput, StreamChunk, StreamedToken
from tokenleap.serve.body import invalid, takes
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
from tokenleap.serve.logprobs import chat_logprobs, prompt_logprobs
from tokenleap.serve.running import (
    Choices,
    Run,
    ServerState,
    answered,
    data,
    refuse_stream_options,
)
from tokenleap.serve.text_limit import TextLimit

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    **takes(ChatBody, messages=[{"role": "user", "content": "Hello"}], max_tokens=64),
)
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    return await answered(request, ChatBody, _Chat)


class _Chat(Choices[ChatBody]):
    prompt_field = "messages"
    prefix = "chatcmpl-"
    object = "chat.completion.chunk"

    def __init__(self, body: ChatBody, state: ServerState) -> None:
        self._tools = tools_of(body)
        _check(body)
        super().__init__(body, state, body.n or 1)

    def prepare(self) -> list[JobSpec]:
        body, state, llm = self.body, self.state, self.state.llm.llm
        form, forced = form_of(body, body.response_format), forced_form(body)
        if form is not None and self._tools:
            field = form_field(body)
            raise invalid(field, f"{field} and tools contradict each other: send one of them.")
        most = body.max_completion_tokens
        params = params_of(
            body,
            state.settings,
            llm.engine.sampling_defaults,
            max_tokens=body.max_tokens if most is None else most,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            form=forced or form,
        )
        limit = state.limit_of(body)
        ids = chat_ids(body.messages, llm.tokenizer, tools=self._tools, asked=body, limit=limit)
        prediction = None if body.prediction is None else body.prediction.text
        if prediction is not None:
            state.text_limit.check(prediction, "prediction")
        config, trace = body.speculative_config, body.wants_trace
        return [JobSpec(ids, params, config, prediction=prediction, trace=trace)]

    def begin(self, run: Run) -> None:
        super().begin(run)
        forced = forced_name(self.body)
        most = 1 if self.body.parallel_tool_calls is False else None
        self._writers = [_Writer(self._tools, forced, most) for _ in range(self.sequences)]

    def whole(self, results: Sequence[RequestOutput]) -> dict[str, Any]:
        made, (result,) = super().whole(results), results
        made["object"] = "chat.completion"
        if self.body.prompt_logprobs is not None:
            made["prompt_logprobs"] = prompt_logprobs(result.prompt_logprobs)
        return made | self._prompt_tokens(result.prompt_token_ids)

    def _prompt_tokens(self, ids: Sequence[int]) -> dict[str, Any]:
        return {"prompt_token_ids": list(ids)} if self.body.return_token_ids else {}

    def choice(
        self,
        prompt: int,
        index: int,
        tokens: Sequence[StreamedToken],
        output: CompletionOutput | None,
    ) -> dict[str, Any]:
        text, writer = "".join(token.text for token in tokens), self._writers[index]
        if self.body.stream:
            told = {"delta": writer.delta(text, ends=output is not None)}
        else:
            told = {"message": writer.message(text)}
        logprobs = None
        if self.body.logprobs:
            known = [token.logprobs for token in tokens if token.logprobs is not None]
            logprobs = chat_logprobs(known, self.body.top_logprobs or 0, self.state.pieces)
        end = self.end(tokens, output, "tool_calls" if writer.num_calls else None)
        return {"index": index, **told, "logprobs": logprobs, **end}

    def begun(self) -> Iterator[bytes]:
        prompt = self._prompt_tokens(self.run.requests[0].job.requests[0].prompt_ids)
        for index in range(self.sequences):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            yield data({**self.head, "choices": [choice], **({} if index else prompt)})

    def is_large(self, prompt: int, chunk: StreamChunk) -> bool:
        return super().is_large(prompt, chunk) or chunk.prompt_logprobs is not None

    def chunk(self, prompt: int, chunk: StreamChunk) -> dict[str, Any]:
        made = super().chunk(prompt, chunk)
        if chunk.prompt_logprobs is not None:
            made["prompt_logprobs"] = prompt_logprobs(chunk.prompt_logprobs)
        return made


def _check(body: ChatBody) -> None:
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise invalid("max_tokens", "max_tokens and max_completion_tokens mean the same: send one.")
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", 'top_logprobs need "logprobs": true.')
    refuse_stream_options(body)
    if body.parallel_tool_calls is not None and not body.tools:
        raise invalid("parallel_tool_calls", "parallel_tool_calls needs tools.")
    refuse_special_tokens(given=body.add_special_tokens)


class _Writer:
    """One output's text, as text and calls; or as the arguments of the function `forced`.

    Attributes:
        num_calls: calls that were found in it so far, which are at most `most`.
    """

    def __init__(self, tools: Sequence[Tool], forced: str | None, most: int | None) -> None:
        self._forced = None if forced is None else Call(forced, "")
        self._begun = False  # whether a piece of the forced call was sent
        self._finder, self._most = CallFinder(tools), most
        self.num_calls = 0

    def message(self, text: str) -> dict[str, Any]:
        """The message with the whole text."""
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self._forced is not None:
            message["content"], calls = None, [replace(self._forced, arguments=text)]
        else:
            text, calls = self._read(text, ends=True)
            message["content"] = (text.strip() or None) if calls else text
        if calls:
            message["tool_calls"] = [call.as_dict() for call in calls]
        return message

    def delta(self, text: str, *, ends: bool) -> dict[str, Any]:
        """The piece of a message with the next piece of text."""
        if self._forced is not None:
            return {"tool_calls": [self._arguments(self._forced, text)]}
        first = self.num_calls
        text, calls = self._read(text, ends=ends)
        delta: dict[str, Any] = {"content": text} if text or not calls else {}
        if calls:
            numbered = enumerate(calls, first)
            delta["tool_calls"] = [{"index": i, **call.as_dict()} for i, call in numbered]
        return delta

    def _arguments(self, call: Call, text: str) -> dict[str, Any]:
        """The next piece of a forced call's arguments; the first one has its name and id."""
        if self._begun:
            return {"index": 0, "function": {"arguments": text}}
        self._begun = True
        return {"index": 0, **replace(call, arguments=text).as_dict()}

    def _read(self, text: str, *, ends: bool) -> tuple[str, list[Call]]:
        """The new text that is no call, and the new calls."""
        given, calls = self._finder.add(text)
        if ends:
            rest, more = self._finder.finish()
            given, calls = given + rest, calls + more
        if self._most is not None:
            calls = calls[: self._most - self.num_calls]
        self.num_calls += len(calls)
        return given, calls


# From the messages and tools of a request to its prompt's token ids. Call it off the loop.


def text_ids(
    prompt: str,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    add_special_tokens: bool,
    limit: TextLimit,
) -> list[int]:
    tokenizer = needed(tokenizer)
    limit.check(prompt)
    text = checked_text("prompt", prompt)
    return tokens_of(tokenizer, text, add_special_tokens=add_special_tokens)


def chat_ids(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    limit: TextLimit,
    tools: Sequence[Tool] = (),
    asked: Templated | None = None,
) -> list[int]:
    """Token ids of a conversation.

    A text that is too long is refused before it is split into tokens.
    """
    fields = ("chat_template_kwargs", "add_generation_prompt", "continue_final_message")
    template = {} if asked is None else {field: getattr(asked, field) for field in fields}
    if tools:
        template["tools"] = [tool.model_dump(exclude_none=True) for tool in tools]
    listed = [message.model_dump(exclude_none=True) for message in messages]
    text = conversation_text(listed, tokenizer, **template)
    limit.check(text)
    return tokens_of(needed(tokenizer), text)


def refuse_special_tokens(*, given: bool | None) -> None:
    """Refuse to add special tokens to a conversation."""
    if given:
        raise invalid("add_special_tokens", "add_special_tokens: the chat template writes them.")


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
            listed = value if isinstance(value, list) else [value]
            calls = [self._call(each) for each in listed]
        except (ValueError, RecursionError):
            return []
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
