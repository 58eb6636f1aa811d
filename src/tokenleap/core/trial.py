"""Tries a grammar out, in a process that may crash (`structured.py` starts it and asks it).

It runs as a program of its own and imports little, so that it starts in a fifth of a second: a line
of JSON with a grammar comes in, and a line with what is wrong with it goes out.

A grammar is compiled for the vocabulary of bytes, which takes llguidance the same steps and the
same stack as any other, and then followed for some bytes, because a form may be too complex only
after its first characters.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from tokenleap.core.sandbox import limit

T = TypeVar("T")

MAX_SECONDS = 2  # most seconds of CPU that a trial may take
MAX_MASK_SECONDS = 0.5
"""Most seconds of CPU for all masks of a trial but the first. All requests wait for a mask."""
MAX_MEGABYTES = 128  # most memory that a trial may take, beyond what the process has already
MAX_ITEMS = 5000
"""Most items that llguidance's parser may make for one mask. An ambiguous grammar makes more of
them with every token, and the time for one grows too: at half this number a mask took up to 30 ms.
An object of 480 optional properties needs fewer."""

MAX_FUEL = 50_000
"""Most expressions that llguidance's lexer may make for one mask, which then takes up to 8 ms, and
60 ms with its own limit of 200,000. Ordinary forms need less than 5,000."""

TOO_LONG = f"it takes more than {MAX_SECONDS} s to compile"

COMPILE_STACK, MASK_STACK = 4 << 20, 512 << 10
"""Stacks of a trial, in bytes. What fits here fits where it is used: grammars are compiled on four
times as much, and no system gives a thread that computes masks less than twice as much."""

_WALKS, _STEPS = 2, 64


def on_stack(size: int, act: Callable[[], T]) -> T:
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(act())
        except BaseException as error:
            errors.append(error)

    with _SIZING:
        before = threading.stack_size(size)
        try:
            thread = threading.Thread(target=run, daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if errors:
        raise errors.pop()
    return results.pop()


_SIZING = threading.Lock()


def wrong(grammar: str) -> str | None:
    """Why a grammar in llguidance's own format cannot be used, in one line; None if it can."""
    vocabulary = _bytes()
    began = time.process_time()
    matchers = [on_stack(COMPILE_STACK, lambda: matcher_of(vocabulary, grammar))]
    if matchers[0].is_error():
        return f"not valid: {first_line(matchers[0])}"
    return on_stack(MASK_STACK, lambda: _followed(matchers.pop(), began))


def matcher_of(vocabulary: Any, grammar: str) -> Any:
    """A matcher of a grammar in llguidance's own format, whose masks are limited."""
    import llguidance

    limits = llguidance.LLParserLimits(step_max_items=MAX_ITEMS, step_lexer_fuel=MAX_FUEL)
    return llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)


@cache
def _bytes() -> Any:
    import llguidance

    return llguidance.LLTokenizer("byte")


def _followed(matcher: Any, began: float) -> str | None:
    """Why the masks of a matcher cannot be used; frees it on this stack, too."""
    matcher.compute_bitmask()
    first = time.process_time()
    if first - began > MAX_SECONDS:
        return f"too complex: {TOO_LONG}"
    for seed in range(_WALKS):
        chooser, walking = random.Random(seed), matcher.deep_copy()
        for _ in range(_STEPS):
            mask = int.from_bytes(walking.compute_bitmask(), "little")
            if time.process_time() - first > MAX_MASK_SECONDS:
                return "too complex: what may come next takes too long to find"
            allowed = [token for token in range(mask.bit_length()) if mask >> token & 1]
            if walking.is_error() or walking.is_stopped() or not allowed:
                break
            walking.try_consume_tokens([chooser.choice(allowed)])
        if walking.is_error():
            return f"too complex: {first_line(walking)}"
    return None


def first_line(matcher: Any) -> str:
    """The line of an error that says most."""
    lines = [line.strip() for line in str(matcher.get_error()).splitlines()]
    found = next((line for line in lines if line.startswith("error:")), (lines or [""])[0])
    return found.removeprefix("error: ")[:500] or "llguidance failed"


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes
    if hasattr(os, "nice"):
        os.nice(5)  # the passes of running requests go first
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # nothing else may write there
    import llguidance  # noqa: F401 (before it says that it is ready)

    answers.write(b"null\n")
    for line in sys.stdin.buffer:
        grammar = json.loads(line)
        limit(MAX_SECONDS + 1, MAX_MEGABYTES)
        try:
            found = wrong(grammar)
        except (MemoryError, RuntimeError):  # a thread cannot start
            found = "too complex: it takes too much memory"
        except BaseException as error:  # a panic of llguidance
            found = f"too complex: {str(error).splitlines()[0][:500] if str(error) else error!r}"
        answers.write(json.dumps(found).encode() + b"\n")


if __name__ == "__main__":
    main()
