"""The n-grams of what a target writes by itself, or in answer to prompts.

They are the negligible-cost approximation models that fit a target best: an n-gram model of its own
text. The text is that of `tokenleap train`: conversations of the target with itself, or its answers
to prompts of the user's; some are greedy and some are sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path

from tokenleap.drafters.text.ngrams import NgramTables, count_ngrams
from tokenleap.errors import DataError
from tokenleap.llm import LLM
from tokenleap.training.conversations import Conversation
from tokenleap.training.prompt_data import FileData
from tokenleap.training.self_data import SelfTalk
from tokenleap.training.talks import Answerer

__all__ = ["ngrams_of_target"]

_ROWS = 16
"""Conversations that are written at a time."""
_LENGTH = 1024
"""Most tokens of a conversation with itself, as in `tokenleap train`."""
_MOST_IDLE = 50
"""Batches in a row without any text after which the target is given up."""


def ngrams_of_target(
    llm: LLM,
    tokens: int,
    files: Sequence[Path] = (),
    progress: Callable[[int], None] = lambda _: None,
) -> NgramTables:
    """Count the n-grams of the target's own text; none reaches into a prompt.

    Args:
        llm: the target.
        tokens: tokens to write; with `files`, the text ends with the last prompt at the latest.
        files: prompts to answer, as for `tokenleap train --data`; with none, the target talks with
            itself.
        progress: called with the number of tokens written so far.

    Raises:
        DataError: a file cannot be read, has no prompts, or the target writes nothing.
        CompatibilityError: there are no files, and the model has no chat template.
    """
    texts: list[tuple[int, ...]] = []
    total = idle = 0
    for batch in _answered(llm, files) if files else _talks(llm):
        before = total
        for each in batch:
            for start, stop in each.answers:
                texts.append(each.tokens[start : min(stop, start + tokens - total)])
                total += len(texts[-1])
        progress(total)
        idle = 0 if total > before else idle + 1
        if total >= tokens or idle == _MOST_IDLE:
            break
    if not total:
        raise DataError("the target has written no text to count: give other prompts.")
    return count_ngrams(texts, llm.engine.target.vocab_size, llm.tokenizer)


def _talks(llm: LLM) -> Iterator[list[Conversation]]:
    """Conversations with itself, without an end."""
    talk = SelfTalk(llm, _LENGTH)
    for first in count(0, _ROWS):
        yield talk.write(range(first, first + _ROWS))


def _answered(llm: LLM, files: Sequence[Path]) -> Iterator[list[Conversation]]:
    """The user's prompts, answered."""
    talks = FileData(llm, files, llm.max_model_len).talks
    if not talks:
        raise DataError(
            f"{', '.join(map(str, files))}: there are no prompts to answer: give .jsonl files with "
            '"prompt", or count text files with `tokenleap ngrams build`.'
        )
    answerer = Answerer(llm)
    for start in range(0, len(talks), _ROWS):
        answered = answerer.answer(talks[start : start + _ROWS])
        yield [talk.written() for talk in answered]
