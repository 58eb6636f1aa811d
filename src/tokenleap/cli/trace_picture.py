"""One step of a trace as one line, like figure 1 of Leviathan et al. (2023).

    accepted accepted x rejected unreached > correction
    accepted accepted accepted + bonus

The marks repeat what the colours say, for output without colours. A token tree has a line per
branch. `tokenleap trace` prints these lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.text import Text

from tokenleap.cli.console import safe

if TYPE_CHECKING:
    from tokenleap.trace import StepTrace

__all__ = ["legend", "picture", "visible"]

REJECTED, CORRECTION, BONUS = "\u2717", "\u2192", "+"
_VISIBLE = str.maketrans({" ": "\u00b7", "\n": "\u21b5", "\t": "\u21e5", "\r": "\u240d"})


def legend() -> Text:
    """The meaning of marks and colours."""
    return Text("   ").join(
        [
            Text("accepted", "draft"),
            Text(f"{REJECTED}rejected", "rejected"),
            Text("not reached", "unreached"),
            Text(f"{CORRECTION}correction", "correction"),
            Text(f"{BONUS}bonus", "bold"),
        ]
    )


def visible(piece: str) -> str:
    """A token's text with its white space shown."""
    return safe(piece.translate(_VISIBLE)) or "''"


def picture(step: StepTrace, pieces: Mapping[int, str]) -> Text:
    """The step's tokens, in one line if its draft is a chain."""
    return _Picture(step, pieces).text()


class _Picture:
    def __init__(self, step: StepTrace, pieces: Mapping[int, str]) -> None:
        self._step = step
        self._pieces = pieces
        self._kept, self._refused = set(step.kept), set(step.refused)
        # The node that the correction or the bonus token follows; -1 is the root.
        self._end = step.accepted[-1] if step.accepted else -1

    def text(self) -> Text:
        if all(parent == index - 1 for index, parent in enumerate(self._step.parents)):
            tokens = [self._token(index) for index in range(len(self._step.drafted))]
            return Text(" ").join([*tokens, *self._added()])
        return Text("\n").join(self._branches(-1))

    def _token(self, index: int) -> Text:
        text = self._piece(self._step.drafted[index])
        if index in self._kept:
            return Text(text, "draft")
        if index in self._refused:
            return Text(REJECTED + text, "rejected")
        return Text(text, "unreached")

    def _added(self) -> list[Text]:
        """The token after the accepted path, unless a stop cut it off."""
        if self._step.committed <= len(self._step.accepted):
            return []
        text = self._piece(self._step.token)
        if self._step.origin.value == "correction":
            return [Text(CORRECTION + text, "correction")]
        return [Text((BONUS if self._step.drafted else "") + text, "bold")]

    def _piece(self, token: int) -> str:
        return visible(self._pieces.get(token, f"#{token}"))

    def _branches(self, node: int) -> list[Text]:
        """Lines for everything below a node, -1 being the root; the first goes on its own line."""
        children = [self._subtree(i) for i, p in enumerate(self._step.parents) if p == node]
        if node == self._end:
            children += [[added] for added in self._added()]
        if len(children) < 2:
            return children[0] if children else []
        lines = [Text()] if node >= 0 else []
        for child in children:
            last = child is children[-1]
            first, *others = child
            lines.append(Text("\u2514\u2500 " if last else "\u251c\u2500 ", "note") + first)
            lines += [Text("   " if last else "\u2502  ", "note") + line for line in others]
        return lines

    def _subtree(self, index: int) -> list[Text]:
        first, *others = self._branches(index) or [Text()]
        return [Text(" ").join([self._token(index), *([first] if first else [])]), *others]
