"""EAGLE-3's training: fused hidden states and training-time test (Li et al., arXiv 2503.01840).

    loss = sum_k decay^k E[KL(p || q_k)]

over the levels k of a draft. Level 0 sees the target's hidden states, with a little noise. Every
other level sees the state that the head made itself at the level before, as it will when it drafts,
beside the text's own token. There is no loss on the states. Embedding and output rows are the
target's and stay as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Le, MinLen
from pydantic import FiniteFloat, model_validator
from torch import Tensor

from tokenleap.core.config import Config
from tokenleap.drafters.heads.checkpoint import (
    Checkpoint,
    Description,
    read_checkpoint,
    write_checkpoint,
)
from tokenleap.drafters.heads.eagle_net import (
    EagleConfig,
    EagleNet,
    FeatureConfig,
    FeatureNet,
    KeysValues,
    ParallelConfig,
    ParallelNet,
    default_layers,
)
from tokenleap.drafters.heads.folder import check_layers
from tokenleap.drafters.heads.probe import Probe, Seen
from tokenleap.drafters.heads.shipped import shipped_head
from tokenleap.errors import CompatibilityError, ConfigError
from tokenleap.models.support import context_length
from tokenleap.training.batches import Batch, Levels
from tokenleap.training.features import dequantize, noisy
from tokenleap.training.method import (
    LOSSES,
    HeadParts,
    Learnt,
    Loss,
    Trainee,
    TrainingMethod,
    at_roots,
)
from tokenleap.training.settings import TrainingSettings

__all__ = [
    "DraftOptions",
    "Eagle1Trainee",
    "Eagle1Training",
    "Eagle1TrainingOptions",
    "EagleHeadTraining",
    "EagleTrainee",
    "EagleTraining",
    "EagleTrainingOptions",
    "FusedOptions",
    "NoiseOptions",
    "ParallelTrainee",
    "ParallelTraining",
    "ParallelTrainingOptions",
    "layer_sizes",
]


# Options that the training methods of several kinds of heads share.


class DraftOptions(Config):
    """Options of the tokens that are drafted.

    Args:
        draft_vocab_size: most tokens that the head can draft: those that the target writes most
            often. None means all.
        loss: of the drafter's distribution against the target's (docs/training.md).
    """

    draft_vocab_size: Annotated[int, Ge(1)] | None = 8192
    loss: Literal["kl", "ce", "tv"] = "kl"

    @property
    def most_draft_tokens(self) -> int:
        """`draft_vocab_size` as a number."""
        return self.draft_vocab_size or sys.maxsize


class NoiseOptions(Config):
    """Options of the noise on hidden states.

    Args:
        noise: standard deviation of the noise on them, relative to their size.
    """

    noise: Annotated[FiniteFloat, Ge(0)] = 0.05


class EagleTrainee(Trainee):
    """An EAGLE-3 head that is being trained."""

    def __init__(self, net: EagleNet, loss: Loss, noise: float) -> None:
        super().__init__(net.draft_tokens, net.config.vocab_size, loss)
        self.net = net
        self._noise = noise

    def fused(self, batch: Batch) -> Tensor:
        """[B, T, E] the states of a text's pairs; with noise while it learns."""
        hidden = dequantize(batch.hidden, batch.scales)
        return self.net.fuse(noisy(hidden, self._noise) if self.training else hidden)

    def outputs(self, batch: Batch, num_levels: int) -> Iterator[Tensor]:
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
        return self.net.logits(outputs)


class FusedOptions(DraftOptions, NoiseOptions):
    """Options of heads that fuse hidden states of several layers; see those of its bases.

    Args:
        layers: ids of the target's layers whose inputs are fused; None means a low, a middle and a
            high one: 2, L // 2 and L - 3.
        qk_norm: whether queries and keys are normalised, as in Qwen3.
        fc_norm: whether each fused hidden state is normalised (EAGLE-3.1).
        intermediate_size: of the MLPs; None means the target's.
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
    """The fields of `EagleConfig` that follow from the target."""
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
    """Common base of the methods that train EAGLE heads of any form."""

    deeper: ClassVar[str] = "learn more levels"

    @property
    def draft_vocab_size(self) -> int:
        assert isinstance(self.options, DraftOptions)
        return self.options.most_draft_tokens

    def probed(self, trainee: Trainee, seen: Seen) -> Mapping[str, Any]:
        assert isinstance(trainee, EagleTrainee)
        return Probe.of(seen, trainee.net).note()

    def write(
        self, trainee: Trainee, parts: HeadParts, folder: Path, notes: Mapping[str, Any]
    ) -> None:
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
        """See `TrainingMethod.adapted`."""
        return settings.one_level_alone()

    def layers(self, num_layers: int) -> tuple[int, ...]:
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
        """The head that learns on."""
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
    """A head with the weights of another one, and the draft vocabulary of `parts`."""
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


# EAGLE-1's training: the next feature and token (Li et al., arXiv 2401.15077, section 4.2).
#
#     loss = sum_k decay^k (feature_weight SmoothL1(f, f_k) + token_weight E[loss(p, q_k)])
#
# f is the target's hidden state after its final norm at the place of the drafted token, f_k what
# the head predicts for it at level k, and the smooth L1 loss is the mean over its numbers. EAGLE-1
# learns one level. With more, the later levels read the features that the head predicted itself,
# which is the training of HASS (arXiv 2408.15766). Embedding and output rows are the target's and
# stay as they are. EAGLE-2 drafts other trees with the same head.


_NOISE_LENGTH = 512
"""Tokens of a text whose features get noise as wide as `noise` says."""


class Eagle1Trainee(EagleTrainee):
    """An EAGLE-1 head that is being trained.

    Args:
        noise: width of the uniform noise on features, of a text of `_NOISE_LENGTH` tokens.
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
        features: [B, T, E] the target's.
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
        feature_weight: of the smooth L1 loss between the predicted feature and the target's.
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
        """See `TrainingMethod.adapted`: one level, unless the user asks for more."""
        return settings.preferring(levels=1).one_level_alone()

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """See `TrainingMethod.layers`: what enters the final norm."""
        return (num_layers,)

    def trainee(self, parts: HeadParts) -> Trainee:
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


# P-EAGLE's training: all levels of a draft in one pass (arXiv 2602.01469).
#
#     loss = sum_k decay^k E[KL(p || q_k)]
#
# over the levels k. Level 0 sees the target's hidden states, as in EAGLE-3; all others see learnt
# masks (see `drafters/heads/eagle_net.py`). Deep levels are learnt from some of the drafts only:
# level k from a share of max(keep^k, least_kept) of them, drawn anew for every batch. A draft that
# has level k has all levels before it.


class ParallelTrainee(EagleTrainee):
    """A P-EAGLE head that is being trained.

    Args:
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
        """See `TrainingMethod.adapted`: all levels are learnt from the first step on."""
        reason = f"'{self.name}' learns all levels from the first step on: set depths."
        return settings.decided(reason, levels=self._own.depths, first_level_share=0.0)

    def trainee(self, parts: HeadParts) -> Trainee:
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
