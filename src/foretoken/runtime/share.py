"""Second module trees over the same weights, so that a user's model is never changed.

A copy may have its attention, its linear layers or its set of layers replaced; the weights are
there once.
"""

from __future__ import annotations

import copy

from torch import Tensor, nn
from transformers import PreTrainedModel

from foretoken.errors import CompatibilityError

__all__ = ["decoder_layers", "share"]


def share(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the model's modules over the same tensors.

    What is changed on the copy leaves the original alone.
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for module in model.modules():  # packed weights are plain attributes
        shared.update((id(x), x) for x in vars(module).values() if isinstance(x, Tensor))
    copied: PreTrainedModel = copy.deepcopy(model, shared)
    return copied


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The stack of decoder layers, wherever the architecture keeps it.

    Raises:
        CompatibilityError: there is no such stack.
    """
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise CompatibilityError(
        f"{type(model).__name__} has no list of its {count} layers, so that none can be left out."
    )
