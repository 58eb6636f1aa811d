"""How diverse conversations are, and whether they contain prompts that must stay unseen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenleap.core.files import parsed_json
from tokenleap.errors import DataError
from tokenleap.training.conversations import Conversation

__all__ = ["Diversity", "Unseen", "diversity", "texts_in"]

_OVERLAP = 8
"""Length of the n-grams that count as an overlap."""


@dataclass(frozen=True)
class Diversity:
    """What conversations are like.

    Args:
        conversations: number.
        answer_tokens: number.
        prompt_tokens: mean number of tokens in front of an answer.
        turns: mean number of answers.
        distinct: distinct n-grams of the answers as a share of all, for n = 1, 2, 3.
        greedy: share of greedy conversations.
    """

    conversations: int
    answer_tokens: int
    prompt_tokens: float
    turns: float
    distinct: tuple[float, float, float]
    greedy: float


def diversity(conversations: Sequence[Conversation]) -> Diversity:
    """Measure these conversations."""
    count = max(1, len(conversations))
    starts = [start for each in conversations for start, _ in each.answers]
    answers = [each.tokens[start:stop] for each in conversations for start, stop in each.answers]
    return Diversity(
        len(conversations),
        sum(map(len, answers)),
        sum(starts) / max(1, len(starts)),
        len(answers) / count,
        (_distinct(answers, 1), _distinct(answers, 2), _distinct(answers, 3)),
        sum(each.temperature == 0 for each in conversations) / count,
    )


def _ngrams(tokens: Sequence[int], length: int) -> Iterable[tuple[int, ...]]:
    return (tuple(tokens[i : i + length]) for i in range(len(tokens) - length + 1))


def _distinct(texts: Sequence[Sequence[int]], length: int) -> float:
    seen: set[tuple[int, ...]] = set()
    total = 0
    for text in texts:
        ngrams = list(_ngrams(text, length))
        total += len(ngrams)
        seen.update(ngrams)
    return len(seen) / max(1, total)


class Unseen:
    """Prompts that training must not see, for example those of a benchmark.

    Args:
        prompts: their tokens.
    """

    def __init__(self, prompts: Iterable[Sequence[int]]) -> None:
        self._ngrams = {ngram for prompt in prompts for ngram in _ngrams(prompt, _OVERLAP)}

    def overlaps(self, conversation: Conversation) -> bool:
        """Whether a conversation shares eight tokens in a row with any of the prompts.

        Answers do not count, but a text that is only to be learnt does.
        """
        return any(
            ngram in self._ngrams
            for part in _prompts(conversation)
            for ngram in _ngrams(part, _OVERLAP)
        )


def _prompts(conversation: Conversation) -> Iterator[Sequence[int]]:
    """What is in front of each answer; all of a text that begins with what is to be learnt.

    The source of an encoder-decoder is in front of everything.
    """
    start = 0
    yield conversation.source
    if conversation.answers[0][0] == 0:
        yield conversation.tokens
        return
    for first, stop in conversation.answers:
        yield conversation.tokens[start:first]
        start = stop


def texts_in(path: Path) -> Iterator[str]:
    """All texts in a file of prompts, whatever its fields are called."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}.") from None
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                yield from _strings(parsed_json(line) if path.suffix == ".jsonl" else line)
        except ValueError as error:
            raise DataError(f"{path}, line {number}: not JSON: {error}.") from None


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)
