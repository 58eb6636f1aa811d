"""Conversations while they are written, and the target's answers in them.

`self_data.py` lets the target write the users' messages, too; `prompt_data.py` takes them from
files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from foretoken.core.params import SamplingParams
from foretoken.llm import LLM
from foretoken.training.conversations import Conversation, loop_start

__all__ = ["FEWEST_ANSWER_TOKENS", "MOST_TURNS", "Answerer", "Talk"]

MOST_TURNS = 3
"""Answers of a conversation."""

FEWEST_ANSWER_TOKENS = 8
_MOST_TOKENS = 384
"""Of an answer."""

_GREEDY = SamplingParams(temperature=0, max_tokens=_MOST_TOKENS)
_SAMPLED = SamplingParams(temperature=0.7, top_p=0.95, top_k=400, max_tokens=_MOST_TOKENS)


@dataclass
class Talk:
    """A conversation that is being written.

    Args:
        seed: everything that is sampled in it follows from this.
        greedy: whether its answers are greedy.
        tokens: so far, chat template included.
        answers: [start, stop) of each answer.
        finished: whether the last answer ended by itself.
    """

    seed: int
    greedy: bool
    tokens: list[int]
    answers: list[tuple[int, int]] = field(default_factory=list)
    finished: bool = False

    @property
    def noise_seed(self) -> int:
        """Seed of its next message or answer."""
        return MOST_TURNS * self.seed + len(self.answers)

    def answer_params(self) -> SamplingParams:
        """Of the next answer."""
        if self.greedy:
            return _GREEDY
        return _SAMPLED.model_copy(update={"seed": self.noise_seed})

    def written(self) -> Conversation:
        """The conversation up to the end of its last answer."""
        stop = self.answers[-1][1]
        temperature = self.answer_params().temperature
        return Conversation(tuple(self.tokens[:stop]), tuple(self.answers), self.seed, temperature)


class Answerer:
    """Lets the target answer.

    Args:
        llm: the target.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def answer(self, talks: Sequence[Talk]) -> list[Talk]:
        """Add an answer to each; where it begins to loop it is cut off.

        Returns:
            Those with a useful answer.
        """
        if not talks:
            return []
        params = [talk.answer_params() for talk in talks]
        outputs = self._llm.generate([list(talk.tokens) for talk in talks], params)
        answered = []
        for talk, output in zip(talks, outputs, strict=True):
            cut = loop_start(output.token_ids)
            answer = output.token_ids[:cut]
            if len(answer) < FEWEST_ANSWER_TOKENS:
                continue
            begin = len(talk.tokens)
            talk.tokens += answer
            talk.answers.append((begin, len(talk.tokens)))
            talk.finished = cut is None and output.finish_reason == "stop"
            answered.append(talk)
        return answered
