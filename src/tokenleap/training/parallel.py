"""P-EAGLE's training: all levels of a draft in one pass (arXiv 2602.01469).

    loss = sum_k decay^k E[KL(p || q_k)]

over the levels k. Level 0 sees the target's hidden states, as in EAGLE-3; all others see learnt
masks (see `parallel_net.py`). Deep levels are learnt from some of the drafts only: level k from a
share of max(keep^k, least_kept) of them, drawn anew for every batch. A draft that has level k has
all levels before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Le
from torch import Tensor

from tokenleap.core.config import Config
from tokenleap.drafters.heads.parallel_net import ParallelConfig, ParallelNet
from tokenleap.errors import ConfigError
from tokenleap.training.batches import Batch, Levels
from tokenleap.training.eagle import EagleTrainee, EagleTraining, FusedOptions
from tokenleap.training.losses import LOSSES, Loss
from tokenleap.training.method import HeadParts, TrainingMethod
from tokenleap.training.settings import TrainingSettings
from tokenleap.training.trainee import Learnt, Trainee

__all__ = ["ParallelTrainee", "ParallelTraining", "ParallelTrainingOptions"]


class ParallelTrainee(EagleTrainee):
    """A P-EAGLE head that is being trained.

    Args:
        net: the head.
        loss: of each place.
        noise: see `features.noisy`.
        kept: [L] the share of drafts from which each level is learnt, not ascending from 1.
    """

    net: ParallelNet

    def __init__(self, net: ParallelNet, loss: Loss, noise: float, kept: Sequence[float]) -> None:
        super().__init__(net, loss, noise)
        self.max_levels = net.config.depths
        self._kept = kept

    def forward(self, batch: Batch, num_levels: int) -> Learnt:
        """See `Trainee.forward`; while it learns, deep levels of some drafts are left out."""
        return super().forward(self._thinned(batch) if self.training else batch, num_levels)

    def _thinned(self, batch: Batch) -> Batch:
        """The batch with its roots in random order; of level k only the first ones are valid."""
        valid = batch.levels.valid
        drawn = torch.rand(batch.roots.shape, device=valid.device)
        # [B, Q] in random order, padding last
        order = drawn.masked_fill(~valid[:, 0], 2.0).argsort(-1)
        levels = Levels(*(_ordered(each, order) for each in batch.levels))
        counts = valid[:, 0].sum(-1, keepdim=True)  # [B, 1]
        shares = torch.tensor(self._kept[: valid.shape[1]], device=valid.device)
        most = (counts * shares).ceil()[:, :, None]  # [B, L, 1]
        ranks = torch.arange(order.shape[1], device=valid.device)
        kept = levels.valid & (ranks < most)
        return batch._replace(
            roots=batch.roots.gather(1, order), levels=levels._replace(valid=kept)
        )

    def outputs(self, batch: Batch, num_levels: int) -> Iterator[Tensor]:
        """See `Trainee.outputs`: all levels at once, of as many drafts as any row needs."""
        used = batch.levels.valid[:, :num_levels].flip(-1).cumsum(-1).flip(-1) > 0
        sizes = used.sum(-1).amax(0).tolist()
        size = batch.roots.shape[1]
        states = self.fused(batch)
        for outputs in self.net.block(batch.next_tokens, states, batch.roots, [size, *sizes[1:]]):
            yield F.pad(outputs, (0, 0, 0, size - outputs.shape[1]))


def _ordered(x: Tensor, order: Tensor) -> Tensor:
    """[B, L, Q, ...] with the Q in the order [B, Q]."""
    index = order[:, None].reshape(len(order), 1, -1, *[1] * (x.dim() - 3))
    return x.gather(2, index.expand_as(x))


class ParallelTrainingOptions(FusedOptions):
    """Options of `tokenleap train parallel`, besides those of fused states.

    Args:
        depths: most tokens of a draft.
        num_layers: decoder layers of the head.
        keep: share of the drafts from which a level is learnt, relative to the level before.
        least_kept: least share of the drafts from which a level is learnt.
        mask_token_id: the token whose embedding masks have; None means the padding or the end
            token of the target's configuration, or 0.
    """

    depths: Annotated[int, Ge(2), Le(16)] = 8
    num_layers: Annotated[int, Ge(1), Le(16)] = 2
    keep: Annotated[float, Gt(0), Le(1)] = 0.7
    least_kept: Annotated[float, Gt(0), Le(1)] = 0.2
    mask_token_id: Annotated[int, Ge(0)] | None = None


class ParallelTraining(EagleTraining):
    """P-EAGLE heads."""

    name: ClassVar[str] = "parallel"
    summary: ClassVar[str] = "a head that drafts a block in one pass (P-EAGLE)"
    deeper: ClassVar[str] = TrainingMethod.deeper
    Options: ClassVar[type[Config]] = ParallelTrainingOptions

    @property
    def _own(self) -> ParallelTrainingOptions:
        assert isinstance(self.options, ParallelTrainingOptions)
        return self.options

    def adapted(self, settings: TrainingSettings) -> TrainingSettings:
        """See `TrainingMethod.adapted`: all levels are learnt from the first step on.

        Raises:
            ConfigError: the settings ask for something else.
        """
        reason = f"'{self.name}' learns all levels from the first step on: set depths."
        return settings.decided(reason, levels=self._own.depths, first_level_share=0.0)

    def trainee(self, parts: HeadParts) -> Trainee:
        """See `TrainingMethod.trainee`."""
        options = self._own
        config = ParallelConfig(
            **self.sizes(parts),
            norm_output=False,
            num_layers=options.num_layers,
            mask_token_id=self._mask_token(parts),
            depths=options.depths,
        )
        rows = parts.output_rows[parts.draft_tokens]
        net = ParallelNet(config, parts.embedding, rows, parts.draft_tokens)
        net.initialise()
        kept = [max(options.keep**k, options.least_kept) for k in range(options.depths)]
        return ParallelTrainee(net, LOSSES[options.loss], options.noise, kept)

    def _mask_token(self, parts: HeadParts) -> int:
        chosen, known = self._own.mask_token_id, len(parts.embedding)
        if chosen is not None and chosen >= known:
            raise ConfigError(
                f"mask_token_id: must be 0 to {known - 1} for this model, got {chosen}."
            )
        ends = parts.config.eos_token_id
        end = ends[0] if isinstance(ends, list) and ends else ends
        candidates = (chosen, parts.config.pad_token_id, end)
        return next((x for x in candidates if isinstance(x, int) and 0 <= x < known), 0)
