"""Conversations to train on: their tokens, and which of them the target wrote.

They are kept in a JSONL file, one conversation a line, appended batch by batch. A file that ends in
half a line (the process was killed) is cut back to its last whole line, so generation can go on.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenleap.core.files import parsed_json
from tokenleap.errors import DataError

__all__ = ["Conversation", "ConversationFile", "Repeats", "loop_start", "opening"]


@dataclass(frozen=True)
class Conversation:
    """The tokens of one conversation, chat template included.

    Args:
        tokens: all of them.
        answers: [start, stop) of each part to learn: what the target wrote.
        seed: what it was generated from; negative if it was not generated.
        temperature: of the answers; 0 is greedy.
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
    """A JSONL file of conversations that grows.

    Args:
        path: the file.
    """

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
        """All conversations, in order.

        Raises:
            DataError: a line is malformed; the message names it.
        """
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
    """What is in front of the first part to learn; of a text that is learnt as a whole, its half.

    Args:
        tokens: of a conversation.
        answers: [start, stop) of each part to learn.
    """
    return tokens[: answers[0][0] or len(tokens) // 2]


def loop_start(tokens: Sequence[int], length: int = 12, times: int = 2) -> int | None:
    """Where a text begins to repeat itself: the end of the part without an n-gram too many.

    Args:
        tokens: the text.
        length: n of the n-grams.
        times: how often an n-gram may occur.

    Returns:
        The index at which some n-gram occurs for the `times` + 1st time; None if none does.
    """
    repeats = Repeats(length, times)
    for stop, token in enumerate(tokens, 1):
        if repeats.add(token):
            return stop - length
    return None


class Repeats:
    """Watches a text that is being written for n-grams that come again and again.

    Args:
        length: n of the n-grams.
        times: how often an n-gram may occur.
    """

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
