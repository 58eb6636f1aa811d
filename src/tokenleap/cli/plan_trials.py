"""`tokenleap plan --measure`: read the prompts, load the model, and time the draft lengths.

`tree` and `tune-layers` read their prompts with it, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table

from tokenleap.bench.prompts_file import read_prompts
from tokenleap.cli.console import counting, display, plain
from tokenleap.cli.demo import PROMPTS
from tokenleap.cli.options import SpeculationOptions, in_panel, open_llm, parse_object
from tokenleap.cli.root import UsageError
from tokenleap.lines import shaped

if TYPE_CHECKING:
    from tokenleap.analysis.compare import Assumptions, StepSample, Trial
    from tokenleap.analysis.measure import Laboratory, LenienceRow
    from tokenleap.cli.options import ModelOptions
    from tokenleap.config import SpeculativeConfig
    from tokenleap.core.params import SamplingParams

__all__ = [
    "DrafterOptions",
    "Leniences",
    "Trials",
    "check_plots",
    "measure_lenience",
    "open_laboratory",
    "read_leniences",
    "read_texts",
    "run_trials",
    "show_lenience",
]


@dataclass(frozen=True)
class Trials:
    """The measured inputs of the predictions, and the trial of every draft length."""

    method: str
    acceptance: str
    temperature: float
    prompts: int
    rounds: int
    assumed: Assumptions
    trials: tuple[Trial, ...]

    @property
    def best_predicted(self) -> int:
        """The best draft length predicted from the measured cost of passes; 0 is no drafts."""
        gammas = range(len(self.assumed.verify_cost))
        return max(gammas, key=self.assumed.predicted_on_curve)

    @property
    def best_measured(self) -> int:
        """The fastest length that was tried; 0 is no drafts."""
        best = max(self.trials, key=lambda trial: trial.measured)
        return best.gamma if best.measured > 1 else 0

    def as_dict(self) -> dict[str, Any]:
        """The trials for JSON."""
        return {
            "method": self.method,
            "acceptance": self.acceptance,
            "temperature": self.temperature,
            "prompts": self.prompts,
            "rounds": self.rounds,
            **self.assumed.as_dict(),
            "best_gamma_predicted": self.best_predicted,
            "best_gamma_measured": self.best_measured,
            "trials": [trial.as_dict() for trial in self.trials],
        }


def check_plots(folder: Path) -> None:
    """Check that plots can be drawn and written, before the work begins."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise UsageError("--plots needs Matplotlib: pip install 'tokenleap[plots]'")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--plots takes a folder, and {folder} is a file")


def read_texts(file: Path | None) -> list[str]:
    """The prompts of a file (see `tokenleap.bench.prompts_file`), or the demo's three."""
    if file is None:
        return [prompt.text for prompt in PROMPTS]
    return [prompt.text for prompt in read_prompts(file)]


def open_laboratory(
    options: ModelOptions, config: SpeculativeConfig, generation_config: str, *, quiet: bool
) -> Laboratory:
    """Load the target and the draft model, once for all draft lengths."""
    llm = open_llm(options, config, quiet=quiet, generation_config=generation_config)
    from tokenleap.analysis.measure import Laboratory

    return Laboratory(llm)


def run_trials(
    laboratory: Laboratory,
    texts: Sequence[str],
    params: SamplingParams,
    gammas: Sequence[int],
    rounds: int,
    *,
    quiet: bool,
) -> Trials:
    """Measure the inputs of the theory, then time every draft length in turn with no drafts.

    Args:
        params: how to sample; round r adds r to the seed, which is 0 if none is given.
    """
    from tokenleap.analysis.compare import compare

    prompts = [laboratory.llm.encode(shaped(laboratory.llm, text)) for text in texts]
    seeded = params.model_copy(update={"seed": params.seed or 0})
    total = len(prompts) * (1 + rounds * (1 + len(gammas)))
    with counting(quiet=quiet) as show:
        doing = "alpha, c and the cost of verification"
        show(doing, 0, total)
        assumed = laboratory.assumptions(
            prompts, seeded, gammas[-1], lambda done: show(doing, done, total)
        )
        runs = count(len(prompts) + 1)
        samples = [
            _round(
                laboratory,
                prompts,
                seeded,
                [0, *gammas],
                index,
                partial(_show_next, show, f"speed, round {index + 1} of {rounds}", runs, total),
            )
            for index in range(rounds)
        ]
    return Trials(
        method=laboratory.llm.speculative_config.method_name,
        acceptance=laboratory.llm.speculative_config.rule.name,
        temperature=params.temperature,
        prompts=len(prompts),
        rounds=rounds,
        assumed=assumed,
        trials=tuple(compare(assumed, samples, gamma) for gamma in gammas),
    )


def _round(
    laboratory: Laboratory,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    gammas: Sequence[int],
    index: int,
    show_next: Callable[[], object],
) -> dict[int, list[StepSample]]:
    """Run all lengths on one prompt after the other, so that other load slows all alike."""
    params = params.model_copy(update={"seed": (params.seed or 0) + index})
    steps: dict[int, list[StepSample]] = {gamma: [] for gamma in gammas}
    for number, prompt in enumerate(prompts):
        start = (index + number) % len(gammas)
        for gamma in (*gammas[start:], *gammas[:start]):
            steps[gamma] += laboratory.run(prompt, params, gamma)
            show_next()
    return steps


def _show_next(
    show: Callable[[str, int, int], object], doing: str, runs: Iterator[int], total: int
) -> None:
    show(doing, next(runs), total)


# `tokenleap plan --measure --lenience`: table 5 of Leviathan et al. (2023) for one's own pairs.


@dataclass(frozen=True)
class Leniences:
    """The table: a row per drafter, by label."""

    model: str
    temperature: float
    prompts: int
    leniences: tuple[float, ...]
    rows: dict[str, LenienceRow]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "model": self.model,
            "temperature": self.temperature,
            "prompts": self.prompts,
            "leniences": list(self.leniences),
            "drafters": [{"label": label, **asdict(row)} for label, row in self.rows.items()],
        }


def read_leniences(text: str) -> tuple[float, ...]:
    """The leniences of a command line."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = (0.0,)
    if not all(0 < lenience <= 1 for lenience in found):
        raise UsageError(
            f"--lenience takes numbers above 0 and at most 1, as in 1,0.5,0.3,0.1, got {text}"
        )
    return found


def measure_lenience(
    target: ModelOptions,
    drafter: DrafterOptions,
    texts: Sequence[str],
    params: SamplingParams,
    leniences: Sequence[float],
    *,
    generation_config: str,
    quiet: bool,
) -> Leniences:
    """Load the target with one drafter after the other, and measure alpha."""
    configs = drafter.configs()
    for label, config in configs.items():
        if config.rule.name != "rejection":
            raise UsageError(f"acceptance of {label}: --lenience measures the rule lenient")
    rows = {}
    for label, config in configs.items():
        laboratory = open_laboratory(target, config, generation_config, quiet=quiet)
        from tokenleap.analysis.measure import alpha_by_lenience

        prompts = [laboratory.llm.encode(shaped(laboratory.llm, text)) for text in texts]
        seeded = params.model_copy(update={"seed": params.seed or 0})
        with counting(quiet=quiet) as show:
            report = partial(_report, show, f"alpha of {label}", len(prompts))
            report(0)
            rows[label] = alpha_by_lenience(laboratory, prompts, seeded, leniences, report)
    return Leniences(target.model, params.temperature, len(texts), tuple(leniences), rows)


def _report(show: Callable[[str, int, int], object], doing: str, total: int, done: int) -> None:
    show(doing, done, total)


def show_lenience(found: Leniences) -> None:
    """Print the table."""
    console = display()
    how = "greedy" if found.temperature == 0 else f"temperature {found.temperature:g}"
    console.print(plain(f"{found.model}, {how}"))
    console.print(plain(f"alpha by lenience, over {found.prompts} prompt(s)\n"))
    table = Table(box=None, pad_edge=False, header_style="head", padding=(0, 2, 0, 0))
    table.add_column("drafter", overflow="fold")
    for heading in ("positions", "A.2", *(f"l = {lenience:g}" for lenience in found.leniences)):
        table.add_column(heading, justify="right", no_wrap=True)
    for label, row in found.rows.items():
        cells = [f"{alpha:.3f}" for alpha in (row.rejection_sampling, *row.alphas)]
        table.add_row(plain(label), str(row.positions), *cells)
    console.print(table)
    console.print(
        plain(
            "\nMean over the positions with a draft, in the target's own text. Lenience below 1 "
            "is lossy: a token's probability may grow by 1/l. A.2: rejection sampling without "
            "iteration, lossless (Leviathan et al., 2023, table 5 and appendix A.2).",
            "note",
        )
    )


# The drafters that `tokenleap plan --measure` measures: its options, and what they stand for.


@dataclass(frozen=True)
class DrafterOptions:
    """The drafters to measure: one, or with --lenience several."""

    method: Annotated[
        list[str] | None,
        in_panel(
            "Measure",
            "Drafter (`tokenleap methods`), or a JSON speculative_config. Repeatable with "
            "--lenience.",
            show_default="ngram",
        ),
    ] = None
    draft_model: Annotated[
        str | None,
        in_panel("Measure", "Folder, id (ORG/NAME), .gguf file or alias of a draft model."),
    ] = None
    speculative_config: Annotated[
        str | None,
        in_panel("Measure", "All of this as a JSON object, with more fields.", metavar="JSON"),
    ] = None

    def config(self) -> SpeculativeConfig:
        """The configuration of the only drafter."""
        if len(self.method or ()) > 1:
            raise UsageError("--method: only --lenience measures several; give one")
        (config,) = self.configs().values()
        return config

    def configs(self) -> dict[str, SpeculativeConfig]:
        """The configurations by label.

        Their rule is the theory's, rejection, unless the JSON names another.
        """
        found = {}
        texts: list[str | None] = list(self.method) if self.method else [None]
        for text in texts:
            config = self._config(text)
            if config.method_name == "none":
                raise UsageError("--method none drafts nothing: there is nothing to measure")
            found[_label(config, text or self.speculative_config)] = config
        return found

    def _config(self, method: str | None) -> SpeculativeConfig:
        """The configuration with this --method, which may be JSON."""
        is_json = method is not None and method.lstrip().startswith("{")
        if is_json and self.speculative_config is not None:
            raise UsageError("--speculative-config: --method has a JSON object already")
        name, text = ("--method", method) if is_json else ("", self.speculative_config)
        fields = parse_object(name or "--speculative-config", text)
        for field in ("num_speculative_tokens", "controller"):
            if field in fields:
                raise UsageError(
                    f"{field} in {name or '--speculative-config'}: --gammas says how much to draft"
                )
        return SpeculationOptions(
            method=None if is_json else method,
            draft_model=self.draft_model,
            acceptance=None if "acceptance" in fields else "rejection",
            speculative_config=text,
        ).config()


def _label(config: SpeculativeConfig, text: str | None) -> str:
    """The method's name, and the other fields of its JSON."""
    if text is None or not text.lstrip().startswith("{"):
        return config.method_name
    others = {name: value for name, value in json.loads(text).items() if name != "method"}
    return f"{config.method_name} {json.dumps(others)}" if others else config.method_name
