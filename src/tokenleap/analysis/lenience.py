"""Alpha by lenience: table 5 of Leviathan et al. (2023), for a drafter and prompts of one's own.

Alpha is measured over the target's own text, as in the paper. At each position, the betas of all
leniences are computed from the same p and q, so they differ by lenience alone. `tokenleap plan
--lenience` prints the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from tokenleap.analysis.measure import Judge, Laboratory
from tokenleap.core.acceptance.base import TargetDistributions
from tokenleap.core.acceptance.lenient import Lenient
from tokenleap.core.noise import StepNoise
from tokenleap.core.params import SamplingParams
from tokenleap.core.tree import Draft
from tokenleap.errors import ConfigError

__all__ = ["LENIENCES", "LenienceRow", "alpha_by_lenience", "rejection_sampling"]

LENIENCES = (1.0, 0.5, 0.3, 0.1)
"""Those of table 5."""


@dataclass(frozen=True)
class LenienceRow:
    """One drafter.

    Args:
        positions: positions with a draft.
        rejection_sampling: alpha of rejection sampling without iteration (A.2).
        alphas: alpha for every lenience, in the order asked for.
    """

    positions: int
    rejection_sampling: float
    alphas: tuple[float, ...]


def alpha_by_lenience(
    laboratory: Laboratory,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    leniences: Sequence[float] = LENIENCES,
    report: Callable[[int], object] = lambda _: None,
) -> LenienceRow:
    """Measure one drafter.

    In greedy decoding, a drafted x passes if p(x) >= l max p, with p at temperature 1 (A.5).

    Args:
        laboratory: the target and the drafter, with a lossless rule.
        prompts: token ids; at least one prompt.
        params: how to sample; p and q are the distributions under these parameters.
        leniences: each above 0 and at most 1.
        report: called with the number of prompts that are done, after each.

    Raises:
        ConfigError: a lenience is out of range, or nothing was drafted.
    """
    rules = [Lenient(Lenient.Options(lenience=lenience)) for lenience in leniences]
    judges: list[Judge] = [rejection_sampling, *(rule.beta for rule in rules)]
    found = laboratory.betas(prompts, params, judges, report)
    if not found[0]:
        raise ConfigError(
            f"method '{laboratory.llm.speculative_config.method_name}' drafted nothing on these "
            "prompts: there is no alpha to measure. Take other prompts or more tokens."
        )
    first, *others = map(fmean, found)
    return LenienceRow(len(found[0]), first, tuple(others))


def rejection_sampling(draft: Draft, p: TargetDistributions, noise: StepNoise) -> float:
    """Beta of rejection sampling without iteration: `rejection_sampling_probability`, on supports.

    Args:
        draft: its first drafted token is judged.
        p: the target's distributions.
        noise: not needed.
    """
    probs = p[0].probs  # [S]
    drafted = draft.q_of(1).at(p[0].tokens).to(probs)  # [S]
    return min(1.0, float((drafted / probs).min()))
