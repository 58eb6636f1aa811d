"""The process of one contestant. It reads commands and writes answers, one JSON line each.

    python -m tokenleap.bench.worker

The first line names the contestant, which is then loaded. Every line is answered by one line. The
process ends at the end of its input. The parent starts one process per contestant and lets only one
compute at a time.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from tokenleap.bench.contestants import OWN, Contestant, Setting
from tokenleap.errors import TokenleapError
from tokenleap.runtime.cores import unbound_spinning


class Worker:
    """A loaded contestant. Commands are methods of this class or of the contestant's runner.

    Only Tokenleap's own runner has `encode`, `control` and `judge` (`OwnRunner`).
    """

    def __init__(self, contestant: Contestant, setting: Setting) -> None:
        from tokenleap.bench.peers import runner

        if contestant.kind != OWN:
            unbound_spinning(os.environ)  # peers run as they do without Tokenleap
        self._runner = runner(contestant, setting)

    def ask(self, command: str, **fields: Any) -> Any:
        found: Callable[..., Any] = getattr(self, command, None) or getattr(self._runner, command)
        return found(**fields)

    def facts(self) -> dict[str, Any]:
        """Its facts, and the memory that it takes once it is loaded."""
        return {**self._runner.facts(), "device": self._runner.device, **self.memory()}

    def generate(self, **fields: Any) -> dict[str, Any]:
        """One timed call for one prompt or a batch (see `Runner.generate`)."""
        gc.collect()
        began = time.perf_counter()
        outputs = self._runner.generate(**fields)
        return {"seconds": time.perf_counter() - began, "outputs": outputs}

    def stream(self, size: int) -> float:
        from tokenleap.bench.own import stream_seconds

        return stream_seconds(size, self._runner.device)

    def memory(self) -> dict[str, int]:
        from tokenleap.bench.machine import peak_bytes

        return {"peak_bytes": peak_bytes(self._runner.device)}


def serve(lines: TextIO, answers: TextIO) -> None:
    """Load the contestant of the first line, then answer every line until the input ends."""
    worker: Worker | None = None
    for line in lines:
        request = json.loads(line)
        try:
            if worker is None:
                worker = Worker(Contestant(**request["contestant"]), Setting(**request["setting"]))
                answer = worker.facts()
            else:
                answer = worker.ask(**request)
        except (TokenleapError, ImportError, OSError, RuntimeError, MemoryError) as error:
            answers.write(json.dumps({"error": _sentence(error)}) + "\n")
        else:
            answers.write(json.dumps({"answer": answer}) + "\n")
        answers.flush()


def _sentence(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__


def main() -> None:
    """Serve on a copy of standard output; what a peer prints goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin, answers)
    os._exit(0)  # everything is flushed, and freeing a model can take seconds


if __name__ == "__main__":
    main()


COMMAND = [sys.executable, "-W", "ignore", "-m", "tokenleap.bench.worker"]

_THREADS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "RAYON_NUM_THREADS",
)
"""Libraries read these when they are imported, so they are set before the process starts."""

_PATIENCE = 60.0
"""Seconds a process gets to end by itself: on a busy machine, freeing a model may take some."""


class Process:
    """A contestant's process, started and told to load; a context manager.

    Args:
        source: a folder that has another version of the package; None is this one.

    Attributes:
        facts: what it reported once it was loaded, and `load_seconds`, how long that took from the
            start of the process.
    """

    def __init__(
        self, contestant: Contestant, setting: Setting, source: Path | None = None
    ) -> None:
        self.label = contestant.label
        environment = {**os.environ, **dict.fromkeys(_THREADS, str(setting.threads))}
        if source is not None:
            environment["PYTHONPATH"] = str(source)
        unbound_spinning(environment)  # those of Tokenleap set it again
        self._complaints = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._began = time.perf_counter()
        self._process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
            encoding="utf-8",
            env=environment,
            start_new_session=True,  # Ctrl-C goes to the parent alone, which closes this process
        )
        self.facts: dict[str, Any] = {}
        own = {**asdict(contestant), "config": dict(contestant.config)}
        # Another version may lack fields, which have their defaults then.
        changed = {
            each.name: getattr(setting, each.name)
            for each in fields(setting)
            if getattr(setting, each.name) != each.default
        }
        self._tell(contestant=own, setting=changed)

    def wait_until_loaded(self) -> None:
        self.facts = self._answer()
        self.facts["load_seconds"] = time.perf_counter() - self._began

    def ask(self, command: str, **fields: Any) -> Any:
        """The answer to a command of `Worker`."""
        self._tell(command=command, **fields)
        return self._answer()

    def _tell(self, **request: Any) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # `_answer` reports why
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise TokenleapError(f"{self.label} has ended: {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise TokenleapError(f"{self.label}: {answer['error']}")
        return answer["answer"]

    def _last_words(self) -> str:
        """The last line of its standard error, or its exit code.

        A process that answers no more, and does not end either, is killed.
        """
        try:
            code = self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._complaints.seek(0)
        lines = self._complaints.read().strip().splitlines()
        return lines[-1] if lines else f"exit code {code}."

    def close(self, *, force: bool = False) -> None:
        """End the process; `force` kills it in the middle of its work."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if force:
            self._process.kill()
        try:
            self._process.stdin.close()
            self._process.wait(_PATIENCE)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._complaints.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(force=kind is not None)
