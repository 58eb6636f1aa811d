"""Two generations of one prompt, compared; and the file in which comparisons are kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks import BenchmarkError
from benchmarks.report import markdown_table
from foretoken.bench.journal import Journal

__all__ = [
    "Comparison",
    "Difference",
    "Generation",
    "ResultsFile",
    "first_difference",
    "summary",
]

FORMAT = "foretoken-identity-1"

Key: TypeAlias = tuple[str, str, str]
"""Check, method, prompt id."""


@dataclass(frozen=True)
class Generation:
    """What one run gave: tokens and, where they were asked for, their log-probabilities.

    `branched` says whether any draft was a tree and not a chain.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    branched: bool = False


@dataclass(frozen=True)
class Difference:
    """The first position at which two generations differ, in tokens or only in a logprob.

    Args:
        position: counted from the first generated token.
        expected, got: the two tokens; None is past the end of one.
        expected_logprob, got_logprob: their log-probabilities, if both sides have them.
        top2_gap: difference of the two largest logits there in float32; small gaps are ties that
            rounding may decide either way.
        token_gap: logit of the expected token less that of the other in float32.
    """

    position: int
    expected: int | None
    got: int | None
    expected_logprob: float | None = None
    got_logprob: float | None = None
    top2_gap: float | None = None
    token_gap: float | None = None


@dataclass(frozen=True)
class Comparison:
    """One method on one prompt against its reference.

    `promised` says whether they ought to be identical: invariant 7 speaks of chains, so that the
    bits of a run that drafted branches may differ.
    """

    check: str
    method: str
    prompt: str
    kind: str
    prompt_tokens: int
    generated_tokens: int
    promised: bool
    difference: Difference | None

    @property
    def key(self) -> Key:
        """What it is a comparison of."""
        return self.check, self.method, self.prompt

    @property
    def identical(self) -> bool:
        """Whether nothing differs."""
        return self.difference is None

    @property
    def broken(self) -> bool:
        """Whether it differs and should not."""
        return self.promised and not self.identical

    @staticmethod
    def from_dict(value: dict[str, Any]) -> Comparison:
        """The inverse of `dataclasses.asdict`."""
        found = value["difference"]
        return Comparison(**{**value, "difference": None if found is None else Difference(**found)})


def first_difference(expected: Generation, got: Generation) -> Difference | None:
    """Where the second differs from the first; None where tokens and logprobs are identical.

    Log-probabilities are compared bit for bit (as floats that are equal), if both sides have them.
    """
    for position in range(max(len(expected.token_ids), len(got.token_ids))):
        tokens = _at(expected.token_ids, position), _at(got.token_ids, position)
        logprobs: tuple[float | None, float | None] = (None, None)
        if expected.logprobs is not None and got.logprobs is not None:
            logprobs = _at(expected.logprobs, position), _at(got.logprobs, position)
        if tokens[0] != tokens[1] or logprobs[0] != logprobs[1]:
            return Difference(position, *tokens, *logprobs)
    return None


def _at(values: Sequence[Any], position: int) -> Any:
    return values[position] if position < len(values) else None


class ResultsFile:
    """Comparisons as JSON lines, appended one by one; a run that was broken off goes on from it.

    Args:
        path: created if it does not exist; None keeps the comparisons in memory only.
        settings: whatever the results depend on.

    Raises:
        ForetokenError: the file is not such a file, or its settings differ.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        self._journal = Journal(path, FORMAT, settings)
        try:
            comparisons = [Comparison.from_dict(line) for line in self._journal.records]
        except (LookupError, TypeError) as error:
            raise BenchmarkError(f"{path} is not a results file: {error}.") from error
        self.comparisons: dict[Key, Comparison] = {c.key: c for c in comparisons}

    def add(self, comparison: Comparison) -> None:
        """Keep one more, on disk before this returns."""
        self.comparisons[comparison.key] = comparison
        self._journal.add(asdict(comparison))

    def __contains__(self, key: Key) -> bool:
        return key in self.comparisons


def summary(comparisons: Iterable[Comparison]) -> str:
    """A Markdown table of identical / compared per check, method and kind of prompt."""
    groups: dict[tuple[str, str], list[Comparison]] = {}
    kinds: dict[str, None] = {}
    for comparison in comparisons:
        groups.setdefault((comparison.check, comparison.method), []).append(comparison)
        kinds[comparison.kind] = None
    rows = [
        [
            f"{check}: {method}",
            *(_share([c for c in members if c.kind == kind]) for kind in kinds),
            _share(members),
        ]
        for (check, method), members in sorted(groups.items())
    ]
    return markdown_table(["check: method", *kinds, "all"], rows)


def _share(comparisons: Sequence[Comparison]) -> str:
    return f"{sum(c.identical for c in comparisons)}/{len(comparisons)}"
