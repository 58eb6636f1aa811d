"""`foretoken generate --prompts-file`: a JSON object per line, each a prompt with its own options.

{"prompt": "Why is the sky blue?", "id": "sky", "max_tokens": 64}
{"messages": [{"role": "user", "content": "Hello"}], "temperature": 0.8, "seed": 7}
{"prompt_token_ids": [1, 2, 3], "references": ["a text that the answer may quote"]}
{"prompt": "Add a docstring: ...", "prediction": "what the answer will mostly repeat"}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.cli.prompt import STDIN, decoded, read_stdin
from foretoken.cli.root import UsageError
from foretoken.errors import ConfigError, PromptError

if TYPE_CHECKING:
    from foretoken.core.params import SamplingParams

__all__ = ["Line", "read_prompts_file"]

FORMS = ("prompt", "messages", "prompt_token_ids")
"""The fields that hold a prompt; a line has one of them."""

_ONLY_SAMPLED = ("top_k", "top_p", "min_p")


@dataclass(frozen=True)
class Line:
    """A prompt of several.

    Args:
        number: of its line in the file, from 1.
        form: one of `FORMS`.
        prompt: text, messages or token ids.
        params: sampling parameters.
        references: what its drafts may quote; None for nothing.
        id: the user's own name for it, or None.
        prediction: what its answer is expected to repeat; None for nothing.
    """

    number: int
    form: str
    prompt: Any
    params: SamplingParams
    references: Sequence[str] | None = None
    id: str | int | None = None
    prediction: str | None = None

    @property
    def shown(self) -> dict[str, Any]:
        """What its result says of it: the line, the id and the prompt."""
        named = {} if self.id is None else {"id": self.id}
        return {"line": self.number, **named, self.form: self.prompt}


def read_prompts_file(file: Path, params: SamplingParams) -> list[Line]:
    """The lines of a file; empty ones are skipped.

    Args:
        file: JSON lines, or "-" for standard input.
        params: for what a line does not say itself.

    Raises:
        UsageError: a line is malformed, or there is none.
        ForetokenError: the file is not UTF-8 text.
        OSError: it cannot be read.
    """
    text = read_stdin() if str(file) == STDIN else decoded(file.read_bytes(), str(file))
    lines = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                lines.append(_line(number, _fields(line), params))
            except (ConfigError, PromptError) as error:
                # Not an error of the library: its fields would be shown as flags.
                raise UsageError(f"line {number} of {file}: {error}") from None
    if not lines:
        raise UsageError(f"--prompts-file: {file} has no prompts")
    return lines


def _fields(line: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"not JSON ({error}): it takes an object per line") from None
    if not isinstance(fields, dict):
        raise PromptError('it takes an object, such as {"prompt": "Hello"}')
    return fields


def _line(number: int, fields: dict[str, Any], params: SamplingParams) -> Line:
    forms = [form for form in FORMS if form in fields]
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise PromptError("a text has a surrogate code point, which is no character") from None
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
    own = _own_params(params, fields)
    return Line(number, form, prompt, own, references, name, prediction)


def _own_params(params: SamplingParams, own: Mapping[str, Any]) -> SamplingParams:
    """The parameters with a line's own ones in their place."""
    if not own:
        return params
    shared = {name: getattr(params, name) for name in params.model_fields_set}
    made = type(params)(**{**shared, **own})
    for name in _ONLY_SAMPLED:
        if name in own and made.temperature == 0:
            raise PromptError(f"{name} changes nothing in greedy decoding: give a temperature, too")
    return made


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(each) is kind for each in value)


_IS_FORM = {
    "prompt": lambda value: isinstance(value, str) and bool(value),
    "messages": lambda value: bool(value) and _is_list_of(value, dict),
    "prompt_token_ids": lambda value: bool(value) and _is_list_of(value, int),
}

_FORM_TEXTS = {
    "prompt": "a text that is not empty",
    "messages": "a list of objects with role and content",
    "prompt_token_ids": "a list of whole numbers that is not empty",
}
