"""Prompts from a file: Spec-Bench's questions, JSON lines or plain text.

Spec-Bench (Xia et al., "Unlocking Efficiency in Large Language Model Inference", 2024) has 480
questions as JSON lines with `question_id`, `category` and `turns`. Its six kinds of 80 are
multi-turn conversation, translation, summarization, question answering, mathematical reasoning and
retrieval-augmented generation; the first consists of MT-Bench's eight categories of 10. Only the
first turn of a conversation is used, as a chat message.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from benchmarks import BenchmarkError
from foretoken import LLM

__all__ = ["MULTI_TURN", "Prompt", "encode", "prompt_limit", "read_prompts", "stratified"]

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
"""Where the text of a prompt stands in JSON lines that are not Spec-Bench's, first found first."""


@dataclass(frozen=True)
class Prompt:
    """One prompt: its id (unique in its file), its kind and its text."""

    id: str
    kind: str
    text: str

    @property
    def seed(self) -> int:
        """A seed of its own, the same wherever the prompt stands in a sample."""
        return int.from_bytes(hashlib.sha256(self.id.encode()).digest()[:4], "big")


def read_prompts(file: Path) -> list[Prompt]:
    """Read a file of prompts.

    Args:
        file: `.jsonl` has one JSON object a line: Spec-Bench's `question_id`, `category` and
            `turns`, or a text under `prompt`, `text`, `question` or `instruction` with an optional
            `category`; or one JSON string a line. Any other file is plain text with one prompt a
            line. Empty lines are skipped. Without a category the kind is the file's name.

    Raises:
        BenchmarkError: the file cannot be read, a line is not a prompt, or an id occurs twice.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchmarkError(f"cannot read the prompts in {file}: {error}") from error
    parse = _parse_json if file.suffix == ".jsonl" else _parse_text
    prompts = [
        parse(line, f"{file}, line {number}", str(number), file.stem)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        raise BenchmarkError(f"{file} has no prompts.")
    _check_ids_differ(prompts, file)
    return prompts


def _parse_text(line: str, _place: str, number: str, kind: str) -> Prompt:
    return Prompt(number, kind, line.strip())


def _parse_json(line: str, place: str, number: str, kind: str) -> Prompt:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise BenchmarkError(f"{place}: not JSON ({error}).") from error
    if isinstance(value, str):
        value = {"text": value}
    if not isinstance(value, dict):
        raise BenchmarkError(f"{place}: expected an object or a string.")
    text = _text(value)
    if not isinstance(text, str) or not text.strip():
        names = ", ".join(TEXT_FIELDS)
        raise BenchmarkError(f"{place}: no text; give turns (a list of strings) or one of {names}.")
    category = str(value.get("category", kind))
    kind = MULTI_TURN if category in MT_BENCH else category
    return Prompt(str(value.get("question_id", number)), kind, text)


def _text(value: dict[str, Any]) -> Any:
    turns = value.get("turns")
    if isinstance(turns, list):
        return turns[0] if turns else None
    return next((value[name] for name in TEXT_FIELDS if name in value), None)


def _check_ids_differ(prompts: Iterable[Prompt], file: Path) -> None:
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise BenchmarkError(f"{file}: question_id {prompt.id} occurs twice.")
        seen.add(prompt.id)


def stratified(
    prompts: Sequence[Prompt], per_kind: int, seed: int, kinds: Sequence[str] = ()
) -> list[Prompt]:
    """A random sample of `per_kind` prompts of every kind, the kinds taking turns.

    A larger sample with the same seed begins with the smaller one, as long as no kind runs out.

    Args:
        prompts: what to draw from; a kind with fewer than `per_kind` gives all it has.
        per_kind: at least 1.
        seed: another seed, another sample.
        kinds: only these kinds; all of them if empty.

    Raises:
        BenchmarkError: a kind does not occur.
    """
    by_kind: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_kind.setdefault(prompt.kind, []).append(prompt)
    for kind in kinds:
        if kind not in by_kind:
            raise BenchmarkError(f"no prompts of kind '{kind}'; there are: {', '.join(by_kind)}.")
    chosen = [
        # A generator per kind: the sample of one does not depend on the others.
        random.Random(f"{seed}/{kind}").sample(members, len(members))[:per_kind]
        for kind, members in by_kind.items()
        if not kinds or kind in kinds
    ]
    return [prompt for turn in zip_longest(*chosen) for prompt in turn if prompt is not None]


def prompt_limit(llm: LLM, wanted: int, max_tokens: int) -> int:
    """Most tokens of a prompt: as many as wanted, or what the context leaves.

    Raises:
        BenchmarkError: it leaves none.
    """
    room = llm.max_model_len - max_tokens
    if room < 2:
        raise BenchmarkError(
            f"--max-tokens {max_tokens} leaves no room for a prompt in the context of "
            f"{llm.max_model_len}."
        )
    return min(wanted, room)


def encode(llm: LLM, prompt: Prompt, limit: int) -> list[int]:
    """Token ids of a prompt as the first message of a chat, or as text without a chat template.

    Args:
        llm: its tokenizer and chat template are used.
        prompt: the prompt.
        limit: most tokens; of a longer prompt the middle is cut out, so that what the template
            puts around the message stays.
    """
    templated = llm.tokenizer is not None and llm.tokenizer.chat_template
    ids = llm.encode([{"role": "user", "content": prompt.text}] if templated else prompt.text)
    return cut_middle(ids, limit)


def cut_middle(ids: list[int], limit: int) -> list[int]:
    """The first and the last `limit / 2` tokens of a longer list."""
    if len(ids) <= limit:
        return ids
    head = limit // 2
    return [*ids[:head], *ids[len(ids) - (limit - head) :]]
