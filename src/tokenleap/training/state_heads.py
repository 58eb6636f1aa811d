"""Training of heads without attention: Medusa, Hydra, blockwise heads and the MLP speculator.

    loss = sum_k decay^k E[loss(p, q_k)]

over the K heads of a draft, all on the target's last hidden state, with the text's own tokens in
front of each. The target itself is not changed (Medusa-1; Stern et al.'s frozen base model). Output
rows are the target's, frozen, over a draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn

from tokenleap.core.config import Config
from tokenleap.drafters.heads.probe import Probe, Seen
from tokenleap.drafters.heads.state import write_state_file
from tokenleap.drafters.heads.state_net import (
    BlockwiseNet,
    HydraNet,
    MedusaNet,
    MlpSpeculatorNet,
    StateNet,
    normed,
)
from tokenleap.errors import CompatibilityError
from tokenleap.training.batches import Batch
from tokenleap.training.eagle import DraftOptions, NoiseOptions
from tokenleap.training.features import dequantize, noisy
from tokenleap.training.method import LOSSES, HeadParts, Loss, Trainee, TrainingMethod, at_roots
from tokenleap.training.settings import TrainingSettings

__all__ = [
    "BlockwiseTraining",
    "HeadOptions",
    "HydraTraining",
    "MedusaTraining",
    "MlpSpeculatorTraining",
    "StateTrainee",
    "StateTraining",
    "head_outputs",
]


class StateTrainee(Trainee):
    """A head without attention that is being trained."""

    def __init__(self, net: StateNet, norm: nn.Module, loss: Loss, noise: float) -> None:
        super().__init__(net.draft_tokens, net.config.vocab_size, loss, net.config.num_heads)
        self.net = net
        self._norm = [norm]  # in a list, so that its weights are not those of this module
        self._noise = noise

    def outputs(self, batch: Batch, num_levels: int) -> Iterator[Tensor]:
        """See `Trainee.outputs`: what the heads give on the last hidden states."""
        hidden = dequantize(
            at_roots(batch.hidden, batch.roots), at_roots(batch.scales, batch.roots)
        )
        if self.training:
            hidden = noisy(hidden, self._noise)
        with torch.no_grad():
            last = normed(self._norm[0], hidden.squeeze(2))  # of the only layer
        return head_outputs(self.net, last, batch, num_levels)

    def logits(self, outputs: Tensor, level: int) -> Tensor:
        logits: Tensor = self.net.output_layer(level)(outputs)
        return logits.float()


def head_outputs(net: StateNet, last: Tensor, batch: Batch, num_levels: int) -> Iterator[Tensor]:
    """A head's output for each level; [B, Q, E].

    Args:
        last: [B, Q, E] hidden states at the roots, after the final norm.
    """
    states = net.start(last, batch.levels.inputs[:, 0])
    for level in range(num_levels):
        if level:
            states = net.advance(states, batch.levels.inputs[:, level], level)
        yield net.outputs(states, level)


class HeadOptions(DraftOptions):
    """Options of all heads without attention.

    Args:
        num_heads: most tokens of a draft.
    """

    num_heads: Annotated[int, Ge(1), Le(32)] = 4


class StateTrainingOptions(HeadOptions, NoiseOptions):
    """Options of heads on the hidden states of a target that stays as it is."""


class StateTraining(TrainingMethod):
    """Common base of the methods that train heads on the last hidden state."""

    Options: ClassVar[type[Config]] = StateTrainingOptions
    for_sources: ClassVar[bool | None] = None
    Net: ClassVar[type[StateNet]]

    @property
    def head_options(self) -> HeadOptions:
        """The method's options."""
        assert isinstance(self.options, HeadOptions)
        return self.options

    @property
    def draft_vocab_size(self) -> int:
        return self.head_options.most_draft_tokens

    def adapted(self, settings: TrainingSettings) -> TrainingSettings:
        """See `TrainingMethod.adapted`: all heads are learnt from the first step on."""
        reason = f"'{self.name}' learns all of its heads from the first step on: set num_heads."
        return settings.decided(reason, levels=self.head_options.num_heads, first_level_share=0.0)

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """See `TrainingMethod.layers`: what enters the final norm."""
        return (num_layers,)

    def trainee(self, parts: HeadParts) -> Trainee:
        net, options = self.net(parts), self.options
        assert parts.final_norm is not None
        assert isinstance(options, StateTrainingOptions)
        return StateTrainee(net, parts.final_norm, LOSSES[options.loss], options.noise)

    def net(self, parts: HeadParts) -> StateNet:
        """A new head."""
        if parts.final_norm is None:
            raise CompatibilityError(
                f"method '{self.name}' reads hidden states after the final norm, and this "
                "architecture's is not known: train 'eagle'."
            )
        sizes: dict[str, Any] = {
            "hidden_size": parts.embedding.shape[1],
            "vocab_size": parts.embedding.shape[0],
            "draft_vocab_size": len(parts.draft_tokens),
            "num_heads": self.head_options.num_heads,
        }
        config = self.Net.Config(**sizes, **self.own_sizes(parts))
        net = self.Net(config, parts.embedding, parts.output_rows, parts.draft_tokens)
        net.add_bias(parts.logits_bias)
        net.initialise()
        return net

    def own_sizes(self, parts: HeadParts) -> dict[str, Any]:
        """The fields of the head's configuration that other kinds do not have."""
        own = {each.name for each in fields(self.Net.Config)} - set(HeadOptions.model_fields)
        return self.options.model_dump(include=own)

    def probed(self, trainee: Trainee, seen: Seen) -> Mapping[str, Any]:
        return Probe.of(seen).note()

    def write(
        self, trainee: Trainee, parts: HeadParts, folder: Path, notes: Mapping[str, Any]
    ) -> None:
        assert isinstance(trainee, StateTrainee)
        write_state_file(folder, trainee.net, parts.verifier, notes)


class _LayeredOptions(StateTrainingOptions):
    """Options of `tokenleap train medusa` and `hydra`, besides those of all such heads.

    Args:
        num_layers: blocks of each head.
    """

    num_layers: Annotated[int, Ge(1)] = 1


class MedusaTraining(StateTraining):
    """Medusa-1 heads."""

    name: ClassVar[str] = "medusa"
    summary: ClassVar[str] = "independent heads, one for each position (Medusa-1)"
    Options: ClassVar[type[Config]] = _LayeredOptions
    Net: ClassVar[type[StateNet]] = MedusaNet


class HydraTraining(StateTraining):
    """Hydra heads."""

    name: ClassVar[str] = "hydra"
    summary: ClassVar[str] = "heads that read the tokens drafted before (Hydra)"
    Options: ClassVar[type[Config]] = _LayeredOptions
    Net: ClassVar[type[StateNet]] = HydraNet


class _InnerOptions(StateTrainingOptions):
    """Options of `tokenleap train blockwise`, besides those of all such heads.

    Args:
        inner_size: width of each head's hidden layer.
    """

    inner_size: Annotated[int, Ge(1)] = 1024


class BlockwiseTraining(StateTraining):
    """Blockwise heads."""

    name: ClassVar[str] = "blockwise"
    summary: ClassVar[str] = "feed-forward heads on the output layer (Stern et al.)"
    Options: ClassVar[type[Config]] = _InnerOptions
    Net: ClassVar[type[StateNet]] = BlockwiseNet


class _MlpOptions(StateTrainingOptions):
    """Options of `tokenleap train mlp_speculator`, besides those of all such heads.

    Args:
        tie_weights: whether all depths share their weights.
    """

    tie_weights: bool = True


class MlpSpeculatorTraining(StateTraining):
    """MLP speculators."""

    name: ClassVar[str] = "mlp_speculator"
    summary: ClassVar[str] = "a recurrent MLP over the drafted tokens (IBM's MLP speculator)"
    Options: ClassVar[type[Config]] = _MlpOptions
    Net: ClassVar[type[StateNet]] = MlpSpeculatorNet

    def own_sizes(self, parts: HeadParts) -> dict[str, Any]:
        """See `StateTraining.own_sizes`: states are as wide as the target's embedding."""
        return {**super().own_sizes(parts), "inner_size": parts.embedding.shape[1]}
