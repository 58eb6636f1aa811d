"""Measure what an optimal tree is computed from: the positional acceptance vector, and costs.

The method drafts one level of K children at every step, chosen as the request's sampling implies.
The traces show which rank was accepted; the rank of a child is the number of its siblings drafted
before it. Sequoia assumes that the children of deeper nodes are accepted as often as the root's;
this is not measured. `tokenleap tree` calls these functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from tokenleap.config import SpeculativeConfig
from tokenleap.core.params import SamplingParams
from tokenleap.drafters.registry import METHODS
from tokenleap.drafters.shapes import TreeOptions
from tokenleap.errors import ConfigError
from tokenleap.llm import LLM, Prompt
from tokenleap.runtime.costs import CostCurve
from tokenleap.runtime.profiling import measure_costs
from tokenleap.trace import StepTrace

__all__ = ["Acceptance", "accepted_rank", "measure_acceptance", "one_level", "pass_costs"]


@dataclass(frozen=True)
class Acceptance:
    """How often the child of each rank was accepted.

    Args:
        accepted: [K] number of steps whose accepted child had this rank.
    """

    accepted: tuple[int, ...]
    drafts: int
    draft_seconds: float

    @property
    def vector(self) -> tuple[float, ...]:
        """[K] the positional acceptance vector."""
        return tuple(count / self.drafts for count in self.accepted)

    @property
    def errors(self) -> tuple[float, ...]:
        """[K] standard errors, if the steps are independent."""
        return tuple((rate * (1 - rate) / self.drafts) ** 0.5 for rate in self.vector)


def pass_costs(llm: LLM) -> CostCurve:
    """Seconds of a target pass by its number of positions."""
    return measure_costs(llm.engine.target)


def one_level(config: SpeculativeConfig, ranks: int) -> SpeculativeConfig:
    """The configuration that drafts one level of `ranks` children at every step."""
    if not issubclass(config.drafter_spec.options, TreeOptions):
        able = ", ".join(
            name for name, spec in METHODS.items() if issubclass(spec.options, TreeOptions)
        )
        raise ConfigError(
            f"method '{config.method_name}' takes no tree: give a draft model, or one of {able}."
        )
    fields = {name: getattr(config, name) for name in config.model_fields_set}
    always = {"tree": (ranks,), "num_speculative_tokens": ranks, "controller": "fixed"}
    return SpeculativeConfig.parse({**fields, **always})


def measure_acceptance(
    llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, ranks: int
) -> Acceptance:
    """Count the accepted ranks while the prompts are answered."""
    counts, seconds = [0] * ranks, []
    for prompt in prompts:
        steps = [step for step in _steps(llm, prompt, params) if step.drafted]
        for rank in map(accepted_rank, steps):
            if rank is not None and rank < ranks:
                counts[rank] += 1
        # A draft model reads the whole prompt in its first step.
        seconds.append([step.draft_seconds for step in steps])
    drafts = sum(map(len, seconds))
    if not drafts:
        raise ConfigError(
            f"method '{llm.speculative_config.method_name}' drafted nothing on these prompts: "
            "there is no acceptance to measure. Take other prompts or more tokens."
        )
    timed = [time for times in seconds for time in times[1:]] or [t[0] for t in seconds if t]
    return Acceptance(tuple(counts), drafts, median(timed))


def _steps(llm: LLM, prompt: Prompt, params: SamplingParams) -> list[StepTrace]:
    (result,) = llm.generate([prompt], params)
    return [step for output in result.outputs for step in output.trace]


def accepted_rank(step: StepTrace) -> int | None:
    """The rank of the root's accepted child; None if all were rejected."""
    if not step.accepted:
        return None
    return step.parents[: step.accepted[0]].count(-1)
