"""A drafter that learns while it serves, when the topic changes: does acceptance recover?

Prompts about everyday things are followed by prompts for SQL, and these by everyday things again.
Every prompt is served twice in turn: by the drafter as it was trained, and by the one that learns
(`speculative_config={"online": ...}`). Both have chains of one length, so that acceptance is
comparable. Outputs have to be the same.

    python -m benchmarks.topic_shift --model smollm2-135m --head HEAD --out build/topic_shift

Writes `topic_shift.csv` and `topic_shift.png`, and prints a Markdown table.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import BenchmarkError, harness
from tokenleap import LLM, RequestOutput, SamplingParams
from tokenleap.drafters.online import OnlineReport
from tokenleap.training.report import Panel, save_panels, save_table

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
    """Some adjacent prompts, as one drafter served them; seconds include learning."""

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


@harness.one_line_errors()
def main(
    head: Annotated[Path, typer.Option(help="Folder of an EAGLE head for the model.")],
    out: Annotated[Path, typer.Option(help="Folder for the files.")],
    model: harness.Model = "smollm2-135m",
    online: Annotated[str, typer.Option(help="How to learn, as JSON.")] = "{}",
    before: Annotated[int, typer.Option(min=1, help="Everyday prompts.")] = 40,
    shifted: Annotated[int, typer.Option(min=1, help="SQL prompts after them.")] = 240,
    after: Annotated[int, typer.Option(min=1, help="Everyday prompts after these.")] = 40,
    part: Annotated[int, typer.Option(min=1, help="Prompts of a row of the table.")] = 20,
    max_tokens: harness.MaxTokens = 96,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    num_speculative_tokens: Annotated[int, typer.Option(min=1)] = 4,
    seed: harness.Seed = 0,
    dtype: harness.Dtype = "auto",
    device: harness.Device = "auto",
) -> None:
    """Serve a shift of topic with a drafter that learns and one that does not."""
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
    learning = {**fixed, "online": harness.json_object("--online", online)}
    loaded = harness.load(model, dtype, device)  # heads share its weights
    llm = harness.llm_for(loaded, learning)
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
    pairs = measure(llm, fixed, phases, params, part)
    assert llm.online_report is not None
    tokens = list(accumulate(first.tokens for first, _ in pairs))
    _save(out, tokens, pairs)
    found = _markdown(tokens, pairs)
    facts = harness.machine(llm.device, llm.dtype)
    print(harness.report("topic_shift", facts, found, _told(llm.online_report)))


def measure(
    llm: LLM,
    as_trained: dict[str, Any],
    phases: Sequence[tuple[str, Sequence[str]]],
    params: SamplingParams,
    part: int,
) -> list[tuple[Part, Part]]:
    """Serve all prompts with both drafters in turn: the `LLM`'s, which learns, and another.

    Returns a pair for each part of a topic: the drafter as it was trained, and the one that learns.
    """
    configs = dict(zip(DRAFTERS, (as_trained, None), strict=True))

    def serve(name: str, prompt: str) -> tuple[float, RequestOutput]:
        asked = [{"role": "user", "content": prompt}]
        seconds, (output,) = harness.timed(
            lambda: llm.chat(asked, params, speculative_config=configs[name])
        )
        return seconds, output

    prompts = [prompt for _, texts in phases for prompt in texts]
    served = harness.in_turn(DRAFTERS, prompts, 1, serve, doing="prompts")
    first, second = ([run for (run,) in served[name]] for name in DRAFTERS)
    for prompt, (_, one), (_, other) in zip(prompts, first, second, strict=True):
        if one.token_ids != other.token_ids:
            raise BenchmarkError(f"the outputs differ for {prompt!r}.")
    pairs, begin = [], 0
    for topic, texts in phases:
        for start in range(0, len(texts), part):
            where = slice(begin + start, begin + min(start + part, len(texts)))
            pairs.append((_part(topic, first[where]), _part(topic, second[where])))
        begin += len(texts)
    return pairs


def _part(topic: str, served: Sequence[tuple[float, RequestOutput]]) -> Part:
    metrics = [output.metrics for _, output in served]
    drafts = sum(each.num_drafts for each in metrics)
    accepted = sum(each.num_accepted_tokens for each in metrics)
    return Part(
        topic,
        sum(each.generated_tokens for each in metrics),
        1 + accepted / max(1, drafts),
        sum(seconds for seconds, _ in served),
    )


def _save(folder: Path, tokens: Sequence[int], pairs: Sequence[tuple[Part, Part]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lengths = [f"mean_acceptance_length_{name.replace(' ', '_')}" for name in DRAFTERS]
    rows = [
        [pair[0].topic, count, *(f"{each.mean_length:.4f}" for each in pair)]
        for count, pair in zip(tokens, pairs, strict=True)
    ]
    save_table(folder / "topic_shift.csv", ["topic", "tokens", *lengths], rows)
    lines = {
        name: [pair[place].mean_length for pair in pairs] for place, name in enumerate(DRAFTERS)
    }
    title = "Mean acceptance length: everyday, SQL, everyday"
    save_panels(folder / "topic_shift.png", [Panel(title, "tokens generated", tokens, lines)])


def _markdown(tokens: Sequence[int], pairs: Sequence[tuple[Part, Part]]) -> str:
    first, second = (f"{name}: tokens a pass" for name in DRAFTERS)
    return harness.table(
        list(zip(tokens, pairs, strict=True)),
        {
            "topic": lambda row: row[1][0].topic,
            "tokens so far": lambda row: f"{row[0]:,}",
            first: lambda row: f"{row[1][0].mean_length:.2f}",
            second: lambda row: f"{row[1][1].mean_length:.2f}",
            "speed": lambda row: f"{row[1][0].seconds / row[1][1].seconds:.2f}x",
        },
    )


def _told(report: OnlineReport) -> str:
    failure = "" if report.failure is None else f" It ended: {report.failure}"
    return (
        f"Learning took {report.share:.1%} of the time: {report.positions:,} positions, "
        f"{report.updates} updates, {report.swaps} swaps.{failure}"
    )


if __name__ == "__main__":
    typer.run(main)
