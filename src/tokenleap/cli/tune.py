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
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from tokenleap.cli.console import (
    errors,
    plain,
    say,
    show,
    show_json,
    table_of,
    tell,
    working,
)
from tokenleap.cli.options import (
    PROMPTS_HELP,
    JsonOutput,
    ModelOptions,
    RuleOption,
    SamplingOptions,
    SpeculationOptions,
    few,
    flat,
    in_panel,
    numbers,
    open_llm,
    option,
    option_group,
    parse_object,
    refuse_given,
)
from tokenleap.cli.plan import prepared, read_texts
from tokenleap.cli.root import UsageError, check_writable, examples, write_json
from tokenleap.drafters.shapes import MAX_DEPTH, MAX_NODES, MAX_RANKS, TreeFile
from tokenleap.lines import shaped

if TYPE_CHECKING:
    from tokenleap.config import SpeculativeConfig
    from tokenleap.core.params import SamplingParams
    from tokenleap.drafters.options import TunedLayers
    from tokenleap.runtime.costs import CostCurve
    from tokenleap.tuning.sequoia import Acceptance, BestTree
    from tokenleap.tuning.tune_layers import Deadline, LayerLaboratory, LayerSearch, Trial

_prompts = partial(typer.Argument, help=PROMPTS_HELP, metavar="PROMPTS_FILE")

TREE_EXAMPLES = examples(
    "tokenleap tree prompts.txt --draft-model ./small --output tree.json",
    "tokenleap tree --method early_exit --nodes 16  # three short prompts",
    "tokenleap tree --acceptance-vector 0.7,0.15,0.05 --nodes 12  # without a model",
)

DEFAULT_DEPTH = 16
DEFAULT_RANKS = 8

_FOUND_HERE = ("tree", "tree_top_k", "tree_depth", "num_speculative_tokens", "controller")


@option_group("Tree")
class ShapeOptions:
    """The size limits of the tree, and the acceptance it is computed from."""

    nodes: int | None = option(
        "Drafted nodes.", min=1, max=MAX_NODES, show_default="best by measured cost"
    )
    depth: int = option(
        "Maximum levels; each takes a draft pass.", default=DEFAULT_DEPTH, min=1, max=MAX_DEPTH
    )
    ranks: int | None = option(
        "Maximum children of a node.", min=1, max=MAX_RANKS, show_default=str(DEFAULT_RANKS)
    )
    acceptance_vector: str | None = option(
        "Acceptance by rank, instead of measuring it.", metavar="A,A,..."
    )

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


@option_group("Speculation")
class DrafterOptions:
    """The drafter to measure."""

    method: str | None = option("Drafter that takes trees (`tokenleap methods`).")
    draft_model: str | None = option("Folder, id (ORG/NAME), .gguf file or alias of a draft model.")
    acceptance: RuleOption = None
    speculative_config: str | None = option(
        "All of this as a JSON object, with more fields.", metavar="JSON"
    )

    def config(self, ranks: int, model: str) -> SpeculativeConfig:
        """A configuration that drafts one level of `ranks` children."""
        for name in _FOUND_HERE:
            if name in parse_object("--speculative-config", self.speculative_config):
                raise UsageError(f"{name} in --speculative-config: this command finds the tree")
        shared = SpeculationOptions(**vars(self)).config(model, trees=False)
        from tokenleap.tuning.sequoia import one_level

        return one_level(shared, ranks)


@few("nodes depth acceptance_vector method draft_model model temperature output json_output")
@flat
def tree(
    prompts: Annotated[Path | None, _prompts(show_default="three short ones")] = None,
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
        show_json(found.as_dict())
    else:
        show(*_blocks(found))
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
    wrong = "--acceptance-vector takes probabilities, as in 0.7,0.15,0.05"
    return tuple(acceptance_vector(numbers(text, float, wrong)).tolist())


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
        config = drafter.config(ranks, target.model)
    params = sampling.params_for(target.model)
    llm = open_llm(target, config, quiet=quiet, generation_config=sampling.generation_config)
    from tokenleap.tuning.sequoia import measure_acceptance, pass_costs

    tokens, params = prepared(llm, texts, params)
    with working("Measuring the acceptance of every rank", quiet=quiet):
        acceptance = measure_acceptance(llm, tokens, params, ranks)
    costs = None
    if shape.nodes is None:
        with working("Measuring the cost of verification", quiet=quiet):
            costs = Costs(pass_costs(llm), acceptance.draft_seconds)
    return solved(
        vector or acceptance.vector,
        shape.nodes,
        shape.depth,
        acceptance if vector is None else None,
        costs,
        method=config.method_name,
        model=target.model,
    )


def _save_tree(found: Found, output: Path, *, quiet: bool) -> None:
    if not found.tree.paths:
        raise UsageError(f"there is no tree to save to {output}: try --nodes or other prompts")
    write_json(output, found.file().as_dict())
    if not quiet:
        use = json.dumps({"tree": str(output)})
        tell(f"\nThe tree is in {output}. To draft it: --speculative-config '{use}'.", "note")


# How `tokenleap tree` shows its result: the acceptance vector, the tree, other shapes.


SHOWN = 40
"""Maximum nodes of a drawing; of a larger tree it shows the most probable."""

_Branch = tuple[int, ...]


def _blocks(found: Found) -> Iterator[RenderableType]:
    """The vector, the tree, and a comparison with other shapes of its size."""
    if found.measured is not None:
        yield f"{found.model}, {found.method}: accepted in {found.measured.drafts} drafts"
        rates = zip(found.measured.vector, found.measured.errors, strict=True)
        rows = ((str(rank), *(f"{each:.4f}" for each in rate)) for rank, rate in enumerate(rates))
        yield table_of(("rank", "accepted", "error"), rows)
    if found.tree.paths:
        yield f"{found.tree.num_nodes} nodes; probability of reaching each"
        yield drawn(found.tree.paths, found.acceptance)
    yield _rival_table(found)
    yield _tree_verdict(found)


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
    rows: list[list[str | Text]] = []
    for rival in found.rivals():
        cells = [str(rival.nodes), str(rival.levels), f"{rival.expected_tokens:.3f}"]
        if found.costs is not None:
            cells.append(f"{rival.tokens_per_second(found.costs):.1f}")
        name = plain(rival.name, "draft" if rival.name == "this tree" else "")
        rows.append([name, *cells])
    return table_of(("", "\nnodes", "\nlevels", "tokens\nper pass", *rates), rows, left=1)


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


LAYERS_EXAMPLES = examples(
    "tokenleap tune-layers prompts.txt --output layers.json",
    "tokenleap tune-layers mine.jsonl -o layers.json --seconds 1800 --temperature 1",
    "tokenleap generate 'Dear' --method layer_skip "
    '--speculative-config \'{"layers": "layers.json"}\'',
)

CALIBRATED = 0.15
"""Share of the time limit after which no further prompt is added."""


@option_group("Search")
class SearchOptions:
    """How much to measure, and for how long."""

    max_tokens: int = option("Tokens per prompt.", default=64, min=2)
    trials: int = option("Maximum timed runs, each on all prompts.", default=30, min=1)
    seconds: float = option("Time limit after the model is loaded.", default=600, min=1)
    temperature: float = option("0 is greedy; 1 is the model's own distribution.", default=0, min=0)

    def params(self) -> SamplingParams:
        """Parameters of the calibration texts, seeded so that every run generates the same ones."""
        from tokenleap.core.params import SamplingParams

        return SamplingParams(temperature=self.temperature, max_tokens=self.max_tokens, seed=0)


@few("model quantization max_tokens trials seconds temperature output json_output")
@flat
def tune_layers(
    prompts: Annotated[Path, _prompts(show_default=False)],
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
    check_writable(output, prompts)
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
            write_json(output, _tuned(found, laboratory, target).model_dump())
            say(f"{output} has the fastest of the {len(found.trials)} choices that were run")
        raise
    tuned = _tuned(found, laboratory, target)
    write_json(output, tuned.model_dump())
    if json_output:
        runs = {"trials": _trials(found)}
        show_json({"output": str(output), **tuned.model_dump(), **runs})
        return
    searched = _searched(found, laboratory, target.model, len(texts))
    show(searched, _trial_table(found), _verdict(found, tuned))
    use = json.dumps({"layers": str(output)})
    tell(f"\nSaved: --method layer_skip --speculative-config '{use}'.", "note")


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


# How `tokenleap tune-layers` shows its result: the trials, the best one, and what to do.


def _searched(found: LayerSearch, laboratory: LayerLaboratory, model: str, num_prompts: int) -> str:
    how = f"temperature {laboratory.temperature:g}" if laboratory.temperature else "greedy"
    used = laboratory.num_texts
    prompts = f"{used} prompts" if used == num_prompts else f"{used} of {num_prompts} prompts"
    return (
        f"{model}, {how}, {prompts}, {laboratory.positions} tokens; alpha of "
        f"{len(found.estimates)} choices measured, {len(found.trials)} run"
    )


def _trial_table(found: LayerSearch) -> Table:
    headings = ("left out\nattention", "\nMLP", "\nalpha", "\nc", "\ngamma", "speed-up\npredicted")
    ordered = sorted(found.trials, key=lambda trial: (-len(trial.runs), -trial.ratio))
    styles = ("draft" if trial is found.best else "" for trial in ordered)
    rows = (
        [plain(cell, style) for cell in _cells(trial)]
        for trial, style in zip(ordered, styles, strict=True)
    )
    return table_of((*headings, "\nmeasured", "\nrange", "\nruns"), rows)


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


def _verdict(found: LayerSearch, tuned: TunedLayers) -> str:
    """The choice, and whether skipping layers pays on this machine."""
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
    return "\n".join(lines)


def _listed(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers)) or "none"
