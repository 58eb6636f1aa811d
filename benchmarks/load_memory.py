"""Memory and seconds of loading a model, with its drafter if there is one.

    python -m benchmarks.load_memory --model target.gguf --config '{"model": "draft.gguf"}'

A line for the imports, and one for the `LLM`:

- *resident*: the memory of this process after it.
- *of files*: the part of it that is pages of files, which the system may take back.
- *peak*: the most that was resident so far, pages of files included.

It reads `/proc/self`, so it runs on Linux. A GGUF file, an alias or quantized weights that were
never loaded are converted or packed first, which is measured as well: run the same command again
for what later loads take. A GGUF file keeps its quantization, as with `LLM` by default.
"""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from benchmarks import BenchmarkError, flags
from benchmarks.report import command_line, machine, markdown_table, one_line_errors
from tokenleap import LLM, SpeculativeConfig

__all__ = ["Memory", "main", "memory"]

_ROLLUP = Path("/proc/self/smaps_rollup")


class Memory(NamedTuple):
    """Megabytes of this process."""

    resident: float
    of_files: float
    peak: float


def main(
    model: flags.Model = "smollm2-135m",
    config: Annotated[str, typer.Option(help="The speculative_config, as JSON.")] = "{}",
    quantization: flags.Quantization = "auto",
    runtime: flags.Runtime = "auto",
    dtype: flags.Dtype = "auto",
    device: flags.Device = "auto",
) -> None:
    """Measure the memory and the seconds of loading a model and its drafter."""
    with one_line_errors():
        before = memory()
        began = time.perf_counter()
        llm = LLM(
            model,
            speculative_config=SpeculativeConfig.parse(_parsed(config)),
            dtype=dtype,
            device=device,
            quantization=quantization,
            runtime=runtime,
        )
        seconds = time.perf_counter() - began
        after = memory()
    rows = [_row("imports", "", before), _row("LLM", f"{seconds:.1f}", after)]
    table = markdown_table(["after", "seconds", "resident, MB", "of files", "peak"], rows)
    print("\n\n".join([command_line("benchmarks.load_memory"), table]) + "\n")
    facts = {**machine(llm.device, llm.dtype), "runtime": llm.runtime}
    print("\n".join(f"- {name}: {value}" for name, value in facts.items()))


def memory() -> Memory:
    """The memory of this process.

    Raises:
        BenchmarkError: the system does not tell.
    """
    try:
        lines = _ROLLUP.read_text().splitlines()
    except OSError as error:
        raise BenchmarkError(f"cannot read {_ROLLUP}: this benchmark runs on Linux") from error
    kilobytes = {fields[0]: int(fields[1]) for fields in map(str.split, lines[1:])}
    resident, anonymous = kilobytes["Rss:"] / 1000, kilobytes["Anonymous:"] / 1000
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    return Memory(resident, resident - anonymous, peak)


def _parsed(config: str) -> dict[str, object]:
    try:
        parsed = json.loads(config)
    except json.JSONDecodeError as error:
        raise BenchmarkError(f"--config is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise BenchmarkError("--config must be a JSON object.")
    return parsed


def _row(part: str, seconds: str, found: Memory) -> list[str]:
    return [part, seconds, *(f"{number:.0f}" for number in found)]


if __name__ == "__main__":
    typer.run(main)
