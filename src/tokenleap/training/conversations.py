"""Conversations to train on: their tokens, and which of them the target wrote.

They are kept in a JSONL file, one conversation a line, appended batch by batch. A file that ends in
half a line (the process was killed) is cut back to its last whole line, so generation can go on.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from tokenleap.core.files import parsed_json
from tokenleap.core.params import SamplingParams
from tokenleap.errors import DataError, RequestError, TokenleapError
from tokenleap.llm import LLM, Prompt
from tokenleap.outputs import StreamChunk

__all__ = [
    "FEWEST_ANSWER_TOKENS",
    "MOST_TURNS",
    "Answerer",
    "Conversation",
    "ConversationFile",
    "FileData",
    "Repeats",
    "Talk",
    "Wanted",
    "Writer",
    "Writing",
    "Written",
    "answered",
    "loop_start",
    "opening",
    "usual_temperature",
]


@dataclass(frozen=True)
class Conversation:
    """The tokens of one conversation, chat template included.

    Args:
        answers: [start, stop) of each part to learn: what the target wrote.
        seed: what it was generated from; negative if it was not generated.
        source: what an encoder-decoder read; `tokens` are then its decoder's. Empty for others.
    """

    tokens: tuple[int, ...]
    answers: tuple[tuple[int, int], ...]
    seed: int = -1
    temperature: float = 0.0
    source: tuple[int, ...] = ()

    @property
    def num_answer_tokens(self) -> int:
        """Tokens to learn."""
        return sum(stop - start for start, stop in self.answers)


class ConversationFile:
    """A JSONL file of conversations that grows."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, conversations: Iterable[Conversation]) -> None:
        """Add these at the end, and see that they reach the disk."""
        lines = "".join(json.dumps(_fields(each)) + "\n" for each in conversations)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())

    def __iter__(self) -> Iterator[Conversation]:
        """All conversations, in order."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return  # the process was killed while it wrote this line
                yield _conversation(line, f"{self.path}, line {number}")

    def mend(self) -> None:
        """Cut off half a line at the end."""
        if not self.path.exists():
            return
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            with self.path.open("r+b") as file:
                file.truncate(whole)


def _fields(conversation: Conversation) -> dict[str, Any]:
    fields = asdict(conversation)
    return fields if conversation.source else {k: v for k, v in fields.items() if k != "source"}


def _conversation(line: bytes, where: str) -> Conversation:
    try:
        fields = parsed_json(line)
        return Conversation(
            tuple(fields["tokens"]),
            tuple((int(start), int(stop)) for start, stop in fields["answers"]),
            int(fields["seed"]),
            float(fields["temperature"]),
            tuple(fields.get("source", ())),
        )
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise DataError(f"{where}: not a conversation of this program: {error}.") from None


def opening(tokens: Sequence[int], answers: Sequence[tuple[int, int]]) -> Sequence[int]:
    """Tokens before the first part to learn; half of a text that is learnt as a whole."""
    return tokens[: answers[0][0] or len(tokens) // 2]


def loop_start(tokens: Sequence[int], length: int = 12, times: int = 2) -> int | None:
    """Where a text begins to repeat itself: the end of the part without an n-gram too many.

    Returns:
        The index at which some n-gram occurs for the `times` + 1st time; None if none does.
    """
    repeats = Repeats(length, times)
    for stop, token in enumerate(tokens, 1):
        if repeats.add(token):
            return stop - length
    return None


class Repeats:
    """Watches a text that is being written for n-grams that come again and again."""

    def __init__(self, length: int = 12, times: int = 2) -> None:
        self._times = times
        self._last: deque[int] = deque(maxlen=length)
        self._seen: dict[tuple[int, ...], int] = {}

    def add(self, token: int) -> bool:
        """The next token; whether it completes an n-gram that occurs too often."""
        self._last.append(token)
        if len(self._last) < (self._last.maxlen or 0):
            return False
        ngram = tuple(self._last)
        self._seen[ngram] = self._seen.get(ngram, 0) + 1
        return self._seen[ngram] > self._times


# Conversations while they are written, and the target's answers in them.
#
# `self_data.py` lets the target write the users' messages, too; `prompt_data.py` takes them from
# files.


MOST_TURNS = 3
"""Answers of a conversation."""

FEWEST_ANSWER_TOKENS = 8
_MOST_TOKENS = 512
"""Of an answer."""

_GREEDY = SamplingParams(temperature=0, max_tokens=_MOST_TOKENS)
_SAMPLED = SamplingParams(top_p=0.95, top_k=400, max_tokens=_MOST_TOKENS)


def usual_temperature(seed: int) -> float:
    """Of the answers of a conversation: half of them are greedy."""
    return 0.0 if seed % 2 == 0 else 0.7


@dataclass
class Talk:
    """A conversation that is being written."""

    seed: int
    temperature: float
    tokens: list[int]
    answers: list[tuple[int, int]] = field(default_factory=list)
    finished: bool = False

    @property
    def noise_seed(self) -> int:
        """Seed of its next message or answer."""
        return MOST_TURNS * self.seed + len(self.answers)

    def answer_params(self) -> SamplingParams:
        """Of the next answer."""
        if self.temperature == 0:
            return _GREEDY
        changed = {"temperature": self.temperature, "seed": self.noise_seed}
        return _SAMPLED.model_copy(update=changed)

    def written(self) -> Conversation:
        """The conversation up to the end of its last answer."""
        stop = self.answers[-1][1]
        tokens, answers = tuple(self.tokens[:stop]), tuple(self.answers)
        return Conversation(tokens, answers, self.seed, self.temperature)


def answered(talk: Talk, length: int) -> Writing[bool]:
    """Add an answer to a conversation; where it begins to loop it is cut off."""
    params = talk.answer_params()
    most = min(params.max_tokens or length, length - len(talk.tokens))
    if most < 1:
        return False
    params = params.model_copy(update={"max_tokens": most})
    written = yield Wanted(tuple(talk.tokens), params)
    if len(written.tokens) < FEWEST_ANSWER_TOKENS:
        return False
    begin = len(talk.tokens)
    talk.tokens += written.tokens
    talk.answers.append((begin, len(talk.tokens)))
    talk.finished = written.finish == "stop"
    return True


class Answerer:
    """Lets a model answer."""

    def __init__(self, llm: LLM) -> None:
        self._writer, self._length = Writer(llm), llm.max_model_len

    def answer(self, talks: Sequence[Talk]) -> list[Talk]:
        """Add an answer to each, see `answered`."""
        useful = self._writer.run(answered(talk, self._length) for talk in talks)
        return [talk for talk, is_useful in zip(talks, useful, strict=True) if is_useful]


# Lets a target write many texts at a time, and stops those that begin to repeat themselves.
#
# What is written is described by generators: one yields a `Wanted`, and gets a `Written` back. So a
# conversation of several turns is one function, although others are written at the same time.


_T = TypeVar("_T")


@dataclass(frozen=True)
class Wanted:
    """A text to be written.

    Args:
        loop: n of the n-grams that may not occur three times.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    loop: int = 12


@dataclass(frozen=True)
class Written:
    """A text that was written."""

    tokens: tuple[int, ...]
    finish: str


Writing = Generator[Wanted, Written, _T]
"""Something that needs texts, one after the other, and makes a result of them."""


@dataclass
class _Running(Generic[_T]):
    """A writing whose current text is being written."""

    place: int
    writing: Writing[_T]
    wanted: Wanted
    repeats: Repeats
    tokens: list[int] = field(default_factory=list)

    def read(self, chunk: StreamChunk) -> Written | None:
        """Take in a chunk; returns the text once it is complete."""
        for token in chunk.tokens:
            self.tokens.append(token.token_id)
            if self.repeats.add(token.token_id):
                return Written(tuple(self.tokens[: len(self.tokens) - self.wanted.loop]), "loop")
        if chunk.output is None:
            return None
        reason = chunk.output.finish_reason
        if reason not in ("stop", "length"):
            raise RequestError("the target failed while it wrote text to learn from.", [])
        return Written(tuple(self.tokens), reason)


class Writer:
    """Writes with a target."""

    def __init__(self, llm: LLM) -> None:
        self._engine = llm.engine
        self._most = 2 * llm.engine.options.max_num_seqs  # so that a row never waits for the next

    def run(self, writings: Iterable[Writing[_T]]) -> list[_T]:
        """The results of these, in order."""
        left = iter(enumerate(writings))
        results: dict[int, _T] = {}
        running: dict[str, _Running[_T]] = {}

        def go_on(place: int, writing: Writing[_T], written: Written | None) -> None:
            try:
                wanted = next(writing) if written is None else writing.send(written)
            except StopIteration as end:
                results[place] = end.value
                return
            name = self._engine.add_request(list(wanted.prompt), wanted.params)
            running[name] = _Running(place, writing, wanted, Repeats(wanted.loop))

        def fill() -> None:
            while len(running) < self._most and (new := next(left, None)) is not None:
                go_on(*new, None)

        try:
            fill()
            while running:
                for chunk in self._engine.step():
                    name = chunk.request_id
                    if name in running and (written := running[name].read(chunk)) is not None:
                        ended = running.pop(name)
                        if written.finish == "loop":
                            self._engine.abort(name)
                        go_on(ended.place, ended.writing, written)
                fill()
        finally:
            self._engine.abort(running)
        return [results[place] for place in sorted(results)]


_ROLES = {
    "assistant": "assistant",
    "gpt": "assistant",
    "human": "user",
    "system": "system",
    "user": "user",
}


class FileData:
    """The data of files, in the order of the files.

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
