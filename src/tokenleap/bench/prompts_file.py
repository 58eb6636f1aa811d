"""Prompts from a file: Spec-Bench's questions, JSON lines or plain text.

Spec-Bench (Xia et al., "Unlocking Efficiency in Large Language Model Inference", 2024) has 480
questions as JSON lines with `question_id`, `category` and `turns`. Its six kinds of 80 are
multi-turn conversation, translation, summarization, question answering, mathematical reasoning and
retrieval-augmented generation; the first consists of MT-Bench's eight categories of 10. Only the
first turn of a conversation is used, as a chat message.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

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
        file: `.jsonl` has one JSON object a line: Spec-Bench's `question_id`, `category` and
            `turns`, or a text under `prompt`, `text`, `question` or `instruction` with an optional
            `category`; or one JSON string a line. Any other file is plain text with one prompt a
            line. Empty lines are skipped. Without a category the kind is the file's name.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise PromptError(f"{file} is not UTF-8 text.") from None
    except OSError as error:
        raise TokenleapError(f"cannot read the prompts in {file}: {error.strerror}.") from error
    parse = _parse_json if file.suffix == ".jsonl" else _parse_text
    prompts = [
        parse(line, f"{file}, line {number}", str(number), file.stem)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        raise PromptError(f"{file} has no prompts.")
    _check_ids_differ(prompts, file)
    return prompts


def _parse_text(line: str, _place: str, number: str, kind: str) -> Prompt:
    return Prompt(number, kind, line.strip())


def _parse_json(line: str, place: str, number: str, kind: str) -> Prompt:
    try:
        value = parsed_json(line)
    except ValueError as error:
        raise PromptError(f"{place}: not JSON ({error}).") from None
    fields = value if isinstance(value, dict) else {"text": value}
    text = _text(fields)
    if not isinstance(text, str) or not text.strip():
        raise PromptError(f"{place}: no text under turns, {', '.join(TEXT_FIELDS)}.")
    category = str(fields.get("category", kind))
    kind = MULTI_TURN if category in MT_BENCH else category
    return Prompt(str(fields.get("question_id", number)), kind, text)


def _text(fields: dict[str, Any]) -> Any:
    turns = fields.get("turns")
    if isinstance(turns, list):
        return turns[0] if turns else None
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
