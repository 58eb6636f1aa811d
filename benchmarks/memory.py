"""Peak memory by batch size: weights, KV, draft model, and the difference to plain decoding.

Tables 8 and 9 of Xia et al., "Speculative Decoding" (2023), for any model and methods. Each case
runs in a process of its own, because a peak never falls. Prompts are random tokens, and outputs
have one length, so that all cases hold as many positions.

    python -m benchmarks.memory --model MODEL --config '{"method": "ngram"}' --batch 1 --batch 8
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks import harness
from benchmarks.harness import machine, one_line_errors, report
from tokenleap import LLM, SamplingParams, models
from tokenleap.bench.contestants import BASELINE, methods
from tokenleap.bench.machine import peak_bytes, weight_bytes
from tokenleap.bench.report import markdown_table


@dataclass(frozen=True)
class Case:
    """A configuration at a batch size; further fields as `LLM` takes them."""

    model: str
    config: Mapping[str, Any] = field(hash=False)
    batch: int
    prompt_tokens: int = 64
    max_tokens: int = 64
    dtype: str = "auto"
    device: str = "auto"
    quantization: str | None = None
    threads: int = 1

    @property
    def label(self) -> str:
        model = self.config.get("model")
        return f"{self.config['method']}{f' ({Path(model).name})' if model else ''}"


@dataclass(frozen=True)
class Peak:
    """Bytes of one case.

    Weights are those that passes of the target, draft model and head read. The KV of the target,
    with what is kept of sources, and the KV of draft models and heads are the most of any step.
    The total is the peak of the process; on a GPU, of what PyTorch allocated.
    """

    weights: int
    kv: int
    draft_kv: int
    total: int


def measure(case: Case) -> Peak:
    """Generate one batch, and look at the memory after every step."""
    torch.set_num_threads(case.threads)
    llm = LLM(
        case.model,
        speculative_config=dict(case.config),
        dtype=case.dtype,
        device=case.device,
        quantization=case.quantization,
        max_num_seqs=case.batch,
        enable_prefix_caching=False,
    )
    engine, itemsize = llm.engine, llm.dtype.itemsize
    params = SamplingParams(temperature=0, max_tokens=case.max_tokens, ignore_eos=True)
    for prompt in _prompts(llm, case):
        engine.add_request(prompt, params)
    seen = [engine.kv_bytes]
    while engine.has_unfinished_requests():
        engine.step()
        seen.append(engine.kv_bytes)
    folders = [llm.model_path] if llm.model_path else []
    if (drafter := case.config.get("model")) is not None:
        folders.append(models.resolve(drafter))
    weights = sum(weight_bytes(each, itemsize, case.quantization) for each in folders)
    kv, draft_kv = (max(each) for each in zip(*seen, strict=True))
    return Peak(weights, kv, draft_kv, peak_bytes(str(llm.device)))


def _prompts(llm: Any, case: Case) -> list[list[int]]:
    """Random tokens; the lowest ids, many of them special, are left out if there are others."""
    network = llm.engine.target.source_network
    size = llm.engine.target.vocab_size if network is None else network.source_vocab_size
    dice = random.Random(0)
    first = 10 if size > 20 else 0
    return [
        [dice.randrange(first, size) for _ in range(case.prompt_tokens)] for _ in range(case.batch)
    ]


def table(peaks: Mapping[Case, Peak]) -> tuple[list[str], list[list[str]]]:
    """Header and rows; a case is compared with plain decoding of the same batch."""
    plain = {case.batch: peak for case, peak in peaks.items() if case.config == BASELINE.config}
    header = ["batch", "method", "weights", "KV", "draft KV", "peak", "over none"]
    rows = []
    for case, peak in peaks.items():
        over = peak.total - plain[case.batch].total
        parts = (peak.weights, peak.kv, peak.draft_kv, peak.total)
        difference = "" if case.config == BASELINE.config else f"{over / 1e6:+.1f}"
        rows.append([str(case.batch), case.label, *(f"{each / 1e6:.1f}" for each in parts)])
        rows[-1].append(difference)
    return header, rows


@one_line_errors()
def main(
    config: Annotated[
        list[str] | None,
        typer.Option(help="A method or a speculative_config as JSON (repeatable)."),
    ] = None,
    model: harness.Model = "smollm2-135m",
    batch: Annotated[list[int], typer.Option(min=1, help="A batch size (repeatable).")] = [1, 8],  # noqa: B006 - Typer copies it
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 64,
    max_tokens: harness.MaxTokens = 64,
    dtype: harness.Dtype = "auto",
    device: harness.Device = "auto",
    quantization: Annotated[str | None, typer.Option(help="int8 or int4.")] = None,
    threads: harness.Threads = 1,
) -> None:
    """Print peak memory by batch size in MB, with the difference to plain decoding."""
    cases = [
        Case(
            model,
            one.config,
            batch=size,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            dtype=dtype,
            device=device,
            quantization=one.quantization,
            threads=threads,
        )
        for size in batch
        for one in methods(config or (), None, quantization, option="--config")
    ]
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        peaks = dict(zip(cases, pool.map(measure, cases), strict=True))
    found = markdown_table(*table(peaks))
    print(report("memory", machine("cpu"), found, "In MB."))


if __name__ == "__main__":
    typer.run(main)
