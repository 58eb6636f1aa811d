"""What is learnt (`DataSettings`), and how any drafter is trained (`TrainingSettings`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from annotated_types import Ge, Gt, Le, Lt
from pydantic import FiniteFloat

from foretoken.core.config import Config
from foretoken.errors import ConfigError

__all__ = ["DataSettings", "TrainingSettings"]

_Share = Annotated[FiniteFloat, Ge(0), Le(1)]


@dataclass(frozen=True)
class DataSettings:
    """What is learnt.

    Args:
        files: the user's own data; empty means that the target writes by itself.
        tokens: of answers to learn.
        held_out_tokens: of answers for evaluation.
        unseen: files of prompts that training must not see.
    """

    files: tuple[Path, ...] = ()
    tokens: int = 1_000_000
    held_out_tokens: int = 40_000
    unseen: tuple[Path, ...] = ()


class TrainingSettings(Config):
    """How any drafter is trained.

    Args:
        epochs: passes over the data.
        batch_tokens: most tokens of a batch, padding included, on each device.
        accumulation: batches per step of the optimizer.
        max_length: most tokens of a conversation; the rest is cut off.
        levels: levels of a draft that are learnt.
        first_level_share: share of the steps in which only the first level is learnt. It costs a
            third of three levels, and the others learn fast once it is good.
        decay: weight of a level's loss, relative to the level before.
        optimizer: of the matrices: Muon, or AdamW. All other weights have AdamW.
        learning_rate: of the matrices.
        vector_learning_rate: of all other weights.
        weight_decay: of the matrices.
        warmup: share of the steps in which the learning rates rise; they fall as a cosine after it.
        max_grad_norm: gradients are clipped to this norm.
        evaluate_every: steps between two evaluations, and between two checkpoints.
        patience: training stops after so many evaluations without a better drafter; 0 means never.
        mixed_precision: of the matrix products; see Accelerate.
        seed: of weights, noise and the order of the data.
    """

    epochs: Annotated[FiniteFloat, Gt(0)] = 3.0
    batch_tokens: Annotated[int, Ge(16)] = 4096
    accumulation: Annotated[int, Ge(1)] = 1
    max_length: Annotated[int, Ge(8)] = 1024
    levels: Annotated[int, Ge(1), Le(16)] = 3
    first_level_share: _Share = 0.4
    decay: Annotated[FiniteFloat, Gt(0), Le(1)] = 0.8
    optimizer: Literal["muon", "adamw"] = "muon"
    learning_rate: Annotated[FiniteFloat, Gt(0)] = 1.5e-3
    vector_learning_rate: Annotated[FiniteFloat, Gt(0)] = 3e-4
    weight_decay: Annotated[FiniteFloat, Ge(0)] = 0.01
    warmup: Annotated[FiniteFloat, Ge(0), Lt(1)] = 0.04
    max_grad_norm: Annotated[FiniteFloat, Gt(0)] = 1.0
    evaluate_every: Annotated[int, Ge(1)] = 100
    patience: Annotated[int, Ge(0)] = 8
    mixed_precision: Literal["no", "bf16", "fp16"] = "bf16"
    seed: Annotated[int, Ge(0)] = 0

    def preferring(self, **fields: Any) -> Self:
        """The settings with other defaults: fields that the user has not given."""
        left = {name: value for name, value in fields.items() if name not in self.model_fields_set}
        return self.model_copy(update=left)

    def one_level_alone(self) -> Self:
        """The settings, without those for more than one level if there is only one.

        Raises:
            ConfigError: the user has given one of them.
        """
        if self.levels > 1:
            return self
        return self.decided(
            "it is for several levels: remove it.", first_level_share=0.0, decay=1.0
        )

    def decided(self, reason: str, **fields: Any) -> Self:
        """The settings with fields that a method decides by itself.

        Args:
            reason: why, and what to do instead; the end of the message.
            fields: their values.

        Raises:
            ConfigError: the user has given one of them.
        """
        for name in fields:
            if name in self.model_fields_set:
                raise ConfigError(f"{name}: {reason}")
        return self.model_copy(update=fields)
