"""EAGLE-3's training: fused hidden states and training-time test (Li et al., arXiv 2503.01840).

    loss = sum_k decay^k E[KL(p || q_k)]

over the levels k of a draft. Level 0 sees the target's hidden states, with a little noise. Every
other level sees the state that the head made itself at the level before, as it will when it drafts,
beside the text's own token. There is no loss on the states. Embedding and output rows are the
target's and stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import torch
from annotated_types import Ge, MinLen
from pydantic import model_validator
from torch import Tensor

from tokenleap.core.config import Config
from tokenleap.drafters.heads.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from tokenleap.drafters.heads.config_file import Description
from tokenleap.drafters.heads.eagle_layer import EagleConfig, KeysValues
from tokenleap.drafters.heads.eagle_net import EagleNet, default_layers
from tokenleap.drafters.heads.feature_net import FeatureConfig
from tokenleap.drafters.heads.folder import check_layers
from tokenleap.drafters.heads.probe import Probe, Seen
from tokenleap.drafters.heads.shipped import shipped_head
from tokenleap.errors import CompatibilityError, ConfigError
from tokenleap.models.support import context_length
from tokenleap.training.batches import Batch
from tokenleap.training.features import dequantize, noisy
from tokenleap.training.head_options import DraftOptions, NoiseOptions
from tokenleap.training.losses import LOSSES, Loss
from tokenleap.training.method import HeadParts, TrainingMethod
from tokenleap.training.settings import TrainingSettings
from tokenleap.training.trainee import Trainee

__all__ = [
    "EagleHeadTraining",
    "EagleTrainee",
    "EagleTraining",
    "EagleTrainingOptions",
    "FusedOptions",
    "layer_sizes",
]


class EagleTrainee(Trainee):
    """An EAGLE-3 head that is being trained.

    Args:
        net: the head.
        loss: of each place.
        noise: see `features.noisy`.
    """

    def __init__(self, net: EagleNet, loss: Loss, noise: float) -> None:
        super().__init__(net.draft_tokens, net.config.vocab_size, loss)
        self.net = net
        self._noise = noise

    def fused(self, batch: Batch) -> Tensor:
        """[B, T, E] the states of a text's pairs; with noise while it learns."""
        hidden = dequantize(batch.hidden, batch.scales)
        return self.net.fuse(noisy(hidden, self._noise) if self.training else hidden)

    def outputs(self, batch: Batch, num_levels: int) -> Iterator[Tensor]:
        """See `Trainee.outputs`."""
        return self.drafts(self.fused(batch), batch, num_levels)

    def drafts(self, states: Tensor, batch: Batch, num_levels: int) -> Iterator[Tensor]:
        """Training-time test on the states [B, T, E] of a text's pairs; see `outputs`."""
        positions = torch.arange(states.shape[1], device=states.device).expand(len(states), -1)
        mask = (positions[:1] <= batch.roots.unsqueeze(-1)).unsqueeze(1)  # [B, 1, Q, T]
        earlier: Sequence[KeysValues] = ()
        tokens, roots = batch.next_tokens, batch.roots
        for level in range(num_levels):
            if level:
                outputs, earlier = self.net(
                    batch.levels.inputs[:, level], states, roots + level, mask, earlier
                )
            else:
                outputs, earlier = self.net(tokens, states, positions, mask, earlier, roots)
            yield outputs
            states = self.net.next_states(outputs)

    def logits(self, outputs: Tensor, level: int) -> Tensor:
        """See `Trainee.logits`."""
        return self.net.logits(outputs)


class FusedOptions(DraftOptions, NoiseOptions):
    """Options of heads that fuse hidden states of several layers; see those of its bases.

    Args:
        layers: ids of the target's layers whose inputs are fused; None means a low, a middle and a
            high one: 2, L // 2 and L - 3.
        qk_norm: whether queries and keys are normalised, as in Qwen3.
        fc_norm: whether each fused hidden state is normalised (EAGLE-3.1).
        intermediate_size: of the MLP; None means the target's.
    """

    layers: Annotated[tuple[Annotated[int, Ge(0)], ...], MinLen(1)] | None = None
    qk_norm: bool = False
    fc_norm: bool = True
    intermediate_size: Annotated[int, Ge(1)] | None = None


class EagleTrainingOptions(FusedOptions):
    """Options of `tokenleap train eagle`, besides those of fused states.

    Args:
        norm_output: whether the state that is fed back is normalised (EAGLE-3.1).
        start: the folder of an EAGLE-3 head that learns on, or the alias of a model with a head in
            the package; None for random weights. Layers, norms and sizes are then that head's.
    """

    norm_output: bool = True
    start: Annotated[str, MinLen(1)] | None = None

    @model_validator(mode="after")
    def _form_is_not_given(self) -> Self:
        form = ("layers", "qk_norm", "fc_norm", "intermediate_size", "norm_output")
        for name in form if self.start is not None else ():
            if name in self.model_fields_set:
                raise ValueError(f"{name}: the head in 'start' decides: remove one of the two.")
        return self


def layer_sizes(parts: HeadParts, intermediate_size: int | None) -> dict[str, Any]:
    """The fields of `EagleConfig` that follow from the target.

    Args:
        parts: of the head.
        intermediate_size: None means the target's.
    """
    config = parts.config.get_text_config()
    heads = config.num_attention_heads
    rope = dict(getattr(config, "rope_parameters", None) or {})
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": intermediate_size
        or getattr(config, "intermediate_size", None)
        or 4 * config.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": len(parts.draft_tokens),
        "max_position_embeddings": context_length(config, None),
        "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-5),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": rope.get("rope_theta", 10000.0),
        },
    }


class EagleHeadTraining(TrainingMethod):
    """What the methods share that train EAGLE heads of any form."""

    deeper: ClassVar[str] = "learn more levels"

    @property
    def draft_vocab_size(self) -> int:
        """See `TrainingMethod.draft_vocab_size`."""
        assert isinstance(self.options, DraftOptions)
        return self.options.most_draft_tokens

    def probed(self, trainee: Trainee, seen: Seen) -> Mapping[str, Any]:
        """See `TrainingMethod.probed`."""
        assert isinstance(trainee, EagleTrainee)
        return Probe.of(seen, trainee.net).note()

    def write(
        self, trainee: Trainee, parts: HeadParts, folder: Path, notes: Mapping[str, Any]
    ) -> None:
        """See `TrainingMethod.write`."""
        assert isinstance(trainee, EagleTrainee)
        net = trainee.net
        write_checkpoint(folder, net, Description(net.config, parts.verifier, notes))


class EagleTraining(EagleHeadTraining):
    """EAGLE-3 heads."""

    name: ClassVar[str] = "eagle"
    summary: ClassVar[str] = "one decoder layer on the target's fused hidden states (EAGLE-3)"
    Options: ClassVar[type[Config]] = EagleTrainingOptions

    @property
    def _options(self) -> FusedOptions:
        assert isinstance(self.options, FusedOptions)
        return self.options

    def adapted(self, settings: TrainingSettings) -> TrainingSettings:
        """See `TrainingMethod.adapted`.

        Raises:
            ConfigError: the settings of several levels are given, and there is only one.
        """
        return settings.one_level_alone()

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """See `TrainingMethod.layers`."""
        start = self._start
        chosen = start.description.config.aux_layers if start else self._options.layers
        if not chosen:
            return default_layers(num_layers)
        if max(chosen) > num_layers:
            raise ConfigError(f"layers: this model has layers 0 to {num_layers}, got {chosen}.")
        if len(set(chosen)) < len(chosen):
            raise ConfigError(f"layers: name each once, got {chosen}.")
        return chosen

    def trainee(self, parts: HeadParts) -> Trainee:
        """See `TrainingMethod.trainee`; with `start`, its weights are those of that head."""
        assert isinstance(self.options, EagleTrainingOptions)
        if self._start:
            net = _learning_on(self._start.for_target(parts.num_layers), parts)
        else:
            config = EagleConfig(**self.sizes(parts), norm_output=self.options.norm_output)
            net = _over_target(config, parts)
            net.initialise()
        return EagleTrainee(net, LOSSES[self._options.loss], self._options.noise)

    @cached_property
    def _start(self) -> Checkpoint | None:
        """The head that learns on.

        Raises:
            CompatibilityError: it is an EAGLE-1 head.
            ModelError: there is none, or it is damaged.
        """
        start = getattr(self.options, "start", None)
        if start is None:
            return None
        found = read_checkpoint(shipped_head(start) or start)
        if isinstance(found.description.config, FeatureConfig):
            raise CompatibilityError(f"start: {start} is an EAGLE-1 head: give an EAGLE-3 head.")
        return found

    def sizes(self, parts: HeadParts) -> dict[str, Any]:
        """The fields of `EagleConfig` that do not depend on what is fed back."""
        options = self._options
        return {
            **layer_sizes(parts, options.intermediate_size),
            "aux_layers": self.layers(parts.num_layers),
            "fc_norm": options.fc_norm,
            "qk_norm": options.qk_norm,
        }


def _over_target(config: EagleConfig, parts: HeadParts) -> EagleNet:
    """A head over the target's embedding and its output rows of the draft vocabulary."""
    rows = parts.output_rows[parts.draft_tokens]
    return EagleNet(config, parts.embedding, rows, parts.draft_tokens)


def _learning_on(start: Checkpoint, parts: HeadParts) -> EagleNet:
    """A head with the weights of another one, and the draft vocabulary of `parts`.

    Raises:
        CompatibilityError: that one is for a target of other sizes, or has an embedding or output
            rows of its own.
    """
    check_layers(start.path, start.description.verifier, parts.num_layers)
    old = start.net(parts.embedding, parts.output_rows)
    shared = parts.output_rows[old.draft_tokens]
    if old.embedding is not parts.embedding or not torch.equal(old.head, shared):
        raise CompatibilityError(
            f"start: {start.path} has an embedding or output rows of its own, and training uses "
            "the target's: give a head without them."
        )
    net = _over_target(replace(old.config, draft_vocab_size=len(parts.draft_tokens)), parts)
    vocabulary = {name: net.state_dict()[name] for name in ("d2t", "t2d")}
    net.load_state_dict({**old.state_dict(), **vocabulary})
    return net
