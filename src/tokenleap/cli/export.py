"""`tokenleap export`: write a trained head as other engines load it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tokenleap.cli.console import display, plain, working
from tokenleap.cli.options import DEFAULT_MODEL, resolve
from tokenleap.cli.root import UsageError, examples

__all__ = ["EXAMPLES", "export"]

EXAMPLES = examples(
    "tokenleap export my-head --out for-vllm",
    "tokenleap export my-head --out for-vllm --verifier HuggingFaceTB/SmolLM2-135M-Instruct",
)


def export(
    head: Annotated[Path, typer.Argument(help="Folder of an EAGLE-3 head.", show_default=False)],
    *,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write.")],
    model: Annotated[
        str, typer.Option("--model", "-m", help="The model that it was trained for.")
    ] = DEFAULT_MODEL,
    verifier: Annotated[
        str | None,
        typer.Option(
            help="The model's name for the other engine.", show_default="as given with --model"
        ),
    ] = None,
) -> None:
    """Write a trained EAGLE-3 head as vLLM and speculators load it.

    Adds the embedding and the output rows of the draft vocabulary, which
    Tokenleap takes from the model itself.
    """
    if not head.is_dir():
        raise UsageError(f"there is no folder {head}")
    folder = resolve(model)
    with working(f"Loading {model}"):
        import torch

        from tokenleap.drafters.heads.eagle import export_head
        from tokenleap.models import load_model
        from tokenleap.runtime.target import vocabulary_weights

        module = load_model(folder, torch.bfloat16, torch.device("cpu"))
        weights = vocabulary_weights(module)
    if weights is None:
        raise UsageError(f"{model} has no output layer of the usual kind")
    layers = module.config.get_text_config().num_hidden_layers
    export_head(head, out, *weights, layers, verifier or model)
    told = f"{out} is {head} with the model's embedding and output rows"
    display().print(plain(told), soft_wrap=True)
