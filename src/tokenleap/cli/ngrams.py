"""`tokenleap ngrams`: count the n-grams of files or of a model's text, for `corpus_ngram`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress

from tokenleap.cli.console import display, errors, plain
from tokenleap.cli.options import DEFAULT_MODEL, ModelOptions, flat, open_llm, open_tokenizer
from tokenleap.cli.root import check_writable, examples

if TYPE_CHECKING:
    from tokenleap.drafters.text.ngrams import NgramTables

__all__ = ["EXAMPLES", "app"]

EXAMPLES = examples(
    "tokenleap ngrams build notes.txt mail/*.txt --output my.ngrams",
    "tokenleap generate 'Dear' --method corpus_ngram "
    '--speculative-config \'{"corpus": "my.ngrams"}\'',
    "tokenleap ngrams write --tokens 20000 --output own.ngrams",
    "tokenleap plan --measure --method corpus_ngram "
    '--speculative-config \'{"corpus": "own.ngrams", "order": 1}\'',
)

app = typer.Typer(rich_markup_mode="rich", epilog=EXAMPLES, no_args_is_help=True)


@app.callback()
def ngrams() -> None:
    """Count n-grams, to draft from your own text files or from a model's own text."""


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
    from tokenleap.drafters.text.ngrams import build_ngrams
    from tokenleap.models.store import progress

    with progress("Counting n-grams", "a second per megabyte", total) as shown:
        tables = build_ngrams(files, tokenizer, shown)
    _save(tables, output)


@app.command(epilog=EXAMPLES)
@flat
def write(
    target: ModelOptions,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that the model writes.")] = 50_000,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="Prompts to answer, as for `tokenleap train`; may be given several times.",
            show_default="the model talks with itself",
        ),
    ] = None,
) -> None:
    """Let a model write, and count unigrams, bigrams and trigrams of its text.

    Its answers are greedy or sampled, as for `tokenleap train`. An n-gram
    model of the target's own text drafts what the target writes most often,
    at next to no cost.
    """
    check_writable(output)
    llm = open_llm(target, None, max_num_seqs=16)
    from tokenleap.training.collect import ngrams_of_target

    console = errors()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"Writing {tokens:,} tokens", total=tokens)
        report = partial(bar.update, task)
        tables = ngrams_of_target(llm, tokens, data or (), lambda done: report(completed=done))
    _save(tables, output)


def _save(tables: NgramTables, output: Path) -> None:
    """Write the file, and say what is in it."""
    from tokenleap.models.store import bytes_text

    tables.save(output)
    size = bytes_text(output.stat().st_size)
    counts = f"{tables.num_tokens:,} tokens, {len(tables.bigram_tokens):,} bigrams, "
    counts += f"{len(tables.trigram_tokens):,} trigrams"
    display().print(plain(f"{output} has {counts} ({size})"), soft_wrap=True)
