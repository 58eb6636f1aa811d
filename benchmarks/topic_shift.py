"""A drafter that learns while it serves, when the topic changes: does acceptance recover?

Prompts about everyday things are followed by prompts for SQL, and these by everyday things again.
Every prompt is served twice in turn: by the drafter as it was trained, and by the one that learns
(`speculative_config={"online": ...}`). Both have chains of one length, so that acceptance is
comparable. Outputs have to be the same.

    python -m benchmarks.topic_shift --model smollm2-135m --head HEAD --out build/topic_shift

Writes `topic_shift.csv` and `topic_shift.png`, and prints a Markdown table.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import BenchmarkError, flags
from benchmarks.loading import llm_for, load
from benchmarks.report import command_line, machine, markdown_table, one_line_errors, progress_bar
from tokenleap import LLM, RequestOutput, SamplingParams
from tokenleap.bench.run import order
from tokenleap.core.config import Config
from tokenleap.drafters.online import OnlineReport
from tokenleap.training.report import Panel, save_panels, save_table

__all__ = ["Part", "main", "measure", "topics"]

DRAFTERS = ("as trained", "learning")

_THINGS = (
    *("houseplants", "bread", "volcanoes", "jazz", "chess", "tea", "sleep", "bees", "trains"),
    *("rivers", "clouds", "glass", "paper", "coffee", "dogs", "maps", "bridges", "salt", "winter"),
    *("running", "painting", "cheese", "lighthouses", "gardens", "libraries"),
)
_EVERYDAY = (
    "Tell me something surprising about {}.",
    "Why do people like {}?",
    "Explain {} to a child.",
    "Write a short story about {}.",
    "What are common mistakes with {}?",
    "Give me some advice about {}.",
)
_TABLES = (
    *("customers", "orders", "employees", "products", "students", "courses", "flights", "books"),
    *("invoices", "hotels", "patients", "songs", "films", "teams", "matches", "cities", "cars"),
    *("payments", "reviews", "tickets"),
)
_SQL = (
    "Write a SQL query that joins {} and {} and keeps the ten newest rows.",
    "Write a SQL query that finds the {} that have no {}.",
    "Write a SQL query that counts the {} for each of the {}.",
    "Write a SQL query that updates the status of {} that belong to {}.",
    "Write a SQL query that ranks the {} within the {}.",
    "Write a SQL query that deletes all {} without {}.",
)


@dataclass(frozen=True)
class Part:
    """Some adjacent prompts, as one drafter served them.

    Args:
        topic: of the prompts.
        tokens: that were generated.
        mean_length: mean acceptance length.
        seconds: that generating took, learning included.
    """

    topic: str
    tokens: int
    mean_length: float
    seconds: float


def topics(seed: int) -> dict[str, list[str]]:
    """The prompts of both topics, in random order."""
    dice = random.Random(seed)
    everyday = [form.format(thing) for form in _EVERYDAY for thing in _THINGS]
    sql = [form.format(*dice.sample(_TABLES, 2)) for form in _SQL for _ in range(100)]
    dice.shuffle(everyday)
    dice.shuffle(sql)
    return {"everyday": everyday, "SQL": sql}


def main(
    head: Annotated[Path, typer.Option(help="Folder of an EAGLE head for the model.")],
    out: Annotated[Path, typer.Option(help="Folder for the files.")],
    model: flags.Model = "smollm2-135m",
    online: Annotated[str, typer.Option(help="How to learn, as JSON.")] = "{}",
    before: Annotated[int, typer.Option(min=1, help="Everyday prompts.")] = 40,
    shifted: Annotated[int, typer.Option(min=1, help="SQL prompts after them.")] = 240,
    after: Annotated[int, typer.Option(min=1, help="Everyday prompts after these.")] = 40,
    part: Annotated[int, typer.Option(min=1, help="Prompts of a row of the table.")] = 20,
    max_tokens: flags.MaxTokens = 96,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    num_speculative_tokens: Annotated[int, typer.Option(min=1)] = 4,
    seed: flags.Seed = 0,
    dtype: flags.Dtype = "auto",
    device: flags.Device = "auto",
) -> None:
    """Serve a shift of topic with a drafter that learns and one that does not."""
    with one_line_errors():
        by_topic = topics(seed)
        everyday, sql = by_topic.values()
        if before + after > len(everyday) or shifted > len(sql):
            raise BenchmarkError(f"there are {len(everyday)} everyday prompts and {len(sql)} SQL.")
        phases = [
            ("everyday", everyday[:before]),
            ("SQL", sql[:shifted]),
            ("everyday", everyday[before : before + after]),
        ]
        fixed = {
            "method": "eagle",
            "model": str(head),
            "num_speculative_tokens": num_speculative_tokens,
            "controller": "fixed",
        }
        learning = {**fixed, "online": _parsed(online)}
        loaded = load(model, dtype, device)  # heads share its weights
        llm = llm_for(loaded, learning)
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
        rows = list(measure(llm, fixed, phases, params, part))
    report = llm.online_report
    assert report is not None
    _save(out, rows)
    print(f"{command_line('benchmarks.topic_shift')}\n\n{_markdown(rows)}\n\n{_told(report)}\n")
    facts = machine(llm.device, llm.dtype)
    print("\n".join(f"- {name}: {value}" for name, value in facts.items()))


def _parsed(online: str) -> dict[str, Any]:
    try:
        options = json.loads(online)
    except ValueError as error:
        raise BenchmarkError(f"--online: {error}.") from None
    if not isinstance(options, dict):
        raise BenchmarkError("--online: give a JSON object.")
    return options


def measure(
    llm: LLM,
    as_trained: Config | dict[str, Any],
    phases: Sequence[tuple[str, Sequence[str]]],
    params: SamplingParams,
    part: int,
) -> Iterator[tuple[Part, Part]]:
    """Serve all prompts with both drafters in turn.

    Args:
        llm: whose drafter learns.
        as_trained: the configuration of the other one.
        phases: topics and their prompts.
        params: of all requests.
        part: prompts of a part.

    Yields:
        The drafter as it was trained and the one that learns, for each part.

    Raises:
        BenchmarkError: the outputs of the two differ.
    """
    configs = dict(zip(DRAFTERS, (as_trained, None), strict=True))
    total = sum(len(prompts) for _, prompts in phases)
    with progress_bar() as bar:
        task = bar.add_task("prompts", total=total)
        for topic, prompts in phases:
            for start in range(0, len(prompts), part):
                served: dict[str, list[tuple[RequestOutput, float]]] = {n: [] for n in DRAFTERS}
                for number, prompt in enumerate(prompts[start : start + part]):
                    for name in order(DRAFTERS, number):
                        served[name].append(_serve(llm, prompt, params, configs[name]))
                    _check_same(*(served[name][-1][0] for name in DRAFTERS))
                    bar.advance(task)
                first, second = (_part(topic, served[name]) for name in DRAFTERS)
                yield first, second


def _serve(
    llm: LLM, prompt: str, params: SamplingParams, config: Any
) -> tuple[RequestOutput, float]:
    """The output, and the seconds that it took."""
    began = time.perf_counter()
    message = {"role": "user", "content": prompt}
    (output,) = llm.chat([message], params, speculative_config=config)
    return output, time.perf_counter() - began


def _check_same(first: RequestOutput, second: RequestOutput) -> None:
    if first.token_ids != second.token_ids:
        raise BenchmarkError(f"the outputs differ for {first.prompt!r}.")


def _part(topic: str, served: Sequence[tuple[RequestOutput, float]]) -> Part:
    metrics = [output.metrics for output, _ in served]
    drafts = sum(each.num_drafts for each in metrics)
    accepted = sum(each.num_accepted_tokens for each in metrics)
    return Part(
        topic,
        sum(each.generated_tokens for each in metrics),
        1 + accepted / max(1, drafts),
        sum(seconds for _, seconds in served),
    )


def _save(folder: Path, rows: Sequence[tuple[Part, Part]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokens = _tokens_so_far(rows)
    header = [
        "topic",
        "tokens",
        *(f"mean_acceptance_length_{n.replace(' ', '_')}" for n in DRAFTERS),
    ]
    save_table(
        folder / "topic_shift.csv",
        header,
        [
            [pair[0].topic, count, *(f"{each.mean_length:.4f}" for each in pair)]
            for count, pair in zip(tokens, rows, strict=True)
        ],
    )
    lines = {
        name: [pair[place].mean_length for pair in rows] for place, name in enumerate(DRAFTERS)
    }
    title = "Mean acceptance length: everyday, SQL, everyday"
    save_panels(folder / "topic_shift.png", [Panel(title, "tokens generated", tokens, lines)])


def _tokens_so_far(rows: Sequence[tuple[Part, Part]]) -> list[int]:
    counts, total = [], 0
    for first, _ in rows:
        total += first.tokens
        counts.append(total)
    return counts


def _markdown(rows: Sequence[tuple[Part, Part]]) -> str:
    header = ["topic", "tokens so far", *(f"{name}: tokens a pass" for name in DRAFTERS), "speed"]
    return markdown_table(
        header,
        [
            [
                first.topic,
                f"{count:,}",
                f"{first.mean_length:.2f}",
                f"{second.mean_length:.2f}",
                f"{first.seconds / second.seconds:.2f}x",
            ]
            for count, (first, second) in zip(_tokens_so_far(rows), rows, strict=True)
        ],
    )


def _told(report: OnlineReport) -> str:
    failure = "" if report.failure is None else f" It ended: {report.failure}"
    return (
        f"Learning took {report.share:.1%} of the time: {report.positions:,} positions, "
        f"{report.updates} updates, {report.swaps} swaps.{failure}"
    )


if __name__ == "__main__":
    typer.run(main)
