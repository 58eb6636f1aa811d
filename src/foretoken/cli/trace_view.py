"""What a page shows of a trace: draft and verification of each step, as plain data.

Table 16 of Xia et al., "Speculative Decoding" (2023), shows a translation so. `trace_page.py` makes
HTML of it. Other pages can read the same data, which the file holds as JSON, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from foretoken.cli.trace_summary import TraceSummary

if TYPE_CHECKING:
    from foretoken.trace import StepTrace, Trace

__all__ = ["Step", "Token", "TraceView"]


@dataclass(frozen=True)
class Token:
    """A token of a step.

    Args:
        text: its text, or "#" and its id if that is not known.
        kind: what became of it: "accepted", "rejected", "unreached", or the token's origin.
        parent: index of the drafted token before it; -1 behind the text so far.
        p, q: its probability under the target and the drafter, if they are known.
    """

    text: str
    kind: str
    parent: int = -1
    p: float | None = None
    q: float | None = None


@dataclass(frozen=True)
class Step:
    """A step: what was drafted, and what the target made of it.

    Args:
        number: of the step, from 1.
        draft: the drafted tokens, parents first; empty in a step without a draft.
        lines: the draft as lines to show: how far each is indented, and indices into `draft`. A
            chain is one line. In a tree, a line ends where branches part.
        verified: what became output: accepted tokens, and the one that the target added.
        reason: why the rule went no further; empty if it did not say.
    """

    number: int
    draft: tuple[Token, ...]
    lines: tuple[tuple[int, tuple[int, ...]], ...]
    verified: tuple[Token, ...]
    reason: str


@dataclass(frozen=True)
class TraceView:
    """All steps of an output, with the counts over them."""

    steps: tuple[Step, ...]
    summary: Mapping[str, Any]

    @staticmethod
    def of(trace: Trace) -> TraceView:
        """The view of a trace."""
        steps = [_step(n, step, trace.pieces) for n, step in enumerate(trace, start=1)]
        return TraceView(tuple(steps), TraceSummary(trace).as_dict())

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def _step(number: int, step: StepTrace, pieces: Mapping[int, str]) -> Step:
    became_output = step.kept

    def text(token: int) -> str:
        return pieces.get(token, f"#{token}")

    def kind(index: int) -> Literal["accepted", "rejected", "unreached"]:
        if index in became_output:
            return "accepted"
        return "rejected" if index in step.rejected else "unreached"

    columns = zip(step.drafted, step.parents, step.p, step.q, strict=True)
    draft = tuple(
        Token(text(token), kind(index), parent, p, q)
        for index, (token, parent, p, q) in enumerate(columns)
    )
    verified = [draft[index] for index in became_output]
    if step.committed > len(step.accepted):  # else a stop has cut it off
        verified.append(Token(text(step.token), step.origin.value))
    return Step(number, draft, _lines(step), tuple(verified), step.reason)


def _lines(step: StepTrace) -> tuple[tuple[int, tuple[int, ...]], ...]:
    children: dict[int, list[int]] = {}
    for index, parent in enumerate(step.parents):
        children.setdefault(parent, []).append(index)
    lines: list[tuple[int, tuple[int, ...]]] = []
    first = children.get(-1, [])
    waiting = [(0, index) for index in reversed(first)]
    while waiting:
        indent, index = waiting.pop()
        line = [index]
        while len(below := children.get(line[-1], [])) == 1:
            line += below
        lines.append((indent, tuple(line)))
        waiting += [(indent + 1, child) for child in reversed(below)]
    return tuple(lines)
