"""`tokenleap plan`: the best draft length, from theory or from measurements on a model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table

from tokenleap.bench.prompts_file import read_prompts
from tokenleap.cli.console import as_json, counting, display, plain, table_of, working
from tokenleap.cli.demo import PROMPTS
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
from tokenleap.cli.root import UsageError, examples
from tokenleap.lines import shaped

if TYPE_CHECKING:
    from tokenleap.analysis.compare import Assumptions, StepSample, Trial
    from tokenleap.analysis.measure import Laboratory, LenienceRow
    from tokenleap.config import SpeculativeConfig
    from tokenleap.core.params import SamplingParams

_theory = partial(in_panel, "Theory")
_measure = partial(in_panel, "Measure")

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
        float | None, _theory("Acceptance rate: mean of sum min(p, q).", min=0, max=1)
    ] = None
    c: Annotated[
        float | None, _theory("Time of a draft step over that of a target pass.", min=0)
    ] = None
    c_hat: Annotated[
        float | None, _theory("The same ratio in operations.", min=0, show_default="as --c")
    ] = None
    max_gamma: Annotated[
        int | None,
        _theory("Longest draft in the table.", min=0, max=256, show_default=str(DEFAULT_MAX_GAMMA)),
    ] = None


@dataclass(frozen=True)
class MeasureOptions:
    """Options of what to measure, and how often."""

    measure: Annotated[
        bool, _measure("Measure alpha, c and the speed-ups on a model.", "--measure")
    ] = False
    prompts: Annotated[
        Path | None,
        _measure(
            "Text with a prompt per line, or .jsonl with a prompt per object.",
            metavar="FILE",
            show_default="three short ones",
        ),
    ] = None
    gammas: Annotated[
        str | None,
        _measure("Draft lengths to try.", metavar="N,N,...", show_default=DEFAULT_GAMMAS),
    ] = None
    rounds: Annotated[
        int | None, _measure("Runs of every length.", min=1, show_default=str(DEFAULT_ROUNDS))
    ] = None
    lenience: Annotated[
        str | None,
        _measure(
            "Instead of speed: alpha of every --method under these leniences.", metavar="L,L,..."
        ),
    ] = None


@dataclass(frozen=True)
class DrafterOptions:
    """The drafters to measure: one, or with --lenience several."""

    method: Annotated[
        list[str] | None,
        _measure(
            "Drafter (`tokenleap methods`), or a JSON speculative_config. Repeatable with "
            "--lenience.",
            show_default="ngram",
        ),
    ] = None
    draft_model: Annotated[
        str | None, _measure("Folder, id (ORG/NAME), .gguf file or alias of a draft model.")
    ] = None
    speculative_config: Annotated[
        str | None, _measure("All of this as a JSON object, with more fields.", metavar="JSON")
    ] = None

    def config(self) -> SpeculativeConfig:
        if len(self.method or ()) > 1:
            raise UsageError("--method: only --lenience measures several; give one")
        (config,) = self.configs().values()
        return config

    def configs(self) -> dict[str, SpeculativeConfig]:
        """The configurations by label; the rule is rejection, the theory's, unless JSON has one."""
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
    json_output: JsonOutput = False,
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
        from tokenleap.analysis.compare import draw

        files = draw(folder, alpha, c)
    if not quiet:
        names = ", ".join(file.name for file in files)
        display().print(plain(f"\n{names} are in {folder}.", "note"), soft_wrap=True)


# The predictions of theory for given alpha, c and c_hat: the rows of `tokenleap plan`.


@dataclass(frozen=True)
class PlanRow:
    """One draft length: equation 1, theorem 3.8 and theorem 3.11 of Leviathan et al. (2023)."""

    gamma: int
    expected_tokens: float
    improvement: float
    operations: float


@dataclass(frozen=True)
class Plan:
    """All draft lengths up to a limit, and the best of all lengths up to `analysis.MAX_GAMMA`."""

    alpha: float
    c: float
    c_hat: float
    rows: tuple[PlanRow, ...]
    best: PlanRow
    oracle: float
    unbounded: bool
    """Whether a longer draft is always better; `best` is then the longest one considered."""

    def as_dict(self) -> dict[str, Any]:
        """The plan for JSON; an infinite oracle improvement is null there."""
        return {
            "alpha": self.alpha,
            "c": self.c,
            "c_hat": self.c_hat,
            "pays": self.best.gamma > 0,
            "best_gamma": self.best.gamma,
            "best_improvement": self.best.improvement,
            "longer_is_always_better": self.unbounded,
            "oracle_improvement": None if self.oracle == float("inf") else self.oracle,
            "table": [asdict(row) for row in self.rows],
        }


def planned(alpha: float, c: float, c_hat: float, max_gamma: int) -> Plan:
    from tokenleap import analysis

    def row(gamma: int) -> PlanRow:
        return PlanRow(
            gamma,
            analysis.expected_tokens(alpha, gamma),
            analysis.improvement(alpha, gamma, c),
            analysis.operations(alpha, gamma, c_hat),
        )

    best = analysis.best_gamma(alpha, c)
    return Plan(
        alpha,
        c,
        c_hat,
        tuple(row(gamma) for gamma in range(max_gamma + 1)),
        row(best),
        analysis.oracle_improvement(alpha, c),
        unbounded=(c == 0 and alpha > 0) or (alpha == 1 and c < 1),
    )


# How `tokenleap plan` shows its results: the tables and the sentences below them.


def show_plan(plan: Plan) -> None:
    """Print the table of the theory with its best row marked, and the conclusions."""
    console = display()
    table = table_of("gamma", "tokens\nper step", "\nspeed-up", "opera-\ntions")
    for row in plan.rows:
        style = "draft" if row.gamma == plan.best.gamma else ""
        table.add_row(*(plain(cell, style) for cell in _cells(row)))
    setting = f"alpha {plan.alpha:g}, c {plan.c:g}, c_hat {plan.c_hat:g}"
    console.print(plain(f"{setting}, against decoding without drafts\n"))
    console.print(table)
    console.print()
    for line in _verdict(plan):
        console.print(plain(line))


def _cells(row: PlanRow) -> tuple[str, ...]:
    return (
        str(row.gamma),
        f"{row.expected_tokens:.3f}",
        f"{row.improvement:.3f}x",
        f"{row.operations:.3f}x",
    )


def _verdict(plan: Plan) -> list[str]:
    best = plan.best
    if not best.gamma:
        return ["Best gamma: 0. Drafting does not pay: alpha is not above c (corollary 3.9)."]
    least = (1 + plan.alpha) / (1 + plan.c)
    if plan.unbounded:
        first = "Best gamma: as long as possible; a longer draft is always better here."
    else:
        first = f"Best gamma: {best.gamma}, {best.improvement:.3f}x faster."
    return [
        first,
        f"Drafting pays, at least {least:.3f}x: alpha is above c (corollary 3.9).",
        f"Oracle that knows how many guesses will pass: {_times(plan.oracle)}.",
    ]


def _times(factor: float) -> str:
    return "no bound" if math.isinf(factor) else f"{factor:.3f}x"


def show_trials(found: Trials, model: str) -> None:
    """Print what was measured, predicted and measured speed-ups, and why they differ."""
    console = display()
    for line in _setting(found, model):
        console.print(plain(line))
    console.print()
    console.print(_trial_table(found))
    console.print()
    for trial in found.trials:
        console.print(plain(_agreement(trial)))
    console.print(
        plain(
            f"\nBest gamma: predicted {found.best_predicted} from measured costs, of 0 to "
            f"{len(found.assumed.verify_cost) - 1}; measured {found.best_measured}, of those tried."
        )
    )
    console.print(
        plain(
            f"\n{_rounds(found.rounds)}. The "
            "first step of an output does not count: it reads the prompt. const.: theorem 3.8. "
            "curve: the same with measured costs of passes and lengths of drafts. ok: within 15 %.",
            "note",
        )
    )


def _setting(found: Trials, model: str) -> list[str]:
    assumed = found.assumed
    curve = assumed.verify_cost
    shown = sorted({1, len(curve) // 2, len(curve) - 1} - {0})
    costs = ", ".join(f"v({gamma}) {curve[gamma]:.2f}" for gamma in shown)
    how = "greedy" if found.temperature == 0 else f"temperature {found.temperature:g}"
    milliseconds = assumed.pass_seconds * 1e3
    lines = [
        f"{model}, {found.method}, rule {found.acceptance}, {how}, {found.prompts} prompt(s)",
        f"alpha {assumed.alpha:.3f}: mean probability that {found.acceptance} accepts, "
        f"over {len(assumed.betas)} positions",
        f"c {assumed.c:.4f}: time of a drafted token over a pass of {milliseconds:.2f} ms",
        f"verification, v(0) = 1: {costs}",
    ]
    if assumed.drafting_share < 1:
        lines.append(f"drafted at {assumed.drafting_share:.0%} of the positions only")
    return lines


def _trial_table(found: Trials) -> Table:
    headings = ("expected\nconst.", "\ncurve", "\nmeasured", "\nrange", "ok\nconst.", "\ncurve")
    table = table_of("gamma", *headings, "tokens\neq. 1", "\nmeasured")
    for trial in found.trials:
        table.add_row(
            str(trial.gamma),
            f"{trial.predicted:.2f}x",
            f"{trial.predicted_on_curve:.2f}x",
            plain(f"{trial.measured:.2f}x", "head"),
            f"{trial.low:.2f}-{trial.high:.2f}" if found.rounds > 1 else "-",
            _yes(trial.agrees),
            _yes(trial.agrees_on_curve),
            f"{trial.expected_tokens:.2f}",
            f"{trial.measured_tokens:.2f}",
        )
    return table


def _rounds(rounds: int) -> str:
    if rounds == 1:
        return "1 round, in turn with none"
    return f"{rounds} rounds, in turn with none; range: slowest and fastest round"


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def _agreement(trial: Trial) -> str:
    """One line for one draft length: agreement, or the assumptions that failed."""
    apart = f"{trial.measured / trial.predicted - 1:+.0%}"
    if trial.agrees:
        return f"gamma {trial.gamma}: agrees with theorem 3.8 ({apart})."
    factors = {
        "drafts": f"drafts have {trial.mean_drafted:.1f} tokens on average, not {trial.gamma}",
        "acceptance": (
            f"acceptance is not i.i.d. with alpha (accepted lengths are {trial.distance:.2f} from "
            "the geometric distribution in total variation)"
        ),
        "verification": f"a pass costs {trial.mean_verify_cost:.2f} plain passes, not 1",
        "drafting": "a drafted token did not cost the measured c",
        "passes": "passes did not take the time measured before",
        "overhead": "a step does not take the time of its drafting and its pass",
    }
    reasons = "; ".join(
        f"{factors[name]}: x{getattr(trial.factors, name):.2f}" for name in trial.factors.failing()
    )
    return f"gamma {trial.gamma}: {apart} from theorem 3.8. {reasons}."


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
        return {
            "model": self.model,
            "temperature": self.temperature,
            "prompts": self.prompts,
            "leniences": list(self.leniences),
            "drafters": [{"label": label, **asdict(row)} for label, row in self.rows.items()],
        }


def read_leniences(text: str) -> tuple[float, ...]:
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
    console = display()
    how = "greedy" if found.temperature == 0 else f"temperature {found.temperature:g}"
    console.print(plain(f"{found.model}, {how}"))
    console.print(plain(f"alpha by lenience, over {found.prompts} prompt(s)\n"))
    columns = (f"l = {lenience:g}" for lenience in found.leniences)
    table = table_of("drafter", "positions", "A.2", *columns, left=1)
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


def _label(config: SpeculativeConfig, text: str | None) -> str:
    """The method's name, and the other fields of its JSON."""
    if text is None or not text.lstrip().startswith("{"):
        return config.method_name
    others = {name: value for name, value in json.loads(text).items() if name != "method"}
    return f"{config.method_name} {json.dumps(others)}" if others else config.method_name
