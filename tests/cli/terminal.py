"""A program at the other end of a pseudo-terminal, as a person would run it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
import time
from pathlib import Path
from types import TracebackType

from tests.programs import MAIN, TIMEOUT, Program

COMMAND = [sys.executable, "-c", MAIN]


def environment(cache: Path | None = None) -> dict[str, str]:
    names = {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": ""}
    if cache is not None:
        names["TOKENLEAP_CACHE"] = str(cache)
    dropped = {"NO_COLOR", "FORCE_COLOR", "COLORTERM", "COLUMNS", "LINES"}
    return {**{k: v for k, v in os.environ.items() if k not in dropped}, **names}


class Terminal:
    """`tokenleap ARGUMENTS` in a terminal of 80 columns; use as a context manager."""

    def __init__(self, *arguments: object) -> None:
        self._controller, controlled = pty.openpty()
        fcntl.ioctl(controlled, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self._process = Program(
            MAIN,
            *arguments,
            stdin=controlled,
            stdout=controlled,
            stderr=controlled,
            env=environment(),
            terminal=True,
        )
        os.close(controlled)
        self.shown = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._process.__exit__(kind, error, at)
        os.close(self._controller)

    def wait_for(self, pattern: str) -> str:
        """Read until this is shown; what was shown since the last wait."""
        ends = time.monotonic() + TIMEOUT
        start = len(self.shown)
        while not re.search(pattern, self.shown[start:]):
            assert time.monotonic() < ends, f"no {pattern!r} in {self.shown!r}"
            assert self._read(), f"ended without {pattern!r}: {self.shown!r}"
        return self.shown[start:]

    def type(self, keys: str) -> None:
        os.write(self._controller, keys.encode())

    def end(self) -> int:
        """Read to the end; the exit code."""
        while self._read():
            pass
        return self._process.wait()

    def _ready(self, seconds: float) -> bool:
        return bool(select.select([self._controller], [], [], seconds)[0])

    def _read(self) -> bool:
        assert self._ready(TIMEOUT), f"nothing more after {self.shown!r}"
        try:
            content = os.read(self._controller, 65536)
        except OSError:  # the other end is closed
            return False
        self.shown += content.decode(errors="replace")
        if b"\x1b[6n" in content:  # asks where the cursor is
            self.type("\x1b[1;1R")
        return bool(content)
