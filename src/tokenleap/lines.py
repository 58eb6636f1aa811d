"""Many prompts, a line each: what a line may say, and the results in the order of the lines.

`tokenleap generate --prompts-file` and `tokenleap.ray.generate` use it. A line is an object with
one prompt, and what belongs to it:

{"prompt": "Why is the sky blue?", "id": "sky", "max_tokens": 64}
{"messages": [{"role": "user", "content": "Hello"}], "temperature": 0.8, "seed": 7}
{"prompt_token_ids": [1, 2, 3], "references": ["a text that the answer may quote"]}
{"prompt": "Add a docstring: ...", "prediction": "what the answer will mostly repeat"}
{"prompt": "The house is small.", "source_language": "en_XX", "target_language": "de_DE"}
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tokenleap.errors import PromptError, TokenleapError

if TYPE_CHECKING:
    from tokenleap.core.params import SamplingParams
    from tokenleap.core.references import References
    from tokenleap.engine.jobs import Job
    from tokenleap.engine.prompts import Prompt
    from tokenleap.llm import LLM

FORMS = ("prompt", "messages", "prompt_token_ids", "encoder_prompt")
"""The fields that hold a prompt; a line has one of them."""

OF_SOURCE = ("decoder_prompt", "source_language", "target_language")
"""Further fields for encoder-decoders; see `engine.prompts`."""

_ONLY_SAMPLED = ("top_k", "top_p", "min_p")


@dataclass(frozen=True)
class Line:
    """A prompt of several.

    Args:
        number: of its line in the file, from 1; None without a file.
        prediction: what its answer is expected to repeat; None for nothing.
    """

    number: int | None
    form: str
    prompt: Any
    params: SamplingParams
    references: Sequence[str] | None = None
    id: str | int | None = None
    prediction: str | None = None
    of_source: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shown(self) -> dict[str, Any]:
        """Its part of the result: the line, the id and the prompt."""
        named: dict[str, Any] = {} if self.id is None else {"id": self.id}
        place = {} if self.number is None else {"line": self.number}
        return {**place, **named, self.form: self.prompt, **self.of_source}


@dataclass(frozen=True)
class Shape:
    """The treatment of a prompt's text.

    Args:
        chat: whether it is a message; None means if the model has a chat template.
    """

    chat: bool | None = None
    source_language: str | None = None
    target_language: str | None = None

    def of_text(self, llm: LLM, text: str) -> Prompt:
        """The prompt with this text."""
        return self._translated(shaped(llm, text, self.chat), {})

    def of_line(self, llm: LLM, line: Line) -> Prompt:
        """The prompt of a line; what is no text for any model is taken as it is."""
        given = shaped(llm, line.prompt, self.chat) if line.form == "prompt" else line.prompt
        translated = self._translated(given, line.of_source)
        if line.form == "encoder_prompt" and not isinstance(translated, Mapping):
            return {"encoder_prompt": translated}
        return translated

    def _translated(self, given: Prompt, own: Mapping[str, Any]) -> Prompt:
        languages = {"source_language": self.source_language}
        languages["target_language"] = self.target_language
        codes = {name: code for name, code in languages.items() if code is not None}
        more = {**codes, **own}
        return {"encoder_prompt": given, **more} if more else given


def shaped(llm: LLM, text: str, chat: bool | None = None) -> Prompt:
    """A prompt as the first message of a conversation, or as plain text."""
    if chat is None:
        chat = llm.tokenizer is not None and bool(llm.tokenizer.chat_template)
    return [{"role": "user", "content": text}] if chat else text


def line_of(number: int | None, fields: Mapping[str, Any], params: SamplingParams) -> Line:
    """A line.

    Args:
        fields: what it says. All but the prompt, `id`, `references`, `prediction` and those of
            `OF_SOURCE` are parameters of `SamplingParams`.
    """
    fields = dict(fields)
    forms = [form for form in FORMS if form in fields]
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise PromptError("a text has a surrogate code point, which is no character") from None
    except TypeError as error:
        raise PromptError(f"a field has no form in JSON: {error}") from None
    if len(forms) != 1:
        given = " and ".join(forms) or "none of them"
        raise PromptError(f"give one of {', '.join(FORMS)}, got {given}")
    form = forms[0]
    prompt = fields.pop(form)
    if not _IS_FORM[form](prompt):
        raise PromptError(f"{form} must be {_FORM_TEXTS[form]}")
    name, references = fields.pop("id", None), fields.pop("references", None)
    prediction = fields.pop("prediction", None)
    if not isinstance(name, str | int | None) or isinstance(name, bool):
        raise PromptError("id must be a text or a whole number")
    if references is not None and not _is_list_of(references, str):
        raise PromptError("references must be a list of texts")
    if not isinstance(prediction, str | None):
        raise PromptError("prediction must be a text")
    of_source = {key: fields.pop(key) for key in OF_SOURCE if key in fields}
    for key, value in of_source.items():
        like = "encoder_prompt" if key == "decoder_prompt" else "prompt"
        if not _IS_FORM[like](value):
            raise PromptError(f"{key} must be {_FORM_TEXTS[like]}")
    own = _own_params(params, fields)
    return Line(number, form, prompt, own, references, name, prediction, of_source)


def jobs_of(llm: LLM, lines: Sequence[Line], shape: Shape) -> list[Job]:
    """The engine's jobs; nothing is generated yet."""
    from tokenleap.engine.jobs import JobSpec

    quoted: dict[int, References] = {}  # lines may share what they quote, which is read once
    jobs = []
    for line in lines:
        try:
            prompt, shared = shape.of_line(llm, line), id(line.references)
            if shared not in quoted:
                quoted[shared] = llm.engine.references.read(line.references)
            spec = JobSpec(
                prompt, line.params, references=quoted[shared], prediction=line.prediction
            )
            jobs.append(llm.engine.job(spec))
        except TokenleapError as error:
            if line.number is None:
                raise
            raise type(error)(f"line {line.number}: {error}") from None
    return jobs


def records(
    llm: LLM, lines: Sequence[Line], jobs: Sequence[Job]
) -> Generator[dict[str, Any], None, None]:
    """Generate for all lines together; yield each result as soon as those before it are done.

    A request that fails has an `error` in its result, and the others go on.
    """
    left, told = deque(jobs), iter(lines)
    for _ in llm.engine.news(jobs):
        while left and left[0].finished:
            yield {**next(told).shown, **_fields(left.popleft())}


def error_of(record: Mapping[str, Any]) -> str | None:
    """Why the first output of a result that failed did; None if none has."""
    errors = (output.get("error") for output in (record, *record.get("outputs", ())))
    return next((str(error) for error in errors if error is not None), None)


def settings_of(llm: LLM) -> dict[str, Any]:
    """Settings that all results depend on, as the model runs."""
    shards = llm.tensor_parallel_size
    return {
        **({"tensor_parallel_size": shards} if shards > 1 else {}),
        "max_model_len": llm.max_model_len,
        "dtype": str(llm.dtype),
        "device": str(llm.device),
        "runtime": llm.runtime,
        "quantization": llm.engine.options.quantization,
        "speculative_config": llm.speculative_config.as_dict(),
    }


def _fields(job: Job) -> dict[str, Any]:
    """The output's part of a result: the first answer's fields, then all if several."""
    result = job.result()
    outputs = [output.as_dict() for output in result.outputs]
    first = {name: field for name, field in outputs[0].items() if name != "index"}
    return {
        **result.prompt_as_dict(),
        **first,
        **({"outputs": outputs} if len(outputs) > 1 else {}),
    }


def _own_params(params: SamplingParams, own: Mapping[str, Any]) -> SamplingParams:
    """The parameters with a line's own ones in their place."""
    if not own:
        return params
    searches = own.get("beam_width", 1) != 1
    unused = _ONLY_SAMPLED if searches else ()  # the model's defaults of sampling
    shared = {name: getattr(params, name) for name in params.model_fields_set - set(unused)}
    made = type(params)(**{**shared, **own})
    for name in _ONLY_SAMPLED:
        if name in own and made.temperature == 0:
            raise PromptError(f"{name} changes nothing in greedy decoding: give a temperature, too")
    return made


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(each) is kind for each in value)


def _is_source(value: Any) -> bool:
    return bool(value) and (isinstance(value, str) or _is_list_of(value, int))


_IS_FORM: Mapping[str, Callable[[Any], bool]] = {
    "encoder_prompt": _is_source,
    "prompt": lambda value: isinstance(value, str) and bool(value),
    "messages": lambda value: bool(value) and _is_list_of(value, dict),
    "prompt_token_ids": lambda value: bool(value) and _is_list_of(value, int),
}

_FORM_TEXTS = {
    "encoder_prompt": "a text or a list of whole numbers, and not empty",
    "prompt": "a text that is not empty",
    "messages": "a list of objects with role and content",
    "prompt_token_ids": "a list of whole numbers that is not empty",
}
