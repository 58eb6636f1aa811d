"""A contestant's process: loads, warms up, then does what it is told, a line of JSON at a time.

    python -m foretoken.bench.worker

The first line says who it is. Every line gets one line as an answer; the end of the input ends the
process. The parent starts one per contestant and never has two compute at once.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

from foretoken.bench.contestants import OWN, Contestant, Setting
from foretoken.errors import ForetokenError

if TYPE_CHECKING:
    from foretoken.bench.own import OwnRunner

__all__ = ["Worker", "serve"]


class Worker:
    """A loaded contestant and what can be asked of it.

    Args:
        contestant: who.
        setting: what is the same for all.
    """

    def __init__(self, contestant: Contestant, setting: Setting) -> None:
        from foretoken.bench.peers import runner

        self._runner = runner(contestant, setting)
        self._own: OwnRunner | None = None
        if contestant.kind == OWN:  # for a peer nothing of ours is imported, it would count as its
            from foretoken.bench.own import OwnRunner

            assert isinstance(self._runner, OwnRunner)
            self._own = self._runner

    def facts(self) -> dict[str, Any]:
        """What it is, and how much memory it takes when it is loaded."""
        return {**self._runner.facts(), "device": self._runner.device, **self.memory()}

    def encode(self, texts: list[str], max_model_len: int) -> list[list[int]]:
        """Prompts as tokens that leave room for the output; the baseline is asked."""
        assert self._own is not None
        return [self._own.encode(text, max_model_len) for text in texts]

    def generate(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """One timed call for one prompt or a batch of them."""
        gc.collect()
        began = time.perf_counter()
        outputs = self._runner.generate(prompts, max_tokens)
        return {"seconds": time.perf_counter() - began, "outputs": outputs}

    def forget(self) -> None:
        """Let go of earlier outputs; peers keep none."""
        if self._own is not None:
            self._own.forget()

    def stream(self, size: int) -> float:
        """Seconds to stream this many bytes."""
        from foretoken.bench.roofline import stream_seconds

        return stream_seconds(size, self._runner.device)

    def memory(self) -> dict[str, int]:
        """Most bytes so far."""
        from foretoken.bench.memory import peak_bytes

        return {"peak_bytes": peak_bytes(self._runner.device)}


def serve(lines: TextIO, answers: TextIO) -> None:
    """Load what the first line says and answer every further one, to the end of the input."""
    worker: Worker | None = None
    for line in lines:
        request = json.loads(line)
        try:
            if worker is None:
                worker = Worker(Contestant(**request["contestant"]), Setting(**request["setting"]))
                answer = worker.facts()
            else:
                command: Callable[..., Any] = getattr(worker, request.pop("command"))
                answer = command(**request)
        except (ForetokenError, ImportError, OSError, RuntimeError, MemoryError) as error:
            answers.write(json.dumps({"error": _sentence(error)}) + "\n")
        else:
            answers.write(json.dumps({"answer": answer}) + "\n")
        answers.flush()


def _sentence(error: Exception) -> str:
    """The first line of what an error says, or its name."""
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__


def main() -> None:
    """Keep standard output for answers alone: a peer may print what it likes."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin, answers)
    os._exit(0)  # taking a model apart can take seconds, and everything has been flushed


if __name__ == "__main__":
    main()
