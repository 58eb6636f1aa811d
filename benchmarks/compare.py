"""Comparisons of two generations of a prompt, and the file that keeps them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks import BenchmarkError
from benchmarks.report import markdown_table
from tokenleap.bench.run import Journal

__all__ = [
    "Comparison",
    "Difference",
    "Generation",
    "ResultsFile",
    "first_difference",
    "summary",
]

FORMAT = "tokenleap-identity-1"

Key: TypeAlias = tuple[str, str, str]
"""Check, method, prompt id."""


@dataclass(frozen=True)
class Generation:
    """The result of one run.

    Args:
        token_ids: the output.
        logprobs: of its tokens, if they were asked for.
        branched: whether any draft was a tree and not a chain.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    branched: bool = False


@dataclass(frozen=True)
class Difference:
    """The first position at which two generations differ in a token or in its logprob.

    Args:
        position: from 0, the first generated token.
        expected, got: the two tokens; None where one generation has ended.
        expected_logprob, got_logprob: their log-probabilities, if both generations have them.
        top2_gap: difference of the two largest float32 logits there. Where it is tiny, rounding
            decides between the two tokens.
        token_gap: float32 logit of the expected token less that of the other.
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
    """One method on one prompt, compared with its reference.

    `promised` says whether they must be identical. In 16 bits invariant 7 covers chains only, so a
    run that drafted trees may differ.
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
        """Identifies the comparison."""
        return self.check, self.method, self.prompt

    @property
    def identical(self) -> bool:
        """Whether nothing differs."""
        return self.difference is None

    @property
    def broken(self) -> bool:
        """Whether it differs although it must not."""
        return self.promised and not self.identical

    @staticmethod
    def from_dict(value: dict[str, Any]) -> Comparison:
        """The inverse of `dataclasses.asdict`."""
        found = value["difference"]
        return Comparison(**{**value, "difference": None if found is None else Difference(**found)})


def first_difference(expected: Generation, got: Generation) -> Difference | None:
    """The first difference; None if tokens and logprobs are identical.

    Log-probabilities are compared as equal floats, if both generations have them.
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
    """Comparisons as JSON lines, appended one by one, from which an interrupted run continues.

    Args:
        path: created if it does not exist; None keeps the comparisons in memory only.
        settings: everything the results depend on.

    Raises:
        TokenleapError: the file is not such a file, or its settings differ.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        self._journal = Journal(path, FORMAT, settings)
        try:
            comparisons = [Comparison.from_dict(line) for line in self._journal.records]
        except (LookupError, TypeError) as error:
            raise BenchmarkError(f"{path} is not a results file: {error}.") from error
        self.comparisons: dict[Key, Comparison] = {c.key: c for c in comparisons}

    def add(self, comparison: Comparison) -> None:
        """Add a comparison; it is on disk before this returns."""
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
