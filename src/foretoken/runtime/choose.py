"""Which network computes a model's passes, and the slab that goes with it."""

from __future__ import annotations

from transformers import PreTrainedModel

from foretoken.errors import ConfigError
from foretoken.runtime.choices import RUNTIMES
from foretoken.runtime.cpu import check_quantization, linear_layer
from foretoken.runtime.cuda import StaticSlab, cuda_network
from foretoken.runtime.cuda.network import CudaNetwork
from foretoken.runtime.kv_slab import KVSlab
from foretoken.runtime.lean import LeanDecoder
from foretoken.runtime.llama import is_llama
from foretoken.runtime.module import ModuleNetwork
from foretoken.runtime.native.decoder import NativeDecoder, why_not_native
from foretoken.runtime.network import Network

__all__ = ["network_for", "slab_for"]

_STATIC_POSITIONS = 2048
"""Positions a GPU slab starts with: growing it costs the captured graphs."""


def network_for(
    model: PreTrainedModel, quantization: str | None = None, runtime: str = "auto"
) -> Network:
    """The fastest network for a model; the model itself is not changed.

    Args:
        model: the Transformers module.
        quantization: None keeps the weights as they are; "int8" and "int4" quantize those of
            linear layers.
        runtime: "native" is this library's C++, compiled at its first use, "torch" PyTorch's
            operations, "cuda" these in CUDA graphs, "compiled" the same after `torch.compile`;
            "auto" takes "cuda" on a GPU, without graphs where they cannot be captured, and on a
            CPU "native" where it is available.

    Raises:
        ConfigError: no such quantization or runtime, or none for this model on this machine.
        CompatibilityError: the model's layers cannot be quantized.
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


def slab_for(network: Network, max_model_len: int) -> KVSlab:
    """The kind of slab that a network needs, for rows of at most so many tokens."""
    if not isinstance(network, CudaNetwork):
        return KVSlab()
    return StaticSlab(positions=min(max_model_len, _STATIC_POSITIONS))
