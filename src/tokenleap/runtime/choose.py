"""Picks the network that computes a model's passes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import torch

from tokenleap.core.peers import ALONE, Peers
from tokenleap.errors import ConfigError
from tokenleap.runtime.choices import AUTO, DRAFTING, NONE, OWN, RUNTIMES
from tokenleap.runtime.cpu import Int8Linear, PackedLinear, check_quantization, linear_layer
from tokenleap.runtime.lean import DenseLinear, LeanDecoder
from tokenleap.runtime.llama import DecoderWeights, LlamaWeights, is_llama
from tokenleap.runtime.module import ModuleNetwork
from tokenleap.runtime.native.build import why_no_library, why_not_native, wrong_sizes
from tokenleap.runtime.native.network import NativeDecoder
from tokenleap.runtime.native.packed import PackedDecoder
from tokenleap.runtime.native.seq2seq import NativeSeq2Seq, why_not_native_seq2seq
from tokenleap.runtime.network import Network
from tokenleap.runtime.seq2seq.network import Seq2SeqNetwork
from tokenleap.runtime.sharded import Group, ShardedNetwork

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)


def network_for(
    model: PreTrainedModel | PackedDecoder,
    quantization: str | None = None,
    runtime: str = "auto",
    beside: Network | None = None,
    peers: Peers = ALONE,
) -> Network:
    """The fastest network that can run a model. The model itself is not changed.

    Args:
        runtime: "native" is this library's C++, compiled at its first use. "torch" uses PyTorch's
            operations ("lean": those of `LeanDecoder`, "module": those of the Transformers module),
            and "compiled" gives the MLPs of that module to `torch.compile`. "auto" takes "native"
            if available, otherwise "torch".
        beside: a network that stays in memory. If both are native, weights with the same bits are
            in memory once.
    """
    if runtime not in RUNTIMES:
        raise ConfigError(f"runtime: must be one of {', '.join(RUNTIMES)}, got '{runtime}'.")
    if isinstance(model, PackedDecoder):
        return NativeDecoder(model, beside=_native(beside))
    if isinstance(peers, Group):
        check_sharding(quantization, runtime, peers.size)
        return ShardedNetwork.of(model, peers)
    check_quantization(quantization, model.device)
    if model.config.is_encoder_decoder:
        return _seq2seq_network(model, quantization, runtime)
    reason = _why_not_native(model, quantization, runtime, why_not_native)
    if reason is None:
        return NativeDecoder(LlamaWeights(model), quantization, beside=_native(beside))
    return _torch_network(model, linear_layer(model.dtype, model.device, quantization), runtime)


def _why_not_native(
    model: PreTrainedModel,
    quantization: str | None,
    runtime: str,
    unsupported: Callable[[PreTrainedModel], str | None],
) -> str | None:
    """Why the C++ code does not run a model; None if it does. Compiles it if needed."""
    asked = runtime not in ("auto", "native")
    reason = f"the runtime is '{runtime}'" if asked else unsupported(model)
    if reason is None:
        reason = why_no_library()
        if reason is None:
            return None
        if runtime == "auto":
            _warn_once(reason)
    if runtime == "native":
        raise ConfigError(
            f"runtime: native is not available for this model on this machine: {reason}."
        )
    _check_not_int4(quantization, reason)
    return reason


def _check_not_int4(quantization: str | None, reason: str) -> None:
    """Refuse int4 where the C++ code does not run."""
    if quantization in ("int4", DRAFTING):
        option = "draft_quantization" if quantization == DRAFTING else "quantization"
        raise ConfigError(
            f"{option}: int4 needs the native runtime, which cannot be used here: {reason}; take "
            "int8 or leave it out."
        )


def _torch_network(
    model: PreTrainedModel, linear: type[PackedLinear | Int8Linear] | None, runtime: str
) -> Network:
    if runtime == "lean" and not is_llama(model):
        raise ConfigError(
            "runtime: lean supports only Llama, Mistral, Qwen2 and Qwen3, and not all their "
            "configurations: take 'module' or 'torch'."
        )
    if runtime == "compiled":
        return ModuleNetwork.compiled(model)
    if runtime == "lean" or (runtime != "module" and linear is not None and is_llama(model)):
        return LeanDecoder(LlamaWeights(model), linear or DenseLinear)
    return ModuleNetwork.sharing(model) if linear is None else ModuleNetwork.packed(model, linear)


@cache
def _warn_once(reason: str) -> None:
    _log.warning("Decoding is slower without the native (C++) runtime: %s.", reason)


def check_sharding(quantization: str | None, runtime: str, size: int) -> None:
    """Refuse what cannot run a model whose weights are spread over so many processes."""
    if size == 1:
        return
    for option, value, takes in (
        ("runtime", runtime, ("auto", "torch", "module")),
        ("quantization", quantization, (None, AUTO, NONE)),
    ):
        if value not in takes:
            raise ConfigError(
                f"{option}: {value} is for a model in one process, not for tensor_parallel_size "
                f"{size}: leave it out."
            )


def _seq2seq_network(model: PreTrainedModel, quantization: str | None, runtime: str) -> Network:
    takes = ("auto", "native", "torch", "lean")
    if runtime not in takes:
        raise ConfigError(
            f"runtime: {runtime} is for decoder-only models, and {type(model).__name__} is an "
            f"encoder-decoder; it takes {', '.join(takes)}."
        )
    if _why_not_native(model, quantization, runtime, why_not_native_seq2seq) is None:
        return NativeSeq2Seq(model, quantization)
    return Seq2SeqNetwork(model, linear_layer(model.dtype, model.device, quantization))


def head_network(
    weights: DecoderWeights,
    target: Network,
    quantization: str | None = None,
    *,
    of_target: str | None = None,
) -> Network:
    """The network of a drafting head that works for a target.

    Without a quantization, a native head is int4 if its target runs in int4 or from a GGUF file,
    else int8 if its weights would be bfloat16, or its target is quantized.
    """
    dtype, device = weights.embedding.dtype, weights.embedding.device
    if isinstance(target, NativeDecoder):
        reason = wrong_sizes(weights)
    else:
        reason = f"the target's runtime is '{target.name}'"
    if quantization is None and reason is None and (of_target or dtype == torch.bfloat16):
        quantization = "int4" if of_target in ("int4", DRAFTING, OWN) else "int8"
    own = {"none": None, "int4": DRAFTING}.get(quantization or "none", quantization)
    if reason is None:
        return NativeDecoder(weights, own, beside=_native(target))
    check_quantization(own, device, "draft_quantization")
    _check_not_int4(own, reason)
    return LeanDecoder(weights, linear_layer(dtype, device, own) or DenseLinear)


def _native(network: Network | None) -> NativeDecoder | None:
    return network if isinstance(network, NativeDecoder) else None
