"""How much memory and disk a training takes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from accelerate.utils import send_to_device
from torch import Tensor

from tokenleap.training.batches import collate
from tokenleap.training.features import TOP_K, Features, quantize
from tokenleap.training.optimizers import optimizers_of
from tokenleap.training.settings import TrainingSettings
from tokenleap.training.trainee import Trainee

__all__ = ["TrainingBytes", "training_bytes"]

_SAMPLE = 128
"""Tokens of the conversations on which activations are counted, at most."""


@dataclass(frozen=True)
class TrainingBytes:
    """What a training takes besides the target and the features.

    Args:
        memory: weights, gradients, the optimizers' states, and what a batch keeps for gradients,
            copies of weights in lower precision included. What is computed and freed within a step
            comes on top.
        disk: of two checkpoints: the one before is deleted when the next one is complete.
    """

    memory: int
    disk: int


def training_bytes(
    trainee: Trainee, num_layers: int, hidden_size: int, settings: TrainingSettings
) -> TrainingBytes:
    """What a training takes.

    Args:
        trainee: the drafter; its weights stay as they are.
        num_layers: layers whose hidden states it reads.
        hidden_size: of the target.
        settings: of the training.
    """
    weights = sum(weight.numel() for weight in trainee.parameters() if weight.requires_grad)
    moments = sum(
        weight.numel() * (1 if isinstance(each, torch.optim.Muon) else 2)
        for each in optimizers_of(trainee, settings)
        for group in each.param_groups
        for weight in group["params"]
    )
    trainee.at_step(1, 1)  # in the last step, nothing is left out any more
    # What grows is counted by texts: some drafters have as many masks for a text of any length.
    one, two = (_kept_bytes(trainee, num_layers, hidden_size, settings, n) for n in (1, 2))
    batch = settings.batch_tokens * (two - one) // _size(settings)
    copies = max(0, 2 * one - two)
    states = 4 * (2 * weights + moments)
    return TrainingBytes(states + copies + batch, 2 * 4 * (weights + moments))


def _size(settings: TrainingSettings) -> int:
    return min(_SAMPLE, settings.max_length)


def _kept_bytes(
    trainee: Trainee, num_layers: int, hidden_size: int, settings: TrainingSettings, count: int
) -> int:
    """Bytes of the tensors that a step keeps for the gradients of so many conversations.

    With mixed precision there are copies of weights among them, which do not grow with these.
    """
    size = _size(settings)
    hidden, scales = quantize(torch.zeros(size, num_layers, hidden_size))
    tokens = torch.zeros(size, dtype=torch.long)
    top = tokens.unsqueeze(-1).expand(-1, TOP_K)
    encoded = torch.zeros(size, hidden_size if trainee.reads_encoder else 0).half()
    sample = Features(tokens, [(0, size)], hidden, scales, top, top.float(), tokens, encoded)
    own = {
        each.untyped_storage().data_ptr()
        for each in itertools.chain(trainee.parameters(), trainee.buffers())
    }
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    device = next(trainee.parameters()).device
    dtype = torch.bfloat16 if settings.mixed_precision == "bf16" else torch.float16
    enabled = settings.mixed_precision != "no"
    levels = max(1, settings.levels)
    batch = send_to_device(collate([sample] * count, levels, trainee.first_learnt), device)
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast(device.type, dtype, enabled=enabled),
    ):
        torch.manual_seed(settings.seed)  # both sizes draw the same
        trainee(batch, settings.levels)
    return sum(kept.values())
