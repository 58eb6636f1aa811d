"""How far quantized weights move p: KL divergence, and agreement of the most probable token.

The prompts are read with the original and with the quantized weights, and the distributions of the
next token are compared at every position. Speculation changes neither: it is lossless with respect
to the weights that run.

    python -m benchmarks.quantization --prompts FILE

With `--quantization auto`, the model is a GGUF file that keeps its quantization. It is compared
with the dequantized file in float32, which passes through memory layer by layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

from benchmarks import BenchmarkError, harness
from benchmarks.harness import llm_for, load, machine, one_line_errors, progress_bar, report
from tokenleap import LLM
from tokenleap.bench.contestants import BASELINE
from tokenleap.bench.report import markdown_table
from tokenleap.core.tree import chain
from tokenleap.models.convert import GgufWeights
from tokenleap.models.gguf import GgufFile
from tokenleap.models.load import load_config
from tokenleap.models.loaded import empty, fill, skeleton
from tokenleap.models.resolver import gguf_file
from tokenleap.runtime.choices import AUTO, OWN, QUANTIZATIONS
from tokenleap.runtime.target import Target


@dataclass(frozen=True)
class Shift:
    """At each position: KL(p || quantized p) in nats, and whether the best token stays."""

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


@one_line_errors()
def main(
    prompts: harness.Prompts,
    model: harness.Model = "smollm2-135m",
    quantization: Annotated[str, typer.Option(help=" or ".join((*QUANTIZATIONS, AUTO)))] = "int8",
    per_kind: harness.PerKind = 4,
    max_prompt_tokens: harness.MaxPromptTokens = 512,
    seed: harness.Seed = 0,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
) -> None:
    """Measure mean KL and top-1 agreement on prompts and print a Markdown table."""
    pair = (
        _own_numbers(model, dtype) if quantization == AUTO else _rounded(model, dtype, quantization)
    )
    sample = harness.sample_of(prompts, per_kind, seed)
    texts = harness.encoded(pair.llm, sample, max_prompt_tokens, 1)
    shifts: dict[str, Shift] = {}
    with progress_bar() as bar:
        references = pair.references(texts)
        for prompt, ids in bar.track(list(zip(sample, texts, strict=True)), description="prompts"):
            found = shift(next(references), logits_of(pair.quantized, ids))
            shifts[prompt.kind] = shifts.get(prompt.kind, Shift((), ())) + found
    shifts["all"] = sum(shifts.values(), Shift((), ()))
    facts = {**machine(pair.llm.device, pair.quantized.dtype), "quantization": quantization}
    rows = [(kind, *each.cells()) for kind, each in shifts.items()]
    header = ("text", "positions", "mean KL (nats)", "same most probable token")
    print(report("quantization", facts, markdown_table(header, rows)))


@dataclass(frozen=True)
class _Pair:
    """The quantized model, and the logits of texts with the original weights."""

    llm: LLM
    quantized: Target
    references: Callable[[Sequence[Sequence[int]]], Iterator[Tensor]]


def _rounded(model: str, dtype: str, quantization: str) -> _Pair:
    loaded = load(model, dtype, "cpu")
    original = Target(loaded.module)

    def references(texts: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        return (logits_of(original, ids) for ids in texts)

    quantized = Target(loaded.module, quantization=quantization)
    return _Pair(llm_for(loaded, BASELINE.config), quantized, references)


def _own_numbers(model: str, dtype: str) -> _Pair:
    """A GGUF file dequantized to float32, and with its own quantization."""
    llm = LLM(model, dtype=dtype, speculative_config=BASELINE.config)
    path, target = gguf_file(model), llm.engine.target
    if path is None or target.quantization != OWN:
        raise BenchmarkError(f"--quantization {AUTO}: {model} is no GGUF file that runs as it is")
    return _Pair(llm, target, partial(_dequantized, path, Path(llm.model_path or "")))


@torch.no_grad()
def _dequantized(path: Path, folder: Path, texts: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    """Logits with a GGUF file's weights in float32, of which one layer is in memory at a time."""
    module: Any = skeleton(load_config(folder), torch.float32)
    weights = GgufWeights(GgufFile.open(path), module)
    tied = module.config.tie_word_embeddings
    embedding = weights.read("model.embed_tokens.weight", torch.float32)
    fill(module.model.embed_tokens, {"weight": embedding})
    fill(module.model.norm, {"weight": weights.read("model.norm.weight", torch.float32)})

    def give(index: int, layer: nn.Module, _inputs: object) -> None:
        names = [name for name, _ in layer.named_parameters()]
        found = {
            name: weights.read(f"model.layers.{index}.{name}", torch.float32) for name in names
        }
        fill(layer, found)

    for index, layer in enumerate(module.model.layers):
        layer.register_forward_pre_hook(partial(give, index))
        layer.register_forward_hook(lambda layer, _inputs, _outputs: empty(layer))
    longest = max(map(len, texts))
    padded = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in texts])
    states = module.model(input_ids=padded, use_cache=False).last_hidden_state
    head = embedding if tied else weights.read("lm_head.weight", torch.float32)
    for ids, found in zip(texts, states, strict=True):
        yield F.linear(found[: len(ids)], head)


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
