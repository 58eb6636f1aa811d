"""Measurements of `benchmarks.seq2seq`: every contestant on every sentence, and batches.

All contestants share one process and one target. A sentence goes through all of them before the
next one does, in an order that changes, so that what slows the machine slows them all.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import BenchmarkError
from benchmarks.report import progress_bar
from benchmarks.seq2seq_drafters import MAIN, SHAPES, DrafterOptions
from tokenleap import LLM, SamplingParams
from tokenleap.bench.run import Journal, order

__all__ = ["BEAM", "GREEDY", "Contestant", "Sample", "contestants", "measure", "measure_batches"]

BEAM, GREEDY = "beam 5", "greedy"
"""The baselines."""
K, BETA, TAU = 25, 3, 1.0
"""SpecDec's published values."""
SHORT = 5
"""Tokens of a draft that pays for a small model."""
LENGTHS = (SHORT, 10, 15, 20, 25, 30)
BETAS, TAUS = (3, 5), (1.0, 2.0, 3.0, 4.0, 5.0)

_MOST_TOKENS = 200


@dataclass(frozen=True)
class Contestant:
    """A way to translate.

    Args:
        name: in the records.
        config: the speculative_config.
        beams: width of the search.
    """

    name: str
    config: Mapping[str, Any] = field(default_factory=lambda: {"method": "none"}, hash=False)
    beams: int = 1

    @property
    def params(self) -> SamplingParams:
        """Greedy, or beam search."""
        return SamplingParams(temperature=0, max_tokens=_MOST_TOKENS, beam_width=self.beams)


@dataclass(frozen=True)
class Sample:
    """Sentences to translate.

    Args:
        sources: in English.
        references: in German.
    """

    sources: Sequence[str]
    references: Sequence[str]


def specdec(drafter: str, k: int = K, beta: int = BETA, tau: float = TAU) -> str:
    """The name of a Spec-Drafter with `top_beta`."""
    return f"{drafter} k={k} beta={beta} tau={tau:g}"


def blockwise(k: int, rule: str = "") -> str:
    """The name of a drafter of blockwise heads; without a rule it is lossless."""
    return f"blockwise-{k}" + (f" {rule}" if rule else "")


def lossless(drafter: str, k: int | None = None) -> str:
    """The name of a Spec-Drafter with the default rule; without k, with the default controller."""
    return f"{drafter} lossless" + ("" if k is None else f" k={k}")


def contestants(options: DrafterOptions, drafters: Mapping[str, Path]) -> list[Contestant]:
    """The baselines, and whatever those of the planned drafters that are there allow."""
    found = {each.name: each for each in (Contestant(BEAM, beams=5), Contestant(GREEDY))}
    for k in (10, 25):
        if (name := f"blockwise-{k}") in drafters:
            base = {"method": "blockwise", "model": str(drafters[name]), "controller": "fixed"}
            _add(found, blockwise(k), base, k)
            _add(found, blockwise(k, "top_beta"), {**base, "acceptance": _rule()}, k)
    for shape in SHAPES:
        if (name := f"specdec-{shape}") in drafters:
            _add_spec(found, name, drafters[name], K)
    for k in LENGTHS:
        if (own := options.drafter_of(k, drafters)) is not None:
            _add_spec(found, own, drafters[own], k)
    if MAIN in drafters:
        for beta in BETAS:
            for tau in TAUS:
                _add_spec(found, MAIN, drafters[MAIN], K, beta, tau)
        plain = {"method": "spec_drafter", "model": str(drafters[MAIN])}
        _add(found, lossless(MAIN), plain, K)
        _add(found, lossless(MAIN, SHORT), {**plain, "controller": "fixed"}, SHORT)
    return list(found.values())


def _rule(beta: int = BETA, tau: float = TAU) -> dict[str, Any]:
    return {"rule": "top_beta", "beta": beta, "tau": tau}


def _add_spec(
    found: dict[str, Contestant],
    drafter: str,
    path: Path,
    k: int,
    beta: int = BETA,
    tau: float = TAU,
) -> None:
    config = {"method": "spec_drafter", "model": str(path), "controller": "fixed"}
    config["draft_quantization"] = "none"  # as published
    _add(found, specdec(drafter, k, beta, tau), {**config, "acceptance": _rule(beta, tau)}, k)


def _add(found: dict[str, Contestant], name: str, config: Mapping[str, Any], k: int) -> None:
    found.setdefault(name, Contestant(name, {**config, "num_speculative_tokens": k}))


def measure(
    llm: LLM, all_of_them: Sequence[Contestant], sample: Sample, rounds: int, journal: Journal
) -> None:
    """Translate sentence by sentence; a record for each contestant, sentence and round.

    Args:
        llm: the target.
        all_of_them: who translates.
        sample: what.
        rounds: how often.
        journal: has the records so far, which are not measured again.
    """
    done = {_key(r) for r in journal.records if r["type"] == "sentence"}
    _warm_up(llm, all_of_them, sample)
    with progress_bar() as bar:
        turns = [(turn, number) for turn in range(rounds) for number in range(len(sample.sources))]
        for index, (turn, number) in enumerate(bar.track(turns, description="sentences")):
            for one in order(all_of_them, index):
                record = {"type": "sentence", "name": one.name, "round": turn, "number": number}
                if _key(record) not in done:
                    journal.add({**record, **_translated(llm, one, sample.sources[number])})


def _key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    return record["name"], record["round"], record["number"]


def _warm_up(llm: LLM, all_of_them: Sequence[Contestant], sample: Sample) -> None:
    for one in all_of_them:
        llm.generate(sample.sources[0], one.params, speculative_config=one.config)


def _translated(llm: LLM, one: Contestant, source: str) -> dict[str, Any]:
    (output,) = llm.generate(source, one.params, speculative_config=one.config)
    metrics = output.metrics
    if metrics.drafter_failure is not None:
        raise BenchmarkError(f"{one.name}: {metrics.drafter_failure}")
    return {
        "text": output.text,
        "tokens": metrics.generated_tokens,
        "seconds": metrics.seconds,
        "encode_seconds": metrics.encode_seconds,
        "draft_seconds": metrics.draft_seconds,
        "verify_seconds": metrics.verify_seconds,
        "passes": metrics.target_passes,
        "drafts": metrics.num_drafts,
        "accepted": metrics.num_accepted_tokens,
    }


def measure_batches(
    llm: LLM,
    all_of_them: Sequence[Contestant],
    sources: Sequence[str],
    sizes: Sequence[int],
    rounds: int,
    journal: Journal,
) -> None:
    """Translate the sources in batches of each size; a record for each contestant and round.

    Args:
        llm: the target; it has to advance the largest batch together.
        all_of_them: who translates.
        sources: what; in random order, so that batches hold sentences of all lengths.
        sizes: of batches.
        rounds: how often.
        journal: see `measure`.
    """
    done = {(*_key(r), r["size"]) for r in journal.records if r["type"] == "batch"}
    mixed = random.Random(0).sample(list(sources), len(sources))
    turns = [(turn, size) for turn in range(rounds) for size in sizes]
    with progress_bar() as bar:
        for index, (turn, size) in enumerate(bar.track(turns, description="batches")):
            for one in order(all_of_them, index):
                record = {"type": "batch", "name": one.name, "round": turn, "number": len(mixed)}
                if (*_key(record), size) not in done:
                    seconds = _seconds_of_batches(llm, one, mixed, size)
                    journal.add({**record, "size": size, "seconds": seconds})


def _seconds_of_batches(
    llm: LLM, one: Contestant, sources: Sequence[str], size: int
) -> list[float]:
    """How long each batch took, until its last sentence was translated."""
    seconds = []
    for start in range(0, len(sources), size):
        begun = time.perf_counter()
        llm.generate(sources[start : start + size], one.params, speculative_config=one.config)
        seconds.append(time.perf_counter() - begun)
    return seconds
