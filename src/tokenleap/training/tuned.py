"""What methods have in common that change the target: a copy of it learns to be easy to draft for.

They write a new model. Drafts for it are lossless with respect to it, not to the target that it was
made of. That one stays as it is and is the teacher: its own text and its most probable tokens are
what the copy learns, so that the copy changes little (self-distillation; Cai et al., arXiv
2401.10774, section 2.3.2).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedModel

from tokenleap.errors import CompatibilityError
from tokenleap.training.distill import DistillTrainee
from tokenleap.training.draft_lm import checked, write_lm
from tokenleap.training.method import HeadParts, TrainingMethod
from tokenleap.training.trainee import Trainee

__all__ = ["TUNING_RATES", "TargetTrainee", "TuningMethod", "copy_of_target"]

TUNING_RATES = {"learning_rate": 2e-4, "vector_learning_rate": 1e-4}
"""The default learning rates of a model that has learnt already; see `TrainingSettings`."""


class TargetTrainee(DistillTrainee):
    """A copy of the target that learns from it.

    Level k of a draft is its own distribution at the position of the k-th token, so level 0 is what
    has to stay as it was.
    """

    keeps_logits = False

    def states(self, tokens: Tensor, **arguments: Any) -> Tensor:
        """[B, T] tokens -> [B, T, E] hidden states after the final norm."""
        found: Tensor = self.decoder(input_ids=tokens, use_cache=False, **arguments)[0]
        return found


def copy_of_target(parts: HeadParts) -> PreTrainedModel:
    """The target's Transformers model once more, in float32 and ready to be trained.

    Raises:
        CompatibilityError: it cannot be loaded again, cannot draft, or its logits are not those of
            its output layer.
    """
    if parts.reload is None:
        raise CompatibilityError(
            "what changes the target trains a copy of it, which has to be loaded: give a folder or "
            "an alias, not a loaded model."
        )
    lm: Any = parts.reload()
    return checked(lm.float().requires_grad_(True), parts.name)


class TuningMethod(TrainingMethod):
    """A method that writes a model which drafts for itself."""

    tunes_target: ClassVar[bool] = True

    @property
    def draft_vocab_size(self) -> int:
        """See `TrainingMethod.draft_vocab_size`: no token is left out."""
        return sys.maxsize

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """See `TrainingMethod.layers`: the copy computes its hidden states itself."""
        return ()

    def write(
        self, trainee: Trainee, parts: HeadParts, folder: Path, notes: Mapping[str, Any]
    ) -> None:
        """See `TrainingMethod.write`: a Hugging Face folder."""
        assert isinstance(trainee, TargetTrainee)
        write_lm(trainee.lm, parts.name, folder, {**notes, **self.notes(trainee)})

    def notes(self, trainee: TargetTrainee) -> dict[str, Any]:
        """What serving has to know, for `config.json`; the default is nothing."""
        return {}

    def serving(self, folder: Path) -> dict[str, Any]:
        """See `TrainingMethod.serving`: the target is the folder."""
        return {"method": self.name}
