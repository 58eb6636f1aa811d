"""Training of draft models: DistillSpec (Zhou et al., arXiv 2310.08461).

    loss = E[D(p, q)]

for the target's distribution p and the draft model's q behind every token in front of a part to
learn. D is one of `losses`; the paper recommends to try several, since the best one depends on task
and temperature. The answers are those that the target writes (`teacher`), those of the draft model
(`on_policy`, see `on_policy.py`), some of both (`mixed`), or the user's own (`fixed`). p is
that of the target, whoever wrote the text.

The draft model is a causal LM with the target's vocabulary. It reads nothing of the target but its
tokens, so one pass over a conversation gives all levels: level k of the draft at root r is its
distribution at position r + 1 + k. Level 0 is learnt. The others are the same distributions at
other places, and are for evaluation only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from annotated_types import Ge, Gt, Lt, MinLen
from pydantic import FiniteFloat, model_validator
from torch import Tensor, nn
from transformers import PreTrainedModel

from tokenleap.core.config import Config
from tokenleap.errors import ConfigError
from tokenleap.models.support import context_length
from tokenleap.training.batches import Batch
from tokenleap.training.draft_lm import (
    Sizes,
    decoder,
    embedding,
    first_layers,
    loaded,
    new_lm,
    output_layer,
    target_tokenizer,
    write_lm,
)
from tokenleap.training.losses import LOSSES, Loss, LossName
from tokenleap.training.method import HeadParts, OnPolicy, TrainingMethod
from tokenleap.training.settings import TrainingSettings
from tokenleap.training.trainee import Trainee, at_roots

__all__ = [
    "DistillTrainee",
    "DistillTraining",
    "DistillTrainingOptions",
    "DraftModelTraining",
    "DraftModelTrainingOptions",
]

SCRATCH, TARGET = "scratch", "target"


class DistillTrainee(Trainee):
    """A draft model that is being trained.

    Args:
        lm: the draft model, with the target's tokens and perhaps other padding behind them.
        vocab_size: the target's.
        loss: of each place.
    """

    def __init__(self, lm: PreTrainedModel, vocab_size: int, loss: Loss) -> None:
        own_size = int(lm.config.get_text_config().vocab_size)
        super().__init__(torch.arange(min(vocab_size, own_size)), vocab_size, loss)
        self._own_size, self._context = own_size, context_length(lm.config, None)
        self._lm = [lm]  # in a list: the modules are its parts, in which tied rows occur once
        self.decoder, rows = decoder(lm), output_layer(lm)
        if len(list(rows.parameters())) > 1 or rows.weight is not embedding(lm).weight:
            self.output_layer = rows

    @property
    def lm(self) -> PreTrainedModel:
        """The whole draft model."""
        return self._lm[0]

    @property
    def matrices(self) -> list[nn.Parameter]:
        """See `Trainee.matrices`: without embedding and output rows."""
        rows = {id(layer(self.lm).weight) for layer in (embedding, output_layer)}
        return [weight for weight in super().matrices if id(weight) not in rows]

    def outputs(self, batch: Batch, num_levels: int) -> Iterator[Tensor]:
        """See `Trainee.outputs`: hidden states of one pass over all tokens.

        Raises:
            ConfigError: a conversation is longer than the model's context.
        """
        length = batch.tokens.shape[1]
        if length > self._context:
            raise ConfigError(
                f"max_length: the draft model takes {self._context} tokens: set it to at most this."
            )
        # A token of the target's padding may be beyond the draft model's.
        tokens = batch.tokens.clamp(max=self._own_size - 1)
        # Padding is behind all tokens, which do not see it, so there is no mask.
        states = self.decoder(input_ids=tokens, use_cache=False).last_hidden_state
        for level in range(num_levels):
            yield at_roots(states, (batch.roots + 1 + level).clamp(max=length - 1))

    def logits(self, outputs: Tensor, level: int) -> Tensor:
        """See `Trainee.logits`."""
        logits: Tensor = output_layer(self.lm)(outputs)
        return logits[..., : len(self.draft_tokens)].float()


class DraftModelTrainingOptions(Config):
    """Options of all methods that train draft models.

    Args:
        start: `scratch` for random weights, `target` for the target's first `num_layers` layers
            with its embedding, final norm and output rows, or a folder or alias of a model with the
            target's tokenizer.
        hidden_size: of a model from scratch; None means half of the target's.
        num_layers: decoder layers; None means an eighth of the target's.
        num_heads: of a model from scratch; None means heads of the target's size.
        intermediate_size: of a model from scratch; None keeps the target's proportion.
        loss: between the draft model's distribution and the target's.
    """

    start: Annotated[str, MinLen(1)] = SCRATCH
    hidden_size: Annotated[int, Ge(1)] | None = None
    num_layers: Annotated[int, Ge(1)] | None = None
    num_heads: Annotated[int, Ge(1)] | None = None
    intermediate_size: Annotated[int, Ge(1)] | None = None
    loss: LossName = "kl"

    @model_validator(mode="after")
    def _sizes_are_not_given(self) -> Self:
        own = Sizes.__dataclass_fields__
        usable = {SCRATCH: tuple(own), TARGET: ("num_layers",)}.get(self.start, ())
        for name in own:
            if getattr(self, name) is not None and name not in usable:
                raise ValueError(
                    f"{name}: with start '{self.start}', the model that is there decides: remove "
                    "it, or start from 'scratch'."
                )
        return self


class DistillTrainingOptions(DraftModelTrainingOptions):
    """Options of `tokenleap train distill`, besides those of all draft models.

    Args:
        answers: what is learnt: those that the target writes (`teacher`), those that the draft
            model writes (`on_policy`), some of both (`mixed`), or those in the user's files
            (`fixed`).
        on_policy_share: of `mixed`: the share of the conversations that the draft model answers.
        refresh_every: steps after which the draft model writes again.
    """

    answers: Literal["teacher", "on_policy", "mixed", "fixed"] = "teacher"
    on_policy_share: Annotated[FiniteFloat, Gt(0), Lt(1)] = 0.5
    refresh_every: Annotated[int, Ge(1)] = 100

    @model_validator(mode="after")
    def _the_draft_model_writes(self) -> Self:
        if self.loss == "ce" and self.answers in ("on_policy", "mixed"):
            raise ValueError(
                "loss: 'ce' learns the tokens of the text, and the draft model would learn its "
                "own: choose another loss."
            )
        usable = {"mixed": ("on_policy_share", "refresh_every"), "on_policy": ("refresh_every",)}
        for name in ("on_policy_share", "refresh_every"):
            if name in self.model_fields_set and name not in usable.get(self.answers, ()):
                raise ValueError(
                    f"{name}: has no meaning with answers '{self.answers}': remove it, or set "
                    "answers to 'mixed'."
                )
        return self


class DraftModelTraining(TrainingMethod):
    """Base of the methods that train draft models."""

    @property
    def _options(self) -> DraftModelTrainingOptions:
        assert isinstance(self.options, DraftModelTrainingOptions)
        return self.options

    @property
    def draft_vocab_size(self) -> int:
        """See `TrainingMethod.draft_vocab_size`: no token is left out."""
        return sys.maxsize

    def adapted(self, settings: TrainingSettings) -> TrainingSettings:
        """See `TrainingMethod.adapted`: one level.

        Raises:
            ConfigError: the settings ask for something else.
        """
        reason = "a draft model learns all levels of a draft at once: remove it."
        return settings.decided(reason, levels=1, first_level_share=0.0, decay=1.0)

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """See `TrainingMethod.layers`: a draft model reads tokens only."""
        return ()

    def trainee(self, parts: HeadParts) -> Trainee:
        """See `TrainingMethod.trainee`."""
        vocab_size = parts.embedding.shape[0]
        return self.of(self._lm(parts, vocab_size), vocab_size)

    def of(self, lm: PreTrainedModel, vocab_size: int) -> DistillTrainee:
        """A draft model with the loss of the options."""
        return DistillTrainee(lm, vocab_size, LOSSES[self._options.loss])

    def _lm(self, parts: HeadParts, vocab_size: int) -> PreTrainedModel:
        options = self._options
        sizes = Sizes(**{name: getattr(options, name) for name in Sizes.__dataclass_fields__})
        if options.start == SCRATCH:
            return new_lm(parts.config.get_text_config(), sizes)
        if options.start == TARGET:
            return first_layers(parts.name, sizes)
        return loaded(options.start, vocab_size, target_tokenizer(parts.name))

    def write(
        self, trainee: Trainee, parts: HeadParts, folder: Path, notes: Mapping[str, Any]
    ) -> None:
        """See `TrainingMethod.write`: a Hugging Face folder."""
        assert isinstance(trainee, DistillTrainee)
        write_lm(trainee.lm, parts.name, folder, notes)


class DistillTraining(DraftModelTraining):
    """One draft model."""

    name: ClassVar[str] = "distill"
    summary: ClassVar[str] = "a small model with the target's vocabulary (DistillSpec)"
    Options: ClassVar[type[Config]] = DistillTrainingOptions

    @property
    def _own(self) -> DistillTrainingOptions:
        assert isinstance(self.options, DistillTrainingOptions)
        return self.options

    @property
    def on_policy(self) -> OnPolicy | None:
        """See `TrainingMethod.on_policy`."""
        shares = {"on_policy": 1.0, "mixed": self._own.on_policy_share}
        share = shares.get(self._own.answers)
        return None if share is None else OnPolicy(share, self._own.refresh_every)

    @property
    def learns_given_answers(self) -> bool:
        """See `TrainingMethod.learns_given_answers`."""
        return self._own.answers == "fixed"

    def serving(self, folder: Path) -> dict[str, Any]:
        """See `TrainingMethod.serving`."""
        return {"method": "draft_model", "model": str(folder)}
