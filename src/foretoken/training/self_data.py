"""Conversations that the target writes by itself, with no outside data (Magpie, arXiv 2406.08464).

The target is given its chat template up to the place of the user's message, and samples one. Then
it answers, half of the time greedily and half of the time sampled. Some conversations go on for
several turns. A drafter trained on this text learns what the target writes, which is what it will
have to guess.

Every conversation follows from its seed. A file that is continued holds the same conversations as
one written in one go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from foretoken.core.params import SamplingParams
from foretoken.errors import CompatibilityError
from foretoken.llm import LLM
from foretoken.training.conversations import Conversation, loop_start
from foretoken.training.openings import opening
from foretoken.training.talks import FEWEST_ANSWER_TOKENS, MOST_TURNS, Answerer, Talk

__all__ = ["SelfTalk", "Template"]

_MOST_USER_TOKENS, _MOST_TEXT_TOKENS, _FEWEST_TOKENS = 160, 448, 4
_CONTINUED = 5
"""One in so many conversations goes on after an answer that was finished."""

_SEEDS_OF_USERS = 1_000_000_000
"""Added to the seeds of users' messages, so that no answer is drawn with the same noise."""

_USER = SamplingParams(temperature=1.0, top_p=0.98, top_k=400)


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
            text = str(tokenizer.apply_chat_template(messages, tokenize=False))
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


class SelfTalk:
    """Writes conversations with a model.

    Args:
        llm: the target.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._template = Template.of(llm.tokenizer)
        self._answerer = Answerer(llm)

    def write(self, seeds: Sequence[int]) -> list[Conversation]:
        """The conversations of these seeds, without those that are of no use."""
        before = self._template.before
        talks = [Talk(seed, seed % 2 == 0, list(before)) for seed in seeds]
        going_on = talks
        for _ in range(MOST_TURNS):
            answered = self._answerer.answer(self._ask(going_on))
            going_on = [talk for talk in answered if self._goes_on(talk)]
        return [talk.written() for talk in talks if talk.answers]

    def _ask(self, talks: Sequence[Talk]) -> list[Talk]:
        """Add a user's message to each; those without a useful one are left out."""
        starts, prompts, params = [], [], []
        for talk in talks:
            words, long = ("", False) if talk.answers else opening(talk.seed)
            starts.append(self._encoded(words))
            prompts.append([*talk.tokens, *starts[-1]])
            most = _MOST_TEXT_TOKENS if long else _MOST_USER_TOKENS
            seed = _SEEDS_OF_USERS + talk.noise_seed
            params.append(_USER.model_copy(update={"seed": seed, "max_tokens": most}))
        outputs = self._llm.generate(prompts, params) if prompts else []
        asked = []
        for talk, start, output in zip(talks, starts, outputs, strict=True):
            message = (*start, *self._without_end(output.token_ids))
            if self._is_useful(talk, message):
                talk.tokens += [*message, *self._template.after]
                asked.append(talk)
        return asked

    def _goes_on(self, talk: Talk) -> bool:
        """Begin another turn in some of the conversations whose last answer is complete."""
        between = self._template.between
        complete = talk.finished and talk.tokens[-1] == between[0]
        if not complete or talk.seed // 4 % _CONTINUED:
            return False
        if len(talk.tokens) + len(between) + _MOST_USER_TOKENS > self._llm.max_model_len:
            return False
        talk.tokens += between[1:]
        return True

    def _encoded(self, words: str) -> tuple[int, ...]:
        assert self._llm.tokenizer is not None
        return tuple(self._llm.tokenizer.encode(words, add_special_tokens=False)) if words else ()

    def _without_end(self, tokens: Sequence[int]) -> list[int]:
        end = len(tokens)
        while end and tokens[end - 1] in self._llm.eos_token_ids:
            end -= 1
        return list(tokens[:end])

    def _is_useful(self, talk: Talk, message: tuple[int, ...]) -> bool:
        """Whether a user's message is long enough, leaves room for an answer, and does not loop."""
        asked = len(talk.tokens) + len(message) + len(self._template.after)
        has_room = asked + FEWEST_ANSWER_TOKENS <= self._llm.max_model_len
        return len(message) >= _FEWEST_TOKENS and has_room and loop_start(message, length=6) is None
