"""Costs of a step: the target's pass by nodes, context and hidden states, and the rest.

Four tables:

- *Nodes*: seconds of a pass by its number of nodes, and over those of one node.
- *Context*: seconds of a pass of one node by the number of tokens before it, beside the straight
  line through the shortest and the longest context.
- *Hidden states*: a pass that returns the hidden states of three layers (an early, a middle and a
  late one, as EAGLE-3 uses) over the same pass without, with a 95 % interval over rounds.
- *Overhead*: the share of a step outside the target's pass: drafting by `ngram`, distributions,
  acceptance, commit, text, bookkeeping. Every draft is filled up to a chain of 5 nodes or a tree of
  32, whatever `ngram` finds.

    python -m benchmarks.step_cost

The variants of a table take turns in every round, in one process; seconds are medians.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks import BenchmarkError, harness
from benchmarks.harness import in_turn, load, machine, one_line_errors, report, table, timed
from tokenleap import LLM, SamplingParams
from tokenleap.bench.summary import Interval, bootstrap_ratio
from tokenleap.control import Budget, Fixed
from tokenleap.core.acceptance import rule_class
from tokenleap.core.tree import Draft, TokenTree, chain
from tokenleap.drafters.base import Drafter, DrafterTraits
from tokenleap.drafters.lookups import NgramDrafter
from tokenleap.drafters.options import NgramOptions
from tokenleap.engine.jobs import JobSpec
from tokenleap.engine.scheduler import Scheduler
from tokenleap.request import Request
from tokenleap.runtime.inputs import PassInputs
from tokenleap.runtime.kv_slab import KVSlab
from tokenleap.runtime.network import LOGITS, Need, PassOutput
from tokenleap.runtime.target import Target
from tokenleap.speculation import Speculation, Strategy

NODES = (1, 2, 4, 8, 16, 32)
HIDDEN_NODES = (1, 8, 32)
CONTEXTS = (256, 1024, 2048, 4096, 8000)
SHAPES = {"a chain of 5": (1, 5), "a tree of 32": (4, 8)}
"""Paths below the root, and the tokens of each."""


@one_line_errors()
def main(
    model: harness.TinyModel = "smollm2-135m",
    rounds: Annotated[int, typer.Option(min=1, help="Passes of each variant.")] = 20,
    steps: Annotated[int, typer.Option(min=2, help="Steps whose overhead is measured.")] = 100,
    context: Annotated[int, typer.Option(min=1, help="Tokens before the nodes.")] = 256,
    quantization: harness.Quantization = "auto",
    runtime: harness.Runtime = "auto",
    dtype: harness.Dtype = "auto",
    device: harness.Device = "auto",
) -> None:
    """Measure what passes and steps cost."""
    options: dict[str, Any] = {"quantization": quantization, "runtime": runtime}
    if model in harness.RANDOM:
        llm = LLM(load(model, dtype, device).module, **options)
    else:  # not as a module, so that a GGUF file keeps its quantization
        llm = LLM(model, dtype=dtype, device=device, **options)
    target = llm.engine.target
    most = target.max_model_len - max(NODES)
    if context > most:
        raise BenchmarkError(f"--context must be at most {most}, got {context}.")
    contexts = [size for size in CONTEXTS if size < target.max_model_len]
    tables = (
        _nodes_table(pass_seconds(target, [(context, count) for count in NODES], rounds)),
        _context_table(pass_seconds(target, [(size, 1) for size in contexts], rounds)),
        _hidden_table(hidden_ratios(target, context, HIDDEN_NODES, rounds), hidden_layers(target)),
        _overhead_table({name: overhead(llm, *SHAPES[name], context, steps) for name in SHAPES}),
    )
    facts = {**machine(target.device, target.dtype), "runtime": target.network.name}
    print(report("step_cost", facts, *tables))


def pass_seconds(
    target: Target, sizes: Sequence[tuple[int, int]], rounds: int
) -> dict[tuple[int, int], float]:
    """Median seconds for each (tokens before, nodes); each context has its own row."""
    contexts = sorted({context for context, _ in sizes}, reverse=True)
    rows = {context: row for row, context in enumerate(contexts)}
    _fill(target, contexts[0])
    for context, row in rows.items():
        if row:
            target.fork(0, row)
            target.rollback(row, context)

    def run(size: tuple[int, int], _: None) -> float:
        context, nodes = size
        return timed(lambda: target.verify([rows[context]], [chain([0] * nodes)]))[0]

    seconds = in_turn(sizes, [None], rounds, run, warm_up=1, doing="passes")
    for row in rows.values():
        target.remove(row)
    return {size: median(times[0]) for size, times in seconds.items()}


def hidden_ratios(
    target: Target, context: int, nodes: Sequence[int], rounds: int
) -> dict[int, Interval]:
    """By nodes: seconds of a pass that returns hidden states, over those of one that does not.

    The interval is over rounds, each of which compares two passes of about the same moment.
    """
    needs = {False: LOGITS, True: Need(hidden=hidden_layers(target))}
    _fill(target, context)

    def run(hidden: bool, count: int) -> float:
        return timed(lambda: target.verify([0], [chain([0] * count)], need=needs[hidden]))[0]

    seconds = in_turn((False, True), nodes, rounds, run, warm_up=1, doing="hidden states")
    target.remove(0)
    pairs = zip(nodes, seconds[True], seconds[False], strict=True)
    return {
        count: bootstrap_ratio([w / wo for w, wo in zip(with_, without, strict=True)])
        for count, with_, without in pairs
    }


def hidden_layers(target: Target) -> tuple[int, ...]:
    """An early, a middle and a late layer: 2, L / 2 and L - 3 where the model has enough."""
    num_layers = target.network.num_layers
    return tuple(sorted({min(2, num_layers), num_layers // 2, max(0, num_layers - 3)}))


def _fill(target: Target, length: int) -> None:
    target.add(0)
    target.prefill(0, [token % target.vocab_size for token in range(length)])


class Timed:
    """A network that adds up the seconds of its passes (see `Network`)."""

    def __init__(self, network: Any) -> None:
        self._network = network
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def forward(self, inputs: PassInputs, slab: KVSlab, need: Need) -> PassOutput:
        began = time.perf_counter()
        output: PassOutput = self._network.forward(inputs, slab, need)
        self.seconds += time.perf_counter() - began
        return output


class Filled(Drafter):
    """Drafts of one shape: what `ngram` proposes, filled up with the root's token."""

    def __init__(self, paths: int, length: int) -> None:
        self.traits = DrafterTraits(drafts_trees=paths > 1)
        self._ngram = NgramDrafter(NgramOptions(prompt_lookup_min=1))
        self._length = length
        one = range(length)
        self._parents = (-1, *(path * length + i if i else 0 for path in range(paths) for i in one))

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        found = self._ngram.propose(batch, budgets)
        return [self._filled(draft.tree) for draft in found]

    def _filled(self, tree: TokenTree) -> Draft:
        root, *tokens = tree.tokens
        path = [*tokens, *[root] * self._length][: self._length]
        paths = (len(self._parents) - 1) // self._length
        return Draft.deterministic(TokenTree((root, *path * paths), self._parents))


@dataclass(frozen=True)
class Overhead:
    """Median seconds of a step, and of the pass in it."""

    step: float
    forward: float


def overhead(llm: LLM, paths: int, length: int, context: int, steps: int) -> Overhead:
    """Measure steps with drafts of one shape."""
    target = llm.engine.target
    network = target.network
    timed: Any = Timed(network)
    target.network = timed
    strategy = Strategy(Filled(paths, length), Fixed(length), rule_class("coupled")())
    scheduler = Scheduler(target, Speculation(strategy))
    prompt = [token % target.vocab_size for token in range(context)]
    # A step commits at least one token, and at most a whole path and the bonus token.
    room = target.max_model_len - context
    params = SamplingParams(temperature=0, max_tokens=min(room, steps * length), ignore_eos=True)
    (request,) = llm.engine.make_requests(JobSpec(prompt, params))
    scheduler.add(request)
    times: list[tuple[float, float]] = []
    while scheduler.busy and len(times) < steps:
        before, began = timed.seconds, time.perf_counter()
        scheduler.step()
        times.append((time.perf_counter() - began, timed.seconds - before))
    scheduler.abort([request])
    target.network = network
    times = times[1:]  # the first one computes the prompt
    return Overhead(median(step for step, _ in times), median(forward for _, forward in times))


def _nodes_table(seconds: dict[tuple[int, int], float]) -> str:
    first = seconds[min(seconds, key=lambda size: size[1])]
    return table(
        list(seconds.items()),
        {
            "nodes": lambda row: row[0][1],
            "ms": lambda row: _ms(row[1]),
            "over one": lambda row: f"{row[1] / first:.2f}",
        },
    )


def _context_table(seconds: dict[tuple[int, int], float]) -> str:
    shortest, longest = min(seconds)[0], max(seconds)[0]
    low, high = seconds[shortest, 1], seconds[longest, 1]
    slope = (high - low) / max(1, longest - shortest)
    return table(
        list(seconds.items()),
        {
            "tokens before": lambda row: row[0][0],
            "ms": lambda row: _ms(row[1]),
            "the straight line": lambda row: _ms(low + slope * (row[0][0] - shortest)),
        },
    )


def _hidden_table(ratios: dict[int, Interval], layers: Sequence[int]) -> str:
    title = f"with hidden states of layers {', '.join(map(str, layers))} over without"
    return table(list(ratios), {"nodes": str, title: ratios.__getitem__})


def _overhead_table(found: dict[str, Overhead]) -> str:
    return table(
        list(found.items()),
        {
            "every step drafts": lambda row: row[0],
            "step ms": lambda row: _ms(row[1].step),
            "pass ms": lambda row: _ms(row[1].forward),
            "outside the pass ms": lambda row: _ms(row[1].step - row[1].forward),
            "share": lambda row: f"{1 - row[1].forward / row[1].step:.1%}",
        },
    )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f}"


if __name__ == "__main__":
    typer.run(main)
