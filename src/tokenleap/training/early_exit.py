"""Training of a target whose first layers draft: LayerSkip (Elhoushi et al., arXiv 2404.16710).

Layer l of L (from 0) is left out for a conversation with the probability (section 4.1)

    p(l, t) = S(t) D(l) p_max,   D(l) = e^(l ln 2 / (L - 1)) - 1,

at step t of T, with S(t) = 1 (`constant`) or e^(t ln 2 / (T - 1)) - 1 (`exponential`). The loss is

    sum_l w(t, l) E[loss(p, q_l)],   w(t, l) = C(t, l) e(l) / sum_i C(t, i) e(i),

over the exits: q_l is what final norm and output layer make of the state behind layer l, and

    e(l) = s (0 + 1 + ... + l) for l < L - 1,   e(L - 1) = L - 1 + s (0 + 1 + ... + (L - 2)).

The curriculum C chooses exits: every R-th layer, another one in each step (`rotational`), or all
from layer L - 1 down to one that moves to layer 0 in the first half of the steps (`gradual`). The
last layer is always among them. The paper's loss is `ce`; `kl` keeps the target's distribution.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from annotated_types import Ge, Gt, Lt
from pydantic import FiniteFloat, model_validator
from torch import Tensor, nn
from transformers import PreTrainedModel

from tokenleap.core.config import Config
from tokenleap.errors import CompatibilityError, ConfigError
from tokenleap.runtime.share import decoder_layers
from tokenleap.runtime.target import final_norm
from tokenleap.training.batches import Batch
from tokenleap.training.losses import LOSSES, Loss, LossName
from tokenleap.training.method import HeadParts
from tokenleap.training.settings import TrainingSettings
from tokenleap.training.trainee import Learnt, Trainee, at_roots
from tokenleap.training.tuned import TUNING_RATES, TargetTrainee, TuningMethod, copy_of_target

__all__ = ["EarlyExitTrainee", "EarlyExitTraining", "EarlyExitTrainingOptions", "Schedule"]


@dataclass(frozen=True)
class Schedule:
    """How often layers are left out, and which exits are learnt, in L layers.

    Args:
        num_layers: L.
        max_dropout: p_max.
        grows: whether dropout grows with the steps: S(t) is exponential.
        exit_scale: s.
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
    """A copy of the target whose layers learn to be exits.

    Args:
        lm: the copy.
        vocab_size: the target's.
        loss: of each place.
        schedule: see `Schedule`.
        exit_layer: layers that draft, in the evaluation.
    """

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
        """[B, T, E] after the final norm, behind each of these layers."""
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
    """While a model runs, leave layers out for some conversations, and record what is behind each.

    Args:
        stack: its L layers.
        dropped: [L, B] whether a layer is left out; None leaves nothing out.

    Yields:
        The states [B, T, E] behind the layers; the pass fills them in.
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
        max_dropout: how often the last layer is left out; earlier ones less often.
        dropout_growth: whether dropout stays as it is (`constant`) or grows with the steps, for a
            model from scratch (`exponential`).
        exit_scale: weight of the exits, relative to the last layer.
        exits: those that a step learns: every `rotation`-th layer, another one each time
            (`rotational`), or more and more from the last one down (`gradual`).
        rotation: None means a quarter of the layers.
        loss: between each exit's distribution and the target's.
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
        """See `TrainingMethod.adapted`: one level.

        Raises:
            ConfigError: the settings ask for something else.
        """
        reason = "all levels of a draft come from the same exit: remove it."
        decided = settings.decided(reason, levels=1, first_level_share=0.0, decay=1.0)
        return decided.preferring(**TUNING_RATES)

    def trainee(self, parts: HeadParts) -> Trainee:
        """See `TrainingMethod.trainee`.

        Raises:
            ConfigError: `exit_layer` or `rotation` does not fit the number of layers.
        """
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
        """See `TrainingMethod.serving`."""
        chosen = self._options.exit_layer
        return super().serving(folder) | ({} if chosen is None else {"exit_layer": chosen})
