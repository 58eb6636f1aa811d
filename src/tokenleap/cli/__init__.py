"""The command line: `tokenleap COMMAND`. Every command has a module of its own.

`main` is what the console script and `python -m tokenleap` call. The commands import PyTorch and
Transformers when they run, so that help pages and wrong options are answered at once.
"""

from __future__ import annotations

import _thread
import io
import logging
import os
import signal
import sys
import threading
import warnings
from typing import Annotated, Any

import typer

from tokenleap import __version__
from tokenleap.cli import (
    about,
    bench,
    chat,
    demo,
    generate,
    models,
    plan,
    serve,
    text_files,
    trace,
    train,
    tune,
)
from tokenleap.cli.generate import check_alone
from tokenleap.cli.root import LongCommand, RootGroup, examples

__all__ = ["app", "main"]

_QUIET_LIBRARIES = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_VERBOSITY": "error",
}

EXAMPLES = examples(
    "tokenleap demo  # the speed-up, measured while you watch",
    'tokenleap generate "Why is the sky blue?"',
    "tokenleap chat",
)

app = typer.Typer(
    cls=RootGroup,
    epilog=EXAMPLES,
    rich_markup_mode="rich",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        # As vLLM, whose options have both forms.
        "token_normalize_func": lambda name: name.replace("_", "-"),
    },
)
app.command(epilog=generate.EXAMPLES, cls=LongCommand)(generate.generate)
app.command(epilog=chat.EXAMPLES, cls=LongCommand)(chat.chat)
app.command(epilog=serve.EXAMPLES, cls=LongCommand)(serve.serve)
app.command(epilog=demo.EXAMPLES, cls=LongCommand)(demo.demo)
app.command(epilog=trace.EXAMPLES)(trace.trace)
app.command(epilog=plan.EXAMPLES, cls=LongCommand)(plan.plan)
app.command(epilog=bench.EXAMPLES, cls=LongCommand)(bench.bench)
app.command(epilog=tune.TREE_EXAMPLES, cls=LongCommand)(tune.tree)
app.command("tune-layers", epilog=tune.LAYERS_EXAMPLES, cls=LongCommand)(tune.tune_layers)
app.command(epilog=train.TRAIN_EXAMPLES, cls=LongCommand)(train.train)
app.command(epilog=train.EXPORT_EXAMPLES)(train.export)
app.command(epilog=train.CHECK_EXAMPLES)(train.check)
app.add_typer(models.app, name="models")
app.add_typer(text_files.ngrams_app, name="ngrams")
app.add_typer(text_files.datastore_app, name="datastore")
app.command(epilog=about.METHODS_EXAMPLES)(about.methods)
app.command(epilog=about.DOCTOR_EXAMPLES)(about.doctor)
app.command(epilog=models.PS_EXAMPLES, hidden=True)(models.ps)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tokenleap {__version__}")
        raise typer.Exit


@app.callback()
def tokenleap(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Speculative decoding for Hugging Face models: the same output, faster.

    Ollama's run, pull, list, ps and rm work, too.
    """
    check_alone(context.invoked_subcommand)
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Set up the process and run the command line."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # see `tokenleap.__main__`
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.unraisablehook = _interrupted_again
    os.environ.update(
        {name: os.environ.get(name, value) for name, value in _QUIET_LIBRARIES.items()}
    )
    warnings.simplefilter("ignore")
    if logging.lastResort is not None:  # log lines of libraries that have no handler
        logging.lastResort.addFilter(lambda record: record.name.startswith("tokenleap"))
    for stream in (sys.stdout, sys.stderr):
        # A character that the terminal's encoding lacks must not end a run.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        app()
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is left to clean up


def _interrupted_again(lost: Any, otherwise: Any = sys.unraisablehook) -> None:
    """Interrupt again, a moment later, where Python has lost a Ctrl-C, as in a destructor."""
    if isinstance(lost.exc_value, KeyboardInterrupt):
        threading.Timer(0.01, _thread.interrupt_main).start()
    else:
        otherwise(lost)
