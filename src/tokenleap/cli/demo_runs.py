"""The results of `tokenleap demo`: runs without and with speculation, and their statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenleap.outputs import CompletionOutput

__all__ = ["Comparison", "Runs"]


@dataclass
class Runs:
    """Outputs of one `LLM` for one prompt. The first is streamed, as a warm-up."""

    outputs: list[CompletionOutput] = field(default_factory=list)

    @property
    def measured(self) -> Sequence[CompletionOutput]:
        """The runs whose time counts."""
        return self.outputs[1:]

    @property
    def tokens_per_second(self) -> float:
        """Median over the measured runs, prefill included."""
        return median(output.metrics.tokens_per_second for output in self.measured)

    @property
    def spread(self) -> float:
        """Half the range of the measured tokens per second."""
        speeds = [output.metrics.tokens_per_second for output in self.measured]
        return (max(speeds) - min(speeds)) / 2

    @property
    def target_passes(self) -> int:
        """Target passes of the first run."""
        return self.outputs[0].metrics.target_passes

    @property
    def mean_acceptance_length(self) -> float:
        """Mean acceptance length of the first run."""
        return self.outputs[0].metrics.mean_acceptance_length


@dataclass
class Comparison:
    """One prompt without and with speculation."""

    title: str
    without: Runs = field(default_factory=Runs)
    speculative: Runs = field(default_factory=Runs)

    @property
    def ratio(self) -> float:
        """The speed-up of speculation."""
        return self.speculative.tokens_per_second / self.without.tokens_per_second

    @property
    def identical(self) -> bool:
        """Whether all runs gave the same token ids."""
        outputs = [*self.without.outputs, *self.speculative.outputs]
        return all(output.token_ids == outputs[0].token_ids for output in outputs)
