"""`tokenleap check`: whether a trained head fits a model, and what it records about it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tokenleap.cli.console import display, plain
from tokenleap.cli.options import ModelOptions, flat, open_llm
from tokenleap.cli.root import UsageError, examples

__all__ = ["EXAMPLES", "check"]

EXAMPLES = examples(
    "tokenleap check my-head",
    "tokenleap check downloaded-head --model my-model --record",
)


@flat
def check(
    head: Annotated[Path, typer.Argument(help="Folder of an EAGLE head.", show_default=False)],
    *,
    target: ModelOptions,
    record: Annotated[
        bool, typer.Option("--record", help="Record it in the head's config.json.")
    ] = False,
) -> None:
    """Check whether a trained EAGLE head fits a model.

    Both run over a short text. With --record the result is kept with the
    head, which is then refused by any other model. Heads that tokenleap
    trains have such a record.
    """
    if not head.is_dir():
        raise UsageError(f"there is no folder {head}")
    from tokenleap.config import SpeculativeConfig
    from tokenleap.drafters.heads.eagle import check_folder, record_probe

    llm = open_llm(target, SpeculativeConfig())
    probe = check_folder(head, llm.engine.target, llm.tokenizer)
    told = (
        f"{head} predicts {probe.accepted:.0%} of the model's most probable tokens after a short "
        "text"
    )
    display().print(plain(told), soft_wrap=True)
    if record:
        record_probe(head, probe)
        display().print(plain(f"Recorded in {head / 'config.json'}", "note"), soft_wrap=True)
