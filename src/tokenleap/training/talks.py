"""Conversations while they are written, and the target's answers in them.

`self_data.py` lets the target write the users' messages, too; `prompt_data.py` takes them from
files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenleap.core.params import SamplingParams
from tokenleap.llm import LLM
from tokenleap.training.conversations import Conversation
from tokenleap.training.writer import Wanted, Writer, Writing

__all__ = [
    "FEWEST_ANSWER_TOKENS",
    "MOST_TURNS",
    "Answerer",
    "Talk",
    "answered",
    "usual_temperature",
]

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
    """A conversation that is being written.

    Args:
        seed: everything that is sampled in it follows from this.
        temperature: of its answers; 0 is greedy.
        tokens: so far, chat template included.
        answers: [start, stop) of each answer.
        finished: whether the last answer ended by itself.
    """

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
        """Of the next answer."""
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
    """Add an answer to a conversation; where it begins to loop it is cut off.

    Args:
        talk: the conversation.
        length: most tokens that it may have afterwards.

    Returns:
        Whether there is a useful answer.
    """
    params = talk.answer_params()
    most = min(params.max_tokens or length, length - len(talk.tokens))
    if most < 1:
        return False
    params = params.model_copy(update={"max_tokens": most})
    written = yield Wanted(tuple(talk.tokens), params)
    if len(written.tokens) < FEWEST_ANSWER_TOKENS:
        return False
    begin = len(talk.tokens)
    talk.tokens += written.tokens
    talk.answers.append((begin, len(talk.tokens)))
    talk.finished = written.finish == "stop"
    return True


class Answerer:
    """Lets a model answer.

    Args:
        llm: the model.
    """

    def __init__(self, llm: LLM) -> None:
        self._writer, self._length = Writer(llm), llm.max_model_len

    def answer(self, talks: Sequence[Talk]) -> list[Talk]:
        """Add an answer to each, see `answered`.

        Returns:
            Those with a useful answer.
        """
        useful = self._writer.run(answered(talk, self._length) for talk in talks)
        return [talk for talk, is_useful in zip(talks, useful, strict=True) if is_useful]
