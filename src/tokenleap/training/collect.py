"""Collects the conversations of a training: written by the target, kept in files, chosen, split.

Files grow batch by batch, so that nothing is lost when the process ends. What is used of them
follows from their contents alone: the first conversations, in the order of their seeds, that hold
the number of tokens asked for, without those with the prompt of an earlier one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tokenleap.core.files import parsed_json
from tokenleap.core.params import SamplingParams
from tokenleap.drafters.text.ngrams import NgramTables, count_ngrams
from tokenleap.errors import DataError, PromptError
from tokenleap.llm import LLM
from tokenleap.training.conversations import (
    Answerer,
    Conversation,
    ConversationFile,
    FileData,
    Talk,
    loop_start,
)
from tokenleap.training.self_data import SelfTalk
from tokenleap.training.settings import DataSettings

__all__ = [
    "Chooser",
    "Diversity",
    "FileSource",
    "Pair",
    "PairData",
    "PairSource",
    "SelfSource",
    "Source",
    "Unseen",
    "collect",
    "diversity",
    "ngrams_of_target",
    "share_of",
    "texts_in",
]


_HELD_OUT_SEEDS = 500_000_000
_MOST_IDLE = 50
"""Batches in a row without anything new after which a source is given up."""
_HELD_OUT_EVERY = 20
"""Of a user's own data, one entry in so many is held out."""


class Source(Protocol):
    """Where conversations come from, batch by batch."""

    def write(self, after: int | None, *, held_out: bool) -> Iterator[list[Conversation]]:
        """Batches of new conversations."""
        ...


class SelfSource:
    """The target writes them by itself."""

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
    """The user's own data; the target answers its prompts."""

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

    Attributes:
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
    """The source, and what comes before the first answer; all of a text without any."""
    opening = conversation.tokens[: conversation.answers[0][0]] or conversation.tokens
    return conversation.source, opening


def collect(source: Source, path: Path, chooser: Chooser, *, held_out: bool) -> Iterator[int]:
    """Let a file grow until enough can be chosen of it, or the source ends."""
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


# Data for encoder-decoders: sources that the target answers, or pairs of source and output.
#
#     {"source": "...", "target": "..."}   a line of JSONL; the languages of the two may be given as
#                                          "source_language" and "target_language"
#     source <tab> target                  a line of a .tsv file
#     source                               a line of any other file
#
# or two files with as many lines, one with the sources and one with the outputs. The target writes
# the outputs that are learnt (sequence-level knowledge distillation, Kim and Rush 2016), so those
# of the files may be missing. Where a method asks for them, they are learnt instead, and the target
# answers only what is held out.


_LANGUAGES = ("source_language", "target_language")


@dataclass(frozen=True)
class Pair:
    """One entry."""

    number: int
    prompt: Mapping[str, Any]
    target: str | None


class PairData:
    """The data of files, in the order of the files.

    Attributes:
        reason: why the first of them was left out; empty if none was.
    """

    def __init__(self, llm: LLM, data: DataSettings) -> None:
        if llm.tokenizer is None:
            raise DataError("this model has no tokenizer, so it cannot learn from text.")
        self.pairs: list[Pair] = []
        self.left_out, self.reason = 0, ""
        for where, prompt, target in _pair_entries(data):
            try:
                llm.engine.read(prompt)
            except PromptError as error:
                self.left_out += 1
                self.reason = self.reason or f"{where}: {error}"
                continue
            self.pairs.append(Pair(len(self.pairs), prompt, target))
        if not self.pairs:
            reason = f" ({self.reason})" if self.reason else ""
            raise DataError(f"{_names(data)}: there is nothing to learn from{reason}.")


class PairSource:
    """The user's own sources, which the target answers (see `collect.Source`)."""

    def __init__(
        self,
        llm: LLM,
        data: PairData,
        rows: int,
        params: SamplingParams,
        *,
        given_answers: bool = False,
    ) -> None:
        self._llm, self._pairs, self._batch = llm, data.pairs, 8 * rows
        self._params, self._given = params, given_answers
        if given_answers and any(pair.target is None for pair in data.pairs):
            raise DataError(
                "answers: 'fixed' learns the outputs in your files, and a line has none: give "
                "'target' beside 'source', or let the target write them."
            )

    def write(self, after: int | None, *, held_out: bool) -> Iterator[list[Conversation]]:
        """See `Source.write`: until the files end."""
        pairs = share_of(self._pairs, held_out=held_out)
        left = [pair for pair in pairs if after is None or pair.number > after]
        for start in range(0, len(left), self._batch):
            part = left[start : start + self._batch]
            if self._given and not held_out:
                yield [self._as_given(pair) for pair in part]
            else:
                yield self._answered(part)

    def _answered(self, pairs: Sequence[Pair]) -> list[Conversation]:
        """The target's answers, cut off where they begin to loop."""
        prompts = [pair.prompt for pair in pairs]
        outputs = self._llm.generate(prompts, self._params, use_tqdm=False)
        written = []
        for pair, output in zip(pairs, outputs, strict=True):
            opening, answer = output.prompt_token_ids, output.token_ids
            answer = answer[: loop_start(answer)]
            source = output.encoder_prompt_token_ids
            assert source is not None, "the target is an encoder-decoder"
            written.append(_conversation(pair, source, opening, answer))
        return [each for each in written if each.num_answer_tokens]

    def _as_given(self, pair: Pair) -> Conversation:
        source, opening = self._llm.engine.read(pair.prompt)
        tokenizer: Any = self._llm.tokenizer
        answer = tuple(tokenizer(text_target=pair.target)["input_ids"])
        known = len(opening) - 1  # a language may be in both
        if answer[:known] == tuple(opening[1:]):
            answer = answer[known:]
        assert source is not None, "the target is an encoder-decoder"
        return _conversation(pair, source.tokens, opening, answer)


def _conversation(
    pair: Pair, source: Sequence[int], opening: Sequence[int], answer: Sequence[int]
) -> Conversation:
    tokens = (*opening, *answer)
    answers = ((len(opening), len(tokens)),)
    return Conversation(tokens, answers, pair.number, source=tuple(source))


def _names(data: DataSettings) -> str:
    return ", ".join(map(str, data.files or data.parallel))


def _pair_entries(data: DataSettings) -> Iterator[tuple[str, dict[str, Any], str | None]]:
    """(where, prompt, output or None) of each entry."""
    if data.parallel:
        yield from _parallel(*data.parallel)
    for path in data.files:
        for number, line in enumerate(_lines(path), 1):
            if line.strip():
                yield _entry(f"{path}, line {number}", line, path.suffix)


def _entry(where: str, line: str, suffix: str) -> tuple[str, dict[str, Any], str | None]:
    if suffix == ".jsonl":
        return _of_json(where, line)
    if suffix != ".tsv":
        return where, {"prompt": line}, None
    source, *rest = line.split("\t")
    if len(rest) != 1:
        raise DataError(f"{where}: has {len(rest)} tabs: write SOURCE, a tab, and TARGET.")
    return where, {"prompt": source}, rest[0]


def _of_json(where: str, line: str) -> tuple[str, dict[str, Any], str | None]:
    try:
        fields = parsed_json(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON: {error}.") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("source"), str):
        raise DataError(f"{where}: has no text in 'source'.")
    target = fields.get("target")
    if target is not None and not isinstance(target, str):
        raise DataError(f"{where}: has no text in 'target'.")
    languages = {name: fields[name] for name in _LANGUAGES if name in fields}
    return where, {"prompt": fields["source"], **languages}, target


def _parallel(sources: Path, targets: Path) -> Iterator[tuple[str, dict[str, Any], str | None]]:
    first, second = _lines(sources), _lines(targets)
    if len(first) != len(second):
        raise DataError(
            f"{sources} has {len(first)} lines and {targets} {len(second)}: line N of one must "
            "belong to line N of the other."
        )
    for number, (source, target) in enumerate(zip(first, second, strict=True), 1):
        if source.strip():
            yield f"{sources}, line {number}", {"prompt": source}, target


def _lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}.") from None
    return text.removesuffix("\n").split("\n")  # not `splitlines`: a line may hold U+2028


# The n-grams of what a target writes by itself, or in answer to prompts.
#
# They are the negligible-cost approximation models that fit a target best: an n-gram model of its
# own text. The text is that of `tokenleap train`: conversations of the target with itself, or its
# answers to prompts of the user's; some are greedy and some are sampled.


_ROWS = 16
"""Conversations that are written at a time."""
_LENGTH = 1024
"""Most tokens of a conversation with itself, as in `tokenleap train`."""
"""Batches in a row without any text after which the target is given up."""


def ngrams_of_target(
    llm: LLM,
    tokens: int,
    files: Sequence[Path] = (),
    progress: Callable[[int], None] = lambda _: None,
) -> NgramTables:
    """Count the n-grams of the target's own text; none reaches into a prompt."""
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


# How diverse conversations are, and whether they contain prompts that must stay unseen.


_OVERLAP = 8
"""Length of the n-grams that count as an overlap."""


@dataclass(frozen=True)
class Diversity:
    """Statistics of conversations.

    Args:
        distinct: distinct n-grams of the answers as a share of all, for n = 1, 2, 3.
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
    """Prompts that training must not see, for example those of a benchmark."""

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
    """The tokens before each answer; all of a text that begins with what is to be learnt.

    The source of an encoder-decoder comes before everything.
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
