"""How far quantized weights move p: KL divergence, and agreement of the most probable token.

The prompts are read with the original and with the quantized weights, and the distributions of the
next token are compared at every position. Speculation changes neither: it is lossless with respect
to the weights that run.

    python -m benchmarks.quantization --prompts FILE

With `--quantization auto`, the model is a GGUF file that runs in its own numbers. It is compared
with the dequantized file in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import typer
from torch import Tensor

from benchmarks import BenchmarkError, flags
from benchmarks.loading import llm_for, load
from benchmarks.report import (
    command_line,
    in_one_line,
    machine,
    markdown_table,
    one_line_errors,
    progress_bar,
)
from foretoken.bench.contestants import BASELINE
from foretoken.bench.encode import encode, prompt_limit
from foretoken.bench.prompts_file import read_prompts, stratified
from foretoken.core.tree import chain
from foretoken.models.support import default_device, default_dtype
from foretoken.runtime.choices import AUTO, QUANTIZATIONS
from foretoken.runtime.packed import open_packed
from foretoken.runtime.target import Target

__all__ = ["Shift", "logits_of", "main", "shift"]


@dataclass(frozen=True)
class Shift:
    """How far quantization moves p, at some positions.

    Args:
        kl: KL(p || quantized p) in nats, at each position.
        agrees: whether the most probable token stays the same, at each position.
    """

    kl: tuple[float, ...]
    agrees: tuple[bool, ...]

    def __add__(self, other: Shift) -> Shift:
        return Shift(self.kl + other.kl, self.agrees + other.agrees)

    def cells(self) -> list[str]:
        """Positions, mean KL with its standard error, agreement."""
        count = len(self.kl)
        mean = sum(self.kl) / count
        error = math.sqrt(sum((x - mean) ** 2 for x in self.kl) / max(1, count - 1) / count)
        return [str(count), f"{mean:.5f} ± {error:.5f}", f"{sum(self.agrees) / count:.2%}"]


def shift(logits: Tensor, quantized: Tensor) -> Shift:
    """Compare the logits [N, V] of the same positions."""
    p, q = (x.float().log_softmax(-1) for x in (logits, quantized))
    kl = (p.exp() * (p - q)).sum(-1)
    agrees = p.argmax(-1) == q.argmax(-1)
    return Shift(tuple(kl.tolist()), tuple(agrees.tolist()))


def main(
    prompts: flags.Prompts,
    model: flags.Model = "smollm2-135m",
    quantization: Annotated[str, typer.Option(help=" or ".join((*QUANTIZATIONS, AUTO)))] = "int8",
    per_kind: flags.PerKind = 4,
    max_prompt_tokens: flags.MaxPromptTokens = 512,
    seed: flags.Seed = 0,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
) -> None:
    """Measure mean KL and top-1 agreement on prompts and print a Markdown table."""
    with one_line_errors():
        own = _own_numbers(model, dtype) if quantization == AUTO else None
        loaded = load(model, dtype if own is None else "float32", "cpu")
        llm = llm_for(loaded, BASELINE.config)
        other = own or Target(loaded.module, quantization=quantization)
        targets = [Target(loaded.module), other]
        sample = stratified(read_prompts(prompts), per_kind, seed)
        limit = prompt_limit(llm.max_model_len, max_prompt_tokens, 1)
        by_kind: dict[str, Shift] = {}
        with progress_bar() as bar:
            for prompt in bar.track(sample, description="prompts"):
                ids = encode(llm, prompt.text, limit)
                logits = [logits_of(target, ids) for target in targets]
                found = shift(logits[0], logits[1])
                by_kind[prompt.kind] = by_kind.get(prompt.kind, Shift((), ())) + found
    everything = sum(by_kind.values(), Shift((), ()))
    rows = [[kind, *each.cells()] for kind, each in {**by_kind, "all": everything}.items()]
    facts = {**machine(llm.device, other.dtype), "quantization": quantization}
    print(f"{command_line('benchmarks.quantization')}\n\n{in_one_line(facts)}\n")
    print(markdown_table(("text", "positions", "mean KL (nats)", "same most probable token"), rows))


def _own_numbers(model: str, dtype: str) -> Target:
    """A GGUF file in its own numbers.

    Raises:
        BenchmarkError: the model is none, or the native runtime cannot run it.
    """
    place = default_device("cpu")
    kind = default_dtype(dtype, place)
    packed = open_packed(model, kind, place, quantization=AUTO, runtime="native")
    if packed is None:
        raise BenchmarkError(f"--quantization {AUTO}: {model} is no GGUF file that runs as it is")
    return Target(packed, runtime="native")


def logits_of(target: Target, tokens: Sequence[int]) -> Tensor:
    """Logits [N, V] at every position of a text."""
    target.add(0)
    try:
        parts = []
        for start in range(0, len(tokens), 64):
            part = tokens[start : start + 64]
            parts.append(target.verify([0], [chain(part)])[0].scores.clone())
            target.commit(0, range(len(part)))
        return torch.cat(parts)
    finally:
        target.remove(0)


if __name__ == "__main__":
    typer.run(main)
