"""The weights of an `EagleNet` in the form that the networks of `runtime/` use."""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.drafters.heads.eagle_net import EagleNet, RMSNorm
from foretoken.runtime.choose import head_network
from foretoken.runtime.llama import JointInput, LayerWeights, LinearWeights, Rotary
from foretoken.runtime.passes import Passes
from foretoken.runtime.rows import INTERNAL_KEY
from foretoken.runtime.target import Target

__all__ = ["EagleWeights", "head_passes"]


class EagleWeights:
    """See `runtime.llama.DecoderWeights`.

    Args:
        net: the head. Its embedding is shared; all other weights are converted to its dtype.
    """

    def __init__(self, net: EagleNet) -> None:
        config = net.config
        self._layer = net.layer
        self.embedding = net.embedding.detach()
        self._dtype = self.embedding.dtype
        self.heads, self.key_heads = config.num_attention_heads, config.num_key_value_heads
        self.hidden_size, self.inner_size = config.hidden_size, config.intermediate_size
        self.width, self.epsilon = config.head_dim, config.rms_norm_eps
        self.scaling: float = self._layer.self_attn.scaling
        self.num_layers = 1
        self.norm = self._of(net.norm.weight)
        self.head = LinearWeights(self._of(net.head), None)
        self.rotary = Rotary(net.rotary, self.embedding.device)
        self.joint: JointInput | None = JointInput(
            self._of(self._layer.input_layernorm.weight),
            self._of(self._layer.hidden_norm.weight),
            config.norm_before_residual,
            config.norm_output,
        )

    def layer(self, index: int) -> LayerWeights:
        """The weights of the only layer."""
        assert index == 0
        attention, mlp = self._layer.self_attn, self._layer.mlp
        return LayerWeights(
            attention_norm=self._of(self._layer.hidden_norm.weight),
            qkv=self._merged(attention.q_proj, attention.k_proj, attention.v_proj),
            query_norm=self._norm(attention.q_norm),
            key_norm=self._norm(attention.k_norm),
            output=self._merged(attention.o_proj),
            mlp_norm=self._of(self._layer.post_attention_layernorm.weight),
            gate_up=self._merged(mlp.gate_proj, mlp.up_proj),
            down=self._merged(mlp.down_proj),
        )

    def _merged(self, *parts: torch.nn.Linear) -> LinearWeights:
        merged = LinearWeights.of(*parts)
        return LinearWeights(self._of(merged.weight), None)

    def _norm(self, norm: RMSNorm | None) -> Tensor | None:
        return None if norm is None else self._of(norm.weight)

    def _of(self, weight: Tensor) -> Tensor:
        return weight.detach().to(self.embedding.device, self._dtype)


def head_passes(net: EagleNet, target: Target) -> Passes:
    """The head over KV rows of its own, computed by the kind of network that the target has."""
    network = head_network(EagleWeights(net), target.network, target.quantization)
    length = min(target.max_model_len, net.config.max_position_embeddings)
    passes = Passes(network, length, target.dtype, target.device)
    # One pass, so that the KV slab knows the size of a token's KV.
    passes.add(INTERNAL_KEY)
    passes.prefill(INTERNAL_KEY, [0], states=net.embedding[:1])
    passes.remove(INTERNAL_KEY)
    passes.num_passes = 0
    return passes
