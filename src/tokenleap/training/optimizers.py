"""The optimizers of a drafter, and how their learning rates go."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from tokenleap.training.settings import TrainingSettings
from tokenleap.training.trainee import Trainee

__all__ = ["optimizers_of", "schedules"]


def optimizers_of(trainee: Trainee, settings: TrainingSettings) -> list[Optimizer]:
    """One for the matrices, one for everything else, and one for `Trainee.own_rate`."""
    matrices = trainee.matrices
    chosen = {id(each) for each in matrices}
    own = trainee.own_rate
    chosen.update(id(each) for each in (own.weights if own else ()))
    vectors = [p for p in trainee.parameters() if p.requires_grad and id(p) not in chosen]
    rate, decay = settings.learning_rate, settings.weight_decay
    optimizers: list[Optimizer] = []
    if matrices and settings.optimizer == "muon":
        optimizers.append(
            Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        )
    elif matrices:
        optimizers.append(AdamW(matrices, lr=rate, weight_decay=decay, betas=settings.betas))
    if vectors:
        vector_rate = settings.vector_learning_rate
        optimizers.append(AdamW(vectors, lr=vector_rate, weight_decay=0, betas=settings.betas))
    if own:
        optimizers.append(
            AdamW(own.weights, lr=own.learning_rate, weight_decay=0, betas=settings.betas)
        )
    return optimizers


def schedules(
    optimizers: Sequence[Optimizer], total: int, settings: TrainingSettings
) -> list[LambdaLR]:
    """The learning rates of each optimizer: they rise linearly, and fall as the settings say.

    Args:
        optimizers: with their highest learning rates.
        total: number of steps of the whole training.
        settings: of the training.
    """
    rising = max(1.0, settings.rising_steps(total))
    falls = {"cosine": partial(_cosine, total=total), "inverse_sqrt": partial(_root, rising=rising)}
    rate = partial(_rate, rising=rising, fall=falls[settings.schedule])
    return [LambdaLR(each, rate) for each in optimizers]


def _rate(step: int, rising: float, fall: Callable[[int], float]) -> float:
    """The learning rate of a step, relative to its highest value."""
    return min(1.0, (step + 1) / rising) * fall(step)


def _cosine(step: int, total: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * min(1.0, step / total)))


def _root(step: int, rising: float) -> float:
    """1 while the rate rises, then one over the square root (Vaswani et al., 2017)."""
    return math.sqrt(rising / max(rising, step + 1))
