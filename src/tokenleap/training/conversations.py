"""Conversations to train on: their tokens, which of them the target wrote, and how it writes them.

They are kept in a file of JSON lines, appended batch by batch, so that generation can go on there.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Any, Generic, TypeVar

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from tokenleap.core.files import JsonLines, parsed_json
from tokenleap.core.params import SamplingParams
from tokenleap.errors import CompatibilityError, DataError, RequestError
from tokenleap.llm import LLM
from tokenleap.models.chat_template import rendered
from tokenleap.outputs import StreamChunk


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
        return sum(stop - start for start, stop in self.answers)


class ConversationFile:
    """A JSONL file of conversations that grows."""

    def __init__(self, path: Path) -> None:
        self.path, self._lines = path, JsonLines(path)

    def mend(self) -> None:
        self._lines.mend()

    def append(self, conversations: Iterable[Conversation]) -> None:
        self._lines.append((json.dumps(_fields(each)) for each in conversations), sync=True)

    def __iter__(self) -> Iterator[Conversation]:
        for number, line in enumerate(self._lines, 1):
            yield _conversation(line, f"{self.path}, line {number}")


def _fields(conversation: Conversation) -> dict[str, Any]:
    fields = asdict(conversation)
    return fields if conversation.source else {k: v for k, v in fields.items() if k != "source"}


def _conversation(line: bytes, where: str) -> Conversation:
    try:
        fields = parsed_json(line)
        if not fields["answers"]:
            raise ValueError("it has no answers")
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
    """Index at which some n-gram occurs for the `times` + 1st time; None if none does."""
    repeats = Repeats(length, times)
    for stop, token in enumerate(tokens, 1):
        if repeats.add(token):
            return stop - length
    return None


class Repeats:
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
# `SelfTalk` lets the target write the users' messages, too; `collect.FileSource` reads files.


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
    text = yield Wanted(tuple(talk.tokens), params)
    if len(text.tokens) < FEWEST_ANSWER_TOKENS:
        return False
    begin = len(talk.tokens)
    talk.tokens += text.tokens
    talk.answers.append((begin, len(talk.tokens)))
    talk.finished = text.finish == "stop"
    return True


def answered_by(llm: LLM, talks: Sequence[Talk]) -> list[Conversation]:
    """Add an answer to each, see `answered`; without those of no use."""
    useful = written(llm, (answered(talk, llm.max_model_len) for talk in talks))
    return [talk.written() for talk, is_useful in zip(talks, useful, strict=True) if is_useful]


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
    tokens: tuple[int, ...]
    finish: str


Writing = Generator[Wanted, Written, _T]
"""Something that needs texts, one after the other, and makes a result of them."""


@dataclass
class _Running(Generic[_T]):
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


def written(llm: LLM, writings: Iterable[Writing[_T]]) -> list[_T]:
    """The results of these, in order."""
    engine, left = llm.engine, iter(enumerate(writings))
    most = 2 * engine.options.max_num_seqs  # so that a row never waits for the next
    results: dict[int, _T] = {}
    running: dict[str, _Running[_T]] = {}

    def go_on(place: int, writing: Writing[_T], text: Written | None) -> None:
        try:
            wanted = next(writing) if text is None else writing.send(text)
        except StopIteration as end:
            results[place] = end.value
            return
        name = engine.add_request(list(wanted.prompt), wanted.params)
        running[name] = _Running(place, writing, wanted, Repeats(wanted.loop))

    def fill() -> None:
        while len(running) < most and (new := next(left, None)) is not None:
            go_on(*new, None)

    try:
        fill()
        while running:
            for chunk in engine.step():
                name = chunk.request_id
                if name in running and (text := running[name].read(chunk)) is not None:
                    ended = running.pop(name)
                    if text.finish == "loop":
                        engine.abort(name)
                    go_on(ended.place, ended.writing, text)
            fill()
    finally:
        engine.abort(running)
    return [results[place] for place in sorted(results)]


# Conversations that the target writes by itself, with no outside data (Magpie, arXiv 2406.08464).
#
# The target is given its chat template up to the place of the user's message, mostly with the
# message's first words, and samples the rest. Then it answers, greedily or sampled. Some
# conversations go on for several turns. A drafter trained on this text learns what the target
# writes, which is what it will have to guess.
#
# Some messages contain texts, which the target wrote as answers in other conversations of the same
# block of seeds. So every conversation follows from its seed alone. A file that is continued holds
# the same conversations as one written in one go.


_FEWEST_TOKENS = 4
"""Of a user's message."""

_GOING_ON = 0.4
"""Share of the conversations that go on after an answer that was finished."""

_FEWEST_TEXT_TOKENS = 48
_SHARES_OF_TEXT = (0.1, 0.7)
"""Least and greatest share of a conversation's length that the texts in its first message have."""

_MARKS_OF_WORDS = "\u0120\u2581"
"""With these, tokenizers mark a token that begins a word."""

_FEWEST_LETTERS = 4
"""Of a topic."""

_SEEDS_OF_USERS = 1_000_000_000
"""Added to the seeds of users' messages, so that no answer is drawn with the same noise."""

_USER = SamplingParams(temperature=1.0, top_p=0.98, top_k=400)


def _temperature(seed: int) -> float:
    """Of the answers of a conversation. Texts that others read are as diverse as messages."""
    return 1.0 if seed in authors_of(seed) else usual_temperature(seed)


@dataclass(frozen=True)
class Template:
    """The tokens of a chat template around its messages.

    Args:
        after: from the end of a user's message to the beginning of the answer.
        between: from the end of an answer to the next user's message.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    between: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase | None) -> Template:
        if tokenizer is None or tokenizer.chat_template is None:
            raise CompatibilityError(
                "this model has no chat template, so it cannot write conversations by itself: give "
                "--data a file of prompts."
            )
        marks = ("\x00first\x00", "\x00answer\x00", "\x00second\x00")
        roles = ("user", "assistant", "user")
        messages = [{"role": r, "content": m} for r, m in zip(roles, marks, strict=True)]
        try:
            text = rendered(tokenizer, messages)
        except TemplateError as error:
            raise CompatibilityError(
                f"the chat template of this model fails on a plain conversation ({error}): give "
                "--data a file of prompts."
            ) from None
        parts = []
        for mark in marks:
            part, found, text = text.partition(mark)
            if not found or not part:
                raise CompatibilityError(
                    "the chat template of this model does not show its messages as they are, each "
                    "with something in front: give --data a file of prompts."
                )
            parts.append(tuple(tokenizer.encode(part, add_special_tokens=False)))
        return cls(*parts)


def topics(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The words of a vocabulary that are one token: something to write about."""
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    words = [token[1:] for token in tokens if token and token[0] in _MARKS_OF_WORDS]
    return [
        each for each in words if len(each) >= _FEWEST_LETTERS and each.isascii() and each.isalpha()
    ]


class SelfTalk:
    def __init__(self, llm: LLM, length: int) -> None:
        self._llm, self._template = llm, Template.of(llm.tokenizer)
        assert llm.tokenizer is not None
        self._tokenizer, self._ends = llm.tokenizer, llm.eos_token_ids
        self._topics = topics(llm.tokenizer)
        self._length = min(length, llm.max_model_len)

    def write(self, seeds: Sequence[int]) -> list[Conversation]:
        """The conversations of these seeds, without those that are of no use.

        Conversations whose texts they read are written, too, and not returned if they are others.
        """
        readers = [seed for seed in seeds if reads(seed)]
        authors = {author for seed in readers for author in authors_of(seed)}
        writers = sorted(authors.union(seeds).difference(readers))
        made = self._written(writers, {})
        texts = {each.seed: self._text(each) for each in made if each.seed in authors}
        made += self._written(readers, texts)
        wanted = set(seeds)
        return sorted((c for c in made if c.seed in wanted), key=lambda each: each.seed)

    def _written(self, seeds: Sequence[int], texts: Mapping[int, str]) -> list[Conversation]:
        before = self._template.before
        talks = [Talk(seed, _temperature(seed), list(before)) for seed in seeds]
        written(self._llm, (self._conversation(talk, texts) for talk in talks))
        return [talk.written() for talk in talks if talk.answers]

    def _conversation(self, talk: Talk, texts: Mapping[int, str]) -> Writing[None]:
        """Messages and answers in turn, until one is of no use."""
        given = [texts[seed] for seed in authors_of(talk.seed) if texts.get(seed)]
        opening = first_opening(talk.seed)
        for turn in range(1, MOST_TURNS + 1):
            message = yield from self._message(talk, opening, given)
            if not self._is_useful(talk, message):
                return
            talk.tokens += [*message, *self._template.after]
            if not (yield from answered(talk, self._length)) or not self._goes_on(talk):
                return
            talk.tokens += self._template.between[1:]
            opening = next_opening(talk.seed, turn)

    def _message(self, talk: Talk, opening: Opening, texts: Sequence[str]) -> Writing[list[int]]:
        """The next message of the user; empty if it is of no use."""
        random = Random(f"message {talk.noise_seed}")
        if opening.reads and not texts:
            return []
        message = self._encoded(self._filled(opening, texts, random))
        if not opening.most:
            return message
        if len(talk.tokens) + len(message) >= self._length:
            return []
        changed = {"seed": _SEEDS_OF_USERS + talk.noise_seed, "max_tokens": opening.most}
        text = yield Wanted((*talk.tokens, *message), _USER.model_copy(update=changed), loop=6)
        return [] if text.finish == "loop" else [*message, *self._without_end(text.tokens)]

    def _filled(self, opening: Opening, texts: Sequence[str], random: Random) -> str:
        """The words of an opening, with a topic and texts in their places."""
        topic = f" {random.choice(self._topics)}" if self._topics else ""
        parts = self._chosen(texts, random) if opening.reads else []
        documents = (f"Document {number}:\n{part}" for number, part in enumerate(parts, 1))
        return opening.words.format(
            topic=topic, text="\n\n".join(parts), documents="\n\n".join(documents)
        )

    def _chosen(self, texts: Sequence[str], random: Random) -> list[str]:
        """Some of the texts, in any order; the last one is cut where they get too long."""
        left = round(random.uniform(*_SHARES_OF_TEXT) * self._length)
        chosen: list[str] = []
        for text in random.sample(texts, len(texts)):
            tokens = self._encoded(text)[:left]
            if chosen and len(tokens) < _FEWEST_TEXT_TOKENS:
                break
            chosen.append(self._decoded(tokens))
            left -= len(tokens)
        return chosen

    def _text(self, conversation: Conversation) -> str:
        """Its first answer; empty if this is short."""
        start, stop = conversation.answers[0]
        tokens = self._without_end(conversation.tokens[start:stop])
        return self._decoded(tokens) if len(tokens) >= _FEWEST_TEXT_TOKENS else ""

    def _goes_on(self, talk: Talk) -> bool:
        complete = talk.finished and talk.tokens[-1] == self._template.between[0]
        return complete and Random(f"going on {talk.noise_seed}").random() < _GOING_ON

    def _encoded(self, words: str) -> list[int]:
        return list(self._tokenizer.encode(words, add_special_tokens=False)) if words else []

    def _decoded(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()

    def _without_end(self, tokens: Sequence[int]) -> list[int]:
        end = len(tokens)
        while end and tokens[end - 1] in self._ends:
            end -= 1
        return list(tokens[:end])

    def _is_useful(self, talk: Talk, message: Sequence[int]) -> bool:
        asked = len(talk.tokens) + len(message) + len(self._template.after)
        return len(message) >= _FEWEST_TOKENS and asked + FEWEST_ANSWER_TOKENS <= self._length


# How users' messages begin: words for the target to go on from, and places for texts of its own.
#
# A small model that is only given the template mostly asks for the same few things. Most messages
# therefore begin with words drawn from the lists in `openings.json`, often with a word of the
# vocabulary as their topic, and the model writes the rest.
#
# Conversations come in blocks of consecutive seeds. The first of a block ask for articles, stories
# and the like. The last ones read what the target answered there: they summarize it, ask about it,
# or have it rewritten, as one text or as several documents.


_BLOCK, _AUTHORS, _READERS = 16, 4, 5

_CHAT_TOKENS, _TEXT_TOKENS, _QUESTION_TOKENS = 160, 448, 48


@dataclass(frozen=True)
class Opening:
    """How a user's message begins.

    Args:
        words: its first words. `{topic}` stands for a word of the vocabulary, `{text}` for text
            that the target wrote in other conversations, and `{documents}` for the same as numbered
            documents.
        most: most tokens that the target adds; 0 if the message is complete.
    """

    words: str = ""
    most: int = _CHAT_TOKENS

    @property
    def reads(self) -> bool:
        """Whether there is text in it that the target wrote elsewhere."""
        return "{text}" in self.words or "{documents}" in self.words


def first_opening(seed: int) -> Opening:
    random, words = Random(f"opening {seed}"), _words()
    if reads(seed):
        return random.choice(
            [Opening(each, 0) for each in words["readings"]]
            + [Opening(each, _QUESTION_TOKENS) for each in words["reading_questions"]]
        )
    if seed % _BLOCK < _AUTHORS:
        return Opening(random.choice(words["articles"]), _QUESTION_TOKENS)
    return random.choices(
        (
            Opening(),
            Opening(random.choice(words["questions"])),
            Opening(random.choice(words["tasks"])),
            Opening(random.choice(words["problems"])),
            Opening(f"{random.choice(words['translate'])} {random.choice(words['german'])}"),
            Opening(random.choice(words["unread"]), _TEXT_TOKENS),
        ),
        weights=(6, 5, 4, 4, 3, 1),
    )[0]


@cache
def _words() -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads(
        files(__package__).joinpath("openings.json").read_text(encoding="utf-8")
    )
    return found


def next_opening(seed: int, turn: int) -> Opening:
    return Opening(Random(f"opening {seed} {turn}").choice(_words()["next"]))


def reads(seed: int) -> bool:
    """Whether a conversation begins with text that the target wrote in others of its block."""
    return seed % _BLOCK >= _BLOCK - _READERS


def authors_of(seed: int) -> range:
    """The seeds of the conversations that give such texts to this one."""
    start = seed - seed % _BLOCK
    return range(start, start + _AUTHORS)
