"""Measurements of Foretoken on real prompts; run from the project root.

    python -m benchmarks.identity --prompts FILE      output with a drafter is output without one
    python -m benchmarks.quick --prompts FILE         how much faster it is
    python -m benchmarks.methods --prompts FILE       every method on every kind of prompt
    python -m benchmarks.contract --prompts FILE      never slower, by batch size and kind of text
    python -m benchmarks.quantization --prompts FILE  how far int8 weights move p
    python -m benchmarks.step_cost                    what a pass costs, and the rest of a step
    python -m benchmarks.tree_cost                    a token tree against a batch row per path
    python -m benchmarks.gpu --prompts FILE           graphs and steps on the device, on a GPU

Prompts are read from a file (`benchmarks.prompts`); none come with the project.
"""

from __future__ import annotations

__all__ = ["BenchmarkError"]


class BenchmarkError(ValueError):
    """What the caller of a benchmark has to change: one line."""
