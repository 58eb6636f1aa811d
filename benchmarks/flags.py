"""Options that several benchmarks share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

__all__ = [
    "Device",
    "Dtype",
    "Kinds",
    "MaxPromptTokens",
    "MaxTokens",
    "Model",
    "PerKind",
    "Prompts",
    "Quantization",
    "Runtime",
    "Seed",
    "TinyModel",
]

Prompts: TypeAlias = Annotated[
    Path, typer.Option(help="Spec-Bench's JSON lines (first turns), others, or a prompt a line.")
]
Kinds: TypeAlias = Annotated[
    list[str] | None, typer.Option(help="A kind of prompt (repeatable). Default: all.")
]
PerKind: TypeAlias = Annotated[int, typer.Option(min=1, help="Prompts of each kind.")]
MaxPromptTokens: TypeAlias = Annotated[
    int, typer.Option(min=2, help="Limit of prompt tokens; longer prompts lose their middle.")
]
MaxTokens: TypeAlias = Annotated[int, typer.Option(min=2, help="Tokens to generate per prompt.")]
Seed: TypeAlias = Annotated[int, typer.Option(min=0, help="Seed of samples.")]

Model: TypeAlias = Annotated[str, typer.Option(help="Folder, id (ORG/NAME), GGUF file or alias.")]
TinyModel: TypeAlias = Annotated[
    str,
    typer.Option(help="Folder, id (ORG/NAME), GGUF file or alias; tiny: random weights, no files."),
]
Dtype: TypeAlias = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device: TypeAlias = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Quantization: TypeAlias = Annotated[str | None, typer.Option(help="auto, int8 or int4.")]
Runtime: TypeAlias = Annotated[str, typer.Option(help="auto, native or torch.")]
