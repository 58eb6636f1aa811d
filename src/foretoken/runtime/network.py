"""The seam between the target and whatever computes a pass.

A network is given the nodes of a pass and the slab, writes the new KV there and returns
logits. On a GPU there are CUDA graphs (`cuda/`). On a CPU there are three: `native/`, the Llama
family in C++; `lean.py`, the same in as few of PyTorch's operations as it takes; and `module.py`,
which runs any Transformers module. `network_for` chooses.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol, Self

from torch import Tensor
from transformers import PreTrainedModel

from foretoken.cache import KVSlab
from foretoken.errors import ConfigError
from foretoken.runtime.choices import RUNTIMES
from foretoken.runtime.cpu import check_quantization, linear_layer
from foretoken.runtime.cuda import cuda_network
from foretoken.runtime.inputs import PassInputs
from foretoken.runtime.lean import LeanDecoder
from foretoken.runtime.llama import is_llama
from foretoken.runtime.module import ModuleNetwork
from foretoken.runtime.native.decoder import NativeDecoder, why_not_native

__all__ = ["Network", "network_for"]


class Network(Protocol):
    """A decoder-only model over a KV slab."""

    @property
    def name(self) -> str:
        """What users are told is running."""
        ...

    @property
    def exact_trees(self) -> bool:
        """Whether a node of a tree has the bits of the same tokens in a row (law 7)."""
        ...

    @property
    def least_nodes(self) -> int:
        """Fewest nodes of a pass over one row that keep law 7; fewer are padded."""
        ...

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        ...

    @property
    def likeliest(self) -> Sequence[int] | None:
        """Of the last pass with logits: each node's token of the largest one, the first of equals.

        None where that was not seen on the way: whoever wants it has to look at the logits.
        """
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


def network_for(
    model: PreTrainedModel, quantization: str | None = None, runtime: str = "auto"
) -> Network:
    """The fastest network that computes what the model does; the model is left as it is.

    Args:
        model: the Transformers module.
        quantization: None keeps the weights as they are; "int8" and "int4" round those of linear
            layers.
        runtime: "native" is this library's C++, compiled at its first use, "torch" PyTorch's
            operations, "cuda" these in CUDA graphs, "compiled" the same after `torch.compile`;
            "auto" takes "cuda" on a GPU, without graphs where they cannot be captured, and on a
            CPU "native" where it can be had.

    Raises:
        ConfigError: no such quantization or runtime, or none for this model on this machine.
        CompatibilityError: the model's layers cannot be quantised.
    """
    if runtime not in RUNTIMES:
        raise ConfigError(f"runtime: must be one of {', '.join(RUNTIMES)}, got '{runtime}'.")
    check_quantization(quantization, model.device)
    on_gpu = model.device.type == "cuda"
    if runtime in ("cuda", "compiled") and not on_gpu:
        raise ConfigError(
            f"runtime: {runtime} needs a CUDA device, and the model is on {model.device.type}."
        )
    if on_gpu and runtime in ("auto", "cuda", "compiled"):
        compiler = "inductor" if runtime == "compiled" else None
        return cuda_network(model, compiler=compiler, required=runtime != "auto")
    reason = "torch was asked for" if runtime == "torch" else why_not_native(model)
    if reason is None:
        return NativeDecoder(model, quantization)
    if runtime == "native":
        raise ConfigError(f"runtime: native cannot be had for this model here: {reason}.")
    if quantization == "int4":
        raise ConfigError(f"quantization: int4 needs the native runtime, and {reason}.")
    linear = linear_layer(model.dtype, model.device, quantization)
    if linear is None:
        return ModuleNetwork.sharing(model)
    return LeanDecoder(model, linear) if is_llama(model) else ModuleNetwork.packed(model, linear)
