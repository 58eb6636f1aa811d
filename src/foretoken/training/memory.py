"""How much memory and disk a training takes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from foretoken.training.batches import collate
from foretoken.training.features import TOP_K, Features, quantize
from foretoken.training.optimizers import optimizers_of
from foretoken.training.settings import TrainingSettings
from foretoken.training.trainee import Trainee

__all__ = ["TrainingBytes", "training_bytes"]

_SAMPLE = 128
"""Tokens of the conversation on which activations are counted, at most."""


class TrainingBytes(NamedTuple):
    """What a training takes besides the target and the features.

    Args:
        memory: weights, gradients, the optimizers' states, and what a batch keeps for gradients.
            What is computed and freed within a step comes on top.
        disk: of two checkpoints: the one before is deleted when the next one is complete.
    """

    memory: int
    disk: int


def training_bytes(
    trainee: Trainee, num_layers: int, hidden_size: int, settings: TrainingSettings
) -> TrainingBytes:
    """What a training takes.

    Args:
        trainee: the drafter; it stays as it is.
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
    size = min(_SAMPLE, settings.max_length)
    kept = _activation_bytes(trainee, num_layers, hidden_size, settings, size)
    batch = settings.batch_tokens * kept // size
    return TrainingBytes(4 * (2 * weights + moments) + batch, 2 * 4 * (weights + moments))


def _activation_bytes(
    trainee: nn.Module, num_layers: int, hidden_size: int, settings: TrainingSettings, size: int
) -> int:
    """Bytes of the tensors that a step keeps for the gradients of so many tokens."""
    hidden, scales = quantize(torch.zeros(size, num_layers, hidden_size))
    tokens = torch.zeros(size, dtype=torch.long)
    top = tokens.unsqueeze(-1).expand(-1, TOP_K)
    sample = Features(tokens, [(0, size)], hidden, scales, top, top.float())
    own = {weight.untyped_storage().data_ptr() for weight in trainee.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    device = next(trainee.parameters()).device
    dtype = torch.bfloat16 if settings.mixed_precision == "bf16" else torch.float16
    enabled = settings.mixed_precision != "no"
    batch = collate([sample], settings.levels)
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast(device.type, dtype, enabled=enabled),
    ):
        trainee(batch, settings.levels)
    return sum(kept.values())
