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
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from tokenleap.bench.contestants import OWN, Contestant, Setting
from tokenleap.errors import TokenleapError
from tokenleap.runtime.cores import unbound_spinning

if TYPE_CHECKING:
    from tokenleap.bench.own import OwnRunner

__all__ = ["Worker", "serve"]


class Worker:
    """A loaded contestant; its public methods are the commands."""

    def __init__(self, contestant: Contestant, setting: Setting) -> None:
        from tokenleap.bench.peers import runner

        if contestant.kind != OWN:
            unbound_spinning(os.environ)  # peers run as they do without Tokenleap
        self._runner = runner(contestant, setting)
        self._own: OwnRunner | None = None
        if contestant.kind == OWN:  # importing it for a peer would count as the peer's memory
            from tokenleap.bench.own import OwnRunner

            assert isinstance(self._runner, OwnRunner)
            self._own = self._runner

    def facts(self) -> dict[str, Any]:
        """What it is, and how much memory it takes once it is loaded."""
        return {**self._runner.facts(), "device": self._runner.device, **self.memory()}

    def encode(self, texts: list[str], max_model_len: int) -> list[list[int]]:
        """Prompts as tokens, cut so that the output has room; only Tokenleap's contestants can."""
        assert self._own is not None
        return [self._own.encode(text, max_model_len) for text in texts]

    def control(self, seeds: list[int], max_model_len: int) -> list[list[int]]:
        """A prompt of random tokens for each seed; only Tokenleap's contestants can."""
        assert self._own is not None
        return [self._own.control(seed, max_model_len) for seed in seeds]

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        temperature: float = 0.0,
        seeds: Sequence[int] = (),
    ) -> dict[str, Any]:
        """One timed call for one prompt or a batch (see `Runner.generate`)."""
        gc.collect()
        began = time.perf_counter()
        outputs = self._runner.generate(prompts, max_tokens, temperature, seeds)
        return {"seconds": time.perf_counter() - began, "outputs": outputs}

    def judge(self, prompt: list[int], token_ids: list[int]) -> dict[str, Any]:
        """Text and mean log-probability of an output; only Tokenleap's contestants can."""
        assert self._own is not None
        return self._own.judge(prompt, token_ids)

    def forget(self) -> None:
        """Forget earlier outputs; peers keep none."""
        if self._own is not None:
            self._own.forget()

    def stream(self, size: int) -> float:
        """Seconds to stream this many bytes."""
        from tokenleap.bench.own import stream_seconds

        return stream_seconds(size, self._runner.device)

    def memory(self) -> dict[str, int]:
        """Peak bytes so far."""
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
                command: Callable[..., Any] = getattr(worker, request.pop("command"))
                answer = command(**request)
        except (TokenleapError, ImportError, OSError, RuntimeError, MemoryError) as error:
            answers.write(json.dumps({"error": _sentence(error)}) + "\n")
        else:
            answers.write(json.dumps({"answer": answer}) + "\n")
        answers.flush()


def _sentence(error: Exception) -> str:
    """The first line of an error's message, or the error's name."""
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
