"""Collects the conversations of a training: written by the target, kept in files, chosen, split.

Files grow batch by batch, so that nothing is lost when the process ends. What is used of them
follows from their contents alone: the first conversations, in the order of their seeds, that hold
the number of tokens asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Protocol, TypeVar

from foretoken.errors import DataError
from foretoken.llm import LLM
from foretoken.training.conversations import Conversation, ConversationFile
from foretoken.training.diversity import Unseen
from foretoken.training.prompt_data import FileData
from foretoken.training.self_data import SelfTalk
from foretoken.training.talks import Answerer, Talk

__all__ = ["Chosen", "FileSource", "SelfSource", "Source", "choose", "collect"]

_HELD_OUT_SEEDS = 500_000_000
_HELD_OUT_EVERY = 20
"""Of a user's own data, one entry in so many is held out."""


class Source(Protocol):
    """Where conversations come from, batch by batch."""

    def write(self, after: int | None, *, held_out: bool) -> Iterator[list[Conversation]]:
        """Batches of new conversations.

        Args:
            after: highest seed that is already there; None for none.
            held_out: whether they are for evaluation: greedy ones, of other seeds.
        """
        ...


class SelfSource:
    """The target writes them by itself.

    Args:
        llm: the target.
        rows: sequences that it writes at a time.
    """

    def __init__(self, llm: LLM, rows: int) -> None:
        self._talk, self._batch = SelfTalk(llm), 8 * rows

    def write(self, after: int | None, *, held_out: bool) -> Iterator[list[Conversation]]:
        """See `Source.write`: without an end."""
        first, step = (_HELD_OUT_SEEDS, 2) if held_out else (0, 1)
        seeds = count(first if after is None else after + step, step)
        while True:
            yield self._talk.write(list(islice(seeds, self._batch)))


class FileSource:
    """The user's own data; the target answers its prompts.

    Args:
        llm: the target.
        data: what the files hold.
        rows: sequences that the target writes at a time.
    """

    def __init__(self, llm: LLM, data: FileData, rows: int) -> None:
        self._answerer, self._data, self._batch = Answerer(llm), data, 8 * rows

    def write(self, after: int | None, *, held_out: bool) -> Iterator[list[Conversation]]:
        """See `Source.write`: until the files end."""
        texts = _share(self._data.texts, held_out=held_out)
        yield [text for text in texts if after is None or text.seed > after]
        talks = _share(self._data.talks, held_out=held_out)
        left = [talk for talk in talks if after is None or talk.seed > after]
        for start in range(0, len(left), self._batch):
            part = left[start : start + self._batch]
            own = [Talk(t.seed, held_out or t.greedy, list(t.tokens)) for t in part]
            yield [talk.written() for talk in self._answerer.answer(own)]


_Entry = TypeVar("_Entry")


def _share(entries: Sequence[_Entry], *, held_out: bool) -> Iterator[_Entry]:
    every = min(_HELD_OUT_EVERY, len(entries))
    for number, entry in enumerate(entries):
        if (number % every == every - 1) == held_out:
            yield entry


def collect(source: Source, path: Path, tokens: int, *, held_out: bool) -> Iterator[int]:
    """Let a file grow until it has enough, or the source ends.

    Args:
        source: writes the conversations.
        path: of the file.
        tokens: of answers that are wanted.
        held_out: see `Source.write`.

    Yields:
        Tokens of answers so far.
    """
    file = ConversationFile(path)
    file.mend()
    there = list(file)
    total = sum(each.num_answer_tokens for each in there)
    yield total
    if total >= tokens:
        return
    after = max((each.seed for each in there), default=None)
    for batch in source.write(after, held_out=held_out):
        file.append(batch)
        total += sum(each.num_answer_tokens for each in batch)
        yield total
        if total >= tokens:
            return


@dataclass(frozen=True)
class Chosen:
    """What is used of a file.

    Args:
        conversations: in order.
        twice: number left out because an earlier one has the same prompt.
        overlapping: number left out because of prompts that must stay unseen.
    """

    conversations: list[Conversation]
    twice: int
    overlapping: int


def choose(
    conversations: Iterable[Conversation],
    tokens: int,
    unseen: Unseen,
    others: Iterable[Conversation] = (),
) -> Chosen:
    """The first conversations with this many tokens of answers.

    Args:
        conversations: in order.
        tokens: of answers that are wanted.
        unseen: prompts that training must not see.
        others: conversations whose prompts are left out, too.

    Raises:
        DataError: there are none.
    """
    kept: list[Conversation] = []
    prompts = {_prompt(each) for each in others}
    total = twice = overlapping = 0
    for each in conversations:
        prompt = _prompt(each)
        if total >= tokens:
            break
        if prompt in prompts:
            twice += 1
        elif unseen.overlaps(each):
            overlapping += 1
        else:
            prompts.add(prompt)
            kept.append(each)
            total += each.num_answer_tokens
    if not kept:
        raise DataError(
            f"there are no conversations to learn from ({twice} have the prompt of another one, "
            f"{overlapping} a prompt that must stay unseen): give more data."
        )
    return Chosen(kept, twice, overlapping)


def _prompt(conversation: Conversation) -> tuple[int, ...]:
    """What is in front of the first answer; all of a text without any."""
    return conversation.tokens[: conversation.answers[0][0]] or conversation.tokens
