"""A second module tree over the same weights, so that a user's model is never changed."""

from __future__ import annotations

import copy

from transformers import PreTrainedModel

__all__ = ["share"]


def share(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the model's modules over the same parameters and buffers.

    What is changed on the copy (its attention, its linear layers) leaves the original alone.
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    copied: PreTrainedModel = copy.deepcopy(model, shared)
    return copied
