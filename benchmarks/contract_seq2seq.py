"""The contract "never slower" of `benchmarks.contract` for encoder-decoders.

    python -m benchmarks.contract_seq2seq --wheels FOLDER --output contract.jsonl --minutes 15

The models are the two published ones of `benchmarks.public_seq2seq` (`stress` copies its source,
`nko` has a draft model) and a translator of 6 + 6 layers of 256 with random weights (`random`),
which runs on the native runtime. Its draft model and its Spec-Drafter have random weights, too: the
first is often right, because both repeat themselves, and the second hardly ever.

A cell is a batch size, a model with a method, and a kind of sources: a few words, a sentence, and
two that defeat drafters, as in `benchmarks.contract`. Outputs end where the model ends them, so
that most of them are short. All that a drafter does for a request is counted: reading or encoding
the source, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer

from benchmarks import BenchmarkError, contract, harness
from benchmarks.contract import (
    HOT,
    RANDOM,
    Cell,
    cells_of,
    conclude,
    next_cell,
    results,
    run_round,
    temperature_of,
)
from benchmarks.harness import Loaded, machine, one_line_errors
from benchmarks.public_seq2seq import (
    SENTENCES,
    Wheels,
    converted_stress,
    nko_lines,
    nko_models,
    nko_sources,
    stress_source,
    stress_vocabulary,
    stress_weights,
)
from benchmarks.seq2seq_training import TargetOptions, new_target
from tokenleap import SamplingParams, models
from tokenleap.bench.run import Journal
from tokenleap.drafters.spec_drafter import SpecDrafterNotes
from tokenleap.training.distill import write_lm
from tokenleap.training.spec_drafter import new_masked_lm

BATCH_SIZES = (1, 4, 8, 16)
WORDS, SENTENCE = "words", "sentence"
TOKENS = 512
"""Of a round, for each eight requests of a batch."""
SHORTEST = 8
"""Tokens of an output that a round counts on, so that it has enough sources."""


@one_line_errors()
def main(
    wheels: Wheels,
    batch_size: Annotated[
        list[int] | None, typer.Option(min=1, help="(Repeatable.) Default: 1, 4, 8, 16.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help='"MODEL, METHOD" (repeatable). Default: all.')
    ] = None,
    rounds: Annotated[int, typer.Option(min=3, help="Rounds of each cell.")] = 5,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Time limit; open cells get more rounds.")
    ] = None,
    output: harness.Output = None,
) -> None:
    """Measure the contract and print a Markdown table."""
    sizes = batch_size or list(BATCH_SIZES)
    journal = Journal(output, "tokenleap contract_seq2seq 1", {"rounds": rounds})
    with TemporaryDirectory() as folder:
        offered = {
            f"{name}, {config['method']}": (subject, config)
            for name, subject in subjects(wheels, Path(folder)).items()
            for config in subject.configs
        }
        seconds = None if minutes is None else 60 * minutes / len(only or offered)
        for name in only or ():
            if name not in offered:
                raise BenchmarkError(f"--only {name}: not among {'; '.join(offered)}.")
        cells: list[Cell] = []
        for name in only or offered:
            subject, config = offered[name]
            own = cells_of(sizes, [f"{name}: {kind}" for kind in subject.kinds], None)
            cells += own
            _measure(subject, config, own, journal, rounds, seconds)
    conclude("contract_seq2seq", machine("cpu"), results(cells, journal.records, rounds))


def _measure(
    subject: Subject,
    config: Mapping[str, Any],
    cells: Sequence[Cell],
    journal: Journal,
    rounds: int,
    seconds: float | None,
) -> None:
    """Measure the cells of one method, beside which no other is loaded."""
    more = seconds is not None
    if next_cell(results(cells, journal.records, rounds), more=more) is None:
        return
    most = max(cell.batch for cell in cells)
    llms = contract.variants(subject.model, config, most)
    run_round(llms, subject, Cell(most, HOT), 0)  # what passes cost is learnt

    def run(cell: Cell, index: int) -> Mapping[str, Any]:
        _, kind = cell.kind.split(": ")
        return run_round(llms, subject, replace(cell, kind=kind), index)

    contract.measure(cells, journal, rounds, run, seconds)


@dataclass(frozen=True)
class Subject:
    """A model, its methods, and the requests of its cells.

    Args:
        configs: a `speculative_config` for each method.
        kinds: of sources, with the most tokens of an output.
        source: makes a source of a kind.
    """

    model: Loaded
    configs: Sequence[Mapping[str, Any]]
    kinds: Mapping[str, int]
    source: Callable[[str, Random], list[int]]

    def prompts(self, cell: Cell, index: int) -> list[list[int]]:
        return [self.source(cell.kind, Random(number)) for number in self._numbers(cell, index)]

    def params(self, cell: Cell, index: int) -> list[SamplingParams]:
        heat, longest = temperature_of(cell.kind), self.kinds[cell.kind]
        return [
            SamplingParams(temperature=heat, seed=number, max_tokens=longest)
            for number in self._numbers(cell, index)
        ]

    def enough(self, cell: Cell) -> int:
        return TOKENS * ceil(cell.batch / 8)

    def _numbers(self, cell: Cell, index: int) -> range:
        most = self.enough(cell) // SHORTEST + cell.batch
        return range(index * most, (index + 1) * most)


def subjects(wheels: Path, folder: Path) -> dict[str, Subject]:
    """All models; those that are made are written to a folder."""
    return {"stress": _stress(wheels), "nko": _nko(wheels), "random": _random(folder)}


_LIMITS = {WORDS: 32, SENTENCE: 128, HOT: 64, RANDOM: 64}


def _stress(wheels: Path) -> Subject:
    vocabulary = stress_vocabulary(wheels)
    words, letters = " ".join(SENTENCES).split(), [*vocabulary][4:]

    def source(kind: str, dice: Random) -> list[int]:
        if kind == RANDOM:
            return stress_source("".join(dice.choices(letters, k=32)), vocabulary)
        text = " ".join(dice.choices(words, k=3 if kind == WORDS else 12))
        return stress_source(text, vocabulary)

    model = Loaded(converted_stress(stress_weights(wheels)), None)
    copy = {"method": "copy", "copy_insertions": True}
    return Subject(model, [copy, {"method": "suffix"}], _LIMITS, source)


def _nko(wheels: Path) -> Subject:
    target, draft = nko_models(wheels)
    lines = nko_lines(wheels)
    few = nko_sources(wheels, [line for line in lines if 8 <= len(line) <= 24][:400])
    many = nko_sources(wheels, [line for line in lines if 60 <= len(line) <= 160][:400])
    ids = sorted({token for source in many for token in source[:-1]})

    def source(kind: str, dice: Random) -> list[int]:
        if kind == RANDOM:
            return [*dice.choices(ids, k=32), few[0][-1]]
        return dice.choice(few if kind == WORDS else many)

    model = Loaded(models.load_model(target, torch.bfloat16, torch.device("cpu")), None)
    configs = [{"method": "draft_model", "model": str(draft)}, {"method": "suffix"}]
    return Subject(model, configs, _LIMITS, source)


def _random(folder: Path) -> Subject:
    options = TargetOptions()
    torch.manual_seed(0)
    target: Any = new_target(options, options.vocab_size)
    draft: Any = new_target(options.model_copy(update={"layers": 1}), options.vocab_size)
    draft.to(torch.bfloat16).save_pretrained(folder / "draft")
    size = options.vocab_size
    masked = new_masked_lm(target.config, size, 10, "small", own_encoder=False)
    notes = SpecDrafterNotes(10, size, size, "target", fewer_masks=True)
    write_lm(masked, "random", folder / "masked", notes.note())
    configs = [
        {"method": "copy"},
        {"method": "suffix"},
        {"method": "draft_model", "model": str(folder / "draft")},
        {"method": "spec_drafter", "model": str(folder / "masked")},
    ]

    def source(kind: str, dice: Random) -> list[int]:
        return dice.choices(range(4, size), k=8 if kind == WORDS else 32)

    model = Loaded(target.to(torch.bfloat16).train(False), None)
    return Subject(model, configs, {WORDS: 12, SENTENCE: 64, HOT: 64}, source)


if __name__ == "__main__":
    typer.run(main)
