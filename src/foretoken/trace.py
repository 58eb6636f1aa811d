"""The trace of an output: what every step drafted and accepted. It can be saved as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from foretoken.core.acceptance.base import Accepted, Origin
from foretoken.core.sampler import TreeDistributions
from foretoken.core.tree import Draft
from foretoken.errors import ForetokenError

__all__ = ["StepTrace", "Trace", "record"]

FORMAT = "foretoken-trace-1"


@dataclass(slots=True)
class StepTrace:
    """One step of one request. The loop sets `committed` and the times after acceptance.

    Args:
        parents: parent of each drafted token, as an index into the drafted ones; -1 is the root.
        drafted: the drafted tokens.
        q: probability of each drafted token under the drafter.
        p: probability of each drafted token under the target. It is None where the rule did not
            need it, because the parent was not accepted. With `trace=True` all are there.
        accepted: indices of the drafted tokens that were accepted.
        rejected: indices of the drafted tokens that were tried and rejected.
        reason: why the tokens after the accepted path were rejected; empty if there were none.
        token: the token added after the accepted path.
        origin: where `token` came from.
        committed: tokens of this step that are part of the output (a stop may cut some off).
        draft_seconds: wall-clock time of drafting, for the whole batch.
        verify_seconds: the same for the target's pass.
        accept_seconds: the same for acceptance, commit and detokenization.
    """

    parents: tuple[int, ...]
    drafted: tuple[int, ...]
    q: tuple[float, ...]
    p: tuple[float | None, ...]
    accepted: tuple[int, ...]
    rejected: tuple[int, ...]
    reason: str
    token: int
    origin: Origin
    committed: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    accept_seconds: float = 0.0

    @property
    def depths(self) -> list[int]:
        """Depth of every drafted token; 1 is right below the root."""
        found: list[int] = []
        for parent in self.parents:
            found.append(1 if parent < 0 else found[parent] + 1)
        return found

    @property
    def kept(self) -> tuple[int, ...]:
        """The accepted tokens that are part of the output."""
        return self.accepted[: self.committed]

    @property
    def refused(self) -> tuple[int, ...]:
        """The rejected tokens, without those at positions behind the end of the output."""
        if self.committed > len(self.accepted):  # no stop has cut the step
            return self.rejected
        depths = self.depths
        return tuple(index for index in self.rejected if depths[index] <= self.committed)


@dataclass
class Trace:
    """All steps of one output.

    Args:
        steps: the steps in order.
        pieces: the text of every token that occurs, if it is known.
        encode_seconds: time in the encoder, before the first step; 0 without an encoder.
        prefill_seconds: time for the prompt before the first step, the encoder's included.
    """

    steps: list[StepTrace] = field(default_factory=list)
    pieces: dict[int, str] = field(default_factory=dict)
    encode_seconds: float = 0.0
    prefill_seconds: float = 0.0

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[StepTrace]:
        return iter(self.steps)

    def tokens(self) -> set[int]:
        """All tokens that were drafted or added."""
        return {token for step in self.steps for token in (*step.drafted, step.token)}

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "format": FORMAT,
            "encode_seconds": self.encode_seconds,
            "prefill_seconds": self.prefill_seconds,
            "pieces": {str(token): piece for token, piece in sorted(self.pieces.items())},
            "steps": [asdict(step) for step in self.steps],
        }

    @staticmethod
    def from_dict(value: Any) -> Trace:
        """The inverse of `as_dict`.

        Raises:
            ForetokenError: this is not a trace.
        """
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise ForetokenError(f"not a trace: expected an object with format '{FORMAT}'.")
        try:
            steps = [_step(step) for step in value["steps"]]
            pieces = {int(token): str(piece) for token, piece in value["pieces"].items()}
            before = [float(value.get(f"{part}_seconds", 0)) for part in ("encode", "prefill")]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ForetokenError(f"damaged trace: {error!r}.") from error
        return Trace(steps, pieces, *before)

    @staticmethod
    def load(path: Path) -> Trace:
        """Read a trace written by `foretoken generate --trace FILE`.

        Raises:
            ForetokenError: the file cannot be read or is not a trace.
        """
        try:
            return Trace.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise ForetokenError(f"cannot read trace {path}: {error}.") from error
        except ForetokenError as error:
            raise ForetokenError(f"{path}: {error}") from error


def _step(value: dict[str, Any]) -> StepTrace:
    names = {item.name for item in fields(StepTrace)}
    if unknown := set(value) - names:
        raise ValueError(f"unknown fields {sorted(unknown)}")
    tuples = {name: tuple(item) for name, item in value.items() if isinstance(item, list)}
    step = StepTrace(**{**value, **tuples, "origin": Origin(value["origin"])})
    _check_tree(step)
    return step


def _check_tree(step: StepTrace) -> None:
    size = len(step.drafted)
    if not len(step.parents) == len(step.q) == len(step.p) == size:
        raise ValueError("drafted, parents, q and p differ in length")
    if not all(-1 <= parent < index for index, parent in enumerate(step.parents)):
        raise ValueError("a parent does not come before its child")
    if not all(0 <= index < size for index in (*step.accepted, *step.rejected)):
        raise ValueError("accepted or rejected tokens that were not drafted")


def record(
    draft: Draft, p: TreeDistributions, accepted: Accepted, *, everything: bool
) -> StepTrace:
    """The trace of one step of one request, without `committed` and the times.

    Args:
        draft: the verified draft.
        p: the target's distributions.
        accepted: the rule's decision.
        everything: compute p also where the rule did not need it.
    """
    tree = draft.tree
    nodes = range(1, len(tree))

    def target_probability(node: int) -> float | None:
        parent = tree.parents[node]
        if everything or p.reached(parent):
            return p.prob(parent, tree.tokens[node])
        return None

    return StepTrace(
        parents=tuple(parent - 1 for parent in tree.parents[1:]),
        drafted=tree.tokens[1:],
        q=tuple(draft.q_of(node).shown_prob(tree.tokens[node]) for node in nodes),
        p=tuple(target_probability(node) for node in nodes),
        accepted=tuple(node - 1 for node in accepted.path),
        rejected=tuple(node - 1 for node in accepted.rejected),
        reason=accepted.reason,
        token=accepted.token,
        origin=accepted.origin(draft),
    )
