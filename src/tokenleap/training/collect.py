"""Collects the conversations of a training: written by the target, kept in files, chosen, split.

Files grow batch by batch, so that nothing is lost when the process ends. What is used of them
follows from their contents alone: the first conversations, in the order of their seeds, that hold
the number of tokens asked for, without those with the prompt of an earlier one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tokenleap.core.files import parsed_json
from tokenleap.core.params import SamplingParams
from tokenleap.drafters.text.ngrams import NgramTables, count_ngrams
from tokenleap.errors import DataError, PromptError, TokenleapError
from tokenleap.llm import LLM, Prompt
from tokenleap.training.conversations import (
    Conversation,
    ConversationFile,
    SelfTalk,
    Talk,
    answered_by,
    loop_start,
    usual_temperature,
)
from tokenleap.training.method import DataSettings

_SEEDS_OF_A_TEXT = 2**30
_HELD_OUT_SEEDS = 500_000_000
_MOST_IDLE = 50
"""Batches in a row without anything new after which a source is given up."""
_HELD_OUT_EVERY = 20
"""Of a user's own data, one entry in so many is held out."""


class Source(Protocol):
    """Where conversations come from, batch by batch."""

    def write(self, after: int | None, *, held_out: bool) -> Iterator[list[Conversation]]: ...


class SelfSource:
    """What the target writes by itself; what is held out is the same for every `seed`."""

    def __init__(self, llm: LLM, rows: int, length: int, seed: int = 0) -> None:
        self._talk, self._batch = SelfTalk(llm, length), 8 * rows
        self._first = seed * _SEEDS_OF_A_TEXT

    def write(self, after: int | None, *, held_out: bool) -> Iterator[list[Conversation]]:
        first, step = (_HELD_OUT_SEEDS, 2) if held_out else (self._first, 1)
        seeds = count(first if after is None else after + step, step)
        while True:
            written = self._talk.write(list(islice(seeds, self._batch)))
            yield [each for each in written if not (held_out and each.temperature)]


_Entry = TypeVar("_Entry", Talk, Conversation, "Pair")
"""An entry of the user's own data; `seed` is its number."""
_T = TypeVar("_T")


def _share_of(entries: Sequence[_Entry], after: int | None, *, held_out: bool) -> list[_Entry]:
    """Those entries after a seed that are held out, or those that are learnt."""
    every = min(_HELD_OUT_EVERY, len(entries))
    return [
        entry
        for number, entry in enumerate(entries)
        if (number % every == every - 1) == held_out and (after is None or entry.seed > after)
    ]


def _batches(entries: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    for start in range(0, len(entries), size):
        yield entries[start : start + size]


class Chooser:
    """Chooses the first conversations with so many tokens of answers.

    Attributes:
        twice: number left out because an earlier one has the same prompt.
        overlapping: number left out because of prompts that must stay unseen.
    """

    def __init__(self, tokens: int, unseen: Unseen, others: Iterable[Conversation] = ()) -> None:
        self._tokens, self._unseen = tokens, unseen
        self._prompts = {_beginning(each) for each in others}
        self.kept: list[Conversation] = []
        self.total = self.twice = self.overlapping = 0

    @property
    def full(self) -> bool:
        return self.total >= self._tokens

    def add(self, conversations: Iterable[Conversation]) -> None:
        """Look at these, in order, until there are enough."""
        for each in conversations:
            if self.full:
                return
            prompt = _beginning(each)
            if prompt in self._prompts:
                self.twice += 1
            elif self._unseen.overlaps(each):
                self.overlapping += 1
            else:
                self._prompts.add(prompt)
                self.kept.append(each)
                self.total += each.num_answer_tokens


def _beginning(conversation: Conversation) -> tuple[tuple[int, ...], ...]:
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


# The user's own data for decoder-only models: prompts, conversations and texts.


_ROLES = {
    "assistant": "assistant",
    "gpt": "assistant",
    "human": "user",
    "system": "system",
    "user": "user",
}


class FileSource:
    """The data of files, in the order of the files; the target answers the prompts.

    Args:
        llm: the target; its tokenizer encodes, and its chat template shapes conversations.
        text_length: most tokens of each piece of a text; prompts that are longer than three
            quarters of it are left out.
        rows: sequences that the target writes at a time.

    Attributes:
        answered: if the answers in the files are learnt: the talks with them.
    """

    def __init__(
        self,
        llm: LLM,
        files: Sequence[Path],
        text_length: int,
        rows: int,
        *,
        given_answers: bool = False,
    ) -> None:
        if llm.tokenizer is None:
            raise DataError("this model has no tokenizer, so it cannot learn from text.")
        self._llm, self._text_length = llm, min(text_length, llm.max_model_len - 1)
        self._shapes = bool(llm.tokenizer.chat_template)
        self._given_answers, self._batch = given_answers, 8 * rows
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

    def write(self, after: int | None, *, held_out: bool) -> Iterator[list[Conversation]]:
        yield _share_of(self.texts, after, held_out=held_out)
        if self.answered and not held_out:
            yield _share_of(self.answered, after, held_out=False)
            return
        for part in _batches(_share_of(self.talks, after, held_out=held_out), self._batch):
            own = [Talk(t.seed, 0.0 if held_out else t.temperature, list(t.tokens)) for t in part]
            yield answered_by(self._llm, own)

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
        return [tuple(each) for each in _batches(tokens, self._text_length) if len(each) > 2]


def _entries(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, fields) of each entry of a file."""
    if path.suffix != ".jsonl":
        yield str(path), {"text": _text_in(path)}
        return
    for where, line in _lines(path):
        fields = _json(where, line)
        if not isinstance(fields, dict):
            raise DataError(f"{where}: not a JSON object.")
        yield where, fields


def _text_in(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}.") from None


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """(where, line) of each line that is not empty."""
    for number, line in enumerate(_split(_text_in(path)), 1):
        if line.strip():
            yield f"{path}, line {number}", line


def _split(text: str) -> list[str]:
    """Lines; not `splitlines`, because a line may hold U+2028."""
    return text.removesuffix("\n").split("\n")


def _json(where: str, line: str) -> Any:
    try:
        return parsed_json(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON: {error}.") from None


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
    seed: int
    prompt: Mapping[str, Any]
    target: str | None


class PairSource:
    """The user's own sources, which the target answers; see `Source`.

    Attributes:
        left_out: number of sources that the target cannot read.
        reason: of the first of these.
    """

    def __init__(
        self,
        llm: LLM,
        data: DataSettings,
        rows: int,
        params: SamplingParams,
        *,
        given_answers: bool = False,
    ) -> None:
        if llm.tokenizer is None:
            raise DataError("this model has no tokenizer, so it cannot learn from text.")
        self._llm, self._batch = llm, 8 * rows
        self._params, self._given = params, given_answers
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
            names = ", ".join(map(str, data.files or data.parallel))
            raise DataError(f"{names}: there is nothing to learn from{reason}.")
        if given_answers and any(pair.target is None for pair in self.pairs):
            raise DataError(
                "answers: 'fixed' learns the outputs in your files, and a line has none: give "
                "'target' beside 'source', or let the target write them."
            )

    def write(self, after: int | None, *, held_out: bool) -> Iterator[list[Conversation]]:
        for part in _batches(_share_of(self.pairs, after, held_out=held_out), self._batch):
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
        read = self._llm.engine.read(pair.prompt)
        source, opening = read.source, read.ids
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
    return Conversation(tokens, answers, pair.seed, source=tuple(source))


def _pair_entries(data: DataSettings) -> Iterator[tuple[str, dict[str, Any], str | None]]:
    """(where, prompt, output or None) of each entry."""
    if data.parallel:
        yield from _parallel(*data.parallel)
    for path in data.files:
        for where, line in _lines(path):
            yield _entry(where, line, path.suffix)


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
    fields = _json(where, line)
    if not isinstance(fields, dict) or not isinstance(fields.get("source"), str):
        raise DataError(f"{where}: has no text in 'source'.")
    target = fields.get("target")
    if target is not None and not isinstance(target, str):
        raise DataError(f"{where}: has no text in 'target'.")
    languages = {name: fields[name] for name in _LANGUAGES if name in fields}
    return where, {"prompt": fields["source"], **languages}, target


def _parallel(sources: Path, targets: Path) -> Iterator[tuple[str, dict[str, Any], str | None]]:
    first, second = (_split(_text_in(path)) for path in (sources, targets))
    if len(first) != len(second):
        raise DataError(
            f"{sources} has {len(first)} lines and {targets} {len(second)}: line N of one must "
            "belong to line N of the other."
        )
    for number, (source, target) in enumerate(zip(first, second, strict=True), 1):
        if source.strip():
            yield f"{sources}, line {number}", {"prompt": source}, target


# The n-grams of what a target writes by itself, or in answer to prompts.
#
# They are the negligible-cost approximation models that fit a target best: an n-gram model of its
# own text. The text is that of `tokenleap train`: conversations of the target with itself, or its
# answers to prompts of the user's; some are greedy and some are sampled.


_ROWS = 16
"""Conversations that are written at a time."""
_LENGTH = 1024
"""Most tokens of a conversation with itself, as in `tokenleap train`."""


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
    talk = SelfTalk(llm, _LENGTH)
    for first in count(0, _ROWS):
        yield talk.write(range(first, first + _ROWS))


def _answered(llm: LLM, files: Sequence[Path]) -> Iterator[list[Conversation]]:
    talks = FileSource(llm, files, llm.max_model_len, _ROWS).talks
    if not talks:
        raise DataError(
            f"{', '.join(map(str, files))}: there are no prompts to answer: give .jsonl files with "
            '"prompt", or count text files with `tokenleap ngrams build`.'
        )
    for part in _batches(talks, _ROWS):
        yield answered_by(llm, part)


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
    counts = Counter(ngram for text in texts for ngram in _ngrams(text, length))
    return len(counts) / max(1, counts.total())


class Unseen:
    """Prompts that training must not see, for example those of a benchmark."""

    def __init__(self, prompts: Iterable[Sequence[int]]) -> None:
        self._ngrams = {ngram for prompt in prompts for ngram in _ngrams(prompt, _OVERLAP)}

    def overlaps(self, conversation: Conversation) -> bool:
        """Whether it has eight tokens in a row, answers left out, in common with any of them."""
        return any(
            ngram in self._ngrams
            for part in _prompts(conversation)
            for ngram in _ngrams(part, _OVERLAP)
        )


def _prompts(conversation: Conversation) -> Iterator[Sequence[int]]:
    """The source and the tokens before each answer; all of a text that is learnt as a whole."""
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
    for where, line in _lines(path):
        yield from _strings(_json(where, line) if path.suffix == ".jsonl" else line)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)
