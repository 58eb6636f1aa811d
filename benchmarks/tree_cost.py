"""What a tree saves over its paths: k drafts in one pass, as a token tree and as batch rows.

Trees are k paths of d tokens whose first s tokens are the same. As a tree (`Target.verify`) the
shared tokens are computed once; as rows (`RowsVerifier`) every path is a batch row with KV of its
own: its shared tokens are computed again, and the context's KV is copied for all rows but the
first. Passes of both forms alternate in one process; seconds are medians, and those of rows
include the copies.

    python -m benchmarks.tree_cost --model tiny

Prints a Markdown table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Annotated

import torch
import typer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks import BenchmarkError, flags
from benchmarks.loading import load
from benchmarks.report import command_line, machine, markdown_table, one_line_errors, progress_bar
from foretoken.analysis.rows import RowsVerifier
from foretoken.bench.rounds import order
from foretoken.core.tree import TokenTree
from foretoken.models.support import default_device, default_dtype
from foretoken.runtime.target import Target

__all__ = ["Case", "Cost", "main", "measure", "tiny"]

TINY = "tiny"
FORMS = ("tree", "rows")
_KEY = 0


@dataclass(frozen=True)
class Case:
    """A tree of k paths.

    Args:
        paths: k.
        depth: d, drafted tokens of each path.
        shared: s, how many of them all paths begin with; less than d.
    """

    paths: int
    depth: int
    shared: int

    def tree(self, vocab_size: int) -> TokenTree:
        """One chain of s tokens below the root, and k of d - s below that."""
        parents = list(range(-1, self.shared))
        for _ in range(self.paths):
            first = len(parents)
            parents += [self.shared, *range(first, first + self.depth - self.shared - 1)]
        return TokenTree(tuple(node % vocab_size for node in range(len(parents))), tuple(parents))


@dataclass(frozen=True)
class Cost:
    """What one form takes for one tree.

    Args:
        positions: computed in a pass, root included.
        written: positions whose KV was written, copies included.
        seconds: of a pass, the median over rounds.
    """

    positions: int
    written: int
    seconds: float


def main(
    model: Annotated[
        str, typer.Option(help="Folder, GGUF file or alias; tiny: random weights, no files.")
    ] = "smollm2-135m",
    paths: Annotated[list[int] | None, typer.Option(min=1, help="k (repeatable).")] = None,
    depth: Annotated[int, typer.Option(min=1, help="d, tokens of a path.")] = 6,
    shared: Annotated[
        list[int] | None, typer.Option(min=0, help="s, less than d (repeatable).")
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens before the tree.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="Passes of each form and tree.")] = 20,
    dtype: flags.Dtype = "auto",
    device: flags.Device = "auto",
) -> None:
    """Measure verification of k drafts as a token tree against k batch rows."""
    with one_line_errors():
        cases = _cases(paths or [1, 2, 4, 8], depth, shared or [0, depth // 2])
        module = tiny(dtype, device) if model == TINY else load(model, dtype, device).module
        target = Target(module)
        costs = measure(target, cases, context, rounds)
    print(f"`{command_line('benchmarks.tree_cost')}`\n\n{_markdown(costs, kv_bytes(module))}\n")
    facts = {**machine(target.device), "dtype": str(target.dtype).removeprefix("torch.")}
    print("\n".join(f"- {name}: {value}" for name, value in facts.items()))


def _cases(paths: list[int], depth: int, shared: list[int]) -> list[Case]:
    if max(shared) >= depth:
        raise BenchmarkError(f"--shared must be less than --depth {depth}, got {max(shared)}.")
    # Without repetitions: a single path shares nothing, whatever s is.
    kept = {Case(k, depth, 0 if k == 1 else s) for s, k in product(shared, paths)}
    return sorted(kept, key=lambda case: (case.shared, case.paths))


def tiny(dtype: str, device: str) -> PreTrainedModel:
    """Two layers of random weights: for trying the benchmark out."""
    config = AutoConfig.for_model(
        "llama",
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    place = default_device(device)
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=default_dtype(dtype, place)
    )
    model.to(place)  # type: ignore[arg-type]
    return model


def kv_bytes(model: PreTrainedModel) -> int:
    """Bytes of one position's keys and values in all layers."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    return int(2 * config.num_hidden_layers * groups * width * model.dtype.itemsize)


def measure(
    target: Target, cases: list[Case], context: int, rounds: int
) -> dict[Case, dict[str, Cost]]:
    """Both forms on every tree after the same context, interleaved.

    Raises:
        BenchmarkError: context and tree do not fit into the model's.
    """
    deepest = max(1 + case.depth for case in cases)
    if context + deepest > target.max_model_len:
        raise BenchmarkError(
            f"--context must be at most {target.max_model_len - deepest} for this model and "
            f"depth, got {context}."
        )
    target.add(_KEY)
    target.prefill(_KEY, [token % target.vocab_size for token in range(context)])
    with progress_bar() as bar:
        return {
            case: _measure_case(target, case, rounds)
            for case in bar.track(cases, description="trees")
        }


def _measure_case(target: Target, case: Case, rounds: int) -> dict[str, Cost]:
    tree, rows = case.tree(target.vocab_size), RowsVerifier(target)
    forms: dict[str, Callable[[], object]] = {
        "tree": lambda: target.verify([_KEY], [tree]),
        "rows": lambda: rows.verify([_KEY], [tree]),
    }
    seconds: dict[str, list[float]] = {form: [] for form in forms}
    forms["rows"]()  # makes the slab as large as it will be
    positions, copied = rows.num_positions, rows.num_copied
    for index in range(rounds + 1):  # the first one warms up
        for form in order(FORMS, index):
            began = time.perf_counter()
            forms[form]()
            seconds[form].append(time.perf_counter() - began)
    rows.close()
    nodes = len(tree)
    return {
        "tree": Cost(nodes, nodes, median(seconds["tree"][1:])),
        "rows": Cost(positions, positions + copied, median(seconds["rows"][1:])),
    }


def _markdown(costs: Mapping[Case, Mapping[str, Cost]], position_bytes: int) -> str:
    header = ["paths x depth", "shared"]
    header += [f"{form} {what}" for what in ("positions", "KV kB", "ms") for form in FORMS]
    header += ["rows / tree"]
    return markdown_table(
        header,
        [
            [
                f"{case.paths} x {case.depth}",
                str(case.shared),
                *(str(cost.positions) for cost in pair),
                *(f"{cost.written * position_bytes / 1000:,.1f}" for cost in pair),
                *(f"{cost.seconds * 1000:.2f}" for cost in pair),
                f"{pair[1].seconds / pair[0].seconds:.2f}x",
            ]
            for case, by_form in costs.items()
            for pair in [[by_form[form] for form in FORMS]]
        ],
    )


if __name__ == "__main__":
    typer.run(main)
