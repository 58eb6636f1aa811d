"""What a training tells: its course in words, and what it brought (`TrainingReport`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tokenleap.core.files import write_whole
from tokenleap.training.diversity import Diversity
from tokenleap.training.method import TrainingMethod
from tokenleap.training.new_target import Perplexity
from tokenleap.training.progress import Evaluation, Step
from tokenleap.training.serving import Served

__all__ = ["Reporter", "TrainingReport", "advice", "evaluation_text", "step_text", "usage_text"]


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
    """What a training brought.

    Args:
        training, held_out: the data.
        coverage: share of the held-out answers' tokens that are in the draft vocabulary.
        best: the best evaluation.
        served: by the engine.
        advice: what to change if acceptance is low.
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
    """What a step showed."""
    shares = " ".join(f"{share:.0%}" for share in step.accuracy)
    return f"loss {step.losses[0]:.2f}, right {shares}"


def evaluation_text(found: Evaluation) -> str:
    """What an evaluation showed."""
    positions = " ".join(f"{share:.0%}" for share in found.by_position)
    lengths = " ".join(f"{length:.2f}" for length in found.mean_lengths)
    star = " (best)" if found.best else ""
    return (
        f"step {found.step}: loss {found.loss:.3f}; held out: acceptance by position {positions}; "
        f"mean acceptance length of chains 1 to {len(found.mean_lengths)}: {lengths}{star}"
    )


def usage_text(config: Mapping[str, Any], new_target: Path | None) -> str:
    """The options of the command line for a `speculative_config`.

    Args:
        config: it.
        new_target: the model that it is for, if training wrote one.
    """
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
    """What to change if acceptance is low, or if the new model has become worse.

    Args:
        coverage: share of the target's text in the draft vocabulary.
        best: the evaluation of the drafter that was written.
        served: what it did in the engine.
        changed: perplexity of the target and of the new one, if training wrote one.
        deeper: see `TrainingMethod`.
    """
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
