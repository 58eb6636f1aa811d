"""Servers as processes: `tokenleap serve`, and llama.cpp's own through llama-cpp-python."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx2

from benchmarks import BenchmarkError

__all__ = ["Server", "llama_command", "llama_is_missing", "tokenleap_command"]

_PATIENCE = 300.0
"""Seconds in which a server has to load its model."""


class Server:
    """A server's process; a context manager that ends it.

    Args:
        name: for tables.
        command: starts it; `{port}` stands for a free port.
        threads: of each library.

    Attributes:
        url: where it listens, without `/v1`.

    Raises:
        BenchmarkError: it does not start; the message has its last line.
    """

    def __init__(self, name: str, command: Sequence[str], threads: int) -> None:
        self.name = name
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [part.replace("{port}", str(port)) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)},
            start_new_session=True,  # Ctrl-C goes to this process alone, which ends them
        )

    def wait(self) -> None:
        """Wait until it answers."""
        until = time.monotonic() + _PATIENCE
        while time.monotonic() < until:
            if self._process.poll() is not None:
                raise BenchmarkError(f"{self.name} ended: {self._last_line()}")
            with suppress(httpx2.HTTPError):
                if httpx2.get(f"{self.url}/v1/models", timeout=5).status_code == 200:
                    return
            time.sleep(0.2)
        raise BenchmarkError(f"{self.name} did not start in {_PATIENCE:.0f} s.")

    def _last_line(self) -> str:
        self._log.seek(0)
        lines = [line for line in self._log.read().splitlines() if line.strip()]
        return lines[-1] if lines else f"exit code {self._process.returncode}"

    def __enter__(self) -> Self:
        """The server; see `wait`."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the process."""
        self._process.terminate()
        try:
            self._process.wait(40)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def tokenleap_command(
    model: str, config: str | None, *, quantization: str | None, max_num_seqs: int
) -> list[str]:
    """`tokenleap serve` on a free port; config None is the default speculation."""
    command = [sys.executable, "-m", "tokenleap", "serve", model, "--port", "{port}"]
    command += ["--served-model-name", "m", "--max-num-seqs", str(max_num_seqs)]
    command += ["--quiet", "--no-log-requests"]
    command += [] if config is None else ["--speculative-config", config]
    return command + ([] if quantization is None else ["--quantization", quantization])


def llama_command(python: str, gguf: Path, threads: int, context: int) -> list[str]:
    """llama.cpp's server on a free port. It serves one request at a time, in order of arrival."""
    command = [python, "-m", "llama_cpp.server", "--model", str(gguf), "--model_alias", "m"]
    command += ["--port", "{port}", "--n_ctx", str(context), "--n_threads", str(threads)]
    # Else a new request ends the one that runs.
    return [*command, "--n_threads_batch", str(threads), "--interrupt_requests", "False"]


def llama_is_missing(python: str) -> bool:
    """Whether this interpreter lacks llama.cpp's server."""
    found = subprocess.run([python, "-c", "import llama_cpp.server.app"], capture_output=True)
    return found.returncode != 0


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as at:
        port: int = at.getsockname()[1]
        return port
