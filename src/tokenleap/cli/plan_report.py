"""How `tokenleap plan` shows its results: the tables and the sentences below them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.table import Table

from tokenleap.cli.console import display, plain

if TYPE_CHECKING:
    from tokenleap.analysis.compare import Trial
    from tokenleap.cli.plan_theory import Plan, PlanRow
    from tokenleap.cli.plan_trials import Trials

__all__ = ["show_plan", "show_trials"]


def show_plan(plan: Plan) -> None:
    """Print the table of the theory with its best row marked, and the conclusions."""
    console = display()
    table = _table("gamma", "tokens\nper step", "\nspeed-up", "opera-\ntions")
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
    table = _table("gamma", *headings, "tokens\neq. 1", "\nmeasured")
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


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="head", padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
