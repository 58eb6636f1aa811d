"""Training of look-ahead embeddings: PaSS (Monea et al., arXiv 2311.13581).

    loss = sum_k decay^k E[loss(p, q_k)]

Behind the text up to position t stand the look-ahead tokens [LA]_1 to [LA]_L. The i-th of them
learns the target's distribution p for position t + 1 + i. Only the L embeddings learn: the target
stays as it is, and so do its tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn
from transformers import PreTrainedModel

from tokenleap.core.config import Config
from tokenleap.drafters.heads.probe import Probe, Seen
from tokenleap.drafters.pad import MOST_PADDING
from tokenleap.drafters.pass_tokens import write_pass_tokens
from tokenleap.runtime.embedding import ExtendedEmbedding
from tokenleap.training.batches import Batch
from tokenleap.training.blocks import BlockTraining, block_levels, pass_with_blocks, some_blocks
from tokenleap.training.draft_lm import decoder, embedding, output_layer
from tokenleap.training.losses import LOSSES, Loss, LossName
from tokenleap.training.method import HeadParts
from tokenleap.training.settings import TrainingSettings
from tokenleap.training.trainee import Learnt, Trainee
from tokenleap.training.tuned import copy_of_target

__all__ = ["PassTrainee", "PassTraining", "PassTrainingOptions"]


class PassTrainee(Trainee):
    """Look-ahead embeddings that are being trained.

    Args:
        lm: a copy of the target. It is changed: its embedding gets the look-ahead tokens.
        vocab_size: the target's.
        loss: of each place.
        rows: [L, E] the embeddings to begin with.
    """

    keeps_logits = False

    def __init__(self, lm: PreTrainedModel, vocab_size: int, loss: Loss, rows: Tensor) -> None:
        super().__init__(torch.arange(vocab_size), vocab_size, loss, len(rows))
        lm.requires_grad_(False)
        lm.set_attn_implementation("sdpa")  # it takes masks that say true and false
        self._config = lm.config.get_text_config()
        extended = ExtendedEmbedding(embedding(lm), rows)
        self.rows, self._first = extended.rows, extended.first
        lm.set_input_embeddings(extended)
        self._lm = [lm]  # in a list: checkpoints need the embeddings only

    @property
    def matrices(self) -> list[nn.Parameter]:
        """See `Trainee.matrices`: embeddings are none."""
        return []

    def outputs(self, batch: Batch, num_levels: int) -> Iterator[Tensor]:
        """See `Trainee.outputs`: the states at the look-ahead tokens behind every root."""
        return block_levels(self._states, self._config, batch, self._tokens(num_levels))

    def forward(self, batch: Batch, num_levels: int) -> Learnt:
        """See `Trainee.forward`; in training, only blocks behind some roots are learnt."""
        if not self.training:
            return super().forward(batch, num_levels)
        some = some_blocks(batch, num_levels)
        _, blocks = pass_with_blocks(self._states, self._config, some, self._tokens(num_levels))
        return self.learnt(blocks.unbind(2), some)

    def _tokens(self, count: int) -> Tensor:
        """[k] ids of the first look-ahead tokens."""
        return torch.arange(self._first, self._first + count)

    def _states(self, tokens: Tensor, **arguments: Any) -> Tensor:
        lm: Any = self._lm[0]
        lm.to(self.rows.device)
        found: Tensor = decoder(lm)(input_ids=tokens, use_cache=False, **arguments)[0]
        return found

    def logits(self, outputs: Tensor, level: int) -> Tensor:
        """See `Trainee.logits`: the target's output layer."""
        logits: Tensor = output_layer(self._lm[0])(outputs)
        return logits[..., : len(self.draft_tokens)].float()


class PassTrainingOptions(Config):
    """Options of `tokenleap train pass`.

    Args:
        num_tokens: L, most tokens of a draft.
        loss: between what is predicted and the target's distribution.
    """

    num_tokens: Annotated[int, Ge(1), Le(MOST_PADDING)] = 4
    loss: LossName = "kl"


class PassTraining(BlockTraining):
    """Look-ahead embeddings."""

    name: ClassVar[str] = "pass"
    summary: ClassVar[str] = "embeddings behind the text, and nothing else (PaSS)"
    Options: ClassVar[type[Config]] = PassTrainingOptions

    @property
    def _options(self) -> PassTrainingOptions:
        assert isinstance(self.options, PassTrainingOptions)
        return self.options

    @property
    def draft_vocab_size(self) -> int:
        """See `TrainingMethod.draft_vocab_size`: no token is left out."""
        return sys.maxsize

    @property
    def block_length(self) -> int:
        """See `BlockTraining.block_length`."""
        return self._options.num_tokens

    def adapted(self, settings: TrainingSettings) -> TrainingSettings:
        """See `TrainingMethod.adapted`: all embeddings are learnt from the first step on.

        Raises:
            ConfigError: the settings ask for something else.
        """
        reason = "'pass' learns all of its embeddings from the first step on: set num_tokens."
        levels = self.block_length
        decided = settings.decided(reason, levels=levels, first_level_share=0.0)
        of_matrices = (
            "it is for matrices, and 'pass' learns vectors only: remove it, or set "
            "vector_learning_rate."
        )
        settings.refuse(of_matrices, "optimizer", "learning_rate", "weight_decay")
        return decided.preferring(vector_learning_rate=_RATE)

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """See `TrainingMethod.layers`: the copy of the target computes its states itself."""
        return ()

    def trainee(self, parts: HeadParts) -> Trainee:
        """See `TrainingMethod.trainee`; the embeddings begin like random tokens of the target."""
        options, (vocab_size, size) = self._options, parts.embedding.shape
        spread, mean = torch.std_mean(parts.embedding.float().cpu(), dim=0)
        rows = mean + spread * torch.randn(options.num_tokens, size)
        return PassTrainee(copy_of_target(parts), vocab_size, LOSSES[options.loss], rows)

    def probed(self, trainee: Trainee, seen: Seen) -> Mapping[str, Any]:
        """See `TrainingMethod.probed`."""
        return Probe.of(seen).note()

    def write(
        self, trainee: Trainee, parts: HeadParts, folder: Path, notes: Mapping[str, Any]
    ) -> None:
        """See `TrainingMethod.write`."""
        assert isinstance(trainee, PassTrainee)
        write_pass_tokens(folder, trainee.rows, len(parts.embedding), parts.verifier, notes)


_RATE = 3e-3
"""Default learning rate: there are so few weights that each may go far."""
