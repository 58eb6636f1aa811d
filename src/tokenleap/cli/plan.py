"""`tokenleap plan`: the best draft length, from theory or from measurements on a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tokenleap.cli.console import display, plain, working
from tokenleap.cli.flat import flat, in_panel, refuse_given
from tokenleap.cli.options import ModelOptions
from tokenleap.cli.plan_drafters import DrafterOptions
from tokenleap.cli.plan_lenience import measure_lenience, read_leniences, show_lenience
from tokenleap.cli.plan_report import show_plan, show_trials
from tokenleap.cli.plan_theory import Plan, planned
from tokenleap.cli.plan_trials import (
    Trials,
    check_plots,
    open_laboratory,
    read_texts,
    run_trials,
)
from tokenleap.cli.report import as_json
from tokenleap.cli.root import UsageError, examples
from tokenleap.cli.sampling_options import SamplingOptions

__all__ = ["EXAMPLES", "plan"]

EXAMPLES = examples(
    "tokenleap plan --alpha 0.8 --c 0.05",
    "tokenleap plan --alpha 0.8 --c 0.05 --c-hat 0.02 --plots figures",
    "tokenleap plan --measure --method ngram  # then predicted and measured, side by side",
    "tokenleap plan --measure --draft-model ./small --prompts mine.jsonl --temperature 1",
    "tokenleap plan --measure --lenience 1,0.5,0.3,0.1 --method ngram --method suffix",
)

DEFAULT_MAX_GAMMA = 10
DEFAULT_GAMMAS = "1,2,4,8"
DEFAULT_ROUNDS = 3
LONGEST_GAMMA = 256


@dataclass(frozen=True)
class TheoryOptions:
    """The inputs of the theory."""

    alpha: Annotated[
        float | None,
        in_panel("Theory", "Acceptance rate: mean of sum min(p, q).", min=0, max=1),
    ] = None
    c: Annotated[
        float | None, in_panel("Theory", "Time of a draft step over that of a target pass.", min=0)
    ] = None
    c_hat: Annotated[
        float | None,
        in_panel("Theory", "The same ratio in operations.", min=0, show_default="as --c"),
    ] = None
    max_gamma: Annotated[
        int | None,
        in_panel(
            "Theory",
            "Longest draft in the table.",
            min=0,
            max=256,
            show_default=str(DEFAULT_MAX_GAMMA),
        ),
    ] = None


@dataclass(frozen=True)
class MeasureOptions:
    """What to measure, and how often."""

    measure: Annotated[
        bool,
        in_panel("Measure", "Measure alpha, c and the speed-ups on a model.", "--measure"),
    ] = False
    prompts: Annotated[
        Path | None,
        in_panel(
            "Measure",
            "Text with a prompt per line, or .jsonl with a prompt per object.",
            metavar="FILE",
            show_default="three short ones",
        ),
    ] = None
    gammas: Annotated[
        str | None,
        in_panel(
            "Measure", "Draft lengths to try.", metavar="N,N,...", show_default=DEFAULT_GAMMAS
        ),
    ] = None
    rounds: Annotated[
        int | None,
        in_panel("Measure", "Runs of every length.", min=1, show_default=str(DEFAULT_ROUNDS)),
    ] = None
    lenience: Annotated[
        str | None,
        in_panel(
            "Measure",
            "Instead of speed: alpha of every --method under these leniences.",
            metavar="L,L,...",
        ),
    ] = None


@flat
def plan(
    theory: TheoryOptions,
    trial: MeasureOptions,
    drafter: DrafterOptions,
    target: ModelOptions,
    sampling: SamplingOptions,
    plots: Annotated[
        Path | None,
        in_panel("Output", "Draw figures 2 to 4 as PNG into this folder.", metavar="DIR"),
    ] = None,
    json_output: Annotated[bool, in_panel("Output", "Print one JSON object.", "--json")] = False,
) -> None:
    """Find the best draft length, from theory or on your own model.

    With --alpha and --c: expected tokens per step, speed-up and operations
    for every draft length (Leviathan et al., 2023, equation 1 and theorems
    3.8 and 3.11). With --measure: measures alpha, c and the cost of
    verification, predicts every speed-up from them, and measures it too.
    With --measure --lenience: measures alpha by lenience (table 5).
    """
    if plots is not None:
        check_plots(plots)
    if trial.lenience is not None:
        _lenience(trial, drafter, target, sampling, theory, plots, json_output=json_output)
        return
    if trial.measure:
        refuse_given("--measure finds this out by itself", theory)
        found = _measured(trial, drafter, target, sampling, quiet=json_output)
        if json_output:
            display().out(as_json({"model": target.model, **found.as_dict()}))
        else:
            show_trials(found, target.model)
        numbers = (found.assumed.alpha, found.assumed.c)
    else:
        refuse_given("only --measure uses this", trial, drafter, target, sampling)
        expected = _expected(theory)
        if json_output:
            display().out(as_json(expected.as_dict()))
        else:
            show_plan(expected)
        numbers = (expected.alpha, expected.c)
    if plots is not None:
        _draw(plots, *numbers, quiet=json_output)


def _expected(theory: TheoryOptions) -> Plan:
    if theory.alpha is None:
        raise UsageError("give --alpha (and --c), or --measure to measure them")
    c = 0.0 if theory.c is None else theory.c
    c_hat = c if theory.c_hat is None else theory.c_hat
    longest = DEFAULT_MAX_GAMMA if theory.max_gamma is None else theory.max_gamma
    return planned(theory.alpha, c, c_hat, longest)


def _measured(
    trial: MeasureOptions,
    drafter: DrafterOptions,
    target: ModelOptions,
    sampling: SamplingOptions,
    *,
    quiet: bool,
) -> Trials:
    gammas = _gammas(DEFAULT_GAMMAS if trial.gammas is None else trial.gammas)
    texts = read_texts(trial.prompts)
    with working("Starting", quiet=quiet):
        config = drafter.config()
    params = sampling.params_for(target.model)
    rounds = DEFAULT_ROUNDS if trial.rounds is None else trial.rounds
    laboratory = open_laboratory(target, config, sampling.generation_config, quiet=quiet)
    return run_trials(laboratory, texts, params, gammas, rounds, quiet=quiet)


def _lenience(
    trial: MeasureOptions,
    drafter: DrafterOptions,
    target: ModelOptions,
    sampling: SamplingOptions,
    theory: TheoryOptions,
    plots: Path | None,
    *,
    json_output: bool,
) -> None:
    """Measure alpha by lenience, and print the table or one JSON object."""
    assert trial.lenience is not None
    if not trial.measure:
        raise UsageError("--lenience: only --measure uses this")
    refuse_given("--measure finds this out by itself", theory)
    for name, value in (("--gammas", trial.gammas), ("--rounds", trial.rounds), ("--plots", plots)):
        if value is not None:
            raise UsageError(f"{name}: --lenience measures alpha only")
    leniences = read_leniences(trial.lenience)
    texts = read_texts(trial.prompts)
    params = sampling.params_for(target.model)
    found = measure_lenience(
        target,
        drafter,
        texts,
        params,
        leniences,
        generation_config=sampling.generation_config,
        quiet=json_output,
    )
    if json_output:
        display().out(as_json(found.as_dict()))
    else:
        show_lenience(found)


def _gammas(text: str) -> list[int]:
    try:
        gammas = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UsageError(f"--gammas takes draft lengths, as in 1,2,4, got {text}") from None
    if not 1 <= gammas[0] <= gammas[-1] <= LONGEST_GAMMA:
        raise UsageError(f"--gammas must be between 1 and {LONGEST_GAMMA}, got {text}")
    return gammas


def _draw(folder: Path, alpha: float, c: float, *, quiet: bool) -> None:
    with working("Drawing", quiet=quiet):
        from tokenleap.analysis.plots import draw

        files = draw(folder, alpha, c)
    if not quiet:
        names = ", ".join(file.name for file in files)
        display().print(plain(f"\n{names} are in {folder}.", "note"), soft_wrap=True)
