"""`tokenleap train`, `check` and `export`: drafters that are trained for a model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenleap.cli.console import errors, plain, remark, show_json, tell, working
from tokenleap.cli.options import (
    DEFAULT_MODEL,
    JsonOutput,
    ModelOptions,
    few,
    flat,
    in_panel,
    open_llm,
    option,
    option_group,
    resolve,
)
from tokenleap.cli.root import UsageError, examples
from tokenleap.core.config import nearest
from tokenleap.core.extras import how_to_install
from tokenleap.training.method import TRAINABLE, check_trainable

if TYPE_CHECKING:
    from tokenleap.training.method import DataSettings, TrainingMethod, TrainingSettings
    from tokenleap.training.run import TrainingRun

_training = partial(in_panel, "Training")

TRAIN_EXAMPLES = examples(
    "tokenleap train eagle --model smollm2-135m --out my-head",
    "tokenleap train eagle --out my-head --data prompts.jsonl --tokens 300000",
    "tokenleap train spec_drafter --model my-bart --data pairs.tsv --out my-drafter --size 0.01",
    "tokenleap train eagle --out my-head --dry-run  # hours, disk and memory, measured here",
    "tokenleap generate 'Why is the sky blue?' --method eagle --draft-model my-head",
)


@option_group("Data")
class DataOptions:
    """Options of the data."""

    data: list[str] | None = option(
        "Files of prompts or conversations (JSONL), which the model answers, or of text; "
        "'self': the model writes by itself. For an encoder-decoder: sources, or pairs.",
        metavar="self|FILE",
        show_default="self",
    )
    source: Path | None = option(
        "Sources for an encoder-decoder, one a line, with the outputs in --target.",
        metavar="FILE",
        show_default=False,
    )
    target_: Path | None = option(
        "The outputs of --source, one a line.", "--target", metavar="FILE", show_default=False
    )
    tokens: int = option("Tokens of answers to learn.", default=1_000_000, min=1)
    held_out_tokens: int = option("Tokens of answers for evaluation.", default=40_000, min=1)
    unseen: list[Path] | None = option(
        "Prompts that training must not see, such as a benchmark's (JSONL or text).",
        metavar="FILE",
        show_default=False,
    )

    def settings(self) -> DataSettings:
        from tokenleap.training.method import DataSettings

        given = self.data or ["self"]
        files = tuple(Path(name) for name in given if name != "self")
        if files and "self" in given:
            raise UsageError("--data: give 'self' or files, not both")
        parallel = [path for path in (self.source, self.target_) if path is not None]
        if len(parallel) == 1 or (parallel and self.data):
            raise UsageError("--source and --target: give both, without --data")
        given_paths = (("--data", files), ("--unseen", self.unseen or ()), ("--source", parallel))
        for name, paths in given_paths:
            for path in paths:
                if not path.is_file():
                    raise UsageError(f"{name}: there is no file {path}")
        return DataSettings(
            files, self.tokens, self.held_out_tokens, tuple(self.unseen or ()), tuple(parallel)
        )


@few("out model data source target_ tokens unseen set_ dry_run json_output")
@flat
def train(
    method: Annotated[
        str,
        typer.Argument(
            help=f"What to train: {', '.join(TRAINABLE)}.",
            metavar="METHOD",
            show_default=False,
            autocompletion=lambda: list(TRAINABLE),
        ),
    ],
    *,
    out: Annotated[Path, in_panel("Output", "Folder of the drafter.", "--out", "-o")],
    learnt: DataOptions,
    target: ModelOptions,
    set_: Annotated[
        list[str] | None,
        _training(
            "An option of the method or of the training, such as epochs=2 (docs/training.md).",
            "--set",
            metavar="NAME=VALUE",
            show_default=False,
        ),
    ] = None,
    size: Annotated[
        float | None,
        _training(
            "Of spec_drafter: scales its steps, and below 0.25 its widths; as --set size=S.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        _training("Only say how many hours and how much disk and memory it takes.", "--dry-run"),
    ] = False,
    json_output: JsonOutput = False,
) -> None:
    """Train a drafter for a model, on what the model itself writes.

    Run it again to continue where it stopped. Ctrl-C saves the state.
    """
    check_trainable(method)
    _check_installed()
    given = [*(set_ or []), *([] if size is None else [f"size={size}"])]
    run = _opened(method, out, learnt, target, given, quiet=json_output)
    if dry_run or (run.num_processes == 1 and not run.has_begun):
        expected = run.estimate()
        remark(expected.text, "")
    elif run.has_begun and run.is_main_process:
        remark(f"Continuing the training in {out}.", "")
    if dry_run:
        if json_output:
            show_json({"hours": expected.hours, **asdict(expected)})
        return
    report = run.run()
    if report is None:
        return
    if json_output:
        show_json(asdict(report))
    else:
        tell(report.text(out))
        tell(f"Use it: {run.usage}{os.linesep}{out / 'training'} can be deleted.", "note")


def _check_installed() -> None:
    try:
        import accelerate  # noqa: F401
        import matplotlib as _  # noqa: F401
    except ImportError as error:
        raise UsageError(f"training needs {error.name}: {how_to_install('train')}") from None


def _opened(
    method: str,
    out: Path,
    learnt: DataOptions,
    target: ModelOptions,
    given: list[str],
    *,
    quiet: bool,
) -> TrainingRun:
    from tokenleap.config import SpeculativeConfig
    from tokenleap.training.run import TrainingRun
    from tokenleap.training.trainer import processes

    if out.exists() and not out.is_dir():
        raise UsageError(f"--out: {out} is not a folder")
    kind, settings = _chosen(method, given)
    wanted = learnt.settings()
    if "LOCAL_RANK" in os.environ:  # each of several processes chooses its GPU before it loads
        import torch

        processes(on_cpu=target.device == "cpu" or not torch.cuda.is_available())
    llm = open_llm(target, SpeculativeConfig(), quiet=quiet, max_num_seqs=32)
    return TrainingRun(llm, target.model, kind, wanted, settings, out, ShownProgress())


def _chosen(method: str, given: list[str]) -> tuple[TrainingMethod, TrainingSettings]:
    """The method with its options, and the settings, of all `--set`."""
    from tokenleap.errors import ConfigError
    from tokenleap.training.method import TrainingSettings, training_class

    pairs = [_pair(each) for each in given]
    fields = dict(pairs)
    if twice := [name for name, _ in pairs if [n for n, _ in pairs].count(name) > 1]:
        raise UsageError(f"--set: {twice[0]} is given twice")
    made = training_class(method)
    general, own = TrainingSettings.field_names(), made.field_names()
    if unknown := [name for name in fields if name not in (*general, *own)]:
        raise UsageError(f"--set: there is no '{unknown[0]}': {nearest(unknown[0], general + own)}")
    try:
        settings = TrainingSettings(**{n: value for n, value in fields.items() if n in general})
        kind = made(**{n: value for n, value in fields.items() if n in own})
        kind.adapted(settings)
    except ConfigError as error:
        raise UsageError(f"--set {error}") from None
    return kind, settings


def _pair(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--set: write NAME=VALUE, got {text}")
    try:
        return name.replace("-", "_"), json.loads(value)
    except ValueError:
        return name.replace("-", "_"), value


class ShownProgress:
    """See `training.report.Reporter`: a bar on a terminal, lines elsewhere; both on stderr."""

    def __init__(self) -> None:
        self._console = errors()
        self._console.quiet = int(os.environ.get("RANK", "0")) > 0  # of `accelerate launch`

    def say(self, text: str) -> None:
        self._console.print(plain(text), soft_wrap=True)

    @contextmanager
    def stage(self, doing: str, total: int) -> Iterator[Callable[[int, str], None]]:
        if not self._console.is_terminal:
            yield self._lines(doing, total)
            return
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TimeRemainingColumn(),
            TextColumn("{task.fields[remark]}"),
        )
        with Progress(*columns, console=self._console) as progress:
            task = progress.add_task(doing, total=total, remark="")

            def done(count: int, remark: str) -> None:
                progress.update(task, completed=count, remark=remark)

            yield done

    def _lines(self, doing: str, total: int) -> Callable[[int, str], None]:
        """A line for every twentieth of the work."""
        last = -1

        def done(count: int, remark: str) -> None:
            nonlocal last
            part = 20 * count // max(1, total)
            if part != last:
                last = part
                self.say(f"{doing}: {count / max(1, total):.0%}, {remark}")

        return done


CHECK_EXAMPLES = examples(
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
    share = f"{probe.accepted:.0%} of the model's most probable tokens"
    tell(f"{head} predicts {share} after a short text")
    if record:
        record_probe(head, probe)
        tell(f"Recorded in {head / 'config.json'}", "note")


EXPORT_EXAMPLES = examples(
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
    tell(f"{out} is {head} with the model's embedding and output rows")
