"""Collects the conversations of a training: written by the target, kept in files, chosen, split.

Files grow batch by batch, so that nothing is lost when the process ends. What is used of them
follows from their contents alone: the first conversations, in the order of their seeds, that hold
the number of tokens asked for, without those with the prompt of an earlier one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Protocol, TypeVar

from tokenleap.errors import DataError
from tokenleap.llm import LLM
from tokenleap.training.conversations import Conversation, ConversationFile
from tokenleap.training.diversity import Unseen
from tokenleap.training.prompt_data import FileData
from tokenleap.training.self_data import SelfTalk
from tokenleap.training.talks import Answerer, Talk

__all__ = ["Chooser", "FileSource", "SelfSource", "Source", "collect", "share_of"]

_HELD_OUT_SEEDS = 500_000_000
_MOST_IDLE = 50
"""Batches in a row without anything new after which a source is given up."""
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
        length: most tokens of a conversation.
    """

    def __init__(self, llm: LLM, rows: int, length: int) -> None:
        self._talk, self._batch = SelfTalk(llm, length), 4 * rows

    def write(self, after: int | None, *, held_out: bool) -> Iterator[list[Conversation]]:
        """See `Source.write`: without an end."""
        first, step = (_HELD_OUT_SEEDS, 2) if held_out else (0, 1)
        seeds = count(first if after is None else after + step, step)
        while True:
            written = self._talk.write(list(islice(seeds, self._batch)))
            yield [each for each in written if not (held_out and each.temperature)]


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
        texts = share_of(self._data.texts, held_out=held_out)
        yield [text for text in texts if after is None or text.seed > after]
        if self._data.answered and not held_out:
            answered = share_of(self._data.answered, held_out=False)
            yield [each for each in answered if after is None or each.seed > after]
            return
        talks = share_of(self._data.talks, held_out=held_out)
        left = [talk for talk in talks if after is None or talk.seed > after]
        for start in range(0, len(left), self._batch):
            part = left[start : start + self._batch]
            own = [Talk(t.seed, 0.0 if held_out else t.temperature, list(t.tokens)) for t in part]
            yield [talk.written() for talk in self._answerer.answer(own)]


_Entry = TypeVar("_Entry")


def share_of(entries: Sequence[_Entry], *, held_out: bool) -> Iterator[_Entry]:
    """Those entries of the user's own data that are held out, or those that are learnt."""
    every = min(_HELD_OUT_EVERY, len(entries))
    for number, entry in enumerate(entries):
        if (number % every == every - 1) == held_out:
            yield entry


class Chooser:
    """Chooses the first conversations with so many tokens of answers.

    Args:
        tokens: of answers that are wanted.
        unseen: prompts that training must not see.
        others: conversations whose prompts are left out, too.

    Attributes:
        kept: the conversations.
        total: tokens of their answers.
        twice: number left out because an earlier one has the same prompt.
        overlapping: number left out because of prompts that must stay unseen.
    """

    def __init__(self, tokens: int, unseen: Unseen, others: Iterable[Conversation] = ()) -> None:
        self._tokens, self._unseen = tokens, unseen
        self._prompts = {_prompt(each) for each in others}
        self.kept: list[Conversation] = []
        self.total = self.twice = self.overlapping = 0

    @property
    def full(self) -> bool:
        """Whether there are enough."""
        return self.total >= self._tokens

    def add(self, conversations: Iterable[Conversation]) -> None:
        """Look at these, in order, until there are enough."""
        for each in conversations:
            if self.full:
                return
            prompt = _prompt(each)
            if prompt in self._prompts:
                self.twice += 1
            elif self._unseen.overlaps(each):
                self.overlapping += 1
            else:
                self._prompts.add(prompt)
                self.kept.append(each)
                self.total += each.num_answer_tokens


def _prompt(conversation: Conversation) -> tuple[tuple[int, ...], ...]:
    """The source, and what is in front of the first answer; all of a text without any."""
    opening = conversation.tokens[: conversation.answers[0][0]] or conversation.tokens
    return conversation.source, opening


def collect(source: Source, path: Path, chooser: Chooser, *, held_out: bool) -> Iterator[int]:
    """Let a file grow until enough can be chosen of it, or the source ends.

    Args:
        source: writes the conversations.
        path: of the file.
        chooser: is shown all of them.
        held_out: see `Source.write`.

    Yields:
        Tokens of answers so far.

    Raises:
        DataError: nothing can be chosen, or a source without an end writes nothing new any more.
    """
    file = ConversationFile(path)
    file.mend()
    after = None
    for each in file:
        after = each.seed if after is None else max(after, each.seed)
        chooser.add([each])
    yield chooser.total
    idle = 0
    batches = () if chooser.full else source.write(after, held_out=held_out)
    for batch in batches:
        before = chooser.total
        file.append(batch)
        chooser.add(batch)
        yield chooser.total
        idle = 0 if chooser.total > before else idle + 1
        if chooser.full or idle == _MOST_IDLE:
            break
    if not chooser.kept or idle == _MOST_IDLE:
        raise DataError(
            f"there is not enough to learn from ({chooser.twice} conversations begin like another "
            f"one, {chooser.overlapping} with a prompt that must stay unseen, others have no "
            "useful answer): give more data, or learn fewer tokens."
        )
