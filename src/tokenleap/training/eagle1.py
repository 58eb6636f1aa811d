"""EAGLE-1's training: the next feature and token (Li et al., arXiv 2401.15077, section 4.2).

    loss = sum_k decay^k (feature_weight SmoothL1(f, f_k) + token_weight E[loss(p, q_k)])

f is the target's hidden state after its final norm at the place of the drafted token, f_k what the
head predicts for it at level k, and the smooth L1 loss is the mean over its numbers. EAGLE-1 learns
one level. With more, the later levels read the features that the head predicted itself, which is
the training of HASS (arXiv 2408.15766). Embedding and output rows are the target's and stay as they
are. EAGLE-2 drafts other trees with the same head.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from annotated_types import Ge
from pydantic import FiniteFloat
from torch import Tensor

from tokenleap.core.config import Config
from tokenleap.drafters.heads.feature_net import FeatureConfig, FeatureNet
from tokenleap.errors import CompatibilityError
from tokenleap.training.batches import Batch
from tokenleap.training.eagle import EagleHeadTraining, EagleTrainee, layer_sizes
from tokenleap.training.features import dequantize
from tokenleap.training.head_options import DraftOptions
from tokenleap.training.losses import LOSSES, Loss
from tokenleap.training.method import HeadParts
from tokenleap.training.settings import TrainingSettings
from tokenleap.training.trainee import Learnt, Trainee, at_roots

__all__ = ["Eagle1Trainee", "Eagle1Training", "Eagle1TrainingOptions"]

_NOISE_LENGTH = 512
"""Tokens of a text whose features get noise as wide as `noise` says."""


class Eagle1Trainee(EagleTrainee):
    """An EAGLE-1 head that is being trained.

    Args:
        net: the head.
        loss: of each place, for its tokens.
        noise: width of the uniform noise on features, of a text of `_NOISE_LENGTH` tokens.
        feature_weight: of the features' loss.
    """

    keeps_logits = False

    def __init__(self, net: FeatureNet, loss: Loss, noise: float, feature_weight: float) -> None:
        super().__init__(net, loss, noise)
        self._feature_weight = feature_weight

    @torch.no_grad()
    def features(self, batch: Batch) -> Tensor:
        """[B, T, E] the target's, at every pair of a text."""
        return self.net.fuse(dequantize(batch.hidden, batch.scales))

    def fused(self, batch: Batch) -> Tensor:
        """See `EagleTrainee.fused`: the features, with more noise the shorter a text is."""
        return self._noisy(self.features(batch), batch)

    def _noisy(self, features: Tensor, batch: Batch) -> Tensor:
        if not self.training:
            return features
        widths = self._noise * _NOISE_LENGTH / batch.lengths
        return features + (torch.rand_like(features) - 0.5) * widths[:, None, None]

    def forward(self, batch: Batch, num_levels: int) -> Learnt:
        """See `Trainee.forward`: the losses of tokens and features."""
        features = self.features(batch)
        outputs = list(self.drafts(self._noisy(features, batch), batch, num_levels))
        found = self.learnt(outputs, batch)
        if not self._feature_weight:
            return found
        missed = [_missed(each, features, level, batch) for level, each in enumerate(outputs)]
        return found._replace(losses=found.losses + self._feature_weight * torch.stack(missed))


def _missed(outputs: Tensor, features: Tensor, level: int, batch: Batch) -> Tensor:
    """The mean smooth L1 loss of the features [B, Q, E] that one level predicts; a scalar.

    Args:
        outputs: these.
        features: [B, T, E] the target's.
        level: its number.
        batch: the batch.
    """
    valid = batch.levels.valid[:, level]
    places = (batch.roots + 1 + level).clamp(max=features.shape[1] - 1)
    wanted = at_roots(features, places)[valid]
    missed = F.smooth_l1_loss(outputs[valid].float(), wanted, reduction="sum")
    return missed / max(1, wanted.numel())


class Eagle1TrainingOptions(DraftOptions):
    """Options of `tokenleap train eagle1`; the defaults are those of the authors.

    Args:
        noise: width of the uniform noise on features, of texts of 512 tokens. It is wider in
            shorter ones, in proportion.
        feature_weight: of the smooth L1 loss of features.
        token_weight: of the loss of tokens.
        fc_bias: whether the layer that joins token and feature has a bias.
        intermediate_size: of the MLP; None means the target's.
    """

    draft_vocab_size: Annotated[int, Ge(1)] | None = None
    noise: Annotated[FiniteFloat, Ge(0)] = 0.2
    feature_weight: Annotated[FiniteFloat, Ge(0)] = 1.0
    token_weight: Annotated[FiniteFloat, Ge(0)] = 0.1
    fc_bias: bool = True
    intermediate_size: Annotated[int, Ge(1)] | None = None


class Eagle1Training(EagleHeadTraining):
    """EAGLE-1 heads."""

    name: ClassVar[str] = "eagle1"
    summary: ClassVar[str] = "one decoder layer on the target's last hidden state (EAGLE-1)"
    Options: ClassVar[type[Config]] = Eagle1TrainingOptions

    @property
    def _options(self) -> Eagle1TrainingOptions:
        assert isinstance(self.options, Eagle1TrainingOptions)
        return self.options

    def adapted(self, settings: TrainingSettings) -> TrainingSettings:
        """See `TrainingMethod.adapted`: one level, unless the user asks for more.

        Raises:
            ConfigError: the settings of several levels are given, and there is only one.
        """
        return settings.preferring(levels=1).one_level_alone()

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """See `TrainingMethod.layers`: what enters the final norm."""
        return (num_layers,)

    def trainee(self, parts: HeadParts) -> Trainee:
        """See `TrainingMethod.trainee`."""
        if parts.final_norm is None:
            raise CompatibilityError(
                "an EAGLE-1 head reads hidden states after the final norm, and this architecture's "
                "is not known: train 'eagle'."
            )
        options = self._options
        config = FeatureConfig(
            **layer_sizes(parts, options.intermediate_size),
            aux_layers=self.layers(parts.num_layers),
            fc_bias=options.fc_bias,
        )
        rows = parts.output_rows[parts.draft_tokens]
        net = FeatureNet(config, parts.embedding, rows, parts.draft_tokens, parts.final_norm)
        net.initialise()
        token_loss, weight = LOSSES[options.loss], options.token_weight
        return Eagle1Trainee(
            net,
            lambda logits, teacher: weight * token_loss(logits, teacher),
            options.noise,
            options.feature_weight,
        )

    def serving(self, folder: Path) -> dict[str, Any]:
        """See `TrainingMethod.serving`: the folder tells the form."""
        return {**super().serving(folder), "method": "eagle"}
