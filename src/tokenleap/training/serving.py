"""What a trained drafter brings, measured by the engine that serves it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tokenleap.core.params import SamplingParams
from tokenleap.errors import TrainingError
from tokenleap.llm import LLM, Prompt
from tokenleap.metrics import Metrics

__all__ = ["Served", "measure"]

_TOKENS = 96


@dataclass(frozen=True)
class Served:
    """Drafts of a fixed length, and the default controller, on held-out prompts.

    Args:
        prompts: number.
        mean_length: mean acceptance length of chains of as many tokens as were asked for.
        by_position: how often each of their positions was accepted, given those before.
        draft_share: time of drafting a level, as a share of a plain pass.
        speed_up: median over the prompts: tokens per second with the default controller, over
            those of plain decoding.
    """

    prompts: int
    mean_length: float
    by_position: tuple[float, ...]
    draft_share: float
    speed_up: float


def measure(
    llm: LLM,
    config: Mapping[str, Any],
    prompts: Sequence[Prompt],
    length: int,
    nodes_per_token: int = 1,
) -> Served:
    """Measure a drafter, in turn with plain decoding.

    Args:
        llm: the target without speculation.
        config: of the drafter.
        prompts: held-out prompts.
        length: tokens of a chain.
        nodes_per_token: nodes of a draft for each token of its chain.

    Raises:
        TrainingError: the drafter failed, or an output differs.
    """
    fixed = {**config, "num_speculative_tokens": length * nodes_per_token, "controller": "fixed"}
    ratios, plain_metrics, drafted = [], [], []
    for number, prompt in enumerate([prompts[0], *prompts]):
        params = SamplingParams(temperature=0, max_tokens=_TOKENS)
        (plain,) = llm.generate([prompt], params)
        (chain,) = llm.generate([prompt], params, speculative_config=fixed)
        (default,) = llm.generate([prompt], params, speculative_config=config)
        if failure := chain.metrics.drafter_failure or default.metrics.drafter_failure:
            raise TrainingError(f"the trained drafter cannot draft: {failure}")
        if llm.engine.target.bit_exact and not plain.token_ids == chain.token_ids:
            raise TrainingError("the output with the trained drafter differs from plain decoding.")
        if not number:
            continue  # the first run builds the drafters and measures the costs of passes
        ratios.append(_decoding(default.metrics) / _decoding(plain.metrics))
        plain_metrics.append(plain.metrics)
        drafted.append(chain.metrics)
    passed = [sum(_accepted_at(m, i) for m in drafted) for i in range(length)]
    drafts = sum(m.num_drafts for m in drafted)
    levels = max(1, sum(m.num_draft_tokens for m in drafted) / nodes_per_token)
    plain_pass = sum(m.verify_seconds for m in plain_metrics) / max(
        1, sum(m.target_passes for m in plain_metrics)
    )
    reached = [drafts, *passed]
    return Served(
        len(prompts),
        1 + sum(m.num_accepted_tokens - m.num_cut_drafts for m in drafted) / max(1, drafts),
        tuple(n / max(1, of) for n, of in zip(passed, reached, strict=False)),
        sum(m.draft_seconds for m in drafted) / levels / plain_pass,
        median(ratios),
    )


def _accepted_at(metrics: Metrics, position: int) -> int:
    """How often the drafted token at a position was accepted."""
    counts = metrics.accepted_per_position
    return counts[position] if position < len(counts) else 0


def _decoding(metrics: Metrics) -> float:
    """Tokens per second of the steps."""
    return metrics.generated_tokens / max(1e-9, metrics.step_seconds)
