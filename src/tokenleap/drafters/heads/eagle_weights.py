"""The weights of an `EagleNet` in the form that the networks of `runtime/` use."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from tokenleap.drafters.heads.eagle_layer import EagleLayer, RMSNorm
from tokenleap.drafters.heads.eagle_net import EagleNet
from tokenleap.drafters.heads.feature_net import FeatureNet
from tokenleap.runtime.choose import head_network
from tokenleap.runtime.families import Traits
from tokenleap.runtime.llama import (
    JointInput,
    LayerWeights,
    LinearWeights,
    MixedInput,
    Rotary,
)
from tokenleap.runtime.network import Network
from tokenleap.runtime.passes import Passes
from tokenleap.runtime.target import Target

__all__ = ["EagleWeights", "head_passes", "network_of"]


class EagleWeights:
    """See `runtime.llama.DecoderWeights`.

    Args:
        net: the head. Its embedding is shared; all other weights are converted to its dtype.
    """

    def __init__(self, net: EagleNet) -> None:
        config = net.config
        self._layers = cast("list[EagleLayer]", list(net.layers))
        self.embedding = net.embedding.detach()
        self._dtype = self.embedding.dtype
        self.heads, self.key_heads = config.num_attention_heads, config.num_key_value_heads
        self.hidden_size, self.inner_size = config.hidden_size, config.intermediate_size
        self.width, self.epsilon = config.head_dim, config.rms_norm_eps
        self.scaling: float = self._layers[0].self_attn.scaling
        self.num_layers = len(net.layers)
        self.head = LinearWeights(self._of(net.head), None)
        self.rotary = Rotary(net.rotary, self.embedding.device)
        self.local_rotary: Rotary | None = None
        self.traits = Traits()
        self.norm: Tensor | None = None
        self.joint: JointInput | MixedInput | None
        if isinstance(net, FeatureNet):
            self.joint = MixedInput(self._merged(net.fc))
        else:
            self.norm = self._of(net.norm.weight)
            self.joint = JointInput(
                self._of(self._layers[0].input_layernorm.weight),
                self._of(self._layers[0].hidden_norm.weight),
                config.norm_before_residual,
                config.norm_output,
            )

    def layer(self, index: int) -> LayerWeights:
        """The weights of a layer; the attention of the first one has norms of its own."""
        layer = self._layers[index]
        attention, mlp = layer.self_attn, layer.mlp
        return LayerWeights(
            attention_norm=self._norm(getattr(layer, "input_layernorm", None)),
            qkv=self._merged(attention.q_proj, attention.k_proj, attention.v_proj),
            query_norm=self._norm(attention.q_norm),
            key_norm=self._norm(attention.k_norm),
            output=self._merged(attention.o_proj),
            mlp_norm=self._of(layer.post_attention_layernorm.weight),
            gate_up=self._merged(mlp.gate_proj, mlp.up_proj),
            down=self._merged(mlp.down_proj),
        )

    def _merged(self, *parts: torch.nn.Linear) -> LinearWeights:
        merged = LinearWeights.of(*parts)
        bias = None if merged.bias is None else self._of(merged.bias)
        return LinearWeights(self._of(merged.weight), bias)

    def _norm(self, norm: RMSNorm | None) -> Tensor | None:
        return None if norm is None else self._of(norm.weight)

    def _of(self, weight: Tensor) -> Tensor:
        return weight.detach().to(self.embedding.device, self._dtype)


def network_of(net: EagleNet, target: Target, quantization: str | None) -> Network:
    """The network that computes a head; see `head_network`."""
    weights, own = EagleWeights(net), target.quantization
    return head_network(weights, target.network, quantization, of_target=own)


def head_passes(net: EagleNet, target: Target, quantization: str | None = None) -> Passes:
    """The head over KV rows of its own, computed by the kind of network that the target has.

    Args:
        net: the head.
        target: the target.
        quantization: of the head; see `head_network`.
    """
    network = network_of(net, target, quantization)
    length = min(target.max_model_len, net.config.max_position_embeddings)
    passes = Passes(network, length, target.dtype, target.device)
    passes.allocate(net.embedding[:1])
    return passes
