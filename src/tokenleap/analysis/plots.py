"""Figures 2, 3 and 4 of Leviathan et al. (2023) as PNG, for `tokenleap plan --plots`.

It needs Matplotlib, the extra `plots`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tokenleap.analysis import formulas
from tokenleap.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

ALPHAS = np.linspace(0, 1, 101)
GAMMAS = (1, 3, 5, 7, 10)
COST_RATIOS = (0.01, 0.02, 0.05, 0.1, 0.2)
BELOW_ONE = ALPHAS[:-1]
"""At alpha = 1 a longer draft is always better, so there is no best one."""


def draw(folder: Path, alpha: float, c: float) -> list[Path]:
    """Draw the paper's three figures, with the given alpha as a dashed line.

    Figure 2 shows the expected number of tokens, figure 3 the best gamma, and figure 4 the speed-up
    and the operations for a drafter whose c and c_hat are `c` (the paper has 0).
    """
    formulas.improvement(alpha, 1, c)  # check the arguments before anything is written
    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Callable[[Axes], None]] = {
        "figure2_expected_tokens.png": _expected_tokens,
        "figure3_best_gamma.png": lambda axes: _best_gamma(axes, c),
        "figure4_speed_and_operations.png": lambda axes: _speed_and_operations(axes, c),
    }
    return [_save(folder / name, alpha, contents) for name, contents in figures.items()]


def _save(path: Path, alpha: float, contents: Callable[[Axes], None]) -> Path:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "plots need Matplotlib: install the extra, pip install 'tokenleap[plots]'."
        ) from error
    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    contents(axes)
    axes.axvline(alpha, color="grey", linestyle="--", linewidth=1)
    axes.set_xlabel(f"acceptance rate alpha (dashed: {alpha:.3g})")
    axes.set_xlim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    return path


def _expected_tokens(axes: Axes) -> None:
    for gamma in GAMMAS:
        values = [formulas.expected_tokens(alpha, gamma) for alpha in ALPHAS]
        axes.plot(ALPHAS, values, label=f"gamma = {gamma}")
    axes.set_ylabel("expected tokens per step")


def _best_gamma(axes: Axes, c: float) -> None:
    for ratio in sorted({*COST_RATIOS, c} - {0.0}):
        values = [formulas.best_gamma(alpha, ratio) for alpha in BELOW_ONE]
        axes.plot(BELOW_ONE, values, label=f"c = {ratio:.3g}")
    axes.set_ylim(0, 20)
    axes.set_ylabel("best gamma")


def _speed_and_operations(axes: Axes, c: float) -> None:
    for gamma in GAMMAS:
        speed = [formulas.improvement(alpha, gamma, c) for alpha in ALPHAS]
        (line,) = axes.plot(ALPHAS, speed, label=f"speed-up, gamma = {gamma}")
        work = [formulas.operations(alpha, gamma, c) for alpha in ALPHAS]
        axes.plot(ALPHAS, work, color=line.get_color(), linestyle=":")
    axes.set_ylabel(f"speed-up; operations dotted (c = {c:.3g})")
