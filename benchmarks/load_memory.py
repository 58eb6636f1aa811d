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

import resource
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from benchmarks import BenchmarkError, harness
from benchmarks.harness import json_object, machine, one_line_errors, report, timed
from tokenleap import LLM, SpeculativeConfig
from tokenleap.bench.report import markdown_table

_ROLLUP = Path("/proc/self/smaps_rollup")


class Memory(NamedTuple):
    """Megabytes of this process."""

    resident: float
    of_files: float
    peak: float


@one_line_errors()
def main(
    model: harness.Model = "smollm2-135m",
    config: Annotated[str, typer.Option(help="The speculative_config, as JSON.")] = "{}",
    quantization: harness.Quantization = "auto",
    runtime: harness.Runtime = "auto",
    dtype: harness.Dtype = "auto",
    device: harness.Device = "auto",
) -> None:
    """Measure the memory and the seconds of loading a model and its drafter."""
    before, parsed = memory(), SpeculativeConfig.parse(json_object("--config", config))
    seconds, llm = timed(
        lambda: LLM(
            model,
            speculative_config=parsed,
            dtype=dtype,
            device=device,
            quantization=quantization,
            runtime=runtime,
        )
    )
    rows = [_row("imports", "", before), _row("LLM", f"{seconds:.1f}", memory())]
    header = ["after", "seconds", "resident, MB", "of files", "peak"]
    facts = {**machine(llm.device, llm.dtype), "runtime": llm.runtime}
    print(report("load_memory", facts, markdown_table(header, rows)))


def memory() -> Memory:
    try:
        lines = _ROLLUP.read_text().splitlines()
    except OSError as error:
        raise BenchmarkError(f"cannot read {_ROLLUP}: this benchmark runs on Linux") from error
    kilobytes = {fields[0]: int(fields[1]) for fields in map(str.split, lines[1:])}
    resident, anonymous = kilobytes["Rss:"] / 1000, kilobytes["Anonymous:"] / 1000
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    return Memory(resident, resident - anonymous, peak)


def _row(part: str, seconds: str, found: Memory) -> list[str]:
    return [part, seconds, *(f"{number:.0f}" for number in found)]


if __name__ == "__main__":
    typer.run(main)
