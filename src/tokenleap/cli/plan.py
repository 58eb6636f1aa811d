"""`tokenleap plan`: the best draft length, from theory or from measurements on a model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tokenleap.bench.prompts_file import read_prompts
from tokenleap.cli.console import counting, plain, show, show_json, table_of, tell, working
from tokenleap.cli.demo import PROMPTS
from tokenleap.cli.options import (
    PROMPTS_HELP,
    JsonOutput,
    ModelOptions,
    SamplingOptions,
    SpeculationOptions,
    few,
    flat,
    in_panel,
    need_matplotlib,
    numbers,
    open_llm,
    option,
    option_group,
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
    from tokenleap.llm import LLM


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


@option_group("Theory")
class TheoryOptions:
    """The inputs of the theory."""

    alpha: float | None = option("Acceptance rate: mean of sum min(p, q).", min=0, max=1)
    c: float | None = option("Time of a draft step over that of a target pass.", min=0)
    c_hat: float | None = option("The same ratio in operations.", min=0, show_default="as --c")
    max_gamma: int | None = option(
        "Longest draft in the table.", min=0, max=256, show_default=str(DEFAULT_MAX_GAMMA)
    )


@option_group("Measure")
class MeasureOptions:
    """Options of what to measure, and how often."""

    measure: bool = option(
        "Measure alpha, c and the speed-ups on a model.", "--measure", default=False
    )
    prompts: Path | None = option(PROMPTS_HELP, metavar="FILE", show_default="three short ones")
    gammas: str | None = option(
        "Draft lengths to try.", metavar="N,N,...", show_default=DEFAULT_GAMMAS
    )
    rounds: int | None = option("Runs of every length.", min=1, show_default=str(DEFAULT_ROUNDS))
    lenience: str | None = option(
        "Instead of speed: alpha of every --method under these leniences.", metavar="L,L,..."
    )


@option_group("Measure")
class DrafterOptions:
    """The drafters to measure: one, or with --lenience several."""

    method: list[str] | None = option(
        "Drafter (`tokenleap methods`), or a JSON speculative_config. Repeatable with --lenience.",
        show_default="ngram",
    )
    draft_model: str | None = option("Folder, id (ORG/NAME), .gguf file or alias of a draft model.")
    speculative_config: str | None = option(
        "All of this as a JSON object, with more fields.", metavar="JSON"
    )

    def config(self, model: str) -> SpeculativeConfig:
        if len(self.method or ()) > 1:
            raise UsageError("--method: only --lenience measures several; give one")
        (config,) = self.configs(model).values()
        return config

    def configs(self, model: str) -> dict[str, SpeculativeConfig]:
        """The configurations by label; the rule is rejection, the theory's, unless JSON has one."""
        found = {}
        texts: list[str | None] = list(self.method) if self.method else [None]
        for text in texts:
            config = self._config(text, model)
            if config.method_name == "none":
                raise UsageError("--method none drafts nothing: there is nothing to measure")
            found[_label(config, text or self.speculative_config)] = config
        return found

    def _config(self, method: str | None, model: str) -> SpeculativeConfig:
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
        ).config(model, trees=False)


@few("alpha c measure prompts gammas method draft_model model plots json_output")
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
        _check_plots(plots)
    measured = (trial, drafter, target, sampling)
    found: Plan | Trials | Leniences
    if trial.lenience is not None:
        _check_lenience(trial, plots)
        refuse_given(_FOUND_OUT, theory)
        found = measure_lenience(*measured, quiet=json_output)
    elif trial.measure:
        refuse_given(_FOUND_OUT, theory)
        found = measure_trials(*measured, quiet=json_output)
    else:
        refuse_given("only --measure uses this", *measured)
        found = planned(theory)
    if json_output:
        show_json(found.as_dict())
    else:
        show(*found.blocks())
    if plots is not None:
        assert not isinstance(found, Leniences)
        _draw(plots, found.alpha, found.c, quiet=json_output)


_FOUND_OUT = "--measure finds this out by itself"


def _check_plots(folder: Path) -> None:
    """Check that plots can be drawn and written, before the work begins."""
    need_matplotlib("--plots")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--plots takes a folder, and {folder} is a file")


def _check_lenience(trial: MeasureOptions, plots: Path | None) -> None:
    if not trial.measure:
        raise UsageError("--lenience: only --measure uses this")
    for name, value in (("--gammas", trial.gammas), ("--rounds", trial.rounds), ("--plots", plots)):
        if value is not None:
            raise UsageError(f"{name}: --lenience measures alpha only")


def _draw(folder: Path, alpha: float, c: float, *, quiet: bool) -> None:
    with working("Drawing", quiet=quiet):
        from tokenleap.analysis.compare import draw

        files = draw(folder, alpha, c)
    if not quiet:
        tell(f"\n{', '.join(file.name for file in files)} are in {folder}.", "note")


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

    @property
    def unbounded(self) -> bool:
        """Whether a longer draft is always better; `best` is then the longest one considered."""
        return (self.c == 0 and self.alpha > 0) or (self.alpha == 1 and self.c < 1)

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
            "oracle_improvement": None if math.isinf(self.oracle) else self.oracle,
            "table": [asdict(row) for row in self.rows],
        }

    def blocks(self) -> Iterator[RenderableType]:
        """The table with its best row marked, and the conclusions."""
        setting = f"alpha {self.alpha:g}, c {self.c:g}, c_hat {self.c_hat:g}"
        yield f"{setting}, against decoding without drafts"
        headings = ("gamma", "tokens\nper step", "\nspeed-up", "opera-\ntions")
        yield table_of(headings, map(self._cells, self.rows))
        yield self._verdict()

    def _cells(self, row: PlanRow) -> list[Text]:
        numbers = f"{row.expected_tokens:.3f}", f"{row.improvement:.3f}x", f"{row.operations:.3f}x"
        style = "draft" if row.gamma == self.best.gamma else ""
        return [plain(cell, style) for cell in (str(row.gamma), *numbers)]

    def _verdict(self) -> str:
        best = self.best
        if not best.gamma:
            return "Best gamma: 0. Drafting does not pay: alpha is not above c (corollary 3.9)."
        least = (1 + self.alpha) / (1 + self.c)
        first = f"{best.gamma}, {best.improvement:.3f}x faster."
        if self.unbounded:
            first = "as long as possible; a longer draft is always better here."
        oracle = "no bound" if math.isinf(self.oracle) else f"{self.oracle:.3f}x"
        return (
            f"Best gamma: {first}\n"
            f"Drafting pays, at least {least:.3f}x: alpha is above c (corollary 3.9).\n"
            f"Oracle that knows how many guesses will pass: {oracle}."
        )


def planned(theory: TheoryOptions) -> Plan:
    from tokenleap import analysis

    if theory.alpha is None:
        raise UsageError("give --alpha (and --c), or --measure to measure them")
    alpha, c = theory.alpha, theory.c or 0.0
    c_hat = c if theory.c_hat is None else theory.c_hat
    longest = DEFAULT_MAX_GAMMA if theory.max_gamma is None else theory.max_gamma

    def row(gamma: int) -> PlanRow:
        return PlanRow(
            gamma,
            analysis.expected_tokens(alpha, gamma),
            analysis.improvement(alpha, gamma, c),
            analysis.operations(alpha, gamma, c_hat),
        )

    rows = tuple(row(gamma) for gamma in range(longest + 1))
    best = row(analysis.best_gamma(alpha, c))
    return Plan(alpha, c, c_hat, rows, best, analysis.oracle_improvement(alpha, c))


# `tokenleap plan --measure`: predicted and measured speed-ups, and why they differ.


@dataclass(frozen=True)
class Trials:
    """The measured inputs of the predictions, and the trial of every draft length."""

    model: str
    method: str
    acceptance: str
    temperature: float
    prompts: int
    rounds: int
    assumed: Assumptions
    trials: tuple[Trial, ...]

    @property
    def alpha(self) -> float:
        return self.assumed.alpha

    @property
    def c(self) -> float:
        return self.assumed.c

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
        setting = {k: v for k, v in vars(self).items() if k not in ("assumed", "trials")}
        return {
            **setting,
            **self.assumed.as_dict(),
            "best_gamma_predicted": self.best_predicted,
            "best_gamma_measured": self.best_measured,
            "trials": [trial.as_dict() for trial in self.trials],
        }

    def blocks(self) -> Iterator[RenderableType]:
        """What was measured, predicted and measured speed-ups, and why they differ."""
        yield self._setting()
        yield self._table()
        yield "\n".join(map(_agreement, self.trials))
        yield (
            f"Best gamma: predicted {self.best_predicted} from measured costs, of 0 to "
            f"{len(self.assumed.verify_cost) - 1}; measured {self.best_measured}, of those tried."
        )
        rounds = f"{self.rounds} rounds, in turn with none; range: slowest and fastest round"
        if self.rounds == 1:
            rounds = "1 round, in turn with none"
        yield plain(
            f"{rounds}. The "
            "first step of an output does not count: it reads the prompt. const.: theorem 3.8. "
            "curve: the same with measured costs of passes and lengths of drafts. ok: within 15 %.",
            "note",
        )

    def _setting(self) -> str:
        assumed, curve = self.assumed, self.assumed.verify_cost
        shown = sorted({1, len(curve) // 2, len(curve) - 1} - {0})
        costs = ", ".join(f"v({gamma}) {curve[gamma]:.2f}" for gamma in shown)
        how = _temperature(self.temperature)
        lines = [
            f"{self.model}, {self.method}, rule {self.acceptance}, {how}, {self.prompts} prompt(s)",
            f"alpha {assumed.alpha:.3f}: mean probability that {self.acceptance} accepts, "
            f"over {len(assumed.betas)} positions",
            f"c {assumed.c:.4f}: time of a drafted token over a pass of "
            f"{assumed.pass_seconds * 1e3:.2f} ms",
            f"verification, v(0) = 1: {costs}",
        ]
        if assumed.drafting_share < 1:
            lines.append(f"drafted at {assumed.drafting_share:.0%} of the positions only")
        return "\n".join(lines)

    def _table(self) -> Table:
        headings = ("expected\nconst.", "\ncurve", "\nmeasured", "\nrange", "ok\nconst.", "\ncurve")
        rows = (
            (
                str(trial.gamma),
                f"{trial.predicted:.2f}x",
                f"{trial.predicted_on_curve:.2f}x",
                plain(f"{trial.measured:.2f}x", "head"),
                f"{trial.low:.2f}-{trial.high:.2f}" if self.rounds > 1 else "-",
                "yes" if trial.agrees else "no",
                "yes" if trial.agrees_on_curve else "no",
                f"{trial.expected_tokens:.2f}",
                f"{trial.measured_tokens:.2f}",
            )
            for trial in self.trials
        )
        return table_of(("gamma", *headings, "tokens\neq. 1", "\nmeasured"), rows)


def _temperature(temperature: float) -> str:
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


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


def measure_trials(
    trial: MeasureOptions,
    drafter: DrafterOptions,
    target: ModelOptions,
    sampling: SamplingOptions,
    *,
    quiet: bool,
) -> Trials:
    """Measure the inputs of the theory, then time every draft length in turn with no drafts.

    Round r adds r to the seed, which is 0 if none is given.
    """
    gammas = _gammas(DEFAULT_GAMMAS if trial.gammas is None else trial.gammas)
    texts = read_texts(trial.prompts)
    with working("Starting", quiet=quiet):
        config = drafter.config(target.model)
    params = sampling.params_for(target.model)
    rounds = trial.rounds or DEFAULT_ROUNDS
    laboratory = _laboratory(target, config, sampling, quiet=quiet)
    from tokenleap.analysis.compare import compare

    prompts, params = prepared(laboratory.llm, texts, params)
    total = len(prompts) * (1 + rounds * (1 + len(gammas)))
    samples = []
    with counting(quiet=quiet) as report:
        doing = "alpha, c and the cost of verification"
        report(doing, 0, total)
        assumed = laboratory.assumptions(
            prompts, params, gammas[-1], lambda done: report(doing, done, total)
        )
        done = count(len(prompts) + 1)
        for index in range(rounds):
            steps: dict[int, list[StepSample]] = {gamma: [] for gamma in (0, *gammas)}
            for gamma, found in _round(laboratory, prompts, params, [0, *gammas], index):
                steps[gamma] += found
                report(f"speed, round {index + 1} of {rounds}", next(done), total)
            samples.append(steps)
    return Trials(
        model=target.model,
        method=laboratory.llm.speculative_config.method_name,
        acceptance=laboratory.llm.speculative_config.rule.name,
        temperature=params.temperature,
        prompts=len(prompts),
        rounds=rounds,
        assumed=assumed,
        trials=tuple(compare(assumed, samples, gamma) for gamma in gammas),
    )


def _gammas(text: str) -> list[int]:
    gammas = sorted({*numbers(text, int, "--gammas takes draft lengths, as in 1,2,4")})
    if not 1 <= gammas[0] <= gammas[-1] <= LONGEST_GAMMA:
        raise UsageError(f"--gammas must be between 1 and {LONGEST_GAMMA}, got {text}")
    return gammas


def _round(
    laboratory: Laboratory,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    gammas: Sequence[int],
    index: int,
) -> Iterator[tuple[int, list[StepSample]]]:
    """Run all lengths on one prompt after the other, so that other load slows all alike."""
    params = params.model_copy(update={"seed": (params.seed or 0) + index})
    for number, prompt in enumerate(prompts):
        start = (index + number) % len(gammas)
        for gamma in (*gammas[start:], *gammas[:start]):
            yield gamma, laboratory.run(prompt, params, gamma)


def read_texts(file: Path | None) -> list[str]:
    """The prompts of a file (see `tokenleap.bench.prompts_file`), or the demo's three."""
    if file is None:
        return [prompt.text for prompt in PROMPTS]
    return [prompt.text for prompt in read_prompts(file)]


def prepared(
    llm: LLM, texts: Sequence[str], params: SamplingParams
) -> tuple[list[list[int]], SamplingParams]:
    """The prompts as tokens, and the parameters with a seed."""
    prompts = [llm.encode(shaped(llm, text)) for text in texts]
    return prompts, params.model_copy(update={"seed": params.seed or 0})


def _laboratory(
    target: ModelOptions, config: SpeculativeConfig, sampling: SamplingOptions, *, quiet: bool
) -> Laboratory:
    """The target and the draft model, loaded once for all draft lengths."""
    llm = open_llm(target, config, quiet=quiet, generation_config=sampling.generation_config)
    from tokenleap.analysis.measure import Laboratory

    return Laboratory(llm)


# `tokenleap plan --measure --lenience`: table 5 of Leviathan et al. (2023) for one's own pairs.


@dataclass(frozen=True)
class Leniences:
    """The table: a row per drafter, by label."""

    model: str
    temperature: float
    prompts: int
    leniences: list[float]
    rows: dict[str, LenienceRow]

    def as_dict(self) -> dict[str, Any]:
        rows = [{"label": label, **asdict(row)} for label, row in self.rows.items()]
        return {**{k: v for k, v in vars(self).items() if k != "rows"}, "drafters": rows}

    def blocks(self) -> Iterator[RenderableType]:
        setting = f"{self.model}, {_temperature(self.temperature)}"
        yield f"{setting}\nalpha by lenience, over {self.prompts} prompt(s)"
        columns = (f"l = {lenience:g}" for lenience in self.leniences)
        rows = (
            (
                label,
                str(row.positions),
                *(f"{a:.3f}" for a in (row.rejection_sampling, *row.alphas)),
            )
            for label, row in self.rows.items()
        )
        yield table_of(("drafter", "positions", "A.2", *columns), rows, left=1)
        yield plain(
            "Mean over the positions with a draft, in the target's own text. Lenience below 1 "
            "is lossy: a token's probability may grow by 1/l. A.2: rejection sampling without "
            "iteration, lossless (Leviathan et al., 2023, table 5 and appendix A.2).",
            "note",
        )


def measure_lenience(
    trial: MeasureOptions,
    drafter: DrafterOptions,
    target: ModelOptions,
    sampling: SamplingOptions,
    *,
    quiet: bool,
) -> Leniences:
    """Load the target with one drafter after the other, and measure alpha."""
    assert trial.lenience is not None
    wrong = "--lenience takes numbers above 0 and at most 1, as in 1,0.5,0.3,0.1"
    leniences = numbers(trial.lenience, float, wrong, lambda lenience: 0 < lenience <= 1)
    texts = read_texts(trial.prompts)
    given = sampling.params_for(target.model)
    configs = drafter.configs(target.model)
    for label, config in configs.items():
        if config.rule.name != "rejection":
            raise UsageError(f"acceptance of {label}: --lenience measures the rule lenient")
    rows = {}
    for label, config in configs.items():
        laboratory = _laboratory(target, config, sampling, quiet=quiet)
        prompts, params = prepared(laboratory.llm, texts, given)
        rows[label] = _alphas(laboratory, label, prompts, params, leniences, quiet=quiet)
    return Leniences(target.model, given.temperature, len(texts), leniences, rows)


def _alphas(
    laboratory: Laboratory,
    label: str,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    leniences: Sequence[float],
    *,
    quiet: bool,
) -> LenienceRow:
    from tokenleap.analysis.measure import alpha_by_lenience

    with counting(quiet=quiet) as report:

        def told(done: int) -> None:
            report(f"alpha of {label}", done, len(prompts))

        told(0)
        return alpha_by_lenience(laboratory, prompts, params, leniences, told)


def _label(config: SpeculativeConfig, text: str | None) -> str:
    """The method's name, and the other fields of its JSON."""
    if text is None or not text.lstrip().startswith("{"):
        return config.method_name
    others = {name: value for name, value in json.loads(text).items() if name != "method"}
    return f"{config.method_name} {json.dumps(others)}" if others else config.method_name
