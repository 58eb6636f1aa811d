"""One round of a cell of the contract: the variants generate the same texts, step by step.

In a round each variant generates the tokens of at least `REQUESTS` requests, with the cell's batch
size of them running at a time: when one ends, the next prompt joins. The variant that has generated
fewest tokens takes the next step, so that all variants see the same state of the machine, which may
be twice as fast in one second as in the next. Prefill takes equally long for all; the ratio is of
tokens/s after it. Each round has new prompts while there are any, so that the intervals are about
the kind of text and not about single prompts.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from benchmarks.contract_rounds import Cell
from tokenleap import LLM, SamplingParams
from tokenleap.bench.contestants import BASELINE
from tokenleap.bench.own import encode, random_ids
from tokenleap.bench.prompts_file import Prompt
from tokenleap.bench.run import order
from tokenleap.engine.jobs import JobSpec

__all__ = ["HOT", "RANDOM", "Texts", "run_round", "warm_up"]

RANDOM, HOT = "random tokens", "temperature 1.5"
REQUESTS = 16
"""Requests whose tokens make a round at least: single texts differ more than machines do."""
WARM_UP_TOKENS = 600
"""Generated before anything is timed, so that the controller knows what passes cost."""
RANDOM_TOKENS = 128
"""Length of a random prompt at most."""


@dataclass(frozen=True)
class Texts:
    """The prompts and sampling parameters of all cells.

    Args:
        llm: its tokenizer encodes the prompts.
        sample: prompts of all kinds.
        max_tokens: generated for each.
        limit: most tokens of a prompt.
        seed: of random tokens and of sampling.
    """

    llm: LLM
    sample: Sequence[Prompt]
    max_tokens: int
    limit: int
    seed: int

    def prompts(self, cell: Cell, index: int) -> list[list[int]]:
        """The prompts of a round; when the sample is used up, it begins again."""
        numbers = _numbers(cell, index)
        if cell.kind == RANDOM:
            length = min(self.limit, RANDOM_TOKENS)
            return [random_ids(self.llm, self.seed + number, length) for number in numbers]
        chosen = [p for p in self.sample if cell.kind in (HOT, p.kind)]
        texts = [chosen[number % len(chosen)].text for number in numbers]
        return [encode(self.llm, text, self.limit) for text in texts]

    def params(self, cell: Cell, index: int, max_tokens: int | None = None) -> list[SamplingParams]:
        """Sampling parameters of a round's requests, greedy except where drafters are defeated.

        The requests of the first batch have different lengths, so that from then on requests end
        and join one at a time.
        """
        longest = max_tokens or self.max_tokens
        return [
            SamplingParams(
                temperature=1.5 if cell.kind in (HOT, RANDOM) else 0.0,
                seed=self.seed + number,
                max_tokens=min(longest, ceil(longest * (place + 1) / cell.batch)),
                ignore_eos=True,
            )
            for place, number in enumerate(_numbers(cell, index))
        ]


def _numbers(cell: Cell, index: int) -> range:
    """The numbers of a round's requests among all of the cell's: as many as may be started."""
    most = _requests(cell) + 2 * cell.batch
    return range(index * most, (index + 1) * most)


def _requests(cell: Cell) -> int:
    """How many requests' tokens make a round."""
    return max(REQUESTS, cell.batch)


def warm_up(llms: Mapping[str, LLM], texts: Texts, most: int) -> None:
    """Generate `WARM_UP_TOKENS` with every variant, in the largest batch."""
    cell = Cell(most, HOT)
    for llm in llms.values():
        params = texts.params(cell, 0, max(16, WARM_UP_TOKENS // most))
        llm.generate(texts.prompts(cell, 0)[:most], params[:most])


class Run:
    """One variant in one round.

    Args:
        llm: generates.
        prompts: token ids.
        params: of each prompt.
        batch: most requests running at a time.
    """

    def __init__(
        self,
        llm: LLM,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        batch: int,
    ) -> None:
        self._engine, self._batch = llm.engine, batch
        specs = [JobSpec(*pair) for pair in zip(prompts, params, strict=True)]
        self._jobs = self._engine.jobs(specs)
        self._requests = [job.requests[0] for job in self._jobs]
        self._started = 0
        self._step_seconds = 0.0

    @property
    def outputs(self) -> list[list[int]]:
        """The tokens of every request so far."""
        return [request.output_ids for request in self._requests]

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all outputs so far."""
        return sum(request.metrics.generated_tokens for request in self._requests)

    @property
    def seconds(self) -> float:
        """Of all steps, without their prefill."""
        prefill = sum(request.metrics.prefill_seconds for request in self._requests)
        return self._step_seconds - prefill

    def step(self) -> None:
        """Fill the batch up with new requests, then take one step of the engine."""
        running = sum(not request.finished for request in self._requests[: self._started])
        joining = self._jobs[self._started :][: self._batch - running]
        self._engine.start(joining)
        self._started += len(joining)
        began = time.perf_counter()
        self._engine.step()
        self._step_seconds += time.perf_counter() - began

    def close(self) -> None:
        """Abort the requests that are still running."""
        self._engine.end(self._jobs[: self._started])


def run_round(llms: Mapping[str, LLM], texts: Texts, cell: Cell, index: int) -> dict[str, Any]:
    """Tokens/s of every variant, and how many outputs differ from those of `none`."""
    prompts, params = texts.prompts(cell, index), texts.params(cell, index)
    runs = {
        label: Run(llms[label], prompts, params, cell.batch) for label in order(list(llms), index)
    }
    for llm in llms.values():  # other cells had the same prompts: drafters must not remember them
        llm.reset_drafter_memory()
    enough = texts.max_tokens * _requests(cell)
    # A full garbage collection takes as long as ten passes, at the expense of one variant.
    gc.collect()
    gc.freeze()
    try:
        while unfinished := [run for run in runs.values() if run.num_tokens < enough]:
            min(unfinished, key=lambda run: run.num_tokens).step()
    finally:
        gc.unfreeze()
        for run in runs.values():
            run.close()
    speeds = {label: run.num_tokens / run.seconds for label, run in runs.items()}
    base = runs[BASELINE.label].outputs
    differing = sum(
        _differ(*pair) for run in runs.values() for pair in zip(run.outputs, base, strict=True)
    )
    return {"tokens_per_second": speeds, "differing": differing}


def _differ(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two outputs differ as far as both go."""
    return any(a != b for a, b in zip(one, other, strict=False))
