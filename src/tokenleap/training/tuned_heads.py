"""Heads that are trained together with the target.

Medusa-2 (Cai et al., arXiv 2401.10774, section 2.2.2) learns

    loss = L_own + lambda_0 sum_k decay^k L_k

with L_k = E[loss(p, q_k)] of head k, and L_own = E[loss(p, q)] for the distribution q of the copy
of the target itself. The heads learn first, alone; then both, the copy at a lower rate. Heads that
know nothing would otherwise change it for the worse.

Fine-tuned blockwise heads (Stern et al., arXiv 1811.03115, section 6) learn one of the K + 1 losses
L_own, L_1, ... L_K in each batch, drawn uniformly.

In both papers the losses are `ce`. With `kl` the target is the teacher (see `tuned.py`). Output
rows are those of the copy; the heads' losses do not change them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Le
from pydantic import FiniteFloat
from torch import Tensor, nn

from tokenleap.core.config import Config
from tokenleap.drafters.heads.blockwise import BlockwiseNet
from tokenleap.drafters.heads.medusa import MedusaNet
from tokenleap.drafters.heads.probe import Probe, Seen
from tokenleap.drafters.heads.state_file import write_state_file
from tokenleap.drafters.heads.state_net import StateNet
from tokenleap.training.batches import Batch
from tokenleap.training.draft_lm import output_layer, write_lm
from tokenleap.training.losses import LOSSES, Loss
from tokenleap.training.method import HeadParts
from tokenleap.training.settings import TrainingSettings
from tokenleap.training.state_heads import HeadOptions, StateTraining, head_outputs
from tokenleap.training.trainee import Learnt, OwnRate, Trainee, at_roots
from tokenleap.training.tuned import TargetTrainee, copy_of_target

__all__ = ["HEADS", "TunedBlockwiseTraining", "TunedMedusaTraining", "TunedTrainee"]

HEADS = "heads"
"""The folder of the heads in that of their target."""


class TunedTrainee(Trainee):
    """Heads and the copy of the target whose hidden states they read.

    Args:
        net: the heads.
        own: the copy.
        loss: of each place.
        learning_rate: the copy's.
    """

    keeps_logits = False
    uses_all_weights = False

    def __init__(self, net: StateNet, own: TargetTrainee, loss: Loss, learning_rate: float) -> None:
        super().__init__(net.draft_tokens, net.config.vocab_size, loss, net.config.num_heads)
        self.net, self.own = net, own
        self._learning_rate = learning_rate

    @property
    def matrices(self) -> list[nn.Parameter]:
        """See `Trainee.matrices`: those of the heads."""
        return [weight for weight in self.net.parameters() if weight.dim() == 2]

    @property
    def own_rate(self) -> OwnRate:
        """See `Trainee.own_rate`: the copy."""
        return OwnRate(list(self.own.parameters()), self._learning_rate)

    @abstractmethod
    def weights(self, num_heads: int) -> Sequence[float]:
        """The weights of the losses of a batch: of the copy's own, and of each head's."""

    def outputs(self, batch: Batch, num_levels: int) -> Iterator[Tensor]:
        """See `Trainee.outputs`."""
        return self._drafts(self.own.states(batch.tokens), batch, num_levels)

    def _drafts(self, states: Tensor, batch: Batch, num_levels: int) -> Iterator[Tensor]:
        return head_outputs(self.net, at_roots(states, batch.roots), batch, num_levels)

    def logits(self, outputs: Tensor, level: int) -> Tensor:
        """See `Trainee.logits`."""
        layer = output_layer(self.own.lm)
        rows: Tensor = layer.weight.detach()[self.draft_tokens]
        bias = None if layer.bias is None else layer.bias.detach()[self.draft_tokens]
        return F.linear(outputs.to(rows.dtype), rows, bias).float()

    def forward(self, batch: Batch, num_levels: int) -> Learnt:
        """See `Trainee.forward`; in training, losses[0] has the copy's own, too."""
        if not self.training:
            return super().forward(batch, num_levels)
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


class _MedusaTrainee(TunedTrainee):
    """See the module.

    Args:
        arguments: see `TunedTrainee`.
        draft_weight: lambda_0.
        heads_first: share of the steps in which only the heads learn.
    """

    def __init__(self, *arguments: Any, draft_weight: float, heads_first: float) -> None:
        super().__init__(*arguments)
        self._draft_weight, self._heads_first = draft_weight, heads_first
        self._joint = not heads_first

    def at_step(self, step: int, total: int) -> None:
        """See `Trainee.at_step`: the heads learn first."""
        self._joint = step >= self._heads_first * total

    @property
    def _learns_own(self) -> bool:
        return self._joint

    def weights(self, num_heads: int) -> Sequence[float]:
        """See `TunedTrainee.weights`; the trainer has the decay."""
        return (
            [1.0, *[self._draft_weight] * num_heads] if self._joint else [0.0, *[1.0] * num_heads]
        )


class _BlockwiseTrainee(TunedTrainee):
    """See the module."""

    def weights(self, num_heads: int) -> Sequence[float]:
        """See `TunedTrainee.weights`: one of them is 1."""
        chosen = int(torch.randint(num_heads + 1, ()))
        return [float(number == chosen) for number in range(num_heads + 1)]

    def forward(self, batch: Batch, num_levels: int) -> Learnt:
        """See `Trainee.forward`; in training, losses[0] is the one that is learnt."""
        found = super().forward(batch, num_levels)
        if not self.training:
            return found
        losses = torch.zeros_like(found.losses)
        losses[0] = found.losses.sum()
        return found._replace(losses=losses)


class TunedOptions(HeadOptions):
    """See `HeadOptions`; `target_learning_rate` is that of the target's copy."""

    target_learning_rate: Annotated[FiniteFloat, Gt(0)] = 1e-4


class _TunedTraining(StateTraining):
    """What the methods share."""

    Options: ClassVar[type[Config]] = TunedOptions
    Kind: ClassVar[type[TunedTrainee]]
    tunes_target: ClassVar[bool] = True
    for_sources: ClassVar[bool | None] = False

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """See `TrainingMethod.layers`: the copy computes its hidden states itself."""
        return ()

    def trainee(self, parts: HeadParts) -> Trainee:
        """See `TrainingMethod.trainee`."""
        options, net = self.options, self.net(parts)
        assert isinstance(options, TunedOptions)
        loss = LOSSES[options.loss]
        own = TargetTrainee(copy_of_target(parts), parts.embedding.shape[0], loss)
        others = options.model_dump(include={"draft_weight", "heads_first"})
        return self.Kind(net, own, loss, options.target_learning_rate, **others)

    def probed(self, trainee: Trainee, seen: Seen) -> Mapping[str, Any]:
        """See `TrainingMethod.probed`: the heads are for the copy, as it is now."""
        assert isinstance(trainee, TunedTrainee)
        own = trainee.own
        logits = own.logits(own.states(seen.tokens.unsqueeze(0))[0], 0)
        return Probe.of(replace(seen, follows=logits.argmax(-1))).note()

    def write(
        self, trainee: Trainee, parts: HeadParts, folder: Path, notes: Mapping[str, Any]
    ) -> None:
        """See `TrainingMethod.write`: a Hugging Face folder with that of the heads in it."""
        assert isinstance(trainee, TunedTrainee)
        of_lm = {name: note for name, note in notes.items() if name != "probe"}
        write_lm(trainee.own.lm, parts.name, folder, of_lm)
        verifier = replace(parts.verifier, name_or_path=str(folder))
        write_state_file(folder / HEADS, trainee.net, verifier, notes)

    def serving(self, folder: Path) -> dict[str, Any]:
        """See `TrainingMethod.serving`: the target is the folder."""
        return {"method": self.Net.METHOD, "model": str(folder / HEADS)}


class TunedMedusaOptions(TunedOptions):
    """See `TunedOptions`.

    Args:
        num_layers: blocks of each head.
        draft_weight: weight of the heads' losses, relative to the copy's own.
        heads_first: share of the steps in which only the heads learn.
    """

    num_layers: Annotated[int, Ge(1)] = 1
    draft_weight: Annotated[FiniteFloat, Gt(0)] = 0.2
    heads_first: Annotated[FiniteFloat, Ge(0), Le(1)] = 0.25


class TunedMedusaTraining(_TunedTraining):
    """Medusa-2."""

    name: ClassVar[str] = "medusa_2"
    summary: ClassVar[str] = "heads of `medusa`, together with the target (Medusa-2)"
    Options: ClassVar[type[Config]] = TunedMedusaOptions
    Net: ClassVar[type[StateNet]] = MedusaNet
    Kind: ClassVar[type[TunedTrainee]] = _MedusaTrainee


class TunedBlockwiseOptions(TunedOptions):
    """See `TunedOptions`; `inner_size` is the width of each head's hidden layer."""

    inner_size: Annotated[int, Ge(1)] = 1024


class TunedBlockwiseTraining(_TunedTraining):
    """Fine-tuned blockwise heads."""

    name: ClassVar[str] = "blockwise_tuned"
    summary: ClassVar[str] = "heads of `blockwise`, together with the target (Stern et al.)"
    Options: ClassVar[type[Config]] = TunedBlockwiseOptions
    Net: ClassVar[type[StateNet]] = BlockwiseNet
    Kind: ClassVar[type[TunedTrainee]] = _BlockwiseTrainee

    def adapted(self, settings: TrainingSettings) -> TrainingSettings:
        """See `TrainingMethod.adapted`: no loss has a smaller weight.

        Raises:
            ConfigError: the settings ask for something else.
        """
        reason = f"'{self.name}' learns one loss at a time: remove it."
        return super().adapted(settings).decided(reason, decay=1.0)
