"""Training of a target that predicts a block of tokens behind padding, for method `pad`.

Behind the text up to position t stand k padding tokens at positions t + 1 to t + k. The i-th of
them learns the distribution p of the target for position t + 1 + i, as in semi-autoregressive
fine-tuning (SPACE, Yi et al., arXiv 2402.11809). PaSS (Monea et al., arXiv 2311.13581) learns the
embedding of such tokens only; here the whole copy of the target learns:

    loss = L_own + lambda sum_k decay^k L_k

for the loss L_own of the copy's own distribution, and L_k of the k-th padding token. One pass
computes the text and many blocks behind it: every block sees the text in front of it and itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Gt, Le
from pydantic import FiniteFloat
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tokenleap.core.config import Config
from tokenleap.drafters.pad import MOST_PADDING
from tokenleap.errors import ConfigError
from tokenleap.training.batches import Batch
from tokenleap.training.blocks import BlockTraining, block_levels, pass_with_blocks, some_blocks
from tokenleap.training.draft_lm import target_tokenizer
from tokenleap.training.losses import LOSSES, Loss, LossName
from tokenleap.training.method import HeadParts
from tokenleap.training.settings import TrainingSettings
from tokenleap.training.trainee import Learnt, Trainee, at_roots
from tokenleap.training.tuned import TUNING_RATES, TargetTrainee, TuningMethod, copy_of_target

__all__ = ["PadTrainee", "PadTraining", "PadTrainingOptions", "padding_token"]


class PadTrainee(TargetTrainee):
    """A copy of the target that learns to predict behind padding.

    Args:
        lm: the copy.
        vocab_size: the target's.
        loss: of each place.
        pad: the padding token.
        num_pads: k, of each block.
        weight: lambda.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        vocab_size: int,
        loss: Loss,
        pad: int,
        num_pads: int,
        weight: float,
    ) -> None:
        super().__init__(lm, vocab_size, loss)
        self.pad, self.max_levels, self._weight = pad, num_pads, weight
        lm.set_attn_implementation("sdpa")  # it takes masks that say true and false
        self._config = lm.config.get_text_config()

    def outputs(self, batch: Batch, num_levels: int) -> Iterator[Tensor]:
        """See `Trainee.outputs`: the states at the padding behind every root, in several passes."""
        return block_levels(self.states, self._config, batch, torch.full((num_levels,), self.pad))

    def forward(self, batch: Batch, num_levels: int) -> Learnt:
        """See `Trainee.forward`; in training, only blocks behind some roots are learnt."""
        if not self.training:
            return super().forward(batch, num_levels)
        some = some_blocks(batch, num_levels)
        padding = torch.full((num_levels,), self.pad)
        text, blocks = pass_with_blocks(self.states, self._config, some, padding)
        found = self.learnt(blocks.unbind(2), some)
        own, _ = self.level(at_roots(text, batch.roots + 1), 0, batch)
        first = torch.eye(num_levels, device=own.device)[0]
        return found._replace(losses=self._weight * found.losses + own * first)


def padding_token(tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> int:
    """A token that stands for padding and does not occur in text.

    It is the mask or padding token, if it does not end sequences; or the last special token that
    has no other use. Without a tokenizer it is the last one of the vocabulary.

    Raises:
        ConfigError: there is none.
    """
    if tokenizer is None:
        return vocab_size - 1
    named: Any = tokenizer
    used = {named.bos_token_id, named.eos_token_id, named.unk_token_id}
    added = named.added_tokens_decoder.items()
    special = sorted((number for number, token in added if token.special), reverse=True)
    for token in (named.mask_token_id, named.pad_token_id, *special):
        if token is not None and token not in used and token < vocab_size:
            return int(token)
    raise ConfigError(
        "pad_token_id: the tokenizer has no padding token of its own: choose a token that does not "
        "occur in your text."
    )


class PadTrainingOptions(Config):
    """Options of `tokenleap train pad`.

    Args:
        pad_token_id: the padding token; None takes the mask or padding token, or a special token
            without another use.
        num_pads: most tokens of a draft.
        draft_weight: weight of the losses behind padding, relative to the copy's own.
        loss: between the copy's distributions and the target's.
    """

    pad_token_id: Annotated[int, Ge(0)] | None = None
    num_pads: Annotated[int, Ge(1), Le(MOST_PADDING)] = 4
    draft_weight: Annotated[FiniteFloat, Gt(0)] = 1.0
    loss: LossName = "kl"


class PadTraining(BlockTraining, TuningMethod):
    """Targets that predict behind padding."""

    name: ClassVar[str] = "pad"
    summary: ClassVar[str] = "the target itself, so that padding behind the text drafts"
    Options: ClassVar[type[Config]] = PadTrainingOptions

    @property
    def block_length(self) -> int:
        """See `BlockTraining.block_length`."""
        return self._options.num_pads

    @property
    def _options(self) -> PadTrainingOptions:
        assert isinstance(self.options, PadTrainingOptions)
        return self.options

    def adapted(self, settings: TrainingSettings) -> TrainingSettings:
        """See `TrainingMethod.adapted`: all padding tokens are learnt from the first step on.

        Raises:
            ConfigError: the settings ask for something else.
        """
        reason = "'pad' learns all of a block from the first step on: set num_pads."
        levels = self.block_length
        decided = settings.decided(reason, levels=levels, first_level_share=0.0)
        return decided.preferring(**TUNING_RATES)

    def trainee(self, parts: HeadParts) -> Trainee:
        """See `TrainingMethod.trainee`.

        Raises:
            ConfigError: the padding token does not exist, or there is none.
        """
        options, vocab_size = self._options, parts.embedding.shape[0]
        pad = options.pad_token_id
        if pad is None:
            pad = padding_token(target_tokenizer(parts.name), vocab_size)
        if pad >= vocab_size:
            raise ConfigError(f"pad_token_id: must be 0 to {vocab_size - 1}, got {pad}.")
        loss = LOSSES[options.loss]
        lm = copy_of_target(parts)
        return PadTrainee(lm, vocab_size, loss, pad, options.num_pads, options.draft_weight)

    def notes(self, trainee: TargetTrainee) -> dict[str, Any]:
        """See `TuningMethod.notes`: what `pad` pads with."""
        assert isinstance(trainee, PadTrainee)
        return {"pad_token_id": trainee.pad}
