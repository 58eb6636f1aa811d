"""`tokenleap ngrams` and `tokenleap datastore`: what drafters read besides the prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress

from tokenleap.cli.console import errors, tell
from tokenleap.cli.options import DEFAULT_MODEL, ModelOptions, flat, open_llm, open_tokenizer
from tokenleap.cli.root import check_writable, examples

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tokenleap.drafters.text.datastore import Datastore
    from tokenleap.drafters.text.ngrams import NgramTables

NGRAMS_EXAMPLES = examples(
    "tokenleap ngrams build notes.txt mail/*.txt --output my.ngrams",
    "tokenleap generate 'Dear' --method corpus_ngram "
    '--speculative-config \'{"corpus": "my.ngrams"}\'',
    "tokenleap ngrams write --tokens 20000 --output own.ngrams",
    "tokenleap plan --measure --method corpus_ngram "
    '--speculative-config \'{"corpus": "own.ngrams", "order": 1}\'',
)
DATASTORE_EXAMPLES = examples(
    "tokenleap datastore build notes.txt mail/*.txt --output my.datastore",
    "tokenleap datastore info my.datastore",
    "tokenleap generate 'Dear' --method rest "
    '--speculative-config \'{"datastore": "my.datastore"}\'',
)

ngrams_app = typer.Typer(rich_markup_mode="rich", epilog=NGRAMS_EXAMPLES, no_args_is_help=True)
datastore_app = typer.Typer(
    rich_markup_mode="rich", epilog=DATASTORE_EXAMPLES, no_args_is_help=True
)

FilesArgument = Annotated[list[Path], typer.Argument(help="UTF-8 text files.", show_default=False)]
OutputOption = Annotated[Path, typer.Option("--output", "-o", help="The file to write.")]
EncodingModel = Annotated[
    str, typer.Option("--model", "-m", help="Model whose tokenizer encodes the files.")
]


@ngrams_app.callback()
def ngrams() -> None:
    """Count n-grams, to draft from your own text files or from a model's own text."""


@ngrams_app.command("build", epilog=NGRAMS_EXAMPLES)
def count_files(
    files: FilesArgument, output: OutputOption, model: EncodingModel = DEFAULT_MODEL
) -> None:
    """Count unigrams, bigrams and trigrams of text files."""

    with _reading(files, output, model, "Counting n-grams", "a second per megabyte") as given:
        from tokenleap.drafters.text.ngrams import build_ngrams

        tables = build_ngrams(*given)
    _save(tables, output)


@ngrams_app.command(epilog=NGRAMS_EXAMPLES)
@flat
def write(
    target: ModelOptions,
    output: OutputOption,
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
    check_writable(output, *(data or ()))
    llm = open_llm(target, None, max_num_seqs=16)
    from tokenleap.training.collect import ngrams_of_target

    console = errors()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"Writing {tokens:,} tokens", total=tokens)
        tables = ngrams_of_target(
            llm, tokens, data or (), lambda done: bar.update(task, completed=done)
        )
    _save(tables, output)


def _save(tables: NgramTables, output: Path) -> None:
    """Write the file, and say what is in it."""
    tables.save(output)
    counts = f"{tables.num_tokens:,} tokens, {len(tables.bigram_tokens):,} bigrams, "
    _tell(output, f"{counts}{len(tables.trigram_tokens):,} trigrams")


@datastore_app.callback()
def datastore() -> None:
    """Build datastores, to draft from your own text files."""


@datastore_app.command("build", epilog=DATASTORE_EXAMPLES)
def index_files(
    files: FilesArgument, output: OutputOption, model: EncodingModel = DEFAULT_MODEL
) -> None:
    """Build the suffix array of text files; each file is a document."""

    speed = "7 seconds per 10 megabytes"
    with _reading(files, output, model, "Building the datastore", speed) as given:
        from tokenleap.drafters.text.datastore import build_datastore

        made = build_datastore(*given)
    made.save(output)
    _show(output, made)


@datastore_app.command(epilog=DATASTORE_EXAMPLES)
def info(
    file: Annotated[
        Path, typer.Argument(help="A file made by `tokenleap datastore build`.", metavar="FILE")
    ],
) -> None:
    """Show what a datastore contains."""
    from tokenleap.drafters.text.datastore import Datastore

    _show(file, Datastore.load(file))


def _show(file: Path, made: Datastore) -> None:
    texts = f"{made.num_documents:,} text" + "s" * (made.num_documents != 1)
    contents = f"{made.num_tokens:,} tokens of a vocabulary of {made.vocab_size:,} in {texts}, "
    _tell(file, f"{contents}the longest of {made.longest_document:,} tokens")


@contextmanager
def _reading(
    files: Sequence[Path], output: Path, model: str, doing: str, speed: str
) -> Iterator[tuple[Sequence[Path], PreTrainedTokenizerBase, Callable[[int], None]]]:
    """Arguments of a function that reads text files, with a progress bar."""
    check_writable(output, *files)
    total = sum(file.stat().st_size for file in files)
    tokenizer = open_tokenizer(model)
    from tokenleap.models.store import progress

    with progress(doing, speed, total) as shown:
        yield files, tokenizer, shown


def _tell(file: Path, contents: str) -> None:
    from tokenleap.models.store import bytes_text

    tell(f"{file} has {contents} ({bytes_text(file.stat().st_size)})")
