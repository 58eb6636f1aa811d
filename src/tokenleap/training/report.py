"""The course of a training in words, and its result (`TrainingReport`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor

from tokenleap.core.files import write_whole
from tokenleap.core.params import SamplingParams
from tokenleap.errors import TrainingError
from tokenleap.llm import LLM, Prompt
from tokenleap.outputs import Metrics
from tokenleap.runtime.network import Need
from tokenleap.runtime.target import Target
from tokenleap.training.checkpoints import Evaluation, Step
from tokenleap.training.collect import Diversity
from tokenleap.training.conversations import Conversation
from tokenleap.training.features import passes
from tokenleap.training.method import TrainingMethod

__all__ = [
    "Perplexity",
    "Reporter",
    "Served",
    "TrainingReport",
    "advice",
    "evaluation_text",
    "measure",
    "perplexity",
    "served_alike",
    "step_text",
    "usage_text",
]


# What a trained drafter brings, measured by the engine that serves it.


_TOKENS = 96


@dataclass(frozen=True)
class Served:
    """Drafts of a fixed length, and the default controller, on held-out prompts.

    Args:
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
    """Measure a drafter, in turn with plain decoding."""
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


# The model that a training wrote in place of the target: served as the target is, and compared.
#
# It writes something else than the target, and no drafter can make up for what it lost. So its
# perplexity on the held-out answers is set beside the target's:
#
#     exp(-mean over all tokens of log p(token | tokens before)).
#
# The target wrote these answers, half of them by its most probable tokens, so its own is low.


_CONVERSATIONS = 64
"""Most conversations that are compared."""


@dataclass(frozen=True)
class Perplexity:
    """Of the target and of the new model, on the same held-out answers."""

    target: float
    new: float

    @classmethod
    def of(cls, target: LLM, new: LLM, held_out: Sequence[Conversation]) -> Perplexity:
        """Both of them, on the first conversations."""
        chosen = held_out[:_CONVERSATIONS]
        return cls(*(perplexity(each.engine.target, chosen) for each in (target, new)))


def served_alike(llm: LLM, folder: Path) -> LLM:
    """A model in a folder, with the options with which another one is served."""
    options = llm.engine.options
    return LLM(
        folder,
        speculative_config={"method": "none"},
        dtype=llm.dtype,
        device=llm.device,
        max_model_len=options.max_model_len,
        max_num_seqs=1,
        quantization=options.quantization,
        runtime=options.runtime,
    )


def perplexity(target: Target, conversations: Sequence[Conversation]) -> float:
    """A model's perplexity on the parts of conversations that are to be learnt."""
    found = []
    for each in conversations:
        logprobs = _logprobs(target, each.tokens)
        found += [logprobs[max(0, first - 1) : stop - 1] for first, stop in each.answers]
    return float((-torch.cat(found).mean()).exp())


@torch.inference_mode()
def _logprobs(target: Target, tokens: Sequence[int]) -> Tensor:
    """[n - 1] the log-probability of every token but the first one."""
    following, found, at = torch.tensor(tokens[1:]), [], 0
    for output in passes(target, tokens[:-1], Need()):
        logits = output.scores.float().cpu()
        chosen = following[at : at + len(logits)].unsqueeze(-1)
        found.append(logits.log_softmax(-1).gather(1, chosen).squeeze(-1))
        at += len(logits)
    return torch.cat(found)


class Reporter(Protocol):
    """Shows how a run goes."""

    def say(self, text: str) -> None:
        """One line."""
        ...

    def stage(self, doing: str, total: int) -> AbstractContextManager[Callable[[int, str], None]]:
        """A part of the work. Yields a function that is told how much is done, with a remark."""
        ...


@dataclass(frozen=True)
class TrainingReport:
    """The result of a training.

    Args:
        coverage: share of the held-out answers' tokens that are in the draft vocabulary.
        perplexity: of the new model, if one was written in place of the target.
    """

    training: Diversity
    held_out: Diversity
    coverage: float
    best: Evaluation
    served: Served
    advice: tuple[str, ...] = field(default=())
    perplexity: Perplexity | None = None

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        text = json.dumps(asdict(self), indent=2) + "\n"
        write_whole(path, lambda to: to.write_text(text))


def step_text(step: Step) -> str:
    """The line of a step."""
    shares = " ".join(f"{share:.0%}" for share in step.accuracy)
    return f"loss {step.losses[0]:.2f}, right {shares}"


def evaluation_text(found: Evaluation) -> str:
    """The lines of an evaluation."""
    positions = " ".join(f"{share:.0%}" for share in found.by_position)
    lengths = " ".join(f"{length:.2f}" for length in found.mean_lengths)
    star = " (best)" if found.best else ""
    return (
        f"step {found.step}: loss {found.loss:.3f}; held out: acceptance by position {positions}; "
        f"mean acceptance length of chains 1 to {len(found.mean_lengths)}: {lengths}{star}"
    )


def usage_text(config: Mapping[str, Any], new_target: Path | None) -> str:
    """The options of the command line for a `speculative_config`."""
    of_target = f"--model {new_target} " if new_target else ""
    if not config.keys() <= {"method", "model"}:
        return f"{of_target}--speculative-config '{json.dumps(config)}'"
    drafter = f" --draft-model {config['model']}" if "model" in config else ""
    return f"{of_target}--method {config['method']}{drafter}"


def advice(
    coverage: float,
    best: Evaluation,
    served: Served,
    changed: Perplexity | None = None,
    deeper: str = TrainingMethod.deeper,
) -> Sequence[str]:
    """The advice if acceptance is low, or if the new model has become worse."""
    found = []
    if coverage < 0.95:
        found.append(
            f"The draft vocabulary covers only {coverage:.0%} of the target's text: raise "
            "draft_vocab_size."
        )
    if served.mean_length < best.score - 0.25:
        found.append(
            f"The engine accepts {served.mean_length:.2f} tokens a pass where the simulation says "
            f"{best.score:.2f}: few prompts were measured, or their first tokens are harder."
        )
    first, *later = best.by_position
    if first < 0.5:
        found.append("The first position is right too rarely: learn more tokens, or more epochs.")
    if later and later[0] < first - 0.15:
        found.append(f"Later positions are much worse than the first: {deeper}.")
    if served.speed_up < 1.02:
        found.append("It hardly pays on this machine; the default controller will rarely use it.")
    if changed and changed.new > 1.1 * changed.target:
        found.append(
            f"The new model's perplexity is {changed.new:.2f}, the target's {changed.target:.2f}: "
            "learn at a lower rate, or from more tokens."
        )
    return found
