"""`foretoken ngrams`: count the n-grams of text files, for `--method corpus_ngram`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foretoken.cli.console import display, plain
from foretoken.cli.files import check_writable
from foretoken.cli.options import DEFAULT_MODEL
from foretoken.cli.root import examples
from foretoken.cli.session import open_tokenizer

__all__ = ["EXAMPLES", "app"]

EXAMPLES = examples(
    "foretoken ngrams build notes.txt mail/*.txt --output my.ngrams",
    "foretoken generate 'Dear' --method corpus_ngram "
    '--speculative-config \'{"corpus": "my.ngrams"}\'',
)

app = typer.Typer(rich_markup_mode="rich", epilog=EXAMPLES, no_args_is_help=True)


@app.callback()
def ngrams() -> None:
    """Count n-grams, to draft from your own text files."""


@app.command(epilog=EXAMPLES)
def build(
    files: Annotated[list[Path], typer.Argument(help="UTF-8 text files.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")],
    model: Annotated[
        str, typer.Option("--model", "-m", help="Model whose tokenizer encodes the files.")
    ] = DEFAULT_MODEL,
) -> None:
    """Count unigrams, bigrams and trigrams of text files."""
    check_writable(output)
    total = sum(file.stat().st_size for file in files)
    tokenizer = open_tokenizer(model)
    from foretoken.drafters.text.ngrams import build_ngrams
    from foretoken.models.progress import bytes_text, progress

    with progress("Counting n-grams", "a second per megabyte", total) as shown:
        tables = build_ngrams(files, tokenizer, shown)
    tables.save(output)
    size = bytes_text(output.stat().st_size)
    counts = f"{tables.num_tokens:,} tokens, {len(tables.bigram_tokens):,} bigrams, "
    counts += f"{len(tables.trigram_tokens):,} trigrams"
    display().print(plain(f"{output} has {counts} ({size})"), soft_wrap=True)
