"""`tokenleap serve` as a process of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from tests.cli.terminal import environment
from tests.programs import MAIN, Program

__all__ = ["process"]


@contextmanager
def process(*arguments: object, code: str = MAIN) -> Iterator[tuple[Program, str]]:
    """A running server and its URL."""
    with Program(code, "serve", *arguments, "--port", 0, env=environment()) as program:
        assert program.stderr is not None
        line = program.stderr.readline().decode()
        found = re.search(r"page at (http://\S+), API at \1/v1; Ctrl-C", line)
        assert found, line + program.stderr.read().decode()
        yield program, found[1]
