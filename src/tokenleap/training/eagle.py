"""Training of EAGLE heads: EAGLE-3, EAGLE-1 and P-EAGLE.

EAGLE-3 (Li et al., arXiv 2503.01840) learns by training-time test:

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
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Le, MinLen
from pydantic import FiniteFloat, model_validator
from torch import Tensor

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
from tokenleap.drafters.heads.layouts import EagleFolder, write_head
from tokenleap.drafters.heads.probe import Probe, Seen
from tokenleap.drafters.heads.shipped import shipped_head
from tokenleap.errors import CompatibilityError, ConfigError
from tokenleap.training.features import Batch, Levels, dequantize, noisy
from tokenleap.training.method import Plan, TrainingMethod, TrainingSettings
from tokenleap.training.trainee import (
    LOSSES,
    HeadParts,
    Learnt,
    Loss,
    Trainee,
    at_level,
    llama_fields,
)


class EagleTrainee(Trainee):
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

    def probe(self, seen: Seen) -> Mapping[str, Any]:
        return Probe.of(seen, self.net).note()

    def write(self, parts: HeadParts, folder: Path, notes: Mapping[str, Any]) -> None:
        write_head(folder, self.net, parts.verifier, notes)


class HeadTraining(TrainingMethod):
    """Heads that are trained for a target.

    Args:
        draft_vocab_size: most tokens that the head can draft: those that the target writes most
            often. None means all.
        loss: of the drafter's distribution against the target's (docs/training.md).
    """

    draft_vocab_size: Annotated[int, Ge(1)] | None = 8192
    loss: Literal["kl", "ce", "tv"] = "kl"

    @property
    def plan(self) -> Plan:
        return Plan(draft_vocab_size=self.draft_vocab_size)


class FusedTraining(HeadTraining):
    """Heads that fuse hidden states of several layers.

    Args:
        noise: standard deviation of the noise on hidden states, relative to their size.
        layers: ids of the target's layers whose inputs are fused; None means a low, a middle and a
            high one: 2, L // 2 and L - 3.
        qk_norm: whether queries and keys are normalised, as in Qwen3.
        fc_norm: whether each fused hidden state is normalised (EAGLE-3.1).
        intermediate_size: of the MLPs; None means the target's.
    """

    noise: Annotated[FiniteFloat, Ge(0)] = 0.05
    layers: Annotated[tuple[Annotated[int, Ge(0)], ...], MinLen(1)] | None = None
    qk_norm: bool = False
    fc_norm: bool = True
    intermediate_size: Annotated[int, Ge(1)] | None = None

    def read_layers(self, num_layers: int) -> tuple[int, ...]:
        return _checked(self.layers, num_layers)

    def sizes(self, parts: HeadParts) -> dict[str, Any]:
        """The fields of `EagleConfig` that do not depend on what is fed back."""
        return {
            **_layer_sizes(parts, self.intermediate_size),
            "aux_layers": self.read_layers(parts.num_layers),
            "fc_norm": self.fc_norm,
            "qk_norm": self.qk_norm,
        }


def _checked(chosen: Sequence[int] | None, num_layers: int) -> tuple[int, ...]:
    if not chosen:
        return default_layers(num_layers)
    if max(chosen) > num_layers:
        raise ConfigError(f"layers: this model has layers 0 to {num_layers}, got {chosen}.")
    if len(set(chosen)) < len(chosen):
        raise ConfigError(f"layers: name each once, got {chosen}.")
    return tuple(chosen)


def _layer_sizes(parts: HeadParts, intermediate_size: int | None) -> dict[str, Any]:
    """The fields of `EagleConfig` that follow from the target."""
    config = parts.config.get_text_config()
    heads = config.num_attention_heads
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
        **llama_fields(config),
    }


class EagleTraining(FusedTraining):
    """EAGLE-3 heads.

    Args:
        norm_output: whether the state that is fed back is normalised (EAGLE-3.1).
        start: the folder of an EAGLE-3 head that learns on, or the alias of a model with a head in
            the package; None for random weights. Layers, norms and sizes are then that head's.
    """

    name: ClassVar[str] = "eagle"
    summary: ClassVar[str] = "one decoder layer on the target's fused hidden states (EAGLE-3)"
    deeper: ClassVar[str] = "learn more levels"

    norm_output: bool = True
    start: Annotated[str, MinLen(1)] | None = None

    @model_validator(mode="after")
    def _form_is_not_given(self) -> Self:
        form = ("layers", "qk_norm", "fc_norm", "intermediate_size", "norm_output")
        for name in form if self.start is not None else ():
            if name in self.model_fields_set:
                raise ValueError(f"{name}: the head in 'start' decides: remove one of the two.")
        return self

    def adapted(self, settings: TrainingSettings) -> TrainingSettings:
        return settings.one_level_alone()

    def read_layers(self, num_layers: int) -> tuple[int, ...]:
        if self._start is None:
            return super().read_layers(num_layers)
        return _checked(self._start.config.aux_layers, num_layers)

    def trainee(self, parts: HeadParts) -> Trainee:
        if self._start:
            net = _learning_on(self._start.for_target(parts.num_layers), parts)
        else:
            config = EagleConfig(**self.sizes(parts), norm_output=self.norm_output)
            net = EagleNet(config, *parts.vocabulary)
            net.initialise()
        return EagleTrainee(net, LOSSES[self.loss], self.noise)

    @cached_property
    def _start(self) -> EagleFolder | None:
        if self.start is None:
            return None
        found = EagleFolder.read(shipped_head(self.start) or self.start, "eagle")
        if isinstance(found.config, FeatureConfig):
            raise CompatibilityError(
                f"start: {self.start} is an EAGLE-1 head: give an EAGLE-3 head."
            )
        return found


def _learning_on(start: EagleFolder, parts: HeadParts) -> EagleNet:
    """A head with the weights of another one, and the draft vocabulary of `parts`."""
    check_layers(start.path, start.verifier, parts.num_layers)
    old = start.net(parts.embedding, parts.output_rows)
    shared = parts.output_rows[old.draft_tokens]
    if old.embedding is not parts.embedding or not torch.equal(old.head, shared):
        raise CompatibilityError(
            f"start: {start.path} has an embedding or output rows of its own, and training uses "
            "the target's: give a head without them."
        )
    config = replace(old.config, draft_vocab_size=len(parts.draft_tokens))
    net = EagleNet(config, *parts.vocabulary)
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
        return self._noisy(self.features(batch), batch)

    def _noisy(self, features: Tensor, batch: Batch) -> Tensor:
        if not self.training:
            return features
        widths = self._noise * _NOISE_LENGTH / batch.lengths
        return features + (torch.rand_like(features) - 0.5) * widths[:, None, None]

    def learn(self, batch: Batch, num_levels: int) -> Learnt:
        features = self.features(batch)
        outputs = list(self.drafts(self._noisy(features, batch), batch, num_levels))
        found = self.learnt(outputs, batch)
        if not self._feature_weight:
            return found
        missed = [_missed(each, features, level, batch) for level, each in enumerate(outputs)]
        return found._replace(losses=found.losses + self._feature_weight * torch.stack(missed))


def _missed(outputs: Tensor, features: Tensor, level: int, batch: Batch) -> Tensor:
    """The mean smooth L1 loss of one level: features [B, Q, E], and the target's [B, T, E]."""
    valid = batch.levels.valid[:, level]
    wanted = at_level(features, batch, level)[valid]
    missed = F.smooth_l1_loss(outputs[valid].float(), wanted, reduction="sum")
    return missed / max(1, wanted.numel())


class Eagle1Training(HeadTraining):
    """EAGLE-1 heads; the defaults are those of the authors.

    Args:
        noise: width of the uniform noise on features, of texts of 512 tokens. It is wider in
            shorter ones, in proportion.
        feature_weight: of the smooth L1 loss between the predicted feature and the target's.
        token_weight: of the loss of tokens.
        fc_bias: whether the layer that joins token and feature has a bias.
        intermediate_size: of the MLP; None means the target's.
    """

    name: ClassVar[str] = "eagle1"
    summary: ClassVar[str] = "one decoder layer on the target's last hidden state (EAGLE-1)"
    deeper: ClassVar[str] = "learn more levels"

    draft_vocab_size: Annotated[int, Ge(1)] | None = None
    noise: Annotated[FiniteFloat, Ge(0)] = 0.2
    feature_weight: Annotated[FiniteFloat, Ge(0)] = 1.0
    token_weight: Annotated[FiniteFloat, Ge(0)] = 0.1
    fc_bias: bool = True
    intermediate_size: Annotated[int, Ge(1)] | None = None

    def adapted(self, settings: TrainingSettings) -> TrainingSettings:
        """One level, unless the user asks for more."""
        return settings.preferring(levels=1).one_level_alone()

    def read_layers(self, num_layers: int) -> tuple[int, ...]:
        """The input of the final norm."""
        return (num_layers,)

    def trainee(self, parts: HeadParts) -> Trainee:
        norm = parts.norm_for(self.name)
        config = FeatureConfig(
            **_layer_sizes(parts, self.intermediate_size),
            aux_layers=self.read_layers(parts.num_layers),
            fc_bias=self.fc_bias,
        )
        net = FeatureNet(config, *parts.vocabulary, norm)
        net.initialise()
        token_loss, weight = LOSSES[self.loss], self.token_weight
        return Eagle1Trainee(
            net,
            lambda logits, teacher: weight * token_loss(logits, teacher),
            self.noise,
            self.feature_weight,
        )

    def serving(self, folder: Path) -> dict[str, Any]:
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

    def learn(self, batch: Batch, num_levels: int) -> Learnt:
        """Deep levels of some drafts are left out."""
        return super().learn(self._thinned(batch), num_levels)

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


class ParallelTraining(FusedTraining):
    """P-EAGLE heads.

    Args:
        depths: most tokens of a draft.
        num_layers: decoder layers of the head.
        keep: share of the drafts from which a level is learnt, relative to the level before.
        least_kept: least share of the drafts from which a level is learnt.
        mask_token_id: the token whose embedding masks have; None means the padding or the end
            token of the target's configuration, or 0.
    """

    name: ClassVar[str] = "parallel"
    summary: ClassVar[str] = "a head that drafts a block in one pass (P-EAGLE)"

    depths: Annotated[int, Ge(2), Le(16)] = 8
    num_layers: Annotated[int, Ge(1), Le(16)] = 2
    keep: Annotated[float, Gt(0), Le(1)] = 0.7
    least_kept: Annotated[float, Gt(0), Le(1)] = 0.2
    mask_token_id: Annotated[int, Ge(0)] | None = None

    def adapted(self, settings: TrainingSettings) -> TrainingSettings:
        reason = f"'{self.name}' learns all levels from the first step on: set depths."
        return settings.decided(reason, levels=self.depths, first_level_share=0.0)

    def trainee(self, parts: HeadParts) -> Trainee:
        config = ParallelConfig(
            **self.sizes(parts),
            norm_output=False,
            num_layers=self.num_layers,
            mask_token_id=self._mask_token(parts),
            depths=self.depths,
        )
        net = ParallelNet(config, *parts.vocabulary)
        net.initialise()
        kept = [max(self.keep**k, self.least_kept) for k in range(self.depths)]
        return ParallelTrainee(net, LOSSES[self.loss], self.noise, kept)

    def _mask_token(self, parts: HeadParts) -> int:
        chosen, known = self.mask_token_id, parts.vocab_size
        if chosen is not None and chosen >= known:
            raise ConfigError(
                f"mask_token_id: must be 0 to {known - 1} for this model, got {chosen}."
            )
        ends = parts.config.eos_token_id
        end = ends[0] if isinstance(ends, list) and ends else ends
        candidates = (chosen, parts.config.pad_token_id, end)
        return next((x for x in candidates if isinstance(x, int) and 0 <= x < known), 0)
