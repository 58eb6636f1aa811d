"""`tokenleap plan --measure`: read the prompts, load the model, and time the draft lengths.

`tree` and `tune-layers` read their prompts with it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenleap.bench.prompts_file import read_prompts
from tokenleap.cli.console import counting
from tokenleap.cli.demo_prompts import PROMPTS
from tokenleap.cli.root import UsageError
from tokenleap.cli.session import open_llm
from tokenleap.engine.lines import shaped

if TYPE_CHECKING:
    from tokenleap.analysis.compare import Assumptions, StepSample, Trial
    from tokenleap.analysis.measure import Laboratory
    from tokenleap.cli.options import ModelOptions
    from tokenleap.config import SpeculativeConfig
    from tokenleap.core.params import SamplingParams

__all__ = ["Trials", "check_plots", "open_laboratory", "read_texts", "run_trials"]


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
    """Check that plots can be drawn and written, before the work begins.

    Raises:
        UsageError: Matplotlib is not installed, or the path is a file.
    """
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise UsageError("--plots needs Matplotlib: pip install 'tokenleap[plots]'")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--plots takes a folder, and {folder} is a file")


def read_texts(file: Path | None) -> list[str]:
    """The prompts of a file (see `tokenleap.bench.prompts_file`), or the demo's three.

    Raises:
        TokenleapError: the file cannot be read.
        PromptError: it is not UTF-8, a line is not a prompt, or there is none.
    """
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
        laboratory: the model.
        texts: prompts.
        params: how to sample; round r adds r to the seed, which is 0 if none is given.
        gammas: draft lengths, ascending.
        rounds: runs of every length.
        quiet: show no progress.

    Raises:
        ConfigError: nothing was drafted, or the outputs are too short to measure.
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
