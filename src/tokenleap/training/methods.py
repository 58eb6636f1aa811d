"""Methods of `tokenleap train METHOD`. A new one is one file and one entry here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenleap.training.distill import BoostTraining, DistillTraining
from tokenleap.training.eagle import Eagle1Training, EagleTraining, ParallelTraining
from tokenleap.training.method import TrainingMethod
from tokenleap.training.pad import PadTraining, PassTraining
from tokenleap.training.settings import check_trainable
from tokenleap.training.spec_drafter import SpecDrafterTraining
from tokenleap.training.state_heads import (
    BlockwiseTraining,
    HydraTraining,
    MedusaTraining,
    MlpSpeculatorTraining,
)
from tokenleap.training.tuned import EarlyExitTraining, TunedBlockwiseTraining, TunedMedusaTraining

__all__ = ["TRAINING_METHODS", "training_method"]

TRAINING_METHODS: dict[str, type[TrainingMethod]] = {
    method.name: method
    for method in (
        EagleTraining,
        Eagle1Training,
        ParallelTraining,
        MedusaTraining,
        HydraTraining,
        BlockwiseTraining,
        MlpSpeculatorTraining,
        DistillTraining,
        BoostTraining,
        EarlyExitTraining,
        PadTraining,
        PassTraining,
        SpecDrafterTraining,
        TunedMedusaTraining,
        TunedBlockwiseTraining,
    )
}


def training_method(name: str, options: Mapping[str, Any]) -> TrainingMethod:
    """The method of this name with its options."""
    check_trainable(name)
    kind = TRAINING_METHODS[name]
    return kind(kind.Options(**options))
