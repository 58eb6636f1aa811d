"""Lets a target write many texts at a time, and stops those that begin to repeat themselves.

What is written is described by generators: one yields a `Wanted`, and gets a `Written` back. So a
conversation of several turns is one function, although others are written at the same time.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tokenleap.core.params import SamplingParams
from tokenleap.errors import RequestError
from tokenleap.llm import LLM
from tokenleap.outputs import StreamChunk
from tokenleap.training.conversations import Repeats

__all__ = ["Wanted", "Writer", "Writing", "Written"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class Wanted:
    """A text to be written.

    Args:
        prompt: in front of it.
        params: how it is sampled.
        loop: n of the n-grams that may not occur three times.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    loop: int = 12


@dataclass(frozen=True)
class Written:
    """A text that was written.

    Args:
        tokens: its tokens, up to where it begins to loop.
        finish: why it ended: "stop", "length" or "loop".
    """

    tokens: tuple[int, ...]
    finish: str


Writing = Generator[Wanted, Written, _T]
"""Something that needs texts, one after the other, and makes a result of them."""


@dataclass
class _Running(Generic[_T]):
    """A writing whose current text is being written."""

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


class Writer:
    """Writes with a target.

    Args:
        llm: the target.
    """

    def __init__(self, llm: LLM) -> None:
        self._engine = llm.engine
        self._most = 2 * llm.engine.options.max_num_seqs  # so that a row never waits for the next

    def run(self, writings: Iterable[Writing[_T]]) -> list[_T]:
        """The results of these, in order.

        Raises:
            RequestError: the engine failed at one of the texts.
        """
        left = iter(enumerate(writings))
        results: dict[int, _T] = {}
        running: dict[str, _Running[_T]] = {}

        def go_on(place: int, writing: Writing[_T], written: Written | None) -> None:
            try:
                wanted = next(writing) if written is None else writing.send(written)
            except StopIteration as end:
                results[place] = end.value
                return
            name = self._engine.add_request(list(wanted.prompt), wanted.params)
            running[name] = _Running(place, writing, wanted, Repeats(wanted.loop))

        def fill() -> None:
            while len(running) < self._most and (new := next(left, None)) is not None:
                go_on(*new, None)

        try:
            fill()
            while running:
                for chunk in self._engine.step():
                    name = chunk.request_id
                    if name in running and (written := running[name].read(chunk)) is not None:
                        ended = running.pop(name)
                        if written.finish == "loop":
                            self._engine.abort(name)
                        go_on(ended.place, ended.writing, written)
                fill()
        finally:
            self._engine.abort(running)
        return [results[place] for place in sorted(results)]
