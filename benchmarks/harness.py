"""What the benchmarks share: options, the model, the runner, the report.

The runner (`in_turn`) runs every contestant on every item in every round. Contestants take turns in
an alternating order, so what slows the machine down for a while slows all of them down. A result is
a ratio with an interval (`speeds_over`).
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

import psutil
import torch
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from benchmarks import BenchmarkError
from tokenleap import LLM, TokenleapError, models
from tokenleap.bench.machine import host
from tokenleap.bench.own import encode, prompt_limit
from tokenleap.bench.prompts_file import Prompt, read_prompts, stratified
from tokenleap.bench.report import markdown_table, rows_of
from tokenleap.bench.run import Journal, order
from tokenleap.bench.summary import Interval, bootstrap_ratio
from tokenleap.core.garbage import kept
from tokenleap.models.support import default_device, default_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Name = TypeVar("Name", bound=Hashable)
Item = TypeVar("Item")
Found = TypeVar("Found")
Row = TypeVar("Row")

# Options of the command line

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
Rounds: TypeAlias = Annotated[int, typer.Option(min=1, help="Runs of each contestant.")]
Output: TypeAlias = Annotated[
    Path | None, typer.Option(help="JSON lines of findings; an existing file is continued.")
]
Threads: TypeAlias = Annotated[int, typer.Option(min=1, help="Of PyTorch.")]

Model: TypeAlias = Annotated[str, typer.Option(help="Folder, id (ORG/NAME), GGUF file or alias.")]
TinyModel: TypeAlias = Annotated[
    str,
    typer.Option(
        help="Folder, id (ORG/NAME), GGUF file or alias; tiny, random-135m, random-7b: random "
        "weights, no files."
    ),
]
Dtype: TypeAlias = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device: TypeAlias = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Quantization: TypeAlias = Annotated[str | None, typer.Option(help="auto, int8 or int4.")]
Runtime: TypeAlias = Annotated[str, typer.Option(help="auto, native or torch.")]


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn errors of wrong use into one line on stderr and exit code 2; also a decorator."""
    try:
        yield
    except (TokenleapError, BenchmarkError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None


def json_object(option: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise BenchmarkError(f"{option}: not JSON: {error}.") from None
    if not isinstance(found, dict):
        raise BenchmarkError(f"{option}: give a JSON object.")
    return found


# Models and prompts

TINY = "tiny"
"""The name of a model of two layers with random weights, for trying a benchmark out."""

RANDOM: dict[str, dict[str, int]] = {
    TINY: {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
    },
    "random-135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
    },
    "random-7b": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
    },
}
"""Models with random weights: sizes of a Llama. The last two are SmolLM2-135M's and Llama-7B's."""


@dataclass(frozen=True)
class Loaded:
    """One model in memory, which several `LLM`s share."""

    module: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None


def load(model: str, dtype: str, device: str) -> Loaded:
    """Load a folder, a GGUF file, an alias, or make one of `RANDOM`."""
    place = default_device(device)
    if model in RANDOM:
        return Loaded(_random(RANDOM[model], default_dtype(dtype, place), place), None)
    folder = models.resolve(model)
    module = models.load_model(folder, default_dtype(dtype, place), place)
    return Loaded(module, models.load_tokenizer(folder))


def _random(sizes: Mapping[str, int], dtype: torch.dtype, place: torch.device) -> PreTrainedModel:
    """A Llama of these sizes, made where it runs; of fewer layers where memory is short."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("llama", **sizes)
    layer = 4 * config.hidden_size**2 + 3 * config.hidden_size * config.intermediate_size
    most = int(0.7 * _free_bytes(place) / (layer * dtype.itemsize))
    config.num_hidden_layers = max(1, min(config.num_hidden_layers, most))
    torch.manual_seed(0)
    make: Any = AutoModelForCausalLM
    with place:
        model: PreTrainedModel = make.from_config(config, dtype=dtype)
    return model


def _free_bytes(place: torch.device) -> int:
    if place.type == "cuda":
        return torch.cuda.mem_get_info(place)[0]
    return int(psutil.virtual_memory().available)


def llm_for(loaded: Loaded, config: Mapping[str, Any], **options: Any) -> LLM:
    """An `LLM` on the loaded module, which stays unchanged; `options` are further arguments."""
    return LLM(
        loaded.module,
        tokenizer=loaded.tokenizer,
        speculative_config=config,
        enable_prefix_caching=False,  # every round computes its prompts again
        **options,
    )


def sample_of(
    file: Path, per_kind: int | None = None, seed: int = 0, kinds: Sequence[str] | None = None
) -> list[Prompt]:
    """A stratified sample of a prompts file; without `per_kind`, all prompts in random order."""
    prompts = read_prompts(file)
    return stratified(prompts, per_kind or len(prompts), seed, kinds or ())


def encoded(llm: LLM, prompts: Sequence[Prompt], limit: int, max_tokens: int) -> list[list[int]]:
    """Token ids of prompts, cut to `limit` and to what the context leaves beside the output."""
    most = prompt_limit(llm.max_model_len, limit, max_tokens)
    return [encode(llm, prompt.text, most) for prompt in prompts]


def message(llm: LLM, text: str) -> Any:
    """A prompt for `generate`: a chat message if the model has a chat template."""
    chats = llm.tokenizer is not None and llm.tokenizer.chat_template
    return [{"role": "user", "content": text}] if chats else text


# The runner


def in_turn(
    contestants: Sequence[Name],
    items: Sequence[Item],
    rounds: int,
    run: Callable[[Name, Item], Found],
    *,
    warm_up: int = 0,
    doing: str = "items",
    journal: Journal | None = None,
    numbers: Sequence[int | str] | None = None,
) -> dict[Name, list[list[Found]]]:
    """Run every contestant on every item in every round: findings by contestant, item and round.

    All contestants run on an item before the next item comes. Findings of the `warm_up` rounds
    before the first one are left out. With a journal, findings are its records: dicts, marked with
    `doing`, contestant, item (its place, or its number in `numbers`) and round, that are not
    measured again.
    """
    made: dict[Any, Any] = {_place(r): r for r in journal.records} if journal else {}
    found: dict[Name, list[list[Found]]] = {one: [[] for _ in items] for one in contestants}
    turns = [(index, place) for index in range(-warm_up, rounds) for place in range(len(items))]
    with progress_bar() as bar, kept():
        for turn, (index, place) in enumerate(bar.track(turns, description=doing)):
            for one in order(contestants, turn):
                number: int | str = place if numbers is None else numbers[place]
                mark = {"type": doing, "name": str(one), "round": index, "number": number}
                value: Any = made.get(_place(mark))
                if value is None:
                    value = run(one, items[place])
                    if journal is not None and index >= 0:
                        value = {**mark, **value}
                        journal.add(value)
                if index >= 0:
                    found[one][place].append(value)
    return found


def _place(record: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(record.get(name) for name in ("type", "name", "round", "number"))


def timed(run: Callable[[], Found]) -> tuple[float, Found]:
    """The seconds that a call takes, and its result."""
    began = time.perf_counter()
    result = run()
    return time.perf_counter() - began, result


def flat(found: Mapping[Name, Sequence[Sequence[Found]]]) -> dict[Name, list[Found]]:
    """The findings of `in_turn` by contestant, over all items and rounds."""
    return {one: [value for each in items for value in each] for one, items in found.items()}


def speeds_over(base: Name, seconds: Mapping[Name, Sequence[float]]) -> dict[Name, Interval]:
    """The base's seconds over each contestant's, of the same moments, with 95 % intervals."""
    return {
        one: bootstrap_ratio([b / own for b, own in zip(seconds[base], taken, strict=True)])
        for one, taken in seconds.items()
    }


def progress_bar() -> Progress:
    """On stderr; stdout is for results."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


# The report


def machine(device: torch.device | str, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """What a measurement depends on: processor, GPU, threads, versions, dtype."""
    place = torch.device(device)
    return {
        **host(),
        "gpu": torch.cuda.get_device_name(place) if place.type == "cuda" else None,
        "torch_threads": torch.get_num_threads(),
        **({} if dtype is None else {"dtype": str(dtype).removeprefix("torch.")}),
    }


def in_one_line(facts: Mapping[str, Any]) -> str:
    """Facts as text; unknown ones (None) are left out."""
    return ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)


def report(program: str, facts: Mapping[str, Any], *parts: str) -> str:
    """The command that ran, the facts, and tables and remarks, as Markdown."""
    command = f"`python -m benchmarks.{program} {shlex.join(sys.argv[1:])}`"
    return "\n\n".join(filter(None, (command, in_one_line(facts), *parts)))


def table(rows: Sequence[Row], columns: Mapping[str, Callable[[Row], object]]) -> str:
    """A Markdown table whose columns say how to make a cell of a row."""
    return markdown_table(list(columns), rows_of(rows, columns))
