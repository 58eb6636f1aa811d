"""Peak memory by batch size: weights, KV, draft model, and the difference to plain decoding.

Tables 8 and 9 of Xia et al., "Speculative Decoding" (2023), for any model and methods. Each case
runs in a process of its own, because a peak never falls. Prompts are random tokens, and outputs
have one length, so that all cases hold as many positions.

    python -m benchmarks.memory --model MODEL --config '{"method": "ngram"}' --batch 1 --batch 8
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks import BenchmarkError, flags
from benchmarks.report import command_line, in_one_line, machine, markdown_table, one_line_errors

__all__ = ["Case", "Peak", "main", "measure", "table"]

PLAIN: dict[str, Any] = {"method": "none"}


@dataclass(frozen=True)
class Case:
    """A case to measure.

    Args:
        model: folder, GGUF file or alias.
        config: a speculative_config.
        batch: prompts that are generated for together.
        prompt_tokens, max_tokens: of each.
        dtype, device: as `LLM` takes them.
        quantization: as `LLM` takes it.
        threads: of PyTorch.
    """

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
        """The method, and the folder of its model."""
        model = self.config.get("model")
        return f"{self.config['method']}{f' ({Path(model).name})' if model else ''}"


@dataclass(frozen=True)
class Peak:
    """Bytes of one case.

    Args:
        weights: that a pass of the target reads, and that its draft model or head has.
        kv: the most that the target's KV took, with what is kept of sources.
        draft_kv: the same of draft models and heads.
        total: the peak of the process; on a GPU, of what PyTorch allocated.
    """

    weights: int
    kv: int
    draft_kv: int
    total: int


def measure(case: Case) -> Peak:
    """Generate one batch, and look at the memory after every step."""
    from tokenleap import LLM, SamplingParams, models
    from tokenleap.bench.machine import peak_bytes, weight_bytes

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
    plain = {case.batch: peak for case, peak in peaks.items() if case.config["method"] == "none"}
    header = ["batch", "method", "weights", "KV", "draft KV", "peak", "over none"]
    rows = []
    for case, peak in peaks.items():
        over = peak.total - plain[case.batch].total
        parts = (peak.weights, peak.kv, peak.draft_kv, peak.total)
        difference = "" if case.config["method"] == "none" else f"{over / 1e6:+.1f}"
        rows.append([str(case.batch), case.label, *(f"{each / 1e6:.1f}" for each in parts)])
        rows[-1].append(difference)
    return header, rows


def _configs(given: Sequence[str]) -> list[dict[str, Any]]:
    """The configurations, plain decoding first.

    Raises:
        BenchmarkError: one is no JSON object with a method.
    """
    from tokenleap.drafters.base import with_method

    found = [PLAIN]
    for text in given:
        try:
            value = json.loads(text)
        except ValueError:
            value = {"method": text}
        if not isinstance(value, dict):
            raise BenchmarkError(f"--config: expected a method or a JSON object, got {text}")
        value = dict(with_method(value))
        if "method" not in value:
            raise BenchmarkError(f"--config: {text} has neither a method nor a model")
        if value != PLAIN:
            found.append(value)
    return found


def main(
    config: Annotated[
        list[str] | None,
        typer.Option(help="A method or a speculative_config as JSON (repeatable)."),
    ] = None,
    model: flags.Model = "smollm2-135m",
    batch: Annotated[list[int], typer.Option(min=1, help="A batch size (repeatable).")] = [1, 8],  # noqa: B006 - Typer copies it
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 64,
    max_tokens: flags.MaxTokens = 64,
    dtype: flags.Dtype = "auto",
    device: flags.Device = "auto",
    quantization: Annotated[str | None, typer.Option(help="int8 or int4.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Of PyTorch.")] = 1,
) -> None:
    """Print peak memory by batch size in MB, with the difference to plain decoding."""
    rest = (prompt_tokens, max_tokens, dtype, device, quantization, threads)
    with one_line_errors():
        cases = [
            Case(model, each, size, *rest) for size in batch for each in _configs(config or ())
        ]
        peaks: dict[Case, Peak] = {}
        with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
            for case in cases:
                peaks[case] = pool.submit(measure, case).result()
    print(f"{command_line('benchmarks.memory')}: MB. {in_one_line(machine(torch.device('cpu')))}\n")
    print(markdown_table(*table(peaks)))


if __name__ == "__main__":
    typer.run(main)
