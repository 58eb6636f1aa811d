"""Training of Spec-Drafters (Xia et al., arXiv 2203.16487): how one is made, and its settings.

Published values are those in the code of the authors. `masked_blocks.py` has the loss.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from tokenleap.core.config import Config
from tokenleap.drafters.heads.probe import Probe, Seen
from tokenleap.drafters.spec_drafter import SpecDrafterNotes
from tokenleap.drafters.transitions import save_transitions
from tokenleap.errors import ConfigError
from tokenleap.training.draft_lm import write_lm
from tokenleap.training.masked_blocks import SpecDrafterTrainee, SpecDrafterTrainingOptions
from tokenleap.training.masked_lm import copy_target, new_masked_lm
from tokenleap.training.method import HeadParts, TrainingMethod
from tokenleap.training.settings import TrainingSettings
from tokenleap.training.trainee import Trainee

__all__ = ["SpecDrafterTraining"]

_UPDATES, _WARMUP = 300_000, 10_000


class SpecDrafterTraining(TrainingMethod):
    """An encoder-decoder that fills blocks of masks."""

    name: ClassVar[str] = "spec_drafter"
    summary: ClassVar[str] = "an encoder-decoder that fills a block of masks (SpecDec)"
    Options: ClassVar[type[Config]] = SpecDrafterTrainingOptions
    for_sources: ClassVar[bool | None] = True

    @property
    def _options(self) -> SpecDrafterTrainingOptions:
        assert isinstance(self.options, SpecDrafterTrainingOptions)
        return self.options

    @property
    def draft_vocab_size(self) -> int:
        """See `TrainingMethod.draft_vocab_size`: no token is left out."""
        return sys.maxsize

    @property
    def served_tokens(self) -> int:
        """See `TrainingMethod.served_tokens`: a block."""
        return self._options.num_masks

    @property
    def learns_given_answers(self) -> bool:
        """See `TrainingMethod.learns_given_answers`."""
        return self._options.answers == "fixed"

    @property
    def beam_width(self) -> int:
        """See `TrainingMethod.beam_width`."""
        return 5 if self._options.answers == "beam" else 1

    def adapted(self, settings: TrainingSettings) -> TrainingSettings:
        """See `TrainingMethod.adapted`: the published values, scaled by `size`.

        Raises:
            ConfigError: the settings ask for levels.
        """
        reason = "a block of masks is learnt at once: remove it."
        given, size = settings.model_fields_set, self._options.size
        steps = {} if "epochs" in given else {"max_steps": max(1, round(_UPDATES * size))}
        if "warmup" not in given:
            steps["warmup_steps"] = max(1, round(_WARMUP * size))
        return settings.decided(reason, levels=1, first_level_share=0.0).preferring(
            optimizer="adamw",
            betas=(0.9, 0.999),
            learning_rate=5e-4,
            vector_learning_rate=5e-4,
            schedule="inverse_sqrt",
            accumulation=4,
            max_grad_norm=5.0,
            evaluate_every=max(100, round(1000 * size)),
            average=10,
            patience=0,
            **steps,
        )

    @property
    def reads_encoder(self) -> bool:
        """See `TrainingMethod.reads_encoder`."""
        return self._options.encoder == "target"

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """See `TrainingMethod.layers`: it reads tokens only."""
        return ()

    def trainee(self, parts: HeadParts) -> SpecDrafterTrainee:
        """See `TrainingMethod.trainee`.

        Raises:
            ConfigError: it is to start from a target that cannot be loaded again.
        """
        options, vocab_size = self._options, parts.embedding.shape[0]
        lm = new_masked_lm(
            parts.config,
            vocab_size,
            options.num_masks,
            options.shape,
            halved=options.halved,
            dropout=options.dropout,
            own_encoder=options.encoder == "own",
        )
        if parts.embedding.device.type == "cpu":
            # The gradients of PyTorch's fused attention take three times as long on a CPU.
            lm.set_attn_implementation("eager")
        if options.from_target:
            if parts.reload is None:
                raise ConfigError("from_target: load the target by name, or set it to false.")
            copy_target(parts.reload(), lm)
        notes = SpecDrafterNotes(
            options.num_masks,
            vocab_size,
            vocab_size,
            options.encoder,
            fewer_masks=options.fewer_masks,
            transitions=options.transitions,
        )
        return SpecDrafterTrainee(lm, notes, options)

    def probed(self, trainee: Trainee, seen: Seen) -> Mapping[str, Any]:
        """See `TrainingMethod.probed`."""
        return Probe.of(seen).note()

    def write(
        self, trainee: Trainee, parts: HeadParts, folder: Path, notes: Mapping[str, Any]
    ) -> None:
        """See `TrainingMethod.write`: a Hugging Face folder."""
        assert isinstance(trainee, SpecDrafterTrainee)
        write_lm(
            trainee.lm,
            parts.name,
            folder,
            {**trainee.notes.note(), **notes},
            [partial(save_transitions, trainee.transitions)] if trainee.transitions else (),
        )
