"""The default controller on recorded texts and pass times: what each mechanism of it gains.

A live run takes an hour, and the machine changes meanwhile. So this records once how long passes
take, by rows and drafted nodes, and what the target generates. It then replays both in seconds.
Controller and drafter are the real ones, and their own time counts. A step takes as long as the
recorded pass of that moment; tokens/s are compared with those of plain passes of the same moments.
Two replays then differ only by the controller.

    python -m benchmarks.control_replay --prompts spec_bench.jsonl --recorded recorded.json

Records if the file does not exist: `--minutes` for passes, and about one more for texts. Only
drafters that need nothing but tokens can be replayed. Requests join and end as in
`benchmarks.contract`.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import geometric_mean, median
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks import harness
from benchmarks.contract import HOT, Texts, kinds_of, temperature_of
from benchmarks.harness import llm_for, load, machine, one_line_errors, report, sample_of, timed
from tokenleap import LLM, SamplingParams
from tokenleap.bench.contestants import BASELINE
from tokenleap.bench.own import prompt_limit
from tokenleap.bench.report import markdown_table
from tokenleap.config import SpeculativeConfig
from tokenleap.control import Controller, CostCurve, controller_class
from tokenleap.core.acceptance import Accepted
from tokenleap.core.sampler import TreeDistributions
from tokenleap.core.tree import Draft, chain
from tokenleap.decode import Outcome, StepTimes
from tokenleap.drafters.base import Drafter
from tokenleap.drafters.lookups import NgramDrafter
from tokenleap.drafters.suffix import SuffixDrafter
from tokenleap.request import Request
from tokenleap.runtime.network import PassOutput

DRAFTERS = {"ngram": NgramDrafter, "suffix": SuffixDrafter}
DRAFTED = (0, 1, 3, 7, 15, 31, 63)
"""Drafted nodes (roots not counted) of the passes of a cycle."""
BATCH_SIZES = (1, 2, 4, 8, 16, 32)
TEXTS, TOKENS = 64, 64
"""Texts of each kind, and tokens generated for each."""
CACHE_BYTES = 4 * 2**20
"""Overwritten before anything is timed, because a real pass evicts all else from the cache."""


@one_line_errors()
def main(
    prompts: harness.Prompts,
    recorded: Annotated[Path, typer.Option(help="JSON file; recorded if it does not exist.")],
    method: Annotated[str, typer.Option(help="ngram or suffix.")] = "ngram",
    model: harness.Model = "smollm2-135m",
    batch_size: Annotated[list[int] | None, typer.Option(help="(Repeatable.)")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Replays, each from another moment on.")] = 2,
    minutes: Annotated[float, typer.Option(help="Time to record passes.")] = 3,
    slow_reading: Annotated[
        float, typer.Option(help="Slow all passes down by so many ms in every other 3 seconds.")
    ] = 0.0,
    max_prompt_tokens: harness.MaxPromptTokens = 256,
    seed: harness.Seed = 0,
    dtype: harness.Dtype = "auto",
    device: harness.Device = "auto",
) -> None:
    """Replay the recording and print a Markdown table."""
    if not recorded.exists():
        llm = llm_for(load(model, dtype, device), BASELINE.config, max_num_seqs=max(BATCH_SIZES))
        texts = _texts(llm, prompts, max_prompt_tokens, seed)
        passes = {rows: _passes(llm, rows, 10 * minutes, seed) for rows in BATCH_SIZES}
        recorded.write_text(json.dumps({"texts": texts, "passes": passes}))
    data = json.loads(recorded.read_text())
    sizes = batch_size or BATCH_SIZES
    cells = {size: replay(data, method, size, rounds, slow_reading / 1000) for size in sizes}
    rows = [[str(size), *_cells(ratios)] for size, ratios in cells.items()]
    header = ["batch", *data["texts"], "mean"]
    remark = "Tokens/s over those of plain decoding."
    found = markdown_table(header, rows)
    print(report("control_replay", machine("cpu"), found, remark))


def _cells(ratios: Mapping[str, float]) -> list[str]:
    return [f"{ratio:.3f}" for ratio in (*ratios.values(), geometric_mean(ratios.values()))]


# Recording


def _texts(llm: LLM, path: Path, most: int, seed: int) -> dict[str, list[Any]]:
    """Prompts with the target's outputs, by kind; one more kind mixes all of them."""
    limit = prompt_limit(llm.max_model_len, most, TOKENS)
    texts = Texts(llm, sample_of(path, seed=seed), TOKENS, limit, seed=0)
    found = dict[str, list[Any]]()
    for kind in kinds_of(texts.sample):
        ids = [texts.prompt(kind, row) for row in range(TEXTS)]
        hot = temperature_of(kind)
        params = [
            SamplingParams(temperature=hot, seed=row, max_tokens=TOKENS, ignore_eos=True)
            for row in range(TEXTS)
        ]
        outputs = [output.token_ids for output in llm.generate(ids, params)]
        found[kind] = list(zip(ids, outputs, strict=True))
    each = TEXTS // len(found)
    mixed = zip(*(of_kind[:each] for of_kind in found.values()), strict=True)
    return {**found, "mixed": [text for group in mixed for text in group]}


def _passes(llm: LLM, rows: int, seconds: float, seed: int) -> list[list[float]]:
    """Seconds of passes in cycles, each of which has every number of drafted nodes once."""
    target, dice = llm.engine.target, random.Random(seed)
    keys = [-(10**9) - row for row in range(rows)]
    for key in keys:
        target.add(key)
        target.prefill(key, [1] * dice.randint(60, 320))
    cycles, began = list[list[float]](), time.perf_counter()
    while time.perf_counter() - began < seconds:
        taken = dict[int, float]()
        for drafted in dice.sample(DRAFTED, len(DRAFTED)):
            trees = [chain([1] * (1 + (drafted + row) // rows)) for row in range(rows)]
            taken[drafted], _ = timed(partial(target.verify, keys, trees))
        cycles.append([taken[drafted] for drafted in DRAFTED])
    for key in keys:
        target.remove(key)
    return cycles


# Replaying


class _Machine:
    """The recorded machine: how long passes take at the present moment.

    It begins at a share `start` of the recording. Passes of every other three seconds are slower.
    """

    def __init__(self, cycles: Sequence[Sequence[float]], start: float, slower: float) -> None:
        seconds = np.array(cycles)
        ends = np.cumsum(seconds.sum(1))
        self._seconds = seconds + slower * (ends // 3 % 2)[:, None]
        self._ends = np.cumsum(self._seconds.sum(1))
        self.now = start * float(self._ends[-1])

    def passes(self, drafted: int) -> tuple[float, float]:
        """Seconds of a pass with so many drafted nodes, and of a plain one."""
        at = int(np.searchsorted(self._ends, self.now % self._ends[-1], side="right"))
        cycle = self._seconds[min(at, len(self._seconds) - 1)]
        beyond = max(0, drafted - DRAFTED[-1]) * (cycle[-1] - cycle[-2]) / 32
        return float(np.interp(drafted, DRAFTED, cycle) + beyond), float(cycle[0])


class _Replayed(Request):
    """A request whose output is known in advance."""

    def __init__(self, prompt: Sequence[int], truth: Sequence[int]) -> None:
        super().__init__(prompt, SamplingParams(), vocab_size=2**17, max_model_len=2**17)
        self.truth = truth

    @property
    def remaining(self) -> int:
        return len(self.truth) - len(self.output_ids)


def replay(
    data: Mapping[str, Any], method: str, batch: int, rounds: int, slower: float
) -> dict[str, float]:
    """Tokens/s over those of plain decoding, by kind of text; geometric means over rounds."""
    ratios: dict[str, list[float]] = {kind: [] for kind in data["texts"]}
    for number in range(rounds):
        config = SpeculativeConfig(method=method)
        drafter = DRAFTERS[method](config.options)
        costs = _measured(data["passes"], 10 * number)
        controller = controller_class("cost_model", looks_up=True)(config.gamma, None, costs)
        warm_up = _Machine(data["passes"][str(batch)], 0.9, slower)
        _Run(controller, drafter, warm_up, batch).ratio(data["texts"][HOT])
        for place, (kind, texts) in enumerate(data["texts"].items()):
            start = (0.13 * place + 0.37 * number) % 1
            machine = _Machine(data["passes"][str(batch)], start, slower)
            drafter.forget()  # `suffix` would remember texts of the warm-up and of other kinds
            ratios[kind].append(_Run(controller, drafter, machine, batch).ratio(texts))
    return {kind: geometric_mean(found) for kind, found in ratios.items()}


def _measured(passes: Mapping[str, Any], first: int) -> CostCurve:
    """The cost curve as a target measures it: medians of five rounds."""
    points = dict[tuple[int, int], float]()
    for rows in (1, 4, 16):
        cycles = passes[str(rows)][first : first + 5]
        for drafted, taken in zip(DRAFTED, zip(*cycles, strict=True), strict=True):
            if rows == 1 or not drafted:
                points[rows, rows + drafted] = median(taken)
    return CostCurve(points)


@dataclass
class _Run:
    """One kind of text at one batch size, until its texts are used up."""

    controller: Controller
    drafter: Drafter
    machine: _Machine
    batch: int

    def ratio(self, texts: Sequence[Any]) -> float:
        """Tokens/s, over those of plain passes at the same moments."""
        waiting = [_Replayed(prompt, truth) for prompt, truth in texts]
        for number, request in enumerate(
            waiting[: self.batch], 1
        ):  # so that they do not end at once
            request.truth = request.truth[: -(-TOKENS * number // self.batch)]
        running, ours, plain = list[_Replayed](), 0.0, 0.0
        while len(running) + len(waiting) >= self.batch:
            while len(running) < self.batch:
                running.append(waiting.pop(0))
            before = sum(len(request.token_ids) for request in running)
            seconds, without = self._step(running)
            tokens = sum(len(request.token_ids) for request in running) - before
            ours, plain = ours + seconds, plain + without * tokens / self.batch
            self.machine.now += seconds
            for request in [r for r in running if not r.remaining]:
                self._release(request)
                running.remove(request)
        for request in running:
            self._release(request)
        return plain / ours

    def _release(self, request: Request) -> None:
        self.drafter.release(request)
        self.controller.release(request)

    def _step(self, batch: Sequence[_Replayed]) -> tuple[float, float]:
        """Take one step; its seconds, and those of a plain pass at this moment."""
        rows, times = len(batch), StepTimes(0.0, 0.0, 0.0)
        _forget_cache()
        clock = [time.perf_counter()]
        budgets = self.controller.budgets(batch, rows)
        drafts = [Draft.empty(request.root) for request in batch]
        if any(budget.nodes for budget in budgets):
            drafts = self.drafter.propose(batch, budgets)
        if not self.controller.resting:
            drafts = self.controller.trim(batch, drafts, rows)
        clock.append(time.perf_counter())
        positions = sum(len(draft.tree) for draft in drafts)
        taken, plain = self.machine.passes(positions - rows)
        outcomes = [_accept(*each) for each in zip(batch, drafts, strict=True)]
        _forget_cache()
        clock.append(time.perf_counter())
        self.drafter.observe(outcomes, times)
        clock.append(time.perf_counter())
        proposing, _, learning = (end - start for start, end in pairwise(clock))
        if self.controller.resting:
            self.controller.costs.settle()
        else:
            self.controller.costs.observe(positions, taken, rows)
            self.controller.observe(outcomes, proposing + learning)
        return taken + proposing + time.perf_counter() - clock[2], plain


def _accept(request: _Replayed, draft: Draft) -> Outcome:
    """Accept the drafted tokens that the recorded text has, and add one more token."""
    tree, path = draft.tree, [0]
    truth = request.truth[len(request.output_ids) :]
    for token in truth[:-1]:
        nodes = [node for node in tree.children[path[-1]] if tree.tokens[node] == token]
        if not nodes:
            break
        path.append(nodes[0])
    kept, rejected = tuple(path[1:]), tree.children[path[-1]]
    request.token_ids += truth[: len(path)]
    accepted = Accepted(kept, truth[len(kept)], rejected, "rejected" if rejected else "")
    logits = torch.empty(len(tree), 0)
    distributions = TreeDistributions(logits, tree, request.sampler, ())
    return Outcome(request, draft, accepted, (), PassOutput(logits), distributions)


_CACHE = np.zeros(CACHE_BYTES // 8)


def _forget_cache() -> None:
    np.add(_CACHE, 1.0, out=_CACHE)


if __name__ == "__main__":
    typer.run(main)
