"""Measures the tables of docs/results.md again, one after the other.

    python -m benchmarks.all --hours 2 --prompts spec_bench.jsonl --large 1.5b.gguf \
        --gguf SmolLM2-135M-Instruct.Q4_1.gguf --draft-model 0.5b.gguf --llama-server PATH \
        --wheels FOLDER

Every section is a command, with more prompts and rounds for more hours. What a command prints goes
to the folder `--output`; a section that is there already is not run again, and one of `tokenleap
bench` that was interrupted goes on. Then the tables in docs/results.md are replaced, with commit
and date. A section whose files are not given, or that fails, keeps its old table and is named.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import BenchmarkError
from benchmarks.harness import Prompts, one_line_errors

RESULTS = Path(__file__).parents[1] / "docs/results.md"
PEERS = "transformers-plain,transformers-lookup,openvino-plain,openvino-lookup"


INT4 = " ".join(
    f"--method {shlex.quote(json.dumps({'method': name, 'quantization': 'int4'}))}"
    for name in ("none", "ngram", "suffix", "hybrid")
)
SHOWN = ("Speed", "Speed by kind of prompt", "Start")
"""The tables of `tokenleap bench` that the page shows."""

BENCH = "tokenleap bench {prompts} --rounds 1 --output {folder}"


@dataclass(frozen=True)
class Section:
    """A table: the command, and what `{amount}` is for two hours."""

    command: str
    amount: int = 1


SECTIONS = {
    "methods": Section(
        f"{BENCH} --per-kind {{amount}} --gguf {{gguf}} --peers {PEERS} "
        f"--method ngram --method suffix --method hybrid {INT4}",
        4,
    ),
    "draft_model": Section(
        f"{BENCH} -m {{large}} --draft-model {{draft_model}} --per-kind {{amount}} --max-tokens 64 "
        "--max-prompt-tokens 600 --peers transformers-assistant,openvino-lookup --method ngram "
        "--method draft_model",
        2,
    ),
    "server": Section(
        "benchmarks.serving --prompts {prompts} --gguf {gguf} --llama-server {llama_server} "
        "--rounds {amount} --max-tokens 96",
        5,
    ),
    "server_large": Section(
        "benchmarks.serving --prompts {prompts} --gguf {large} --draft-model {draft_model} "
        "--llama-server {llama_server} --rounds {amount} --clients 1 --clients 4 --clients 16 "
        "--requests 4",
        4,
    ),
    "contract": Section(
        "benchmarks.contract --prompts {prompts} --output {folder}.jsonl --minutes {amount} "
        "--batch-size 1 --batch-size 4 --batch-size 8 --batch-size 16",
        28,
    ),
    "contract_seq2seq": Section(
        "benchmarks.contract_seq2seq --wheels {wheels} --output {folder}.jsonl --rounds 3 "
        "--minutes {amount}",
        20,
    ),
    "passes": Section("benchmarks.step_cost"),
    "passes_int4": Section("benchmarks.step_cost --quantization int4"),
    "int4": Section(
        "benchmarks.quantization --prompts {prompts} --quantization int4 --per-kind {amount}", 5
    ),
    "identity": Section(
        "benchmarks.identity --prompts {prompts} --per-kind {amount} --method none --method ngram "
        "--method suffix",
        2,
    ),
}


@one_line_errors()
def main(
    prompts: Prompts,
    hours: Annotated[
        float, typer.Option(min=0.01, help="About how long all sections take on two cores.")
    ] = 2.0,
    gguf: Annotated[Path | None, typer.Option(help="The default model's file.")] = None,
    large: Annotated[Path | None, typer.Option(help="A larger model's file.")] = None,
    draft_model: Annotated[Path | None, typer.Option(help="The draft model of that one.")] = None,
    llama_server: Annotated[Path | None, typer.Option(help="llama.cpp's `llama-server`.")] = None,
    wheels: Annotated[
        Path | None, typer.Option(help="The folder of `benchmarks.public_seq2seq`.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(SECTIONS)} (repeatable). Default: all.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder of what the commands print.")] = Path(
        "build/results"
    ),
) -> None:
    """Run the commands, and put their tables into docs/results.md."""
    chosen = {name: SECTIONS.get(name) for name in only or SECTIONS}
    output.mkdir(parents=True, exist_ok=True)
    files = {
        "prompts": prompts,
        "gguf": gguf,
        "large": large,
        "draft_model": draft_model,
        "llama_server": llama_server,
        "wheels": wheels,
    }
    for name, section in chosen.items():
        if section is None:
            raise BenchmarkError(f"no section {name!r}: choose of {', '.join(SECTIONS)}.")
        report = output / f"{name}.md"
        if not report.exists() and (problem := _measure(section, files, report, hours / 2)):
            typer.echo(f"{name}: {problem}", err=True)
        if report.exists():
            _replace(name, report.read_text(encoding="utf-8"))


def _measure(
    section: Section, files: Mapping[str, Path | None], report: Path, scale: float
) -> str | None:
    """Run a command and write what it prints; what went wrong, if anything did."""
    missing = [
        name for name, path in files.items() if f"{{{name}}}" in section.command and not path
    ]
    if missing:
        return f"not measured without --{', --'.join(missing).replace('_', '-')}"
    folder, amount = report.with_suffix(""), max(2, round(section.amount * scale))
    places = {**files, "folder": folder, "amount": amount}
    command = re.sub(r"{(\w+)}", lambda at: shlex.quote(str(places[at[1]])), section.command)
    resumed = [*["--resume"] * (folder / "results.jsonl").exists()]  # of `tokenleap bench`
    typer.echo(shlex.join([command, *resumed]), err=True)
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(command), *resumed],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode > 1 or not done.stdout:
        return f"ended with status {done.returncode}"
    version = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(version, capture_output=True, text=True, check=True).stdout.strip()
    facts = f"Commit {commit}, {datetime.now(UTC):%d %B %Y}."
    report.write_text(f"{_shown(command, done.stdout)}\n\n{facts}\n", encoding="utf-8")
    return "measured, and a promise is broken" if done.returncode else None


def _shown(command: str, printed: str) -> str:
    """What a command printed, as a part of a page: without names of folders and some tables."""
    first, *parts = re.split(r"^## (.*)$", re.sub(r"\A# .*\s*", "", printed), flags=re.M)
    titled = zip(parts[::2], parts[1::2], strict=True)
    kept = [f"**{title}**{text}" for title, text in titled if title in SHOWN]
    called = "" if "python -m" in first else f"`{command}`\n\n"
    text = re.sub(r"(?<=[\s'\"=`])/\S*/", "", "".join([called, first, *kept])).strip()
    return re.sub(r"^\|.*", _narrow, text, flags=re.M)


def _narrow(row: re.Match[str]) -> str:
    """A row of a table without padding."""
    return re.sub(r" +(?=\|)", " ", re.sub(r"(?<=\|) +", " ", re.sub(r"-{4,}", "---", row[0])))


def _replace(name: str, text: str) -> None:
    """Put a section's text between its marks."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    page = RESULTS.read_text(encoding="utf-8")
    before, found, rest = page.partition(begin)
    if not found:
        raise BenchmarkError(f"{RESULTS.name} has no mark {begin.strip()}")
    page = before + begin + "\n" + text + "\n" + end + rest.partition(end)[2]
    RESULTS.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
