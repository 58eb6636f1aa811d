"""`tokenleap datastore`: build a datastore from text files, for `--method rest`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenleap.cli.console import display, plain
from tokenleap.cli.options import DEFAULT_MODEL, open_tokenizer
from tokenleap.cli.root import check_writable, examples

if TYPE_CHECKING:
    from tokenleap.drafters.text.datastore import Datastore

__all__ = ["EXAMPLES", "app"]

EXAMPLES = examples(
    "tokenleap datastore build notes.txt mail/*.txt --output my.datastore",
    "tokenleap datastore info my.datastore",
    "tokenleap generate 'Dear' --method rest "
    '--speculative-config \'{"datastore": "my.datastore"}\'',
)

app = typer.Typer(rich_markup_mode="rich", epilog=EXAMPLES, no_args_is_help=True)


@app.callback()
def datastore() -> None:
    """Build datastores, to draft from your own text files."""


@app.command(epilog=EXAMPLES)
def build(
    files: Annotated[list[Path], typer.Argument(help="UTF-8 text files.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")],
    model: Annotated[
        str, typer.Option("--model", "-m", help="Model whose tokenizer encodes the files.")
    ] = DEFAULT_MODEL,
) -> None:
    """Build the suffix array of text files; each file is a document."""
    check_writable(output)
    total = sum(file.stat().st_size for file in files)
    tokenizer = open_tokenizer(model)
    from tokenleap.drafters.text.datastore import build_datastore
    from tokenleap.models.store import progress

    with progress("Building the datastore", "7 seconds per 10 megabytes", total) as shown:
        made = build_datastore(files, tokenizer, shown)
    made.save(output)
    _show(output, made)


@app.command(epilog=EXAMPLES)
def info(
    file: Annotated[
        Path, typer.Argument(help="A file made by `tokenleap datastore build`.", metavar="FILE")
    ],
) -> None:
    """Show what a datastore contains."""
    from tokenleap.drafters.text.datastore import Datastore

    _show(file, Datastore.load(file))


def _show(file: Path, made: Datastore) -> None:
    from tokenleap.models.store import bytes_text

    size = bytes_text(file.stat().st_size)
    texts = f"{made.num_documents:,} text" + "s" * (made.num_documents != 1)
    contents = f"{made.num_tokens:,} tokens of a vocabulary of {made.vocab_size:,} in {texts}, "
    contents += f"the longest of {made.longest_document:,} tokens"
    display().print(plain(f"{file} has {contents} ({size})"), soft_wrap=True)
