"""Two commits against each other: speed of the second over that of the first, and their tokens.

    python -m benchmarks.compare HEAD~1 HEAD --method ngram

Each commit is checked out into a temporary folder (`git worktree`), and a process of each
(`tokenleap.bench.worker`) loads the model and stays alive. The two take turns on every prompt of
every round, so what slows the machine down slows both. The same commit twice (HEAD HEAD) shows how
much the machine's noise alone does.

Prints a Markdown table with the ratio of tokens/s by kind of prompt: the geometric mean over
prompts of medians over rounds, with a 95 % interval over prompts. Exits with 1 if an output
differs.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks import BenchmarkError, harness
from benchmarks.harness import in_turn, machine, one_line_errors, report, table
from tokenleap.bench.contestants import Contestant, Setting, methods
from tokenleap.bench.prompts_file import Prompt
from tokenleap.bench.run import Journal
from tokenleap.bench.summary import ALL, bootstrap_ratio
from tokenleap.bench.worker import Process

CODE_PROMPTS = Path(__file__).with_name("code_prompts.jsonl")
ROOT = Path(__file__).parents[1]
A, B = "A", "B"

Calls = Mapping[str, Sequence[Sequence[Mapping[str, Any]]]]
"""By side, prompt and round: seconds, and the tokens of the output."""


@one_line_errors()
def main(
    a: Annotated[str, typer.Argument(help="A commit, which the other is compared with.")],
    b: Annotated[str, typer.Argument(help="A commit.")],
    prompts: harness.Prompts = CODE_PROMPTS,
    model: harness.Model = "smollm2-135m",
    method: Annotated[str, typer.Option(help="A drafter, or JSON of its config.")] = "ngram",
    draft_model: Annotated[str | None, typer.Option(help="For methods that take one.")] = None,
    kind: harness.Kinds = None,
    per_kind: harness.PerKind = 4,
    rounds: harness.Rounds = 3,
    max_tokens: harness.MaxTokens = 64,
    max_prompt_tokens: harness.MaxPromptTokens = 1024,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests of a prompt at a time.")] = 1,
    threads: harness.Threads = 1,
    quantization: harness.Quantization = None,
    runtime: harness.Runtime = "auto",
    dtype: harness.Dtype = "auto",
    device: harness.Device = "auto",
    seed: harness.Seed = 0,
    output: harness.Output = None,
) -> None:
    """Let two commits take turns, and print how much faster the second one is."""
    commits = {A: _commit(a), B: _commit(b)}
    chosen = methods([method], draft_model, quantization)[-1]
    setting = Setting(
        model=model,
        dtype=dtype,
        device=device,
        runtime=runtime,
        draft_model=draft_model,
        threads=threads,
        max_tokens=max_tokens,
        max_prompt_tokens=max_prompt_tokens,
        temperature=temperature,
        max_num_seqs=batch_size,
    )
    sample = harness.sample_of(prompts, per_kind, seed, kind)
    header = {**vars(setting), "commits": commits, "method": chosen.label}
    header["prompts"] = [prompt.id for prompt in sample]
    journal = Journal(output, "tokenleap-compare-1", header)
    with ExitStack() as stack:
        sides = {
            side: stack.enter_context(_started(side, commit, chosen, setting))
            for side, commit in commits.items()
        }
        calls = measure(sides, sample, setting, rounds, journal)
    facts = {**machine("cpu"), **commits, "method": chosen.label, "model": model}
    text, same = report_of(sample, calls, facts)
    print(text)
    raise typer.Exit(0 if same else 1)


def report_of(sample: Sequence[Prompt], calls: Calls, facts: Mapping[str, Any]) -> tuple[str, bool]:
    """The report, and whether both sides have the same tokens."""
    differing = [p.id for p, *pair in zip(sample, *calls.values(), strict=True) if _differ(*pair)]
    agreement = (
        f"Other tokens on prompts {', '.join(differing)}." if differing else "All tokens are equal."
    )
    text = report("compare", facts, _table(sample, calls), _spread(calls), agreement)
    return text, not differing


def _commit(name: str) -> str:
    return _git("rev-parse", "--short=12", "--verify", f"{name}^{{commit}}")


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise BenchmarkError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


@contextmanager
def _started(side: str, commit: str, one: Contestant, setting: Setting) -> Iterator[Process]:
    """A process of this commit, loaded."""
    with tempfile.TemporaryDirectory(prefix=f"tokenleap-{commit}-") as folder:
        tree = Path(folder, "tree")
        _git("worktree", "add", "--detach", str(tree), commit)
        try:
            label = f"{side} ({commit})"
            named = Contestant(label, one.kind, one.config, one.quantization)
            with Process(named, setting, source=tree / "src") as process:
                process.wait_until_loaded()
                yield process
        finally:
            _git("worktree", "remove", "--force", str(tree))


def measure(
    sides: Mapping[str, Process],
    sample: Sequence[Prompt],
    setting: Setting,
    rounds: int,
    journal: Journal,
) -> Calls:
    """Generate for every prompt on both sides in turn; a run of each before that warms up."""
    context = min(int(process.facts["max_model_len"]) for process in sides.values())
    texts = [prompt.text for prompt in sample]
    ids = sides[A].ask("encode", texts=texts, max_model_len=context)

    def generate(side: str, place: int) -> dict[str, Any]:
        process, copies = sides[side], range(setting.max_num_seqs)
        seeds = [sample[place].seed + copy for copy in copies] if setting.temperature else []
        process.ask("forget")
        called = process.ask(
            "generate",
            prompts=[ids[place] for _ in copies],
            max_tokens=setting.max_tokens,
            temperature=setting.temperature,
            seeds=seeds,
        )
        tokens = [token for output in called["outputs"] for token in output["token_ids"]]
        return {"seconds": called["seconds"], "tokens": tokens}

    in_turn(list(sides), [0], 1, generate, doing="warm-up")
    places = list(range(len(sample)))
    return in_turn(list(sides), places, rounds, generate, doing="prompts", journal=journal)


def _differ(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> bool:
    return any(call["tokens"] != one[0]["tokens"] for call in (*one, *other))


def _table(sample: Sequence[Prompt], calls: Calls) -> str:
    """By kind of prompt: tokens/s of both sides, and their ratio."""
    places: dict[str, list[int]] = {}
    for place, prompt in enumerate(sample):
        places.setdefault(prompt.kind, []).append(place)
    if len(places) > 1:
        places[ALL] = list(range(len(sample)))

    def ratio(kind: str) -> object:
        return bootstrap_ratio([_speed(calls[B][at]) / _speed(calls[A][at]) for at in places[kind]])

    def speed(side: str, kind: str) -> str:
        return f"{median(_speed(calls[side][at]) for at in places[kind]):.1f}"

    return table(
        list(places),
        {
            "prompts": str,
            "number": lambda kind: len(places[kind]),
            "A, tokens/s": lambda kind: speed(A, kind),
            "B, tokens/s": lambda kind: speed(B, kind),
            "speed of B over A": ratio,
        },
    )


def _speed(calls: Sequence[Mapping[str, Any]]) -> float:
    return float(median(len(call["tokens"]) / call["seconds"] for call in calls))


def _spread(calls: Calls) -> str:
    """How much rounds of a call differ."""
    seconds = [[call["seconds"] for call in rounds] for side in calls.values() for rounds in side]
    spread = median((max(each) - min(each)) / median(each) for each in seconds)
    return f"Rounds of the same call differ by {spread:.1%} (the median of all calls)."


if __name__ == "__main__":
    typer.run(main)
