"""What a step costs: the pass by nodes and by context, and everything beside the pass.

Three tables. *Nodes*: seconds of a pass by the number of nodes, and over that of one. *Context*:
seconds of a pass of one node by the number of tokens before it, beside the straight line through
the first and the last. *Overhead*: the share of a step that is not the target's forward pass:
drafting by `ngram`, distributions, acceptance, commit, text, bookkeeping. There every draft is
filled up to a chain of 5 nodes or a tree of 32, whatever `ngram` finds.

    python -m benchmarks.step_cost

Sizes alternate from round to round in one process; figures are medians.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated, TypeVar

import typer
from torch import Tensor

from benchmarks import BenchmarkError, flags
from benchmarks.loading import Loaded, load
from benchmarks.report import command_line, machine, markdown_table, one_line_errors, progress_bar
from benchmarks.tree_cost import TINY, tiny
from foretoken import LLM, SamplingParams
from foretoken.bench.rounds import order
from foretoken.control import Budget, Fixed
from foretoken.core.acceptance import rule_class
from foretoken.core.tree import Draft, TokenTree, chain
from foretoken.drafters.base import Drafter
from foretoken.drafters.ngram import NgramDrafter, NgramOptions
from foretoken.engine.scheduler import Engine
from foretoken.request import Request
from foretoken.runtime.inputs import PassInputs
from foretoken.runtime.kv_slab import KVSlab
from foretoken.runtime.network import Network
from foretoken.runtime.target import Target

__all__ = ["Filled", "Overhead", "Timed", "main", "overhead", "pass_seconds"]

NODES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (256, 1024, 2048, 4096, 8000)
SHAPES = {"a chain of 5": (1, 5), "a tree of 32": (4, 8)}
"""Paths below the root, and the tokens of each."""

Size = TypeVar("Size")


def main(
    model: Annotated[
        str, typer.Option(help="Folder, GGUF file or alias; tiny: random weights, no files.")
    ] = "smollm2-135m",
    rounds: Annotated[int, typer.Option(min=1, help="Passes of each size.")] = 20,
    steps: Annotated[int, typer.Option(min=2, help="Steps whose overhead is measured.")] = 100,
    context: Annotated[int, typer.Option(min=1, help="Tokens before the nodes.")] = 256,
    quantization: Annotated[str | None, typer.Option(help="int8 or int4.")] = None,
    runtime: Annotated[str, typer.Option(help="auto, native or torch.")] = "auto",
    dtype: flags.Dtype = "auto",
    device: flags.Device = "auto",
) -> None:
    """Measure what passes and steps cost."""
    with one_line_errors():
        given = Loaded(tiny(dtype, device), None) if model == TINY else load(model, dtype, device)
        module = given.module
        target = Target(module, quantization=quantization, runtime=runtime)
        if context + max(NODES) > target.max_model_len:
            most = target.max_model_len - max(NODES)
            raise BenchmarkError(f"--context must be at most {most}, got {context}.")
        contexts = [size for size in CONTEXTS if size < target.max_model_len]
        with progress_bar() as bar:
            task = bar.add_task("parts", total=3)
            nodes = pass_seconds(target, [(context, count) for count in NODES], rounds)
            bar.advance(task)
            lengths = pass_seconds(target, [(size, 1) for size in contexts], rounds)
            bar.advance(task)
            llm = LLM(module, tokenizer=given.tokenizer, quantization=quantization, runtime=runtime)
            beside = {name: overhead(llm, *SHAPES[name], context, steps) for name in SHAPES}
            bar.advance(task)
    print(f"`{command_line('benchmarks.step_cost')}`\n")
    print(f"{_nodes_table(nodes)}\n\n{_context_table(lengths)}\n\n{_overhead_table(beside)}\n")
    facts = {**machine(target.device), "dtype": str(target.dtype).removeprefix("torch.")}
    facts["runtime"] = target.network.name
    print("\n".join(f"- {name}: {value}" for name, value in facts.items()))


def pass_seconds(
    target: Target, sizes: Sequence[tuple[int, int]], rounds: int
) -> dict[tuple[int, int], float]:
    """Medians for (tokens before, nodes), interleaved: each context is a row of its own."""
    contexts = sorted({context for context, _ in sizes}, reverse=True)
    rows = {context: row for row, context in enumerate(contexts)}
    target.add(0)
    target.prefill(0, [token % target.vocab_size for token in range(contexts[0])])
    for context, row in rows.items():
        if row:
            target.fork(0, row)
            target.rollback(row, context)

    def run(size: tuple[int, int]) -> None:
        context, nodes = size
        target.verify([rows[context]], [chain([0] * nodes)])

    seconds = _medians(run, sizes, rounds)
    for row in rows.values():
        target.remove(row)
    return seconds


def _medians(run: Callable[[Size], None], keys: Sequence[Size], rounds: int) -> dict[Size, float]:
    times: dict[Size, list[float]] = {key: [] for key in keys}
    for index in range(rounds + 1):  # the first one warms up
        for key in order(keys, index):
            began = time.perf_counter()
            run(key)
            times[key].append(time.perf_counter() - began)
    return {key: median(values[1:]) for key, values in times.items()}


class Timed:
    """A network that measures its passes (see `Network`)."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.least_nodes, self.exact_trees = network.least_nodes, network.exact_trees
        self.name, self.num_layers = network.name, network.num_layers
        self.seconds = 0.0

    @property
    def likeliest(self) -> Sequence[int] | None:
        """See `Network.likeliest`."""
        return self._network.likeliest

    def forward(self, inputs: PassInputs, slab: KVSlab, *, scored: bool) -> Tensor | None:
        """See `Network.forward`."""
        began = time.perf_counter()
        logits = self._network.forward(inputs, slab, scored=scored)
        self.seconds += time.perf_counter() - began
        return logits


class Filled(Drafter):
    """Drafts of one shape: what `ngram` proposes, filled up with the root's token.

    Args:
        paths: below the root.
        length: tokens of each.
    """

    def __init__(self, paths: int, length: int) -> None:
        self.drafts_trees = paths > 1
        self._ngram = NgramDrafter(NgramOptions(prompt_lookup_min=1))
        self._length = length
        one = range(length)
        self._parents = (-1, *(path * length + i if i else 0 for path in range(paths) for i in one))

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """One draft each, all of the same shape."""
        found = self._ngram.propose(batch, budgets)
        return [self._filled(draft.tree) for draft in found]

    def _filled(self, tree: TokenTree) -> Draft:
        root, *tokens = tree.tokens
        path = [*tokens, *[root] * self._length][: self._length]
        paths = (len(self._parents) - 1) // self._length
        return Draft.deterministic(TokenTree((root, *path * paths), self._parents))


@dataclass(frozen=True)
class Overhead:
    """Seconds of a step, and of the pass in it: medians."""

    step: float
    forward: float


def overhead(llm: LLM, paths: int, length: int, context: int, steps: int) -> Overhead:
    """Of steps with drafts of one shape."""
    target = llm._target
    timed = Timed(target.network)
    target.network = timed  # type: ignore[assignment]
    engine = Engine(target, Filled(paths, length), rule_class("coupled")(), Fixed(length))
    prompt = [token % target.vocab_size for token in range(context)]
    # Every step commits a token at least, and not more than a whole path.
    room = target.max_model_len - context
    params = SamplingParams(temperature=0, max_tokens=min(room, steps * length), ignore_eos=True)
    (request,) = llm._requests(prompt, params, False)
    engine.add(request)
    times: list[tuple[float, float]] = []
    while engine.busy and len(times) < steps:
        before, began = timed.seconds, time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - began, timed.seconds - before))
    engine.abort([request])
    target.network = timed._network
    times = times[1:]  # the first one computes the prompt
    return Overhead(median(step for step, _ in times), median(forward for _, forward in times))


def _nodes_table(seconds: dict[tuple[int, int], float]) -> str:
    first = seconds[min(seconds, key=lambda size: size[1])]
    return markdown_table(
        ["nodes", "ms", "over one"],
        [
            [str(nodes), f"{each * 1000:.2f}", f"{each / first:.2f}"]
            for (_, nodes), each in seconds.items()
        ],
    )


def _context_table(seconds: dict[tuple[int, int], float]) -> str:
    shortest, longest = min(seconds)[0], max(seconds)[0]
    low, high = seconds[shortest, 1], seconds[longest, 1]
    slope = (high - low) / max(1, longest - shortest)
    return markdown_table(
        ["tokens before", "ms", "the straight line"],
        [
            [str(context), *(f"{1000 * t:.2f}" for t in (each, low + slope * (context - shortest)))]
            for (context, _), each in seconds.items()
        ],
    )


def _overhead_table(found: dict[str, Overhead]) -> str:
    return markdown_table(
        ["every step drafts", "step ms", "pass ms", "beside it ms", "share"],
        [
            [
                name,
                f"{each.step * 1000:.2f}",
                f"{each.forward * 1000:.2f}",
                f"{(each.step - each.forward) * 1000:.2f}",
                f"{1 - each.forward / each.step:.1%}",
            ]
            for name, each in found.items()
        ],
    )


if __name__ == "__main__":
    typer.run(main)
