"""EAGLE-1's training: the next feature, and the next token (Li et al., arXiv 2401.15077, eq. 3-5).

    loss = sum_k decay^k (feature_weight SmoothL1(f, f_k) + token_weight E[loss(p, q_k)])

f is the target's hidden state after its final norm at the place of the drafted token, f_k what the
head predicts for it at level k, and the smooth L1 loss is the mean over its numbers. EAGLE-1 learns
one level. With more, the later levels read the features that the head predicted itself, which is
the training of HASS (arXiv 2408.15766). Embedding and output rows are the target's and stay as they
are. EAGLE-2 drafts other trees with the same head.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from annotated_types import Ge
from pydantic import FiniteFloat
from torch import Tensor

from foretoken.core.config import Config
from foretoken.drafters.heads.checkpoint import write_checkpoint
from foretoken.drafters.heads.config_file import Description
from foretoken.drafters.heads.feature_net import FeatureConfig, FeatureNet
from foretoken.drafters.heads.probe import Probe, Seen
from foretoken.errors import CompatibilityError
from foretoken.training.batches import Batch
from foretoken.training.eagle import EagleTrainee, layer_sizes
from foretoken.training.features import dequantize
from foretoken.training.head_options import DraftOptions
from foretoken.training.losses import LOSSES, Loss
from foretoken.training.method import HeadParts, TrainingMethod
from foretoken.training.settings import TrainingSettings
from foretoken.training.trainee import Trainee, at_roots

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

    def __init__(self, net: FeatureNet, loss: Loss, noise: float, feature_weight: float) -> None:
        super().__init__(net, loss, noise)
        self._feature_weight = feature_weight

    @torch.no_grad()
    def features(self, batch: Batch) -> Tensor:
        """[B, T, E] the target's, at every pair of a text."""
        return self.net.fuse(dequantize(batch.hidden, batch.scales))

    def fused(self, batch: Batch) -> Tensor:
        """See `EagleTrainee.fused`: the features, with more noise the shorter a text is."""
        features = self.features(batch)
        if not self.training:
            return features
        widths = self._noise * _NOISE_LENGTH / batch.lengths
        return features + (torch.rand_like(features) - 0.5) * widths[:, None, None]

    def level(self, outputs: Tensor, level: int, batch: Batch) -> tuple[Tensor, Tensor]:
        """See `Trainee.level`: the loss of tokens and features."""
        loss, right = super().level(outputs, level, batch)
        valid = batch.levels.valid[:, level]
        places = (batch.roots + 1 + level).clamp(max=batch.hidden.shape[1] - 1)
        wanted = at_roots(self.features(batch), places)[valid]
        missed = F.smooth_l1_loss(outputs[valid].float(), wanted, reduction="sum")
        return loss + self._feature_weight * missed / max(1, wanted.numel()), right


class Eagle1TrainingOptions(DraftOptions):
    """Options of `foretoken train eagle1`; the defaults are those of the authors.

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


class Eagle1Training(TrainingMethod):
    """EAGLE-1 heads."""

    name: ClassVar[str] = "eagle1"
    summary: ClassVar[str] = "one decoder layer on the target's last hidden state (EAGLE-1)"
    Options: ClassVar[type[Config]] = Eagle1TrainingOptions

    @property
    def _options(self) -> Eagle1TrainingOptions:
        assert isinstance(self.options, Eagle1TrainingOptions)
        return self.options

    @property
    def draft_vocab_size(self) -> int:
        """See `TrainingMethod.draft_vocab_size`."""
        return self._options.most_draft_tokens

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

    def probed(self, trainee: Trainee, seen: Seen) -> Mapping[str, Any]:
        """See `TrainingMethod.probed`."""
        assert isinstance(trainee, Eagle1Trainee)
        return Probe.of(seen, trainee.net).note()

    def write(
        self, trainee: Trainee, parts: HeadParts, folder: Path, notes: Mapping[str, Any]
    ) -> None:
        """See `TrainingMethod.write`."""
        assert isinstance(trainee, Eagle1Trainee)
        net = trainee.net
        write_checkpoint(folder, net, Description(net.config, parts.verifier, notes))

    def serving(self, folder: Path) -> dict[str, Any]:
        """See `TrainingMethod.serving`: the folder tells the form."""
        return {**super().serving(folder), "method": "eagle"}
