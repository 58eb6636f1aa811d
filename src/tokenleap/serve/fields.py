"""The bodies of requests: OpenAI's fields, and vLLM's further ones."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias

from annotated_types import Ge, Le, MaxLen, MinLen
from pydantic import BeforeValidator, FiniteFloat, Tag

from tokenleap.serve.body import Body, by_type
from tokenleap.serve.field_types import Items, JSONObject, Prompts, Text, Texts, TokenIds, few
from tokenleap.serve.messages import Content, Message, NamedTool, Prediction, Tool

__all__ = [
    "ChatBody",
    "CompletionBody",
    "Details",
    "DetokenizeBody",
    "ResponseBody",
    "SamplingBody",
    "TokenizeBody",
]


CacheSalt: TypeAlias = Annotated[Text, MinLen(1)] | None
"""vLLM's field: requests with the same API key and salt share what is kept between requests."""


class StreamOptions(Body):
    """When a stream tells its usage: in a last chunk, or in every chunk."""

    only: ClassVar = {"include_obfuscation": (False,)}

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Details(Body):
    """What a response tells of speculation, under `tokenleap` in each choice.

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
    stop: (
        Annotated[
            Annotated[Text, Tag("<text>")] | Annotated[Texts, Tag("<list>")],
            by_type(text="a string", items="a list of strings"),
        ]
        | None
    ) = None
    logit_bias: Annotated[dict[str, FiniteFloat], BeforeValidator(few)] | None = None
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
    bad_words: Annotated[Items[Text], MaxLen(256)] | None = None
    allowed_token_ids: TokenIds | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: CacheSalt = None
    structured_outputs: JSONObject | None = None
    guided_json: (
        Annotated[
            Annotated[str, Tag("<text>")] | Annotated[JSONObject, Tag("<object>")],
            by_type(text="a schema as a string", fields="an object"),
        ]
        | None
    ) = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None
    # ours
    speculative_config: JSONObject | None = None
    tokenleap: Details | None = None

    @property
    def wants_trace(self) -> bool:
        """Whether the response has the trace of all steps."""
        return self.tokenleap is not None and self.tokenleap.trace


class CompletionBody(SamplingBody):
    """The body of `/v1/completions`."""

    only: ClassVar = {"suffix": ("",)}

    prompt: Prompts
    max_tokens: Annotated[int, Ge(0)] | None = None
    logprobs: Annotated[int, Ge(0)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    response_format: JSONObject | None = None


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

    messages: Annotated[Items[Message], MinLen(1)]
    max_tokens: Annotated[int, Ge(0)] | None = None
    max_completion_tokens: Annotated[int, Ge(0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Ge(0)] | None = None
    response_format: JSONObject | None = None
    tools: Annotated[Items[Tool], MaxLen(128)] | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("<text>")]
            | Annotated[NamedTool, Tag("<object>")],
            by_type(text="'none', 'auto' or 'required'", fields="an object that names a tool"),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JSONObject | None = None


class InputMessage(Body):
    """A message of the input of `/v1/responses`."""

    dropped: ClassVar = ("id", "status")  # of a response's output that is sent back

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


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
    input: Annotated[
        Annotated[str, Tag("<text>")] | Annotated[Items[InputMessage], MinLen(1), Tag("<list>")],
        by_type(text="a string", items="a list of messages"),
    ]
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
    cache_salt: CacheSalt = None
    speculative_config: JSONObject | None = None


class TokenizeBody(Body):
    """The body of `/tokenize`: a prompt, or the messages of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Items[Message], MinLen(1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Annotated[Items[Tool], MaxLen(128)] | None = None
    chat_template_kwargs: JSONObject | None = None


class DetokenizeBody(Body):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: TokenIds
