"""Data of the user's own: prompts and conversations that the target answers, or text as it is.

    {"prompt": "..."}                                a prompt, or the first of "turns": the target
                                                     answers it
    {"messages": [{"role": "user", "content": ...}]} a conversation, or "conversations" with "from"
                                                     and "value": the target writes its last answer
    {"text": "..."}                                  text to learn as it is, like a .txt file

A prompt becomes a user's message, or is taken as it is by a model without a chat template.
Answers of a file are not learnt: what counts is what the target itself writes. Where a method asks
for them (`answers=fixed`), the last answer of a conversation is learnt, or the `answer` beside a
`prompt`; the target then answers only what is held out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenleap.core.files import parsed_json
from tokenleap.errors import DataError, TokenleapError
from tokenleap.llm import LLM, Prompt
from tokenleap.training.conversations import Conversation, Talk, usual_temperature

__all__ = ["FileData"]

_ROLES = {
    "assistant": "assistant",
    "gpt": "assistant",
    "human": "user",
    "system": "system",
    "user": "user",
}


class FileData:
    """What files hold, in the order of the files.

    Args:
        llm: the target; its tokenizer encodes, and its chat template shapes conversations.
        text_length: most tokens of each piece of a text; prompts that are longer than three
            quarters of it are left out.

    Attributes:
        answered: if the answers in the files are learnt: the talks with them.
    """

    def __init__(
        self, llm: LLM, files: Sequence[Path], text_length: int, *, given_answers: bool = False
    ) -> None:
        if llm.tokenizer is None:
            raise DataError("this model has no tokenizer, so it cannot learn from text.")
        self._llm, self._text_length = llm, min(text_length, llm.max_model_len - 1)
        self._shapes = bool(llm.tokenizer.chat_template)
        self._given_answers = given_answers
        self.talks: list[Talk] = []
        self.answered: list[Conversation] = []
        self.too_long = 0
        pieces: list[tuple[int, ...]] = []
        for path in files:
            for where, fields in _entries(path):
                if isinstance(text := fields.get("text"), str):
                    pieces += self._pieces(text)
                else:
                    self._add(where, fields)
        self.texts = [
            Conversation(piece, ((0, len(piece)),), seed=number - len(pieces))
            for number, piece in enumerate(pieces)
        ]
        if not self.talks and not self.texts:
            long = f" ({self.too_long} prompts are too long)" if self.too_long else ""
            raise DataError(f"{', '.join(map(str, files))}: there is nothing to learn from{long}.")

    def _add(self, where: str, fields: dict[str, Any]) -> None:
        try:
            tokens = self._llm.encode(_prompt(fields, shapes=self._shapes))
        except TokenleapError as error:
            raise DataError(f"{where}: {error}") from None
        if not tokens:
            raise DataError(f"{where}: the prompt is empty.")
        if len(tokens) > 3 * self._text_length // 4:
            self.too_long += 1
            return
        number = len(self.talks)
        self.talks.append(Talk(number, usual_temperature(number), list(tokens)))
        if self._given_answers:
            self.answered.append(self._answered(tokens, _answer(where, fields), number))

    def _answered(self, prompt: Sequence[int], answer: str, number: int) -> Conversation:
        """A prompt with its answer and the token that ends it."""
        tokenizer = self._llm.tokenizer
        assert tokenizer is not None
        end = tokenizer.eos_token_id
        tokens = [
            *prompt,
            *tokenizer.encode(answer, add_special_tokens=False),
            *([end] if isinstance(end, int) else []),
        ]
        return Conversation(tuple(tokens), ((len(prompt), len(tokens)),), number)

    def _pieces(self, text: str) -> list[tuple[int, ...]]:
        """The tokens of a text, in pieces from which something can be learnt."""
        assert self._llm.tokenizer is not None
        tokens = self._llm.tokenizer.encode(text, add_special_tokens=False)
        starts = range(0, len(tokens), self._text_length)
        pieces = [tuple(tokens[start : start + self._text_length]) for start in starts]
        return [piece for piece in pieces if len(piece) > 2]


def _entries(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, fields) of each entry of a file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}.") from None
    if path.suffix != ".jsonl":
        yield str(path), {"text": text}
        return
    # Not `splitlines`: JSON may hold other characters that end lines, such as U+2028.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            fields = parsed_json(line)
        except ValueError as error:
            raise DataError(f"{where}: not JSON: {error}.") from None
        if not isinstance(fields, dict):
            raise DataError(f"{where}: not a JSON object.")
        yield where, fields


def _prompt(fields: dict[str, Any], *, shapes: bool) -> Prompt:
    """An entry as `LLM.encode` takes it."""
    turns = fields.get("turns")
    prompt = turns[0] if isinstance(turns, list) and turns else fields.get("prompt")
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}] if shapes else prompt
    messages = fields.get("messages") or fields.get("conversations")
    if not isinstance(messages, list):
        raise DataError("has none of 'prompt', 'turns', 'messages', 'conversations' and 'text'.")
    shaped = [_message(each) for each in messages]
    while shaped and shaped[-1]["role"] == "assistant":
        shaped.pop()
    if not shaped:
        raise DataError("has no message of a user.")
    return shaped


def _answer(where: str, fields: dict[str, Any]) -> str:
    """The answer of an entry whose prompt is well-formed."""
    found = fields.get("answer")
    if found is None and (messages := fields.get("messages") or fields.get("conversations")):
        last = _message(messages[-1])
        found = last["content"] if last["role"] == "assistant" else None
    if not isinstance(found, str) or not found:
        raise DataError(
            f"{where}: has no answer to learn: give 'answer' beside 'prompt', or end the "
            "conversation with the assistant's message."
        )
    return found


def _message(fields: Any) -> dict[str, str]:
    """A message as chat templates know it."""
    if not isinstance(fields, dict):
        raise DataError("a message is not a JSON object with 'role' and 'content'.")
    role = fields.get("role", fields.get("from"))
    content = fields.get("content", fields.get("value"))
    if not isinstance(role, str) or role not in _ROLES:
        raise DataError(f"a message has the role {role!r}: known are {', '.join(_ROLES)}.")
    if not isinstance(content, str):
        raise DataError("a message has no text in 'content' or 'value'.")
    return {"role": _ROLES[role], "content": content}
