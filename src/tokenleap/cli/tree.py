"""`tokenleap tree`: find the best token tree from how often each rank is accepted."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenleap.cli.console import display, plain, working
from tokenleap.cli.files import check_writable, write_whole
from tokenleap.cli.flat import flat, in_panel, refuse_given
from tokenleap.cli.options import ModelOptions, SpeculationOptions, parse_object
from tokenleap.cli.plan_trials import read_texts
from tokenleap.cli.report import as_json
from tokenleap.cli.root import UsageError, examples
from tokenleap.cli.sampling_options import SamplingOptions
from tokenleap.cli.session import open_llm
from tokenleap.cli.tree_report import show_found
from tokenleap.cli.tree_search import Found, measured, solved
from tokenleap.drafters.tree_file import MAX_DEPTH, MAX_NODES, MAX_RANKS

if TYPE_CHECKING:
    from tokenleap.config import SpeculativeConfig

__all__ = ["EXAMPLES", "tree"]

EXAMPLES = examples(
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
        in_panel(
            "Tree", "Drafted nodes.", min=1, max=MAX_NODES, show_default="best by measured cost"
        ),
    ] = None
    depth: Annotated[
        int, in_panel("Tree", "Maximum levels; each takes a draft pass.", min=1, max=MAX_DEPTH)
    ] = DEFAULT_DEPTH
    ranks: Annotated[
        int | None,
        in_panel(
            "Tree",
            "Maximum children of a node.",
            min=1,
            max=MAX_RANKS,
            show_default=str(DEFAULT_RANKS),
        ),
    ] = None
    acceptance_vector: Annotated[
        str | None,
        in_panel("Tree", "Acceptance by rank, instead of measuring it.", metavar="A,A,..."),
    ] = None

    def vector(self) -> tuple[float, ...] | None:
        """The acceptance vector that was given, if any.

        Raises:
            UsageError: the vector cannot be parsed, is too long, or --ranks was given, too.
            ConfigError: an entry is not a probability, or the sum is above 1.
        """
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
        """A configuration that drafts one level of `ranks` children.

        Raises:
            UsageError: the JSON is not an object, contradicts a flag, or says how much to draft.
            ConfigError: a value is unknown or out of range, or the method takes no trees.
        """
        for name in _FOUND_HERE:
            if name in parse_object("--speculative-config", self.speculative_config):
                raise UsageError(f"{name} in --speculative-config: this command finds the tree")
        shared = SpeculationOptions(**vars(self)).config()
        from tokenleap.tuning.measure_tree import one_level

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
        Path | None,
        in_panel("Output", "Save the tree to this file.", metavar="FILE.json"),
    ] = None,
    json_output: Annotated[bool, in_panel("Output", "Print one JSON object.", "--json")] = False,
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
        _save(found, output, quiet=json_output)


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


def _save(found: Found, output: Path, *, quiet: bool) -> None:
    if not found.tree.paths:
        raise UsageError(f"there is no tree to save to {output}: try --nodes or other prompts")
    write_whole(output, as_json(found.file().as_dict()) + "\n")
    if not quiet:
        use = json.dumps({"tree": str(output)})
        note = f"\nThe tree is in {output}. To draft it: --speculative-config '{use}'."
        display().print(plain(note, "note"), soft_wrap=True)
