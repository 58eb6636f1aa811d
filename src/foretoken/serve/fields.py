"""The bodies of requests: OpenAI's fields, and vLLM's further ones, with their types."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from annotated_types import Ge, Le, MaxLen, MinLen
from pydantic import FiniteFloat

from foretoken.serve.body import Body

__all__ = [
    "ChatBody",
    "CompletionBody",
    "Details",
    "DetokenizeBody",
    "Message",
    "NamedTool",
    "ResponseBody",
    "SamplingBody",
    "TokenizeBody",
    "Tool",
]

JSONObject: TypeAlias = dict[str, Any]
Text: TypeAlias = Annotated[str, MaxLen(1000)]
Texts: TypeAlias = Annotated[list[Text], MaxLen(64)]
TokenIds: TypeAlias = list[Annotated[int, Ge(0)]]


class StreamOptions(Body):
    """When a stream tells its usage: in a last chunk, or in every chunk."""

    only: ClassVar = {"include_obfuscation": (False,)}

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Details(Body):
    """What a response tells of speculation, under `foretoken` in each choice.

    Args:
        tokens: id, text and origin of each token, as they come.
        metrics: counts and times of the output, at its end.
        trace: what each step drafted and accepted, with p of every drafted token, at the end.
    """

    tokens: bool = False
    metrics: bool = False
    trace: bool = False


class SamplingBody(Body):
    """How the next token is drawn, and what the response has besides text."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Ge(1)] | None = None
    temperature: FiniteFloat | None = None
    top_p: FiniteFloat | None = None
    frequency_penalty: FiniteFloat | None = None
    presence_penalty: FiniteFloat | None = None
    seed: int | None = None
    stop: Text | Texts | None = None
    logit_bias: Annotated[dict[str, FiniteFloat], MaxLen(1024)] | None = None
    user: str | None = None
    # vLLM's
    top_k: int | None = None
    min_p: FiniteFloat | None = None
    repetition_penalty: FiniteFloat | None = None
    min_tokens: int | None = None
    stop_token_ids: Annotated[TokenIds, MaxLen(1024)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: Annotated[list[Text], MaxLen(256)] | None = None
    allowed_token_ids: TokenIds | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    structured_outputs: JSONObject | None = None
    guided_json: JSONObject | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # ours
    speculative_config: JSONObject | None = None
    foretoken: Details | None = None


class CompletionBody(SamplingBody):
    """The body of `/v1/completions`."""

    only: ClassVar = {"suffix": ("",)}

    prompt: str | list[str] | TokenIds | list[TokenIds]
    max_tokens: Annotated[int, Ge(0)] | None = None
    logprobs: Annotated[int, Ge(0)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    response_format: JSONObject | None = None


class TextPart(Body):
    """A part of a message's content."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    only: ClassVar = {"annotations": ([],), "logprobs": ([],)}


class FunctionCall(Body):
    """A function's name, and its arguments as JSON."""

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

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
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
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        """The text in one piece."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatBody(SamplingBody):
    """The body of `/v1/chat/completions`."""

    only: ClassVar = {
        "store": (False,),
        "metadata": ({},),
        "service_tier": ("auto", "default"),
        "modalities": (["text"],),
        "audio": (),
        "functions": (),
        "function_call": (),
        "reasoning_effort": (),
        "verbosity": (),
        "web_search_options": (),
        "prompt_cache_key": (),
        "safety_identifier": (),
    }

    messages: Annotated[list[Message], MinLen(1)]
    max_tokens: Annotated[int, Ge(0)] | None = None
    max_completion_tokens: Annotated[int, Ge(0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Ge(0)] | None = None
    response_format: JSONObject | None = None
    tools: Annotated[list[Tool], MaxLen(128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JSONObject | None = None


class InputMessage(Body):
    """A message of the input of `/v1/responses`."""

    only: ClassVar = {"id": (), "status": ("completed",)}

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]


class ResponseBody(Body):
    """The body of `/v1/responses`: text in, text out."""

    only: ClassVar = {
        "background": (False,),
        "conversation": (),
        "include": ([],),
        "max_tool_calls": (),
        "metadata": ({},),
        "parallel_tool_calls": (True,),
        "previous_response_id": (),
        "prompt": (),
        "prompt_cache_key": (),
        "reasoning": (),
        "safety_identifier": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "stream_options": ({},),
        "tool_choice": ("auto", "none"),
        "tools": ([],),
        "truncation": ("disabled",),
    }

    model: str
    input: str | Annotated[list[InputMessage], MinLen(1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Ge(1)] | None = None
    temperature: FiniteFloat | None = None
    top_p: FiniteFloat | None = None
    top_logprobs: Annotated[int, Ge(0), Le(0)] | None = None
    stream: bool | None = None
    text: JSONObject | None = None
    user: str | None = None
    # vLLM's and ours
    seed: int | None = None
    top_k: int | None = None
    speculative_config: JSONObject | None = None


class TokenizeBody(Body):
    """The body of `/tokenize`: a prompt, or the messages of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], MinLen(1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Annotated[list[Tool], MaxLen(128)] | None = None
    chat_template_kwargs: JSONObject | None = None


class DetokenizeBody(Body):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: TokenIds
