"""`tokenleap tree` and `tokenleap tune-layers`: the best shape of a drafter, by measurement."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from tokenleap.cli.console import as_json, display, errors, plain, say, table_of, working
from tokenleap.cli.options import (
    JsonOutput,
    ModelOptions,
    SamplingOptions,
    SpeculationOptions,
    flat,
    in_panel,
    open_llm,
    parse_object,
    refuse_given,
)
from tokenleap.cli.plan import read_texts
from tokenleap.cli.root import UsageError, check_writable, examples, write_whole
from tokenleap.drafters.shapes import MAX_DEPTH, MAX_NODES, MAX_RANKS, TreeFile
from tokenleap.lines import shaped

if TYPE_CHECKING:
    from tokenleap.config import SpeculativeConfig
    from tokenleap.core.params import SamplingParams
    from tokenleap.drafters.options import TunedLayers
    from tokenleap.llm import LLM
    from tokenleap.runtime.costs import CostCurve
    from tokenleap.tuning.sequoia import Acceptance, BestTree
    from tokenleap.tuning.tune_layers import Deadline, LayerLaboratory, LayerSearch, Trial

_tree = partial(in_panel, "Tree")
_search = partial(in_panel, "Search")

TREE_EXAMPLES = examples(
    "tokenleap tree prompts.txt --draft-model ./small --output tree.json",
    "tokenleap tree --method early_exit --nodes 16  # three short prompts",
    "tokenleap tree --acceptance-vector 0.7,0.15,0.05 --nodes 12  # without a model",
)

DEFAULT_DEPTH = 16
DEFAULT_RANKS = 8

_FOUND_HERE = ("tree", "tree_top_k", "tree_depth", "num_speculative_tokens", "controller")


@dataclass(frozen=True)
class ShapeOptions:
    """The size limits of the tree, and the acceptance it is computed from."""

    nodes: Annotated[
        int | None,
        _tree("Drafted nodes.", min=1, max=MAX_NODES, show_default="best by measured cost"),
    ] = None
    depth: Annotated[
        int, _tree("Maximum levels; each takes a draft pass.", min=1, max=MAX_DEPTH)
    ] = DEFAULT_DEPTH
    ranks: Annotated[
        int | None,
        _tree("Maximum children of a node.", min=1, max=MAX_RANKS, show_default=str(DEFAULT_RANKS)),
    ] = None
    acceptance_vector: Annotated[
        str | None, _tree("Acceptance by rank, instead of measuring it.", metavar="A,A,...")
    ] = None

    def vector(self) -> tuple[float, ...] | None:
        """The acceptance vector that was given, if any."""
        if self.acceptance_vector is None:
            return None
        if self.ranks is not None:
            raise UsageError("--ranks: --acceptance-vector has its own number of ranks")
        entries = _parse_vector(self.acceptance_vector)
        if len(entries) > MAX_RANKS:
            raise UsageError(f"--acceptance-vector takes {MAX_RANKS} ranks, got {len(entries)}")
        return entries


@dataclass(frozen=True)
class DrafterOptions:
    """The drafter to measure."""

    method: Annotated[
        str | None, in_panel("Speculation", "Drafter that takes trees (`tokenleap methods`).")
    ] = None
    draft_model: Annotated[
        str | None,
        in_panel("Speculation", "Folder, id (ORG/NAME), .gguf file or alias of a draft model."),
    ] = None
    acceptance: Annotated[
        str | None, in_panel("Speculation", "Acceptance rule.", show_default="coupled, lossless")
    ] = None
    speculative_config: Annotated[
        str | None,
        in_panel("Speculation", "All of this as a JSON object, with more fields.", metavar="JSON"),
    ] = None

    def config(self, ranks: int) -> SpeculativeConfig:
        """A configuration that drafts one level of `ranks` children."""
        for name in _FOUND_HERE:
            if name in parse_object("--speculative-config", self.speculative_config):
                raise UsageError(f"{name} in --speculative-config: this command finds the tree")
        shared = SpeculationOptions(**vars(self)).config()
        from tokenleap.tuning.sequoia import one_level

        return one_level(shared, ranks)


@flat
def tree(
    prompts: Annotated[
        Path | None,
        typer.Argument(
            help="Text with a prompt per line, or .jsonl with a prompt per object.",
            metavar="PROMPTS_FILE",
            show_default="three short ones",
        ),
    ] = None,
    *,
    shape: ShapeOptions,
    drafter: DrafterOptions,
    target: ModelOptions,
    sampling: SamplingOptions,
    output: Annotated[
        Path | None, in_panel("Output", "Save the tree to this file.", metavar="FILE.json")
    ] = None,
    json_output: JsonOutput = False,
) -> None:
    """Find the best tree to draft, for your model and prompts.

    Measures how often a node's first, second, ... child is accepted. Finds
    the tree with the most expected tokens per pass (Chen et al.,
    "Sequoia"). Without --nodes, also finds the size with the most tokens per
    second, from measured costs of passes.
    """
    _check_output(output)
    vector = shape.vector()
    if vector is not None and shape.nodes is not None:
        _refuse_unused(prompts, drafter, target, sampling)
        found = solved(vector, shape.nodes, shape.depth)
    else:
        found = _on_a_model(prompts, vector, shape, drafter, target, sampling, quiet=json_output)
    if json_output:
        display().out(as_json(found.as_dict()))
    else:
        show_found(found)
    if output is not None:
        _save_tree(found, output, quiet=json_output)


def _check_output(output: Path | None) -> None:
    if output is None:
        return
    if output.suffix != ".json":
        raise UsageError(f"--output takes a file that ends in .json, got {output}")
    check_writable(output)


def _refuse_unused(prompts: Path | None, *unused: Any) -> None:
    reason = "with --acceptance-vector and --nodes nothing is measured"
    if prompts is not None:
        raise UsageError(f"{prompts}: {reason}")
    refuse_given(reason, *unused)


def _parse_vector(text: str) -> tuple[float, ...]:
    with working("Starting"):
        from tokenleap.tuning.sequoia import acceptance_vector
    try:
        entries = [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(
            f"--acceptance-vector takes probabilities, as in 0.7,0.15,0.05, got {text}"
        ) from None
    return tuple(acceptance_vector(entries).tolist())


def _on_a_model(
    prompts: Path | None,
    vector: tuple[float, ...] | None,
    shape: ShapeOptions,
    drafter: DrafterOptions,
    target: ModelOptions,
    sampling: SamplingOptions,
    *,
    quiet: bool,
) -> Found:
    ranks = len(vector) if vector else shape.ranks or DEFAULT_RANKS
    texts = read_texts(prompts)
    with working("Starting", quiet=quiet):
        config = drafter.config(ranks)
    params = sampling.params_for(target.model)
    llm = open_llm(target, config, quiet=quiet, generation_config=sampling.generation_config)
    timed = shape.nodes is None
    acceptance, costs = measured(llm, texts, params, ranks, costs=timed, quiet=quiet)
    origin = {"method": config.method_name, "model": target.model}
    if vector is not None:
        return solved(vector, shape.nodes, shape.depth, None, costs, **origin)
    return solved(acceptance.vector, shape.nodes, shape.depth, acceptance, costs, **origin)


def _save_tree(found: Found, output: Path, *, quiet: bool) -> None:
    if not found.tree.paths:
        raise UsageError(f"there is no tree to save to {output}: try --nodes or other prompts")
    write_whole(output, as_json(found.file().as_dict()) + "\n")
    if not quiet:
        use = json.dumps({"tree": str(output)})
        note = f"\nThe tree is in {output}. To draft it: --speculative-config '{use}'."
        display().print(plain(note, "note"), soft_wrap=True)


# How `tokenleap tree` shows its result: the acceptance vector, the tree, other shapes.


SHOWN = 40
"""Maximum nodes of a drawing; of a larger tree it shows the most probable."""

_Branch = tuple[int, ...]


def show_found(found: Found) -> None:
    """Print the vector, the tree, and a comparison with other shapes of its size."""
    console = display()
    if found.measured is not None:
        what = f"{found.model}, {found.method}: accepted in {found.measured.drafts} drafts"
        console.print(plain(f"{what}\n"))
        console.print(_vector_table(found.measured))
        console.print()
    if found.tree.paths:
        console.print(plain(f"{found.tree.num_nodes} nodes; probability of reaching each\n"))
        console.print(drawn(found.tree.paths, found.acceptance))
        console.print()
    console.print(_rival_table(found))
    console.print()
    console.print(plain(_tree_verdict(found)))


def _vector_table(acceptance: Acceptance) -> Table:
    table = table_of("rank", "accepted", "error")
    for rank, (rate, error) in enumerate(zip(acceptance.vector, acceptance.errors, strict=True)):
        table.add_row(str(rank), f"{rate:.4f}", f"{error:.4f}")
    return table


def drawn(paths: Sequence[_Branch], acceptance: Sequence[float], shown: int = SHOWN) -> Tree:
    """A drawing of the tree, with the probability of reaching each node."""
    reached = {path: prod(acceptance[rank] for rank in path) for path in paths}
    # A node is never more probable than its parent, which is shallower: the kept nodes are a tree.
    best = sorted(paths, key=lambda path: (-reached[path], len(path), path))
    kept = set(best[:shown])
    root = Tree(plain("last token", "note"), guide_style="note")
    branches: dict[_Branch, Tree] = {(): root}
    for path in sorted(kept, key=lambda path: (len(path), path)):
        branches[path] = branches[path[:-1]].add(_node(path, reached))
    hidden = Counter(_above(path, branches) for path in best[shown:])
    for path, count in hidden.items():
        branches[path].add(plain(f"{count} more", "note"))
    return root


def _node(path: _Branch, reached: Mapping[_Branch, float]) -> Text:
    return Text.assemble((str(path[-1]), "head"), f"  {reached[path]:.3f}")


def _above(path: _Branch, branches: Mapping[_Branch, Tree]) -> _Branch:
    """The nearest ancestor that is drawn."""
    return next(path[:depth] for depth in range(len(path) - 1, -1, -1) if path[:depth] in branches)


def _rival_table(found: Found) -> Table:
    rates = () if found.costs is None else ("tokens\nper second",)
    table = table_of("", "\nnodes", "\nlevels", "tokens\nper pass", *rates, left=1)
    for rival in found.rivals():
        cells = [str(rival.nodes), str(rival.levels), f"{rival.expected_tokens:.3f}"]
        if found.costs is not None:
            cells.append(f"{rival.tokens_per_second(found.costs):.1f}")
        table.add_row(plain(rival.name, "draft" if rival.name == "this tree" else ""), *cells)
    return table


def _tree_verdict(found: Found) -> str:
    if not any(found.acceptance):
        return "No tree: no drafted token is ever accepted."
    if not found.tree.paths:
        return "No tree: by the measured costs, none is faster than plain decoding."
    tree, chain, full, _ = found.rivals()
    over_chain = tree.expected_tokens / chain.expected_tokens - 1
    over_full = tree.expected_tokens / full.expected_tokens - 1
    return (
        f"Expected {tree.expected_tokens:.3f} tokens per pass: {over_chain:+.1%} over the chain of "
        f"as many nodes, {over_full:+.1%} over the best full tree."
    )


# `tokenleap tree`: measure acceptance and costs, compute the best tree, compare other shapes.


LARGEST = 128
"""Maximum nodes where costs choose the size. Costs above 64 positions are extrapolated."""


@dataclass(frozen=True)
class Costs:
    """The cost of a step: verification by positions, drafting by levels."""

    curve: CostCurve
    level: float

    def seconds(self, nodes: int, levels: int) -> float:
        return levels * self.level + self.curve(1 + nodes)


@dataclass(frozen=True)
class Rival:
    """A shape that the best tree is compared with, or the best tree itself."""

    name: str
    nodes: int
    levels: int
    expected_tokens: float

    def as_dict(self, costs: Costs | None) -> dict[str, Any]:
        rate = None if costs is None else self.tokens_per_second(costs)
        return {**vars(self), "tokens_per_second": rate}

    def tokens_per_second(self, costs: Costs) -> float:
        return self.expected_tokens / costs.seconds(self.nodes, self.levels)


@dataclass(frozen=True)
class Found:
    """The best tree, and the measurements of it; what was given was not measured."""

    acceptance: tuple[float, ...]
    measured: Acceptance | None
    costs: Costs | None
    tree: BestTree
    depth: int
    method: str | None = None
    model: str | None = None

    def rivals(self) -> list[Rival]:
        """The tree, the chain of as many nodes, the best full tree, and no draft at all."""
        from tokenleap.analysis import expected_tokens
        from tokenleap.tuning.sequoia import best_widths

        nodes = self.tree.num_nodes
        none = Rival("no draft", 0, 0, 1.0)
        if not nodes:
            return [none]
        widths, tokens = best_widths(self.acceptance, nodes, self.depth)
        return [
            Rival("this tree", nodes, self.tree.depth, self.tree.expected_tokens),
            Rival("chain", nodes, nodes, expected_tokens(self.acceptance[0], nodes)),
            Rival(str(list(widths)), _full_nodes(widths), len(widths), tokens),
            none,
        ]

    def file(self) -> TreeFile:
        tree = self.tree
        return TreeFile(tree.paths, self.acceptance, tree.expected_tokens, self.method, self.model)

    def as_dict(self) -> dict[str, Any]:
        """The fields for JSON: the file's, the measurement and the comparison."""
        found = self.measured
        return {
            **self.file().as_dict(),
            "nodes": self.tree.num_nodes,
            "depth": self.tree.depth,
            "drafts": None if found is None else found.drafts,
            "errors": None if found is None else found.errors,
            "compared": [rival.as_dict(self.costs) for rival in self.rivals()],
        }


def _full_nodes(widths: Sequence[int]) -> int:
    """Nodes of a full tree: the sum over levels of the product of widths down to it."""
    total = 0
    for width in reversed(widths):
        total = width * (1 + total)
    return total


def solved(
    acceptance: Sequence[float],
    nodes: int | None,
    depth: int,
    measured: Acceptance | None = None,
    costs: Costs | None = None,
    **origin: str,
) -> Found:
    """The best tree of this many nodes; None takes the best number by measured costs."""
    from tokenleap.tuning.sequoia import BestTree, best_size, best_tree

    levels = depth
    if nodes is None:
        assert costs is not None, "without a number of nodes, the costs are measured"
        size = best_size(acceptance, costs.curve, LARGEST, depth, costs.level)
        nodes, levels = size.nodes, size.depth
    tree = best_tree(acceptance, nodes, levels) if nodes else BestTree((), 1.0)
    return Found(tuple(acceptance), measured, costs, tree, depth, **origin)


def measured(
    llm: LLM,
    texts: Sequence[str],
    params: SamplingParams,
    ranks: int,
    *,
    costs: bool,
    quiet: bool,
) -> tuple[Acceptance, Costs | None]:
    from tokenleap.tuning.sequoia import measure_acceptance, pass_costs

    prompts = [llm.encode(shaped(llm, text)) for text in texts]
    seeded = params.model_copy(update={"seed": params.seed or 0})
    with working("Measuring the acceptance of every rank", quiet=quiet):
        found = measure_acceptance(llm, prompts, seeded, ranks)
    if not costs:
        return found, None
    with working("Measuring the cost of verification", quiet=quiet):
        return found, Costs(pass_costs(llm), found.draft_seconds)


LAYERS_EXAMPLES = examples(
    "tokenleap tune-layers prompts.txt --output layers.json",
    "tokenleap tune-layers mine.jsonl -o layers.json --seconds 1800 --temperature 1",
    "tokenleap generate 'Dear' --method layer_skip "
    '--speculative-config \'{"layers": "layers.json"}\'',
)

CALIBRATED = 0.15
"""Share of the time limit after which no further prompt is added."""


@dataclass(frozen=True)
class SearchOptions:
    """How much to measure, and for how long."""

    max_tokens: Annotated[int, _search("Tokens per prompt.", min=2)] = 64
    trials: Annotated[int, _search("Maximum timed runs, each on all prompts.", min=1)] = 30
    seconds: Annotated[float, _search("Time limit after the model is loaded.", min=1)] = 600
    temperature: Annotated[
        float, _search("0 is greedy; 1 is the model's own distribution.", min=0)
    ] = 0

    def params(self) -> SamplingParams:
        """Parameters of the calibration texts, seeded so that every run generates the same ones."""
        from tokenleap.core.params import SamplingParams

        return SamplingParams(temperature=self.temperature, max_tokens=self.max_tokens, seed=0)


@flat
def tune_layers(
    prompts: Annotated[
        Path,
        typer.Argument(
            help="Text with a prompt per line, or .jsonl with a prompt per object.",
            metavar="PROMPTS_FILE",
            show_default=False,
        ),
    ],
    *,
    output: Annotated[
        Path, in_panel("Output", "The file to write.", "--output", "-o", metavar="FILE")
    ],
    search: SearchOptions,
    target: ModelOptions,
    json_output: JsonOutput = False,
) -> None:
    """Find the sublayers to skip with --method layer_skip.

    Predicts from acceptance rates and pass times which choices of sublayers
    and draft lengths are fast. Then times the best ones, in turn with plain
    decoding, and saves the fastest (Zhang et al., "Draft & Verify").
    Ctrl-C saves the fastest of those that were run.
    """
    check_writable(output)
    texts = read_texts(prompts)
    with working("Starting", quiet=json_output):
        params = search.params()
    laboratory = _laboratory(target, quiet=json_output)
    found, deadline = _started_search(laboratory, search)
    try:
        with _reporting(found, quiet=json_output) as report:
            report("Generating the calibration texts")
            encoded = [laboratory.llm.encode(shaped(laboratory.llm, text)) for text in texts]
            laboratory.calibrate(encoded, params, lambda: deadline.passed(CALIBRATED))
            found.run()
    except KeyboardInterrupt:
        if found.trials:
            _save_layers(output, _tuned(found, laboratory, target))
            say(f"{output} has the fastest of the {len(found.trials)} choices that were run")
        raise
    tuned = _tuned(found, laboratory, target)
    _save_layers(output, tuned)
    if json_output:
        runs = {"trials": _trials(found)}
        display().out(as_json({"output": str(output), **tuned.model_dump(), **runs}))
        return
    show_tuning(found, laboratory, tuned, len(texts))
    use = json.dumps({"layers": str(output)})
    note = f"\nSaved: --method layer_skip --speculative-config '{use}'."
    display().print(plain(note, "note"), soft_wrap=True)


def _laboratory(target: ModelOptions, *, quiet: bool) -> LayerLaboratory:
    from tokenleap.config import SpeculativeConfig

    llm = open_llm(target, SpeculativeConfig(), quiet=quiet)
    from tokenleap.tuning.tune_layers import LayerLaboratory

    return LayerLaboratory(llm)


def _started_search(
    laboratory: LayerLaboratory, options: SearchOptions
) -> tuple[LayerSearch, Deadline]:
    from tokenleap.tuning.tune_layers import Deadline, LayerSearch

    deadline = Deadline(options.seconds)
    return LayerSearch(laboratory, laboratory.num_layers, deadline, options.trials), deadline


@contextmanager
def _reporting(found: LayerSearch, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show the search's progress on stderr, if that is a terminal."""
    console = errors()
    if quiet or not console.is_terminal:
        yield lambda _: None
        return
    with console.status(plain("Starting ...", "note")) as status:
        found.report = lambda doing: status.update(plain(f"{doing} ...", "note"))
        yield found.report


def _tuned(found: LayerSearch, laboratory: LayerLaboratory, target: ModelOptions) -> TunedLayers:
    from tokenleap.drafters.options import TunedLayers
    from tokenleap.tuning.tune_layers import layers_of

    best = found.best
    assert best is not None, "the caller has checked that there was a run"
    measured: dict[str, Any] = {
        "model": target.model,
        "dtype": str(laboratory.llm.dtype).removeprefix("torch."),
        "device": str(laboratory.llm.device),
        "temperature": laboratory.temperature,
        "prompts": laboratory.num_texts,
        "positions": laboratory.positions,
        **best.as_dict(),
    }
    layers = layers_of(best.estimate.skip)
    return TunedLayers(
        skip_attention=layers["skip_attention"],
        skip_mlp=layers["skip_mlp"],
        num_hidden_layers=laboratory.num_layers,
        num_speculative_tokens=best.gamma,
        measured=measured,
    )


def _trials(found: LayerSearch) -> list[dict[str, Any]]:
    from tokenleap.tuning.tune_layers import layers_of

    return [{**layers_of(trial.estimate.skip), **trial.as_dict()} for trial in found.trials]


def _save_layers(output: Path, tuned: TunedLayers) -> None:
    write_whole(output, as_json(tuned.model_dump()) + "\n")


# How `tokenleap tune-layers` shows its result: the trials, the best one, and what to do.


def show_tuning(
    found: LayerSearch, laboratory: LayerLaboratory, tuned: TunedLayers, num_prompts: int
) -> None:
    """Print the trials, their speed, and whether skipping layers pays on this machine."""
    console = display()
    how = f"temperature {laboratory.temperature:g}" if laboratory.temperature else "greedy"
    used = laboratory.num_texts
    prompts = f"{used} prompts" if used == num_prompts else f"{used} of {num_prompts} prompts"
    console.print(
        plain(
            f"{tuned.measured['model']}, {how}, {prompts}, {laboratory.positions} tokens; alpha of "
            f"{len(found.estimates)} choices measured, {len(found.trials)} run"
        )
    )
    console.print()
    console.print(_trial_table(found))
    console.print()
    for line in _layers_verdict(found, tuned):
        console.print(plain(line))


def _trial_table(found: LayerSearch) -> Table:
    headings = ("left out\nattention", "\nMLP", "\nalpha", "\nc", "\ngamma", "speed-up\npredicted")
    table = table_of(*headings, "\nmeasured", "\nrange", "\nruns")
    for trial in sorted(found.trials, key=lambda t: (-len(t.runs), -t.ratio)):
        style = "draft" if trial is found.best else ""
        table.add_row(*(plain(cell, style) for cell in _cells(trial)))
    return table


def _cells(trial: Trial) -> Sequence[str]:
    estimate = trial.estimate
    kinds = [sublayer.kind for sublayer in estimate.skip]
    return (
        str(kinds.count("attention")),
        str(kinds.count("mlp")),
        f"{estimate.alpha:.3f}",
        f"{estimate.cost:.3f}",
        str(trial.gamma),
        f"{trial.predicted:.2f}x",
        f"{trial.ratio:.2f}x",
        f"{trial.low:.2f}-{trial.high:.2f}",
        str(len(trial.runs)),
    )


def _layers_verdict(found: LayerSearch, tuned: TunedLayers) -> list[str]:
    best = found.best
    assert best is not None, "the caller has checked that there was a run"
    lines = [
        f"Attention left out in layers: {_listed(tuned.skip_attention)}.",
        f"MLP left out in layers: {_listed(tuned.skip_mlp)}.",
    ]
    if best.ratio > 1:
        lines.append(f"Best: {best.ratio:.2f}x plain decoding, drafting {best.gamma}.")
    else:
        lines.append(
            f"None is faster than plain decoding here: the best, drafting {best.gamma}, reaches "
            f"{best.ratio:.2f}x of its speed. Use another method on this machine."
        )
    if not found.confirmed:
        times = "once" if len(best.runs) == 1 else f"{len(best.runs)} times"
        lines.append(f"It was run {times} only: to be sure, give more --seconds or --trials.")
    return lines


def _listed(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers)) or "none"
