"""Training that changes the target: a copy of it learns to be easy to draft for.

They write a new model. Drafts for it are lossless with respect to it, not to the target that it was
made of. That one stays as it is and is the teacher: its own text and its most probable tokens are
what the copy learns, so that the copy changes little (self-distillation; Cai et al., arXiv
2401.10774, section 2.3.2).
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Le, Lt
from pydantic import FiniteFloat, model_validator
from torch import Tensor, nn
from transformers import PreTrainedModel

from tokenleap.core.config import Config
from tokenleap.drafters.heads.probe import Probe, Seen
from tokenleap.drafters.heads.state import write_state_file
from tokenleap.drafters.heads.state_net import BlockwiseNet, MedusaNet, StateNet
from tokenleap.errors import CompatibilityError, ConfigError
from tokenleap.runtime.cpu import decoder_layers
from tokenleap.runtime.target import final_norm
from tokenleap.training.batches import Batch
from tokenleap.training.distill import DistillTrainee, checked, output_layer, write_lm
from tokenleap.training.method import (
    LOSSES,
    HeadParts,
    Learnt,
    Loss,
    LossName,
    OwnRate,
    Trainee,
    TrainingMethod,
    at_roots,
)
from tokenleap.training.settings import TrainingSettings
from tokenleap.training.state_heads import HeadOptions, StateTraining, head_outputs

__all__ = [
    "HEADS",
    "TUNING_RATES",
    "EarlyExitTrainee",
    "EarlyExitTraining",
    "EarlyExitTrainingOptions",
    "Schedule",
    "TargetTrainee",
    "TunedBlockwiseTraining",
    "TunedMedusaTraining",
    "TunedTrainee",
    "TuningMethod",
    "copy_of_target",
]


TUNING_RATES = {"learning_rate": 2e-4, "vector_learning_rate": 1e-4}
"""The default learning rates of a model that has learnt already; see `TrainingSettings`."""


class TargetTrainee(DistillTrainee):
    """A copy of the target that learns from it.

    Level k of a draft is its own distribution at the position of the k-th token, so level 0 is what
    has to stay as it was.
    """

    keeps_logits = False

    def states(self, tokens: Tensor, **arguments: Any) -> Tensor:
        """[B, T] tokens -> [B, T, E] hidden states after the final norm."""
        found: Tensor = self.decoder(input_ids=tokens, use_cache=False, **arguments)[0]
        return found


def copy_of_target(parts: HeadParts) -> PreTrainedModel:
    """The target's Transformers model once more, in float32 and ready to be trained."""
    if parts.reload is None:
        raise CompatibilityError(
            "what changes the target trains a copy of it, which has to be loaded: give a folder or "
            "an alias, not a loaded model."
        )
    lm: Any = parts.reload()
    return checked(lm.float().requires_grad_(True), parts.name)


class TuningMethod(TrainingMethod):
    """A method that writes a model which drafts for itself."""

    tunes_target: ClassVar[bool] = True

    @property
    def draft_vocab_size(self) -> int:
        """See `TrainingMethod.draft_vocab_size`: no token is left out."""
        return sys.maxsize

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """See `TrainingMethod.layers`: the copy computes its hidden states itself."""
        return ()

    def write(
        self, trainee: Trainee, parts: HeadParts, folder: Path, notes: Mapping[str, Any]
    ) -> None:
        """See `TrainingMethod.write`: a Hugging Face folder."""
        assert isinstance(trainee, TargetTrainee)
        write_lm(trainee.lm, parts.name, folder, {**notes, **self.notes(trainee)})

    def notes(self, trainee: TargetTrainee) -> dict[str, Any]:
        """Notes for serving, in `config.json`; by default none."""
        return {}

    def serving(self, folder: Path) -> dict[str, Any]:
        """See `TrainingMethod.serving`: the target is the folder."""
        return {"method": self.name}


# Training of a target whose first layers draft: LayerSkip (Elhoushi et al., arXiv 2404.16710).
#
# Layer l of L (from 0) is left out for a conversation with the probability (section 4.1)
#
#     p(l, t) = S(t) D(l) p_max,   D(l) = e^(l ln 2 / (L - 1)) - 1,
#
# at step t of T, with S(t) = 1 (`constant`) or e^(t ln 2 / (T - 1)) - 1 (`exponential`). The loss
# is
#
#     sum_l w(t, l) E[loss(p, q_l)],   w(t, l) = C(t, l) e(l) / sum_i C(t, i) e(i),
#
# over the exits: q_l is what final norm and output layer make of the state after layer l, and
#
#     e(l) = s (0 + 1 + ... + l) for l < L - 1,   e(L - 1) = L - 1 + s (0 + 1 + ... + (L - 2)).
#
# The curriculum C chooses exits: every R-th layer, another one in each step (`rotational`), or all
# from layer L - 1 down to one that moves to layer 0 in the first half of the steps (`gradual`). The
# last layer is always among them. The paper's loss is `ce`; `kl` keeps the target's distribution.


@dataclass(frozen=True)
class Schedule:
    """How often layers are left out, and which exits are learnt, in L layers.

    Args:
        rotation: R of the rotational curriculum; None is the gradual one.
    """

    num_layers: int
    max_dropout: float
    grows: bool
    exit_scale: float
    rotation: int | None

    def dropout(self, step: int, total: int) -> Tensor:
        """[L] the probabilities p(l, t)."""
        layers = torch.arange(self.num_layers, dtype=torch.float32)
        over_layers = (layers * log(2) / max(1, self.num_layers - 1)).exp() - 1
        over_time = 2 ** (step / max(1, total - 1)) - 1 if self.grows else 1.0
        return over_time * self.max_dropout * over_layers

    def exits(self, step: int, total: int) -> dict[int, float]:
        """Layer -> w(t, l), for the layers whose exits are learnt."""
        last = self.num_layers - 1
        if self.rotation is None:
            first = last - 2 * self.num_layers * step // max(1, total)
            chosen = range(max(0, first), last)
        else:
            chosen = range(-step % self.rotation, last, self.rotation)
        weights = {layer: self.exit_scale * layer * (layer + 1) / 2 for layer in chosen}
        weights[last] = last + self.exit_scale * (last - 1) * last / 2
        total_weight = sum(weights.values())
        return {layer: weight / total_weight for layer, weight in weights.items() if weight}


class EarlyExitTrainee(TargetTrainee):
    """A copy of the target whose layers learn to be exits."""

    def __init__(
        self,
        lm: PreTrainedModel,
        vocab_size: int,
        loss: Loss,
        schedule: Schedule,
        exit_layer: int,
    ) -> None:
        super().__init__(lm, vocab_size, loss)
        self._schedule, self._exit_layer = schedule, exit_layer
        self._step = (0, 1)

    def at_step(self, step: int, total: int) -> None:
        """See `Trainee.at_step`: the schedule depends on it."""
        self._step = (step, total)

    def outputs(self, batch: Batch, num_levels: int) -> Iterator[Tensor]:
        """See `Trainee.outputs`: what the first layers draft."""
        drafts = self._exits(batch.tokens, [self._exit_layer - 1])[0]
        last = batch.tokens.shape[1] - 1
        for level in range(num_levels):
            yield at_roots(drafts, (batch.roots + 1 + level).clamp(max=last))

    def forward(self, batch: Batch, num_levels: int) -> Learnt:
        """See `Trainee.forward`; what is learnt in a step is the loss of all of its exits."""
        if not self.training:
            return super().forward(batch, num_levels)
        weights = self._schedule.exits(*self._step)
        dropout = self._schedule.dropout(*self._step)
        wanted = [self._exit_layer - 1, *weights]
        drafts, *exits = (
            at_roots(each, batch.roots + 1) for each in self._exits(batch.tokens, wanted, dropout)
        )
        with torch.no_grad():
            _, right = self.level(drafts, 0, batch)
        losses = [self.level(each, 0, batch)[0] for each in exits]
        loss = sum(weight * each for weight, each in zip(weights.values(), losses, strict=True))
        assert isinstance(loss, Tensor)
        counts = batch.levels.valid[:, :1].sum((0, 2))
        return Learnt(loss.unsqueeze(0), right.unsqueeze(1), counts)

    def _exits(
        self, tokens: Tensor, layers: Sequence[int], dropout: Tensor | None = None
    ) -> list[Tensor]:
        """[B, T, E] after the final norm, after each of these layers."""
        norm, stack = final_norm(self.lm), decoder_layers(self.lm)
        assert norm is not None
        with _behind(stack, _dropped(dropout, len(tokens))) as found:
            self.states(tokens)
        return [norm(found[layer]) for layer in layers]


def _dropped(dropout: Tensor | None, size: int) -> Tensor | None:
    """[L, B] whether a layer is left out for a conversation; drawn on the CPU on every device."""
    return None if dropout is None else torch.rand(len(dropout), size) < dropout.unsqueeze(1)


@contextmanager
def _behind(stack: nn.ModuleList, dropped: Tensor | None) -> Iterator[list[Tensor]]:
    """While a model runs, leave layers out for some conversations, and record what follows each.

    Args:
        dropped: [L, B] whether a layer is left out; None leaves nothing out.
    """
    found: list[Tensor] = []

    def behind(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        entered = args[0] if args else kwargs["hidden_states"]
        left = output[0] if isinstance(output, tuple) else output
        if dropped is not None:
            out = dropped[len(found)].to(left.device)[:, None, None]
            left = torch.where(out, entered, left)
        found.append(left)
        return (left, *output[1:]) if isinstance(output, tuple) else left

    hooks = [layer.register_forward_hook(behind, with_kwargs=True) for layer in stack]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


class EarlyExitTrainingOptions(Config):
    """Options of `tokenleap train early_exit`.

    Args:
        exit_layer: layers that will draft; None means half of them, as in method `early_exit`.
            Training is the same for all of them.
        max_dropout: how often the last layer is left out; earlier ones less often,
            exponentially.
        dropout_growth: whether dropout stays as it is (`constant`) or grows with the steps, for a
            model from scratch (`exponential`).
        exit_scale: weight of the exits, relative to the last layer.
        exits: those that a step learns: every `rotation`-th layer, another one each time
            (`rotational`), or more and more from the last one down (`gradual`).
        rotation: of `rotational` exits; None means a quarter of the layers.
        loss: of the drafter's distribution against the target's (docs/training.md).
    """

    exit_layer: Annotated[int, Ge(1)] | None = None
    max_dropout: Annotated[FiniteFloat, Ge(0), Lt(1)] = 0.1
    dropout_growth: Literal["constant", "exponential"] = "constant"
    exit_scale: Annotated[FiniteFloat, Gt(0)] = 0.2
    exits: Literal["rotational", "gradual"] = "rotational"
    rotation: Annotated[int, Ge(1)] | None = None
    loss: LossName = "kl"

    @model_validator(mode="after")
    def _rotation_is_used(self) -> Self:
        if self.rotation is not None and self.exits != "rotational":
            raise ValueError("rotation: the exits are 'gradual': remove it.")
        return self


class EarlyExitTraining(TuningMethod):
    """Targets whose first layers draft."""

    name: ClassVar[str] = "early_exit"
    summary: ClassVar[str] = "the target itself, so that its first layers draft (LayerSkip)"
    Options: ClassVar[type[Config]] = EarlyExitTrainingOptions

    @property
    def _options(self) -> EarlyExitTrainingOptions:
        assert isinstance(self.options, EarlyExitTrainingOptions)
        return self.options

    def adapted(self, settings: TrainingSettings) -> TrainingSettings:
        """See `TrainingMethod.adapted`: one level."""
        reason = "all levels of a draft come from the same exit: remove it."
        decided = settings.decided(reason, levels=1, first_level_share=0.0, decay=1.0)
        return decided.preferring(**TUNING_RATES)

    def trainee(self, parts: HeadParts) -> Trainee:
        """See `TrainingMethod.trainee`."""
        options, count = self._options, parts.num_layers
        for name in ("exit_layer", "rotation"):
            if (getattr(options, name) or 1) >= count:
                raise ConfigError(
                    f"{name}: must be below the {count} layers of the target: lower it."
                )
        if parts.final_norm is None:
            raise CompatibilityError(
                "early exits need the final norm, and this architecture's is not known."
            )
        rotation = options.rotation or max(1, count // 4)
        grows = options.dropout_growth == "exponential"
        schedule = Schedule(
            count,
            options.max_dropout,
            grows,
            options.exit_scale,
            rotation if options.exits == "rotational" else None,
        )
        return EarlyExitTrainee(
            copy_of_target(parts),
            parts.embedding.shape[0],
            LOSSES[options.loss],
            schedule,
            options.exit_layer or count // 2,
        )

    def serving(self, folder: Path) -> dict[str, Any]:
        chosen = self._options.exit_layer
        return super().serving(folder) | ({} if chosen is None else {"exit_layer": chosen})


# Heads that are trained together with the target.
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
        return self._drafts(self.own.states(batch.tokens), batch, num_levels)

    def _drafts(self, states: Tensor, batch: Batch, num_levels: int) -> Iterator[Tensor]:
        return head_outputs(self.net, at_roots(states, batch.roots), batch, num_levels)

    def logits(self, outputs: Tensor, level: int) -> Tensor:
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
    """Options of heads that are trained together with a copy of the target.

    Args:
        target_learning_rate: of the copy of the target, with AdamW.
    """

    target_learning_rate: Annotated[FiniteFloat, Gt(0)] = 1e-4


class _TunedTraining(StateTraining):
    """Common base of the methods that train heads together with the target."""

    Options: ClassVar[type[Config]] = TunedOptions
    Kind: ClassVar[type[TunedTrainee]]
    tunes_target: ClassVar[bool] = True
    for_sources: ClassVar[bool | None] = False

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """See `TrainingMethod.layers`: the copy computes its hidden states itself."""
        return ()

    def trainee(self, parts: HeadParts) -> Trainee:
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
    """Options of `tokenleap train medusa_2`, besides those of all such heads.

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
    """Options of `tokenleap train blockwise_tuned`, besides those of all such heads.

    Args:
        inner_size: width of each head's hidden layer.
    """

    inner_size: Annotated[int, Ge(1)] = 1024


class TunedBlockwiseTraining(_TunedTraining):
    """Fine-tuned blockwise heads."""

    name: ClassVar[str] = "blockwise_tuned"
    summary: ClassVar[str] = "heads of `blockwise`, together with the target (Stern et al.)"
    Options: ClassVar[type[Config]] = TunedBlockwiseOptions
    Net: ClassVar[type[StateNet]] = BlockwiseNet
    Kind: ClassVar[type[TunedTrainee]] = _BlockwiseTrainee

    def adapted(self, settings: TrainingSettings) -> TrainingSettings:
        """See `TrainingMethod.adapted`: no loss has a smaller weight."""
        reason = f"'{self.name}' learns one loss at a time: remove it."
        return super().adapted(settings).decided(reason, decay=1.0)
