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
from tokenleap import LLM
from tokenleap.bench.contestants import BASELINE
from tokenleap.bench.own import encode, prompt_limit
from tokenleap.bench.prompts_file import read_prompts, stratified
from tokenleap.core.tree import chain
from tokenleap.models.convert import GgufWeights
from tokenleap.models.gguf import GgufFile
from tokenleap.models.loaded import empty, fill, skeleton
from tokenleap.models.resolver import gguf_file
from tokenleap.runtime.choices import AUTO, OWN, QUANTIZATIONS
from tokenleap.runtime.packed import fill_ends
from tokenleap.runtime.target import Target

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
        pair = (
            _own_numbers(model, dtype)
            if quantization == AUTO
            else _rounded(model, dtype, quantization)
        )
        sample = stratified(read_prompts(prompts), per_kind, seed)
        limit = prompt_limit(pair.llm.max_model_len, max_prompt_tokens, 1)
        texts = [encode(pair.llm, prompt.text, limit) for prompt in sample]
        by_kind: dict[str, Shift] = {}
        with progress_bar() as bar:
            references = pair.references(texts)
            for prompt, ids in bar.track(
                list(zip(sample, texts, strict=True)), description="prompts"
            ):
                found = shift(next(references), logits_of(pair.quantized, ids))
                by_kind[prompt.kind] = by_kind.get(prompt.kind, Shift((), ())) + found
    everything = sum(by_kind.values(), Shift((), ()))
    rows = [[kind, *each.cells()] for kind, each in {**by_kind, "all": everything}.items()]
    facts = {**machine(pair.llm.device, pair.quantized.dtype), "quantization": quantization}
    print(f"{command_line('benchmarks.quantization')}\n\n{in_one_line(facts)}\n")
    print(markdown_table(("text", "positions", "mean KL (nats)", "same most probable token"), rows))


@dataclass(frozen=True)
class _Pair:
    """The two models to compare.

    Args:
        llm: has the tokenizer.
        quantized: the model with quantized weights.
        references: the logits of each of some texts with the original weights.
    """

    llm: LLM
    quantized: Target
    references: Callable[[Sequence[Sequence[int]]], Iterator[Tensor]]


def _rounded(model: str, dtype: str, quantization: str) -> _Pair:
    """A model as it is, and rounded."""
    loaded = load(model, dtype, "cpu")
    original = Target(loaded.module)

    def references(texts: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        return (logits_of(original, ids) for ids in texts)

    quantized = Target(loaded.module, quantization=quantization)
    return _Pair(llm_for(loaded, BASELINE.config), quantized, references)


def _own_numbers(model: str, dtype: str) -> _Pair:
    """A GGUF file dequantized to float32, and with its own quantization.

    Raises:
        BenchmarkError: the model is none, or the native runtime cannot run it.
    """
    llm = LLM(model, dtype=dtype, speculative_config=BASELINE.config)
    path, target = gguf_file(model), llm.engine.target
    if path is None or target.quantization != OWN:
        raise BenchmarkError(f"--quantization {AUTO}: {model} is no GGUF file that runs as it is")
    return _Pair(llm, target, partial(_dequantized, path, Path(llm.model_path or "")))


@torch.no_grad()
def _dequantized(path: Path, folder: Path, texts: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    """Logits with a GGUF file's weights in float32, of which one layer is in memory at a time.

    Args:
        path: the file.
        folder: its configuration.
        texts: their tokens.
    """
    module: Any = skeleton(folder, torch.float32)
    weights = GgufWeights(GgufFile.open(path), module)
    tied = module.config.tie_word_embeddings
    embedding = weights.read("model.embed_tokens.weight", torch.float32)
    fill_ends(module, embedding, weights.read("model.norm.weight", torch.float32))

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
