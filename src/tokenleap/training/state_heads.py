"""Training of heads without attention: Medusa, Hydra, blockwise heads and the MLP speculator.

    loss = sum_k decay^k E[loss(p, q_k)]

over the K heads of a draft, all on the target's last hidden state, with the text's own tokens in
front of each. The target itself is not changed (Medusa-1; Stern et al.'s frozen base model). Output
rows are the target's, frozen, over a draft vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Le
from pydantic import FiniteFloat
from torch import Tensor, nn

from tokenleap.drafters.heads.layouts import write_head
from tokenleap.drafters.heads.probe import Seen
from tokenleap.drafters.heads.state_net import (
    BlockwiseNet,
    HydraNet,
    MedusaNet,
    MlpSpeculatorNet,
    StateNet,
    normed,
)
from tokenleap.training.distill import output_layer, write_lm
from tokenleap.training.eagle import HeadTraining
from tokenleap.training.features import Batch, dequantize, noisy
from tokenleap.training.method import TrainingSettings
from tokenleap.training.trainee import (
    LOSSES,
    HeadParts,
    Learnt,
    Loss,
    OwnRate,
    Trainee,
    at_roots,
)
from tokenleap.training.tuned import TargetTrainee, copy_of_target


class StateTrainee(Trainee):
    def __init__(self, net: StateNet, norm: nn.Module, loss: Loss, noise: float) -> None:
        super().__init__(net.draft_tokens, net.config.vocab_size, loss, net.config.num_heads)
        self.net = net
        self._norm = [norm]  # in a list, so that its weights are not those of this module
        self._noise = noise

    def outputs(self, batch: Batch, num_levels: int) -> Iterator[Tensor]:
        hidden = dequantize(
            at_roots(batch.hidden, batch.roots), at_roots(batch.scales, batch.roots)
        )
        if self.training:
            hidden = noisy(hidden, self._noise)
        with torch.no_grad():
            last = normed(self._norm[0], hidden.squeeze(2))  # of the only layer
        return _head_outputs(self.net, last, batch, num_levels)

    def logits(self, outputs: Tensor, level: int) -> Tensor:
        logits: Tensor = self.net.output_layer(level)(outputs)
        return logits.float()

    def write(self, parts: HeadParts, folder: Path, notes: Mapping[str, Any]) -> None:
        write_head(folder, self.net, parts.verifier, notes)


def _head_outputs(net: StateNet, last: Tensor, batch: Batch, num_levels: int) -> Iterator[Tensor]:
    """A head's output for each level; [B, Q, E].

    Args:
        last: [B, Q, E] hidden states at the roots, after the final norm.
    """
    states = net.start(last, batch.levels.inputs[:, 0])
    for level in range(num_levels):
        if level:
            states = net.advance(states, batch.levels.inputs[:, level], level)
        yield net.outputs(states, level)


class _NetTraining(HeadTraining):
    """Heads of a `StateNet`.

    Args:
        num_heads: most tokens of a draft.
    """

    Net: ClassVar[type[StateNet]]

    num_heads: Annotated[int, Ge(1), Le(32)] = 4

    def adapted(self, settings: TrainingSettings) -> TrainingSettings:
        reason = f"'{self.name}' learns all of its heads from the first step on: set num_heads."
        return settings.decided(reason, levels=self.num_heads, first_level_share=0.0)

    def net(self, parts: HeadParts) -> StateNet:
        parts.norm_for(self.name)  # which serving needs
        vocab_size, hidden_size = parts.embedding.shape
        config = self.Net.Config(
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            draft_vocab_size=len(parts.draft_tokens),
            num_heads=self.num_heads,
            **self.own_sizes(parts),
        )
        net = self.Net(config, parts.embedding, parts.output_rows, parts.draft_tokens)
        net.add_bias(parts.logits_bias)
        net.initialise()
        return net

    def own_sizes(self, parts: HeadParts) -> dict[str, Any]:
        """The fields of the head's configuration that other kinds do not have."""
        own = {each.name for each in fields(self.Net.Config)} - set(_NetTraining.model_fields)
        return self.model_dump(include=own)


class _StateTraining(_NetTraining):
    """Heads on the hidden states of a target that stays as it is.

    Args:
        noise: standard deviation of the noise on hidden states, relative to their size.
    """

    for_sources: ClassVar[bool | None] = None

    noise: Annotated[FiniteFloat, Ge(0)] = 0.05

    def read_layers(self, num_layers: int) -> tuple[int, ...]:
        """The input of the final norm."""
        return (num_layers,)

    def trainee(self, parts: HeadParts) -> Trainee:
        norm = parts.norm_for(self.name)
        return StateTrainee(self.net(parts), norm, LOSSES[self.loss], self.noise)


class MedusaTraining(_StateTraining):
    """Medusa-1 heads.

    Args:
        num_layers: blocks of each head.
    """

    name: ClassVar[str] = "medusa"
    summary: ClassVar[str] = "independent heads, one for each position (Medusa-1)"
    Net: ClassVar[type[StateNet]] = MedusaNet

    num_layers: Annotated[int, Ge(1)] = 1


class HydraTraining(_StateTraining):
    """Hydra heads.

    Args:
        num_layers: blocks of each head.
    """

    name: ClassVar[str] = "hydra"
    summary: ClassVar[str] = "heads that read the tokens drafted before (Hydra)"
    Net: ClassVar[type[StateNet]] = HydraNet

    num_layers: Annotated[int, Ge(1)] = 1


class BlockwiseTraining(_StateTraining):
    """Blockwise heads.

    Args:
        inner_size: width of each head's hidden layer.
    """

    name: ClassVar[str] = "blockwise"
    summary: ClassVar[str] = "feed-forward heads on the output layer (Stern et al.)"
    Net: ClassVar[type[StateNet]] = BlockwiseNet

    inner_size: Annotated[int, Ge(1)] = 1024


class MlpSpeculatorTraining(_StateTraining):
    """MLP speculators, as wide as the target.

    Args:
        tie_weights: whether all depths share their weights.
    """

    name: ClassVar[str] = "mlp_speculator"
    summary: ClassVar[str] = "a recurrent MLP over the drafted tokens (IBM's MLP speculator)"
    Net: ClassVar[type[StateNet]] = MlpSpeculatorNet

    tie_weights: bool = True

    def own_sizes(self, parts: HeadParts) -> dict[str, Any]:
        return {**super().own_sizes(parts), "inner_size": parts.embedding.shape[1]}


# Heads that are trained together with a copy of the target.
#
# Medusa-2 (Cai et al., arXiv 2401.10774, section 2.2.2) learns
#
#     loss = L_own + lambda_0 sum_k decay^k L_k
#
# with L_k = E[loss(p, q_k)] of head k, and L_own = E[loss(p, q)] for the distribution q of the copy
# of the target itself. The heads learn first, alone; then both, the copy at a lower rate. Heads
# that know nothing would otherwise change it for the worse.
#
# Fine-tuned blockwise heads (Stern et al., arXiv 1811.03115, section 6) learn one of the K + 1
# losses L_own, L_1, ... L_K in each batch, drawn uniformly.
#
# In both papers the losses are `ce`. With `kl` the target is the teacher (see `tuned.py`). Output
# rows are those of the copy; the heads' losses do not change them.


HEADS = "heads"
"""The folder of the heads in that of their target."""


class TunedTrainee(Trainee):
    """Heads and the copy of the target whose hidden states they read."""

    keeps_logits = False
    uses_all_weights = False

    def __init__(self, options: _TunedTraining, parts: HeadParts) -> None:
        net, loss = options.net(parts), LOSSES[options.loss]
        super().__init__(net.draft_tokens, net.config.vocab_size, loss, net.config.num_heads)
        self.net, self.own = net, TargetTrainee(copy_of_target(parts), parts.vocab_size, loss)
        self.own_rate = OwnRate(list(self.own.parameters()), options.target_learning_rate)

    @abstractmethod
    def weights(self, num_heads: int) -> Sequence[float]:
        """The weights of the losses of a batch: of the copy's own, and of each head's."""

    def outputs(self, batch: Batch, num_levels: int) -> Iterator[Tensor]:
        return self._drafts(self.own.states(batch.tokens), batch, num_levels)

    def _drafts(self, states: Tensor, batch: Batch, num_levels: int) -> Iterator[Tensor]:
        return _head_outputs(self.net, at_roots(states, batch.roots), batch, num_levels)

    def logits(self, outputs: Tensor, level: int) -> Tensor:
        layer = output_layer(self.own.lm)
        rows: Tensor = layer.weight.detach()[self.draft_tokens]
        bias = None if layer.bias is None else layer.bias.detach()[self.draft_tokens]
        return F.linear(outputs.to(rows.dtype), rows, bias).float()

    def learn(self, batch: Batch, num_levels: int) -> Learnt:
        """Beside the heads, losses[0] has the copy's own."""
        of_own, *of_heads = self.weights(num_levels)
        with torch.set_grad_enabled(self._learns_own):
            states = self.own.states(batch.tokens)
        losses, hits = [], []
        for level, outputs in enumerate(self._drafts(states, batch, num_levels)):
            with torch.set_grad_enabled(of_heads[level] > 0):
                loss, right = self.level(outputs, level, batch)
            losses.append(of_heads[level] * loss)
            hits.append(right)
        if of_own:
            own, _ = self.own.level(at_roots(states, batch.roots + 1), 0, batch)
            losses[0] = losses[0] + of_own * own
        counts = batch.levels.valid[:, :num_levels].sum((0, 2))
        return Learnt(torch.stack(losses), torch.stack(hits, dim=1), counts)

    @property
    def _learns_own(self) -> bool:
        """Whether the copy learns now."""
        return True

    def probe(self, seen: Seen) -> Mapping[str, Any]:
        """The heads are for the copy, as it is now."""
        logits = self.own.logits(self.own.states(seen.tokens.unsqueeze(0))[0], 0)
        return super().probe(replace(seen, follows=logits.argmax(-1)))

    def write(self, parts: HeadParts, folder: Path, notes: Mapping[str, Any]) -> None:
        of_lm = {name: note for name, note in notes.items() if name != "probe"}
        write_lm(self.own.lm, parts.name, folder, of_lm)
        verifier = replace(parts.verifier, name_or_path=str(folder))
        write_head(folder / HEADS, self.net, verifier, notes)


class _MedusaTrainee(TunedTrainee):
    """Medusa-2; in the first share `heads_first` of the steps, only the heads learn."""

    def __init__(self, options: TunedMedusaTraining, parts: HeadParts) -> None:
        super().__init__(options, parts)
        self._options = options

    @property
    def _learns_own(self) -> bool:
        step, total = self.step
        return step >= self._options.heads_first * total

    def weights(self, num_heads: int) -> Sequence[float]:
        """Without the decay, which is the trainer's."""
        if not self._learns_own:
            return [0.0, *[1.0] * num_heads]
        return [1.0, *[self._options.draft_weight] * num_heads]


class _BlockwiseTrainee(TunedTrainee):
    def weights(self, num_heads: int) -> Sequence[float]:
        chosen = int(torch.randint(num_heads + 1, ()))
        return [float(number == chosen) for number in range(num_heads + 1)]

    def learn(self, batch: Batch, num_levels: int) -> Learnt:
        found = super().learn(batch, num_levels)
        losses = torch.zeros_like(found.losses)
        losses[0] = found.losses.sum()
        return found._replace(losses=losses)


class _TunedTraining(_NetTraining):
    """Heads with their target.

    Args:
        target_learning_rate: of the copy of the target, with AdamW.
    """

    tunes_target: ClassVar[bool] = True

    target_learning_rate: Annotated[FiniteFloat, Gt(0)] = 1e-4

    def serving(self, folder: Path) -> dict[str, Any]:
        return {"method": self.Net.METHOD, "model": str(folder / HEADS)}


class TunedMedusaTraining(_TunedTraining):
    """Medusa-2.

    Args:
        num_layers: blocks of each head.
        draft_weight: weight of the heads' losses, relative to the copy's own.
        heads_first: share of the steps in which only the heads learn.
    """

    name: ClassVar[str] = "medusa_2"
    summary: ClassVar[str] = "heads of `medusa`, together with the target (Medusa-2)"
    Net: ClassVar[type[StateNet]] = MedusaNet

    num_layers: Annotated[int, Ge(1)] = 1
    draft_weight: Annotated[FiniteFloat, Gt(0)] = 0.2
    heads_first: Annotated[FiniteFloat, Ge(0), Le(1)] = 0.25

    def trainee(self, parts: HeadParts) -> Trainee:
        return _MedusaTrainee(self, parts)


class TunedBlockwiseTraining(_TunedTraining):
    """Fine-tuned blockwise heads.

    Args:
        inner_size: width of each head's hidden layer.
    """

    name: ClassVar[str] = "blockwise_tuned"
    summary: ClassVar[str] = "heads of `blockwise`, together with the target (Stern et al.)"
    Net: ClassVar[type[StateNet]] = BlockwiseNet

    inner_size: Annotated[int, Ge(1)] = 1024

    def adapted(self, settings: TrainingSettings) -> TrainingSettings:
        reason = f"'{self.name}' learns one loss at a time: remove it."
        return super().adapted(settings).decided(reason, decay=1.0)

    def trainee(self, parts: HeadParts) -> Trainee:
        return _BlockwiseTrainee(self, parts)
