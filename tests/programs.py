"""Programs in processes of their own that need not import PyTorch and Transformers again.

That import takes six seconds of CPU, so a server does it once in a test process's life and forks
for every program. What must be seen without it (environment variables that libraries read when
they are loaded, the wheel) starts Python itself.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import IO

__all__ = ["MAIN", "TIMEOUT", "Program"]

MAIN = "from tokenleap.cli import main; main()"
TIMEOUT = 240.0
"""Seconds after which a program hangs: many, for a machine that has other things to do."""

_SERVER = Path(__file__).with_name("fork_server.py")
_QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_VERBOSITY": "error",
}
"""Environment variables that `main` sets before Transformers is imported."""


@cache
def _server() -> socket.socket:
    """Ends when this process does, which closes the socket."""
    own, theirs = socket.socketpair()
    with theirs:
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(_SERVER)],
            stdin=theirs.fileno(),
            env={**os.environ, **_QUIET},
            start_new_session=True,
        ).returncode = 0  # no one waits for it
    return own


class Program:
    """A running program: as much of `subprocess.Popen` as the tests need; a context manager.

    Args:
        code: Python.
        arguments: `sys.argv[1:]`.
        env: the environment; by default this process's.
        stdin, stdout, stderr: `subprocess.DEVNULL`, `subprocess.PIPE` or a file descriptor.
        terminal: whether stdin is a terminal and is to control the program.
    """

    def __init__(
        self,
        code: str,
        *arguments: object,
        env: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.PIPE,
        stderr: int = subprocess.PIPE,
        terminal: bool = False,
    ) -> None:
        self.returncode: int | None = None
        self._ends: list[int] = []
        self.stdin, theirs_in = self._stream(stdin, writes=True)
        self.stdout, theirs_out = self._stream(stdout)
        self.stderr, theirs_err = self._stream(stderr)
        report, theirs_report = os.pipe()
        self._ends.append(theirs_report)
        self._report = os.fdopen(report, "rb", buffering=0)
        request = {
            "code": code,
            "arguments": [str(argument) for argument in arguments],
            "env": dict(os.environ if env is None else env),
            "folder": str(Path.cwd()),
            "terminal": terminal,
        }
        message = json.dumps(request).encode()
        _server().sendall(len(message).to_bytes(4, "big"))
        files = [theirs_in, theirs_out, theirs_err, theirs_report]
        sent = socket.send_fds(_server(), [message], files)
        _server().sendall(message[sent:])
        for end in self._ends:
            os.close(end)
        self.pid = self._number()

    def _stream(self, kind: int, writes: bool = False) -> tuple[IO[bytes] | None, int]:
        """This process's end, if there is one, and the program's."""
        if kind == subprocess.DEVNULL:
            self._ends.append(os.open(os.devnull, os.O_RDWR))
            return None, self._ends[-1]
        if kind != subprocess.PIPE:
            return None, kind
        reader, writer = os.pipe()
        own, end = (writer, reader) if writes else (reader, writer)
        self._ends.append(end)
        return os.fdopen(own, "wb" if writes else "rb", buffering=0 if writes else -1), end

    def _number(self) -> int:
        line = b""
        while not line.endswith(b"\n"):
            byte = self._report.read(1)
            assert byte, "the server is gone"
            line += byte
        return int(line)

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.kill()
        self.wait()
        for stream in (self.stdin, self.stdout, self.stderr, self._report):
            if stream is not None:
                stream.close()

    def poll(self) -> int | None:
        """The exit code, if it has ended."""
        if self.returncode is None and select.select([self._report], [], [], 0)[0]:
            self.returncode = self._number()
        return self.returncode

    def wait(self, timeout: float = TIMEOUT) -> int:
        """The exit code, or minus the signal that ended it."""
        if self.returncode is None:
            ready = select.select([self._report], [], [], timeout)[0]
            assert ready, f"process {self.pid} has not ended"
            self.returncode = self._number()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, line: str = "") -> tuple[str, str]:
        """Write and close its stdin; all of its stdout and stderr. Wait for its end."""
        if self.stdin is not None:
            self.stdin.write(line.encode())
            self.stdin.close()
        texts = [
            "" if each is None else each.read().decode() for each in (self.stdout, self.stderr)
        ]
        self.wait()
        return texts[0], texts[1]
