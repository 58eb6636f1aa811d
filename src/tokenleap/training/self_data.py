"""Conversations that the target writes by itself, with no outside data (Magpie, arXiv 2406.08464).

The target is given its chat template up to the place of the user's message, mostly with the
message's first words (`openings.py`), and samples the rest. Then it answers, greedily or sampled.
Some conversations go on for several turns. A drafter trained on this text learns what the target
writes, which is what it will have to guess.

Some messages contain texts, which the target wrote as answers in other conversations of the same
block of seeds. So every conversation follows from its seed alone. A file that is continued holds
the same conversations as one written in one go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from tokenleap.core.params import SamplingParams
from tokenleap.errors import CompatibilityError
from tokenleap.llm import LLM
from tokenleap.models.chat_template import rendered
from tokenleap.training.conversations import Conversation
from tokenleap.training.openings import Opening, authors_of, first_opening, next_opening, reads
from tokenleap.training.talks import (
    FEWEST_ANSWER_TOKENS,
    MOST_TURNS,
    Talk,
    answered,
    usual_temperature,
)
from tokenleap.training.writer import Wanted, Writer, Writing

__all__ = ["SelfTalk", "Template", "topics"]

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
        before: up to the first user's message.
        after: from the end of a user's message to the beginning of the answer.
        between: from the end of an answer to the next user's message.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    between: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase | None) -> Template:
        """The template of a tokenizer.

        Raises:
            CompatibilityError: it has none.
        """
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
    """Writes conversations with a model.

    Args:
        llm: the target.
        length: most tokens of a conversation.
    """

    def __init__(self, llm: LLM, length: int) -> None:
        self._template = Template.of(llm.tokenizer)
        assert llm.tokenizer is not None
        self._tokenizer, self._ends = llm.tokenizer, llm.eos_token_ids
        self._topics = topics(llm.tokenizer)
        self._writer, self._length = Writer(llm), min(length, llm.max_model_len)

    def write(self, seeds: Sequence[int]) -> list[Conversation]:
        """The conversations of these seeds, without those that are of no use.

        Conversations whose texts they read are written, too, and not returned if they are others.
        """
        readers = [seed for seed in seeds if reads(seed)]
        authors = {author for seed in readers for author in authors_of(seed)}
        writers = sorted(authors.union(seeds).difference(readers))
        written = self._written(writers, {})
        texts = {each.seed: self._text(each) for each in written if each.seed in authors}
        written += self._written(readers, texts)
        wanted = set(seeds)
        return sorted((c for c in written if c.seed in wanted), key=lambda each: each.seed)

    def _written(self, seeds: Sequence[int], texts: Mapping[int, str]) -> list[Conversation]:
        before = self._template.before
        talks = [Talk(seed, _temperature(seed), list(before)) for seed in seeds]
        self._writer.run(self._conversation(talk, texts) for talk in talks)
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
        wanted = Wanted((*talk.tokens, *message), _USER.model_copy(update=changed), loop=6)
        written = yield wanted
        return [] if written.finish == "loop" else [*message, *self._without_end(written.tokens)]

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
        """Whether there is another turn: in some of the conversations whose answer is complete."""
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
        """Whether a user's message is long enough, and leaves room for an answer."""
        asked = len(talk.tokens) + len(message) + len(self._template.after)
        return len(message) >= _FEWEST_TOKENS and asked + FEWEST_ANSWER_TOKENS <= self._length
