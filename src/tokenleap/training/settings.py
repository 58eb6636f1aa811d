"""Settings of the data (`DataSettings`) and of the training (`TrainingSettings`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from annotated_types import Ge, Gt, Le, Lt
from pydantic import FiniteFloat, model_validator

from tokenleap.core.config import Config, nearest
from tokenleap.errors import ConfigError

__all__ = ["TRAINABLE", "DataSettings", "TrainingSettings", "check_trainable"]


_Share = Annotated[FiniteFloat, Ge(0), Le(1)]
_Beta = Annotated[FiniteFloat, Ge(0), Lt(1)]


@dataclass(frozen=True)
class DataSettings:
    """Settings of the data.

    Args:
        files: the user's own data; empty means that the target writes by itself.
        parallel: two files for an encoder-decoder, in place of `files`: a source and its output in
            each line.
    """

    files: tuple[Path, ...] = ()
    tokens: int = 1_000_000
    held_out_tokens: int = 40_000
    unseen: tuple[Path, ...] = ()
    parallel: tuple[Path, ...] = ()


class TrainingSettings(Config):
    """How any drafter is trained.

    Args:
        epochs: passes over the data.
        max_steps: steps of the optimizer, in place of `epochs`; None means that those decide.
            `spec_drafter` takes 300,000 times its `size`.
        batch_tokens: most tokens of a batch, padding included, on each device.
        accumulation: batches per step of the optimizer; 4 for `spec_drafter`.
        max_length: most tokens of a conversation; the rest is cut off.
        levels: levels of a draft that are learnt; 1 for `eagle1`.
        first_level_share: share of the steps in which only the first level is learnt. It costs a
            third of three levels, and the others learn fast once it is good.
        decay: weight of a level's loss, relative to the level before.
        optimizer: of the matrices: Muon, or AdamW. All other weights have AdamW,
            embeddings and output rows too.
        betas: of AdamW; 0.9 and 0.999 for `spec_drafter`.
        learning_rate: of the matrices; 0.0002 for `early_exit` and `pad`, 0.0005 for
            `spec_drafter`.
        vector_learning_rate: of all other weights; 0.0001 for `early_exit` and `pad`, 0.003 for
            `pass`, 0.0005 for `spec_drafter`.
        weight_decay: of the matrices.
        schedule: how the learning rates fall after they have risen: as a `cosine` to 0, or as one
            over the square root of the step, as for `spec_drafter`.
        warmup: share of the steps in which the learning rates rise.
        warmup_steps: the number of these steps, in place of `warmup`; None means that decides.
            `spec_drafter` takes 10,000 times its `size`.
        max_grad_norm: gradients are clipped to this norm; 5 for `spec_drafter`.
        evaluate_every: steps between two evaluations, and between two checkpoints; 1,000 times
            `size`, and at least 100, for `spec_drafter`.
        average: the weights after the last so many evaluations are averaged at the end, and are
            the drafter if it is better; 1 means that nothing is averaged. 10 for
            `spec_drafter`.
        patience: training stops after so many evaluations without a better drafter; 0 means never,
            as for `spec_drafter`.
        mixed_precision: of the matrix products: `bf16`, `no`, or on a GPU `fp16`.
        seed: of weights, noise and the order of the data.
    """

    epochs: Annotated[FiniteFloat, Gt(0)] = 3.0
    max_steps: Annotated[int, Ge(1)] | None = None
    batch_tokens: Annotated[int, Ge(16)] = 4096
    accumulation: Annotated[int, Ge(1)] = 1
    max_length: Annotated[int, Ge(8)] = 1024
    levels: Annotated[int, Ge(1), Le(32)] = 3
    first_level_share: _Share = 0.4
    decay: Annotated[FiniteFloat, Gt(0), Le(1)] = 0.8
    optimizer: Literal["muon", "adamw"] = "muon"
    betas: tuple[_Beta, _Beta] = (0.9, 0.95)
    learning_rate: Annotated[FiniteFloat, Gt(0)] = 1.5e-3
    vector_learning_rate: Annotated[FiniteFloat, Gt(0)] = 3e-4
    weight_decay: Annotated[FiniteFloat, Ge(0)] = 0.01
    schedule: Literal["cosine", "inverse_sqrt"] = "cosine"
    warmup: Annotated[FiniteFloat, Ge(0), Lt(1)] = 0.04
    warmup_steps: Annotated[int, Ge(1)] | None = None
    max_grad_norm: Annotated[FiniteFloat, Gt(0)] = 1.0
    evaluate_every: Annotated[int, Ge(1)] = 100
    average: Annotated[int, Ge(1), Le(100)] = 1
    patience: Annotated[int, Ge(0)] = 8
    mixed_precision: Literal["no", "bf16", "fp16"] = "bf16"
    seed: Annotated[int, Ge(0)] = 0

    @model_validator(mode="after")
    def _given_once(self) -> Self:
        for name, other in (("max_steps", "epochs"), ("warmup_steps", "warmup")):
            if getattr(self, name) is not None and other in self.model_fields_set:
                raise ValueError(f"{name}: takes the place of {other}: give one of the two.")
        return self

    def steps(self, batches: int) -> int:
        """Steps of the optimizer, with so many batches in the data."""
        return self.max_steps or max(1, round(math.ceil(batches / self.accumulation) * self.epochs))

    def rising_steps(self, total: int) -> float:
        """Steps in which the learning rates rise, of so many."""
        return self.warmup * total if self.warmup_steps is None else self.warmup_steps

    def preferring(self, **fields: Any) -> Self:
        """The settings with other defaults: fields that the user has not given."""
        given = self.model_fields_set
        left = {name: value for name, value in fields.items() if name not in given}
        return self.model_copy(update=left)

    def one_level_alone(self) -> Self:
        """The settings, without those for more than one level if there is only one."""
        if self.levels > 1:
            return self
        return self.decided(
            "it is for several levels: remove it.", first_level_share=0.0, decay=1.0
        )

    def decided(self, reason: str, **fields: Any) -> Self:
        """The settings with fields that a method decides by itself."""
        self.refuse(reason, *fields)
        return self.model_copy(update=fields)

    def refuse(self, reason: str, *names: str) -> None:
        """Refuse fields that a method has no use for."""
        for name in names:
            if name in self.model_fields_set:
                raise ConfigError(f"{name}: {reason}")


# Names of what can be trained; without PyTorch, for help pages.


TRAINABLE = (
    "eagle",
    "eagle1",
    "parallel",
    "medusa",
    "hydra",
    "blockwise",
    "mlp_speculator",
    "distill",
    "boost",
    "early_exit",
    "pad",
    "pass",
    "spec_drafter",
    "medusa_2",
    "blockwise_tuned",
)
"""The names in `methods.TRAINING_METHODS`."""


def check_trainable(name: str) -> None:
    """Refuse a name that stands for nothing that can be trained."""
    if name not in TRAINABLE:
        known = nearest(name, list(TRAINABLE))
        raise ConfigError(f"nothing can be trained as '{name}': {known}")
