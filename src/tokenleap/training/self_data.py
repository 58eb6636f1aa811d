"""Conversations that the target writes by itself, with no outside data (Magpie, arXiv 2406.08464).

The target is given its chat template up to the place of the user's message, mostly with the
message's first words (`self_data.py`), and samples the rest. Then it answers, greedily or sampled.
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
from tokenleap.training.conversations import (
    FEWEST_ANSWER_TOKENS,
    MOST_TURNS,
    Conversation,
    Talk,
    Wanted,
    Writer,
    Writing,
    answered,
    usual_temperature,
)

__all__ = [
    "Opening",
    "SelfTalk",
    "Template",
    "authors_of",
    "first_opening",
    "next_opening",
    "reads",
    "topics",
]


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
        """The template of a tokenizer."""
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
    """Writes conversations with a model."""

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


# How users' messages begin: words for the target to go on from, and places for texts of its own.
#
# A small model that is only given the template mostly asks for the same few things. Most messages
# therefore begin with words drawn from these lists, often with a word of the vocabulary as their
# topic, and the model writes the rest.
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


_QUESTIONS = (
    "What is",
    "What is{topic}",
    "What are",
    "What are the main",
    "What was the",
    "What does",
    "What is the difference between",
    "What happens if",
    "Who was",
    "Who wrote",
    "Who is the",
    "Who played",
    "When did",
    "When was the",
    "Where is",
    "Where does the",
    "Why do",
    "Why is",
    "How do I",
    "How does",
    "How does{topic}",
    "How many",
    "How long",
    "How would you",
    "Which of the following",
    "In which year",
    "Is it true that",
    "Can you explain",
    "Could you help me",
    "Could you tell me about{topic}",
    "Do you know",
    "Should I",
    "Tell me about{topic}",
    "Here are some facts about",
    "I am",
    "I have",
    "I need",
    "I want to",
    "My",
    "We are",
    "Hello",
)
_TASKS = (
    "Explain",
    "Explain{topic}",
    "Explain to a child",
    "Describe",
    "Describe{topic}",
    "Discuss",
    "Compare",
    "Compare{topic} and",
    "Give me",
    "List",
    "List ten",
    "Imagine you are",
    "Pretend to be",
    "Act as",
    "You are a",
    "Write a",
    "Write a poem about{topic}",
    "Write an email to",
    "Write a letter about{topic}",
    "Write a Python function that",
    "Write a program in C++ that",
    "Write a script that",
    "Write a SQL query",
    "Implement",
    "Fix the following code:\n\n",
    "Design",
    "Plan",
    "Suggest",
    "Create a table of",
    "Outline",
    "Name",
    "Classify the following",
    "Extract all names from the following text:",
    "Correct the grammar of this sentence:",
    "Rewrite the following sentence",
    "Evaluate the following",
    "Complete the sentence:",
)
_PROBLEMS = (
    "Solve the following equation:",
    "Solve this problem step by step.\n\n",
    "Find the",
    "Find the value of",
    "Calculate",
    "Prove that",
    "Simplify",
    "A train",
    "A farmer has",
    "A store sells",
    "A recipe needs",
    "A class of",
    "A car travels",
    "A box contains",
    "A school",
    "Every day,",
    "In a garden",
    "There are",
    "If a",
    "If it takes",
    "Each{topic} costs $",
    "How much money",
    "John has",
    "Mary bought",
    "Tom is",
    "Anna wants to",
    "Peter and his",
    "Lisa earns $",
    "David reads",
    "Emma bakes",
    "Mr. Smith",
    "Two friends",
)
_TRANSLATE = (
    "Translate this German sentence into English:",
    "Translate the following sentence into English:",
    "Translate this from German into English:",
    "Translate into English:\n\n",
    "What does this mean in English?\n\n",
    "Please translate for me:",
    "Translate into French:",
    "Translate the following text into Spanish:",
)
_GERMAN = (
    *("Der", "Die", "Das", "Ein", "Eine", "Er", "Sie", "Es", "Wir", "Ich", "Man", "Nach", "Mit"),
    *("In der", "Im Jahr", "Auf dem", "Am", "Auch", "Wenn", "Für", "Bei", "Seit", "Zwei", "Viele"),
    *("Der Präsident", "Die Stadt", "Das Unternehmen", "Die Polizei", "Die Menschen", "Am Montag"),
    *("Unsere", "Mein", "Das Hotel", "Die Regierung", "Nicht", "Heute", "Gestern", "Als", "Doch"),
)
_ARTICLES = tuple(
    f"{words}{{topic}}"
    for words in (
        "Write a long article about",
        "Write an article for an encyclopedia about",
        "Write a news report about",
        "Write a newspaper article about",
        "Write a short story about",
        "Write a long story about",
        "Write a dialogue about",
        "Write an interview about",
        "Write an essay about",
        "Write a blog post about",
        "Write the biography of",
        "Write the history of",
        "Write a chapter of a textbook about",
        "Write a review of",
        "Write a guide to",
        "Write a speech about",
        "Write a scientific text about",
        "Tell me everything about",
    )
)
_READINGS = (
    *(
        Opening(words, 0)
        for words in (
            "Summarize:\n\n{text}",
            "Summarize the following article:\n\n{text}",
            "Summarize the following text in three sentences.\n\n{text}",
            "Write a summary of this report.\n\n{text}",
            "{text}\n\nSummarize the text above.",
            "{text}\n\nTL;DR",
            "What are the main points of this text?\n\n{text}",
            "Give this article a headline, and explain your choice.\n\n{text}",
            "Summarize each of these documents.\n\n{documents}",
            "Rewrite this text in simple words:\n\n{text}",
            "Correct the mistakes in this text:\n\n{text}",
            "Continue this text:\n\n{text}",
            "List all names and places in this text.\n\n{text}",
            "Translate into German:\n\n{text}",
        )
    ),
    *(
        Opening(words, _QUESTION_TOKENS)
        for words in (
            "Read the passage and answer the question.\n\nPassage: {text}\n\nQuestion:",
            "{text}\n\nQuestion: What",
            "{text}\n\nAccording to this text,",
            "{text}\n\nWho",
            "{text}\n\nIn the text above,",
            "{text}\n\nRewrite this text",
            "Use the following documents to answer the question.\n\n{documents}\n\nQuestion:",
            "I have some information for you:\n\n{documents}\n\nAnswer this question: what is",
            "I have some information for you:\n\n{documents}\n\nAnswer this question: who",
            "{documents}\n\nAnswer with the documents above: how",
            "{documents}\n\nAnswer with the documents above: when",
            "Here are search results.\n\n{documents}\n\nWith their help, tell me where",
        )
    ),
)
_UNREAD = (
    Opening("Summarize the following article:\n\n", _TEXT_TOKENS),
    Opening("Read the passage and answer the question.\n\nPassage:", _TEXT_TOKENS),
    Opening("Use these documents to answer the question.\n\nDocument 1:", _TEXT_TOKENS),
    Opening("Edit the following text:\n\n", _TEXT_TOKENS),
)
_NEXT = (
    *("", "", "", "Now", "Can you", "Could you", "Why", "What", "What if", "How", "Who", "Where"),
    *("Explain", "Give me an example of", "Rewrite your answer", "Rewrite your answer as a poem"),
    *("Summarize your answer", "Summarize this in one sentence", "Translate your answer into"),
    *("Write the same", "Make it shorter", "Tell me more about", "Are you sure", "I don't"),
    *("Thank you", "In your answer,", "List", "Is there", "Add", "Continue", "And if", "Compare"),
)


def first_opening(seed: int) -> Opening:
    """Of the first message of a conversation."""
    random = Random(f"opening {seed}")
    if reads(seed):
        return random.choice(_READINGS)
    if seed % _BLOCK < _AUTHORS:
        return Opening(random.choice(_ARTICLES), _QUESTION_TOKENS)
    return random.choices(
        (
            Opening(),
            Opening(random.choice(_QUESTIONS)),
            Opening(random.choice(_TASKS)),
            Opening(random.choice(_PROBLEMS)),
            Opening(f"{random.choice(_TRANSLATE)} {random.choice(_GERMAN)}"),
            random.choice(_UNREAD),
        ),
        weights=(6, 5, 4, 4, 3, 1),
    )[0]


def next_opening(seed: int, turn: int) -> Opening:
    """Of a later message."""
    return Opening(Random(f"opening {seed} {turn}").choice(_NEXT))


def reads(seed: int) -> bool:
    """Whether a conversation begins with text that the target wrote in others of its block."""
    return seed % _BLOCK >= _BLOCK - _READERS


def authors_of(seed: int) -> range:
    """The seeds of the conversations that give such texts to this one."""
    start = seed - seed % _BLOCK
    return range(start, start + _AUTHORS)
