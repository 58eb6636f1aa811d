"""The trace of an output: what every step drafted and accepted. It can be saved as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias

from pydantic import ConfigDict

from tokenleap.core import clock
from tokenleap.core.acceptance.base import Accepted, Origin
from tokenleap.core.files import read_json, validated
from tokenleap.errors import TokenleapError, in_one_line

if TYPE_CHECKING:
    from tokenleap.core.sampler import TreeDistributions
    from tokenleap.core.tree import Draft

FORMAT = "tokenleap-trace-1"

NUM_CANDIDATES = 5
"""Most likely tokens that a trace has for each position."""

PASS_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of tokens of the passes whose expected seconds a trace has."""

_DIGITS = 6
"""Decimal places of their probabilities: with more, the file would be half as large again."""

WITHHELD = -1
"""In the place of a drafted token that the reader of a trace may not know."""

Source: TypeAlias = Literal["lookup", "model"]
"""The finder of a drafted token. "model" is any drafter that looks no tokens up; "lookup" is
a lookup, alone or together with a trained drafter that had drafted the same token."""


class Candidate(NamedTuple):
    """One of the most likely tokens at a position."""

    token: int
    """Its id."""
    model: float
    """Its probability under the model itself, before temperature, masks and truncation."""
    p: float
    """Its probability under the target, as it was drawn from; one-hot in greedy decoding."""
    q: float | None
    """Its probability under the drafter, for the first token drafted here; None if nothing was."""


@dataclass(slots=True)
class StepTrace:
    """One step of one request. The loop sets `committed` and the times after acceptance.

    Args:
        parents: parent of each drafted token, as an index into the drafted ones; -1 is the root.
        drafted: the drafted tokens.
        q: probability of each drafted token under the drafter. It is None where nothing needed it,
            for example because the rule reads no q. With `trace=True` all are there.
        p: probability of each drafted token under the target. It is None where the rule did not
            need it: its parent was not accepted, or the token after its parent was drawn without p.
            With `trace=True` all are there.
        accepted: indices of the drafted tokens that were accepted.
        rejected: indices of the drafted tokens that were tried and rejected.
        reason: why the tokens after the accepted path were rejected; empty if there were none.
        token: the token added after the accepted path.
        origin: where `token` came from.
        committed: tokens of this step that are part of the output (a stop may cut some off).
        draft_seconds: wall-clock time of drafting, for the whole batch.
        verify_seconds: the same for the target's pass.
        accept_seconds: the same for acceptance, commit and detokenization, without
            `recording_seconds`.
        recording_seconds: time for what only the trace needs; 0 without `trace=True`.
        sources: what found each drafted token; empty without `trace=True`.
        candidates: the most likely tokens after the root and after each drafted token, in the order
            of their indices, which begin with -1 here; empty without `trace=True`.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    parents: tuple[int, ...]
    drafted: tuple[int, ...]
    q: tuple[float | None, ...]
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
    recording_seconds: float = 0.0
    sources: tuple[Source, ...] = ()
    candidates: tuple[tuple[Candidate, ...], ...] = ()

    @property
    def seconds(self) -> float:
        """Wall-clock time of the step, for the whole batch, without `recording_seconds`."""
        return self.draft_seconds + self.verify_seconds + self.accept_seconds

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

    def withheld(self) -> StepTrace:
        """The step without tokens that were not committed."""
        shown = frozenset(self.accepted)

        def only(values: tuple[Any, ...], other: Any) -> tuple[Any, ...]:
            return tuple(each if i in shown else other for i, each in enumerate(values))

        # The first child's q is one-hot for most drafters, and so names it.
        first: dict[int, int] = {}
        for index, parent in enumerate(self.parents):
            first.setdefault(parent, index)
        candidates = []
        for index, place in enumerate(self.candidates, -1):
            names = first.get(index, -1) in shown
            candidates.append(
                tuple(each if names else each._replace(q=None) for each in place)
                if index < 0 or index in shown
                else ()
            )
        return replace(
            self,
            drafted=only(self.drafted, WITHHELD),
            q=only(self.q, None),
            p=only(self.p, None),
            reason="withheld: it may be from another request" if self.reason else "",
            candidates=tuple(candidates),
        )

    @property
    def refused(self) -> tuple[int, ...]:
        """The rejected tokens, without those at positions after the end of the output."""
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
        pass_seconds: expected seconds of a pass by its number of tokens, at the end of the output;
            empty without `trace=True`, or if the controller does not measure passes.
    """

    steps: list[StepTrace] = field(default_factory=list)
    pieces: dict[int, str] = field(default_factory=dict)
    encode_seconds: float = 0.0
    prefill_seconds: float = 0.0
    pass_seconds: dict[int, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[StepTrace]:
        return iter(self.steps)

    def tokens(self) -> set[int]:
        """All tokens that were drafted, added, or likely."""
        found = {token for step in self.steps for token in (*step.drafted, step.token)}
        likely = (place for step in self.steps for place in step.candidates)
        return found | {candidate.token for place in likely for candidate in place}

    def withheld(self) -> Trace:
        """Without all that tells which tokens were drafted and not accepted.

        `WITHHELD` takes their places, without p and q, and there are no candidates after them.
        """
        steps = [step.withheld() for step in self.steps]
        trace = replace(self, steps=steps)
        known = trace.tokens()
        trace.pieces = {token: piece for token, piece in self.pieces.items() if token in known}
        if WITHHELD in known:
            trace.pieces[WITHHELD] = "\N{HORIZONTAL ELLIPSIS}"
        return trace

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "format": FORMAT,
            "encode_seconds": self.encode_seconds,
            "prefill_seconds": self.prefill_seconds,
            "pass_seconds": {str(size): value for size, value in self.pass_seconds.items()},
            "pieces": {str(token): piece for token, piece in sorted(self.pieces.items())},
            "steps": [asdict(step) for step in self.steps],
        }

    @staticmethod
    def from_dict(value: Any) -> Trace:
        """The inverse of `as_dict`.

        Raises:
            TokenleapError: this is not a trace.
        """
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise TokenleapError(f"not a trace: expected an object with format '{FORMAT}'.")
        try:
            needed = {name: value[name] for name in ("steps", "pieces")}
            trace = validated(Trace, {**value, **needed})
            for step in trace.steps:
                _check_tree(step)
                _check_times(step.draft_seconds, step.verify_seconds, step.accept_seconds)
            _check_times(trace.encode_seconds, trace.prefill_seconds, *trace.pass_seconds.values())
        except (KeyError, ValueError) as error:
            raise TokenleapError(f"damaged trace: {in_one_line(error).rstrip('.')}.") from error
        return trace

    @staticmethod
    def load(path: Path) -> Trace:
        """Read a trace written by `tokenleap generate --trace FILE`.

        Raises:
            TokenleapError: the file cannot be read or is not a trace.
        """
        try:
            value = read_json(path)
        except (OSError, ValueError) as error:
            raise TokenleapError(f"cannot read trace {path}: {error}.") from error
        try:
            return Trace.from_dict(value)
        except TokenleapError as error:
            raise TokenleapError(f"{path}: {error}") from error


_MOST_NODES, _MOST_LEVELS, _LONGEST = 4096, 512, 1e6  # the last one in seconds


def _check_tree(step: StepTrace) -> None:
    size = len(step.drafted)
    if not len(step.parents) == len(step.q) == len(step.p) == size:
        raise ValueError("drafted, parents, q and p differ in length")
    if not all(-1 <= parent < index for index, parent in enumerate(step.parents)):
        raise ValueError("a parent does not come before its child")
    if not all(0 <= index < size for index in (*step.accepted, *step.rejected)):
        raise ValueError("accepted or rejected tokens that were not drafted")
    above = [-1, *step.accepted]
    if [step.parents[index] for index in step.accepted] != above[: len(step.accepted)]:
        raise ValueError("accepted tokens that are no path")
    if size > _MOST_NODES or max(step.depths, default=0) > _MOST_LEVELS:
        raise ValueError(f"a draft of {size} tokens: more than {_MOST_NODES}, or too deep")
    if len(step.candidates) not in (0, size + 1) or len(step.sources) not in (0, size):
        raise ValueError("candidates or sources that do not belong to the drafted tokens")


def _check_times(*seconds: float) -> None:
    if not all(0 <= each < _LONGEST for each in seconds):
        raise ValueError("a time that is negative, too long, or not finite")


def record(
    draft: Draft, p: TreeDistributions, accepted: Accepted, *, everything: bool
) -> StepTrace:
    """The trace of one step of one request, without `committed` and the times.

    Args:
        draft: the verified draft.
        p: the target's distributions.
        accepted: the rule's decision.
        everything: compute p and q also where the rule did not need them, sources and candidates.
    """
    tree, origin = draft.tree, accepted.origin(draft)
    if not (tree.num_drafted or everything):  # quickly: in batches, plain steps are short
        return StepTrace((), (), (), (), (), (), accepted.reason, accepted.token, origin)
    nodes = range(1, len(tree))

    def target_probability(node: int) -> float | None:
        parent = tree.parents[node]
        if everything or p.reached(parent):
            return p.prob(parent, tree.tokens[node])
        return None

    def draft_probability(node: int) -> float | None:
        q, token = draft.q_of(node), tree.tokens[node]
        known = q.known_prob(token)
        return q.prob(token) if known is None and everything else known

    began = clock.now() if everything else 0.0
    step = StepTrace(
        parents=tuple(parent - 1 for parent in tree.parents[1:]),
        drafted=tree.tokens[1:],
        q=(1.0,) * len(nodes)
        if draft.is_one_hot
        else tuple(draft_probability(node) for node in nodes),
        p=tuple(target_probability(node) for node in nodes),
        accepted=tuple(node - 1 for node in accepted.path),
        rejected=tuple(node - 1 for node in accepted.rejected),
        reason=accepted.reason,
        token=accepted.token,
        origin=origin,
        sources=_sources(draft) if everything else (),
        candidates=_candidates(draft, p) if everything else (),
    )
    if everything:
        step.recording_seconds = clock.now() - began
    return step


def _sources(draft: Draft) -> tuple[Source, ...]:
    features = draft.features or (0,) * draft.tree.num_drafted
    return tuple("lookup" if feature else "model" for feature in features)


def _candidates(draft: Draft, p: TreeDistributions) -> tuple[tuple[Candidate, ...], ...]:
    """The most likely tokens after every node."""
    tokens, probs = p.likeliest(NUM_CANDIDATES)  # [1 + n, k] each
    found = []
    for node, likely in enumerate(zip(tokens.tolist(), probs.tolist(), strict=True)):
        children = draft.tree.children[node]
        q = draft.q_of(children[0]) if children else None
        found.append(
            tuple(
                Candidate(
                    token,
                    round(value, _DIGITS),
                    round(p.prob(node, token), _DIGITS),
                    None if q is None else round(q.prob(token), _DIGITS),
                )
                for token, value in zip(*likely, strict=True)
            )
        )
    return tuple(found)
