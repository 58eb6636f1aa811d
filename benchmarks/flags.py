"""Options that several benchmarks share, each with its words for the help page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

__all__ = [
    "ControlPrompts",
    "Device",
    "DraftModel",
    "Dtype",
    "JsonFile",
    "Kinds",
    "MaxPromptTokens",
    "MaxTokens",
    "Model",
    "PerKind",
    "Prompts",
    "Rounds",
    "Seed",
]

Prompts: TypeAlias = Annotated[
    Path, typer.Option(help="Spec-Bench's JSON lines (first turns only) or others.")
]
Kinds: TypeAlias = Annotated[
    list[str] | None, typer.Option(help="A kind of prompt (repeatable); default: all.")
]
PerKind: TypeAlias = Annotated[int, typer.Option(min=1, help="Prompts of each kind.")]
MaxPromptTokens: TypeAlias = Annotated[
    int, typer.Option(min=2, help="The middle of longer prompts is cut out.")
]
Seed: TypeAlias = Annotated[int, typer.Option(min=0, help="Of whatever is drawn.")]

Model: TypeAlias = Annotated[str, typer.Option(help="Folder, GGUF file or alias.")]
DraftModel: TypeAlias = Annotated[
    str | None, typer.Option(help="For methods that take one; default: the model itself.")
]
Dtype: TypeAlias = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device: TypeAlias = Annotated[str, typer.Option(help="Where the model runs.")]

Rounds: TypeAlias = Annotated[int, typer.Option(min=1, help="Runs of each prompt and method.")]
MaxTokens: TypeAlias = Annotated[int, typer.Option(min=2, help="Tokens generated per run.")]
ControlPrompts: TypeAlias = Annotated[
    int, typer.Option(min=0, help="Prompts of random tokens; 0 leaves the control out.")
]
JsonFile: TypeAlias = Annotated[
    Path | None, typer.Option("--json", help="Write everything measured to this file.")
]
