"""Prompts from a file: questions of Spec-Bench or SPEED-Bench, JSON lines or plain text.

Spec-Bench (Xia et al., "Unlocking Efficiency in Large Language Model Inference", 2024) has 480
questions as JSON lines with `question_id`, `category` and `turns`. Its six kinds of 80 are
multi-turn conversation, translation, summarization, question answering, mathematical reasoning and
retrieval-augmented generation; the first consists of MT-Bench's eight categories of 10.

SPEED-Bench (NVIDIA, "SPEED-Bench: A Unified and Diverse Benchmark for Speculative Decoding", 2026,
https://huggingface.co/datasets/nvidia/SPEED-Bench) has a Parquet file per subset. `qualitative` has
880 questions in eleven categories; `throughput_1k`, `_2k`, `_8k`, `_16k` and `_32k` have 1,536
prompts of about so many tokens each, in `low_entropy`, `mixed` and `high_entropy`. Rows have
`question_id`, `category`, `sub_category`, `turns`, `source`, `src_id`, `difficulty` and
`multiturn`. Where a source's licence forbids copies, `turns` begins with a placeholder, which
NVIDIA's `prepare.py` replaces; that of NeMo-Skills, which vLLM's documentation names, writes JSON
lines with `messages` in place of `turns`.

Of both, only the first turn of a conversation is used, as a chat message.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeAlias

from tokenleap.core.files import parsed_json
from tokenleap.errors import PromptError, TokenleapError

MULTI_TURN = "multi-turn"
MT_BENCH = frozenset(
    {
        "writing",
        "roleplay",
        "reasoning",
        "math",
        "coding",
        "extraction",
        "stem",
        "humanities",
    }
)
"""The categories that Spec-Bench took from MT-Bench: together they are one kind."""

SPEED_BENCH_FIELD = "multiturn"
"""SPEED-Bench's rows have it: their categories have names of MT-Bench's, but are kinds."""

PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
"""Begins a text that SPEED-Bench may not publish."""

TEXT_FIELDS = ("prompt", "text", "question", "instruction")
"""Fields that may have a prompt's text in JSON lines other than Spec-Bench's; the first counts."""


@dataclass(frozen=True)
class Prompt:
    """One prompt: its id (unique in its file), its kind and its text."""

    id: str
    kind: str
    text: str

    @property
    def seed(self) -> int:
        """A seed computed from the id: the same in every sample that has the prompt."""
        return int.from_bytes(hashlib.sha256(self.id.encode()).digest()[:4], "big")


def read_prompts(file: Path) -> list[Prompt]:
    """Read a file of prompts.

    Args:
        file: `.jsonl` has one JSON object a line: `question_id`, `category` and `turns` or
            `messages`, as of Spec-Bench and SPEED-Bench, or a text under `prompt`, `text`,
            `question` or `instruction` with an optional `category`; or one JSON string a line.
            `.parquet` has the same fields as columns. Any other file is plain text with one prompt
            a line. Empty lines are skipped. Without a category the kind is the file's name.
    """
    try:
        rows = _rows_of_parquet(file) if file.suffix == ".parquet" else _rows_of_lines(file)
    except UnicodeDecodeError:
        raise PromptError(f"{file} is not UTF-8 text.") from None
    except OSError as error:
        why = error.strerror or str(error)
        raise TokenleapError(f"cannot read the prompts in {file}: {why}.") from error
    prompts = [_prompt(fields, place, number, file.stem) for place, number, fields in rows]
    if not prompts:
        raise PromptError(f"{file} has no prompts.")
    _check_ids_differ(prompts, file)
    return prompts


_Row: TypeAlias = tuple[str, str, Any]
"""Where a row stands, for messages; its number; its fields, or its text alone."""


def _rows_of_lines(file: Path) -> list[_Row]:
    lines = file.read_text(encoding="utf-8").split("\n")  # a text may have other line ends
    return [
        (place := f"{file}, line {number}", str(number), _fields(file, line, place))
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]


def _fields(file: Path, line: str, place: str) -> Any:
    if file.suffix != ".jsonl":
        return line.strip()
    try:
        return parsed_json(line)
    except ValueError as error:
        raise PromptError(f"{place}: not JSON ({error}).") from None


def _rows_of_parquet(file: Path) -> list[_Row]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table
    except ImportError:
        raise TokenleapError(f"reading {file} needs pyarrow: pip install pyarrow") from None
    try:
        rows = read_table(file).to_pylist()
    except ArrowException as error:
        raise PromptError(f"{file}: {str(error).splitlines()[0]}") from None
    return [(f"{file}, row {n}", str(n), fields) for n, fields in enumerate(rows, start=1)]


def _prompt(value: Any, place: str, number: str, kind: str) -> Prompt:
    fields = value if isinstance(value, dict) else {"text": value}
    text = _text(fields)
    if not isinstance(text, str) or not text.strip():
        raise PromptError(f"{place}: no text under turns, messages, {', '.join(TEXT_FIELDS)}.")
    if text.startswith(PLACEHOLDER):
        raise PromptError(
            f"{place}: a placeholder, because the source's licence forbids copies. NVIDIA's "
            "prepare.py for SPEED-Bench gets the texts: see docs/bench.md."
        )
    category = str(fields.get("category", kind))
    own = SPEED_BENCH_FIELD in fields or category not in MT_BENCH
    return Prompt(str(fields.get("question_id", number)), category if own else MULTI_TURN, text)


def _text(fields: dict[str, Any]) -> Any:
    for name in ("turns", "messages"):
        if isinstance(turns := fields.get(name), list):
            first = turns[0] if turns else None
            return first.get("content") if isinstance(first, dict) else first
    return next((fields[name] for name in TEXT_FIELDS if name in fields), None)


def _check_ids_differ(prompts: Iterable[Prompt], file: Path) -> None:
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise PromptError(f"{file}: question_id {prompt.id} occurs twice.")
        seen.add(prompt.id)


def stratified(
    prompts: Sequence[Prompt], per_kind: int, seed: int, kinds: Sequence[str] = ()
) -> list[Prompt]:
    """A random sample of `per_kind` prompts of every kind, the kinds taking turns.

    A larger sample with the same seed begins with the smaller one, as long as no kind runs out.
    """
    by_kind: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_kind.setdefault(prompt.kind, []).append(prompt)
    for kind in kinds:
        if kind not in by_kind:
            raise PromptError(f"no prompts of kind '{kind}'; there are: {', '.join(by_kind)}.")
    chosen = [
        # A generator per kind: adding a kind does not change the samples of the others.
        random.Random(f"{seed}/{kind}").sample(members, len(members))[:per_kind]
        for kind, members in by_kind.items()
        if not kinds or kind in kinds
    ]
    return [prompt for turn in zip_longest(*chosen) for prompt in turn if prompt is not None]


def cut_middle(ids: Sequence[int], limit: int) -> list[int]:
    """At most `limit` tokens: of a longer list the first half and the last half of that."""
    if len(ids) <= limit:
        return list(ids)
    head = limit // 2
    return [*ids[:head], *ids[len(ids) - (limit - head) :]]
