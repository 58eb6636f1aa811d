"""`TrainingMethod`: what can be trained, with its settings, and the registry of all methods.

A method is a frozen value: its fields are its options, and it makes a network with its loss
(`trainee`). This module needs no PyTorch, so that help pages are fast.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, cast

from annotated_types import Ge, Gt, Le, Lt
from pydantic import FiniteFloat, model_validator

from tokenleap.core.config import Config, nearest
from tokenleap.errors import ConfigError

if TYPE_CHECKING:
    from tokenleap.training.trainee import HeadParts, Trainee

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
        seed: of weights, noise, the order of the data, and the text that the target writes by
            itself.
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
    seed: Annotated[int, Ge(0), Le(2**31 - 1)] = 0

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
        self.refuse(reason, *fields)
        return self.model_copy(update=fields)

    def refuse(self, reason: str, *names: str) -> None:
        for name in names:
            if name in self.model_fields_set:
                raise ConfigError(f"{name}: {reason}")


@dataclass(frozen=True)
class OnPolicy:
    """Text that the drafter writes while it learns: its share, and the steps of a round."""

    share: float
    every: int


@dataclass(frozen=True)
class Plan:
    """How a training goes that is not as usual.

    Args:
        draft_vocab_size: most tokens of the draft vocabulary; None for all.
        given_answers: whether the answers in the user's files are learnt instead of the target's.
        beam_width: of the search by which an encoder-decoder writes what is learnt; 1 is greedy.
        on_policy: text that the drafter writes; None for none.
        reads_encoder: whether it reads what the target's encoder makes of the sources.
        num_drafters: how many drafters are trained, one after the other.
        sample_length: tokens of the samples, of which a later one learns those that were missed.
        served_tokens: tokens of the drafts with which the result is measured.
        nodes_per_token: nodes of such a draft for each of its tokens.
    """

    draft_vocab_size: int | None = None
    given_answers: bool = False
    beam_width: int = 1
    on_policy: OnPolicy | None = None
    reads_encoder: bool = False
    num_drafters: int = 1
    sample_length: int = 1
    served_tokens: int = 4
    nodes_per_token: int = 1


class TrainingMethod(Config, ABC):
    """One kind of drafter, with its options as fields."""

    name: ClassVar[str]
    summary: ClassVar[str]

    tunes_target: ClassVar[bool] = False
    """Whether it writes a target of its own, for which the drafts are."""

    deeper: ClassVar[str] = "learn for more epochs"
    """Advice if later positions of drafts are much worse than the first."""

    for_sources: ClassVar[bool | None] = False
    """Whether it trains for encoder-decoders, or for decoder-only models; None for both."""

    @abstractmethod
    def trainee(self, parts: HeadParts) -> Trainee:
        """A new network with its loss; random weights are drawn from PyTorch's generator."""

    @property
    def plan(self) -> Plan:
        return Plan()

    def read_layers(self, num_layers: int) -> tuple[int, ...]:
        """Ids of the target's layers whose hidden states it reads; by default it reads tokens."""
        return ()

    def adapted(self, settings: TrainingSettings) -> TrainingSettings:
        return settings

    def serving(self, folder: Path) -> dict[str, Any]:
        """The `speculative_config` that uses a written drafter."""
        return {"method": self.name, "model": str(folder)}


TRAINABLE: Mapping[str, str] = {
    "eagle": "eagle.EagleTraining",
    "eagle1": "eagle.Eagle1Training",
    "parallel": "eagle.ParallelTraining",
    "medusa": "state_heads.MedusaTraining",
    "hydra": "state_heads.HydraTraining",
    "blockwise": "state_heads.BlockwiseTraining",
    "mlp_speculator": "state_heads.MlpSpeculatorTraining",
    "distill": "distill.DistillTraining",
    "boost": "distill.BoostTraining",
    "early_exit": "tuned.EarlyExitTraining",
    "pad": "tuned.PadTraining",
    "pass": "tuned.PassTraining",
    "spec_drafter": "spec_drafter.SpecDrafterTraining",
    "medusa_2": "state_heads.TunedMedusaTraining",
    "blockwise_tuned": "state_heads.TunedBlockwiseTraining",
}
"""The registry: METHOD of `tokenleap train` -> its class, in a file of this package."""


def check_trainable(name: str) -> None:
    if name not in TRAINABLE:
        known = nearest(name, list(TRAINABLE))
        raise ConfigError(f"nothing can be trained as '{name}': {known}")


def training_class(name: str) -> type[TrainingMethod]:
    check_trainable(name)
    file, _, kind = TRAINABLE[name].partition(".")
    module = import_module(f"{__package__}.{file}")
    return cast(type[TrainingMethod], getattr(module, kind))


def training_methods() -> dict[str, type[TrainingMethod]]:
    """All of them, by name; this imports PyTorch."""
    return {name: training_class(name) for name in TRAINABLE}


def training_method(name: str, options: Mapping[str, Any]) -> TrainingMethod:
    return training_class(name)(**options)
