"""`tokenleap plan --measure --lenience`: table 5 of Leviathan et al. (2023) for one's own pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.table import Table

from tokenleap.cli.console import counting, display, plain
from tokenleap.cli.plan_drafters import DrafterOptions
from tokenleap.cli.plan_trials import open_laboratory
from tokenleap.cli.root import UsageError
from tokenleap.engine.lines import shaped

if TYPE_CHECKING:
    from tokenleap.analysis.lenience import LenienceRow
    from tokenleap.cli.options import ModelOptions
    from tokenleap.core.params import SamplingParams

__all__ = ["Leniences", "measure_lenience", "read_leniences", "show_lenience"]


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
    """The leniences of a command line.

    Raises:
        UsageError: one is not a number above 0 and at most 1.
    """
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
    """Load the target with one drafter after the other, and measure alpha.

    Raises:
        UsageError: a drafter's JSON names an acceptance rule.
        ConfigError: nothing was drafted.
    """
    configs = drafter.configs()
    for label, config in configs.items():
        if config.rule.name != "rejection":
            raise UsageError(f"acceptance of {label}: --lenience measures the rule lenient")
    rows = {}
    for label, config in configs.items():
        laboratory = open_laboratory(target, config, generation_config, quiet=quiet)
        from tokenleap.analysis.lenience import alpha_by_lenience

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
