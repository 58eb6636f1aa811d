"""The seam between the target and whatever computes a pass.

A network is given the nodes of a pass and the slab, writes the new KV there and returns
logits. There are two: `lean.py`, the Llama family written down in as few operations as it takes,
and `module.py`, which runs any Transformers module. `network_for` chooses.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, Self

from torch import Tensor
from transformers import PreTrainedModel

from foretoken.cache import KVSlab
from foretoken.runtime.cpu import linear_layer
from foretoken.runtime.inputs import PassInputs
from foretoken.runtime.lean import LeanDecoder, can_be_lean
from foretoken.runtime.module import ModuleNetwork

__all__ = ["Network", "network_for"]


class Network(Protocol):
    """A decoder-only model over a KV slab."""

    @property
    def least_nodes(self) -> int:
        """Fewest nodes of a pass over one row that keep law 7; fewer are padded."""
        ...

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        ...

    def forward(self, inputs: PassInputs, slab: KVSlab, *, scored: bool) -> Tensor | None:
        """One pass; the slab has been told what comes (`KVSlab.begin`).

        Args:
            inputs: the nodes, their mask in the network's dtype.
            slab: takes the new KV and gives all of it.
            scored: whether logits are wanted.

        Returns:
            Logits [T, V] of the nodes, or None.
        """
        ...

    def first_layers(self, count: int) -> Self:
        """The first layers with the final norm and head, over the same weights and KV."""
        ...

    def without(self, attention: Collection[int], mlp: Collection[int]) -> Self:
        """The same without these layers' sublayers, over the same weights and KV."""
        ...


def network_for(model: PreTrainedModel, quantization: str | None = None) -> Network:
    """The fastest network that computes what the model does; the model is left as it is.

    Args:
        model: the Transformers module.
        quantization: None keeps the weights as they are; "int8" rounds those of linear layers.

    Raises:
        ConfigError: no such quantization, or none on this device.
        CompatibilityError: the model's layers cannot be quantised.
    """
    linear = linear_layer(model.dtype, model.device, quantization)
    if linear is None:
        return ModuleNetwork.sharing(model)
    return LeanDecoder(model, linear) if can_be_lean(model) else ModuleNetwork.packed(model, linear)
