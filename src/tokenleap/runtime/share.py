"""Copies of a model's module tree that share its weights.

In such a copy, `cpu.py` and `module.py` replace attention, linear layers or the list of layers. The
user's model is not changed, and the weights are in memory only once.
"""

from __future__ import annotations

import copy

from torch import Tensor, nn
from transformers import PreTrainedModel

from tokenleap.errors import CompatibilityError

__all__ = ["decoder_layers", "share"]


def share(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the model's module tree over the same tensors.

    Replacing modules of the copy does not change the original.
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for module in model.modules():  # packed weights are attributes, not parameters
        shared.update((id(x), x) for x in vars(module).values() if isinstance(x, Tensor))
    copied: PreTrainedModel = copy.deepcopy(model, shared)
    return copied


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The list of decoder layers, wherever the architecture keeps it.

    Raises:
        CompatibilityError: there is no such list.
    """
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise CompatibilityError(
        f"{type(model).__name__} has no list of its {count} layers, so they can neither be skipped "
        "nor give their hidden states."
    )
