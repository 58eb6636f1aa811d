"""The decoder layer of EAGLE heads: of the Llama family, reading tokens beside hidden states.

The networks are in `eagle_net.py`, `feature_net.py` and `parallel_net.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tokenleap.drafters.heads.state_net import linear

__all__ = ["EagleConfig", "EagleLayer", "KeysValues", "RMSNorm", "at", "attend"]


@dataclass(frozen=True)
class EagleConfig:
    """Sizes and variants of an EAGLE-3 head.

    Args:
        hidden_size: E, of the head and of the target.
        intermediate_size: I, of the MLP.
        num_attention_heads: H.
        num_key_value_heads: G.
        head_dim: D.
        vocab_size: V, of the target.
        draft_vocab_size: Vd, the tokens that the head can draft.
        aux_layers: ids of the target's layers whose inputs are fused (see `runtime.network.Need`).
        max_position_embeddings: most tokens of a row.
        rms_norm_eps: epsilon of all norms.
        rope_parameters: of the rotary embedding, as in Transformers.
        norm_before_residual: whether the residual stream starts from the normalised state.
        fc_norm: whether each fused hidden state is normalised by itself (EAGLE-3.1).
        norm_output: whether the final norm is applied to the state that is fed back (EAGLE-3.1).
        qk_norm: whether queries and keys are normalised (the layer is then of type qwen3).
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_parameters: Mapping[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0}, hash=False
    )
    norm_before_residual: bool = True
    fc_norm: bool = True
    norm_output: bool = True
    qk_norm: bool = False

    def rotary(self) -> LlamaRotaryEmbedding:
        """The rotary embedding of Transformers."""
        # Only the fields that it reads: Transformers checks the others against each other.
        config = LlamaConfig(
            num_attention_heads=1,
            num_key_value_heads=1,
            hidden_size=self.head_dim,
            head_dim=self.head_dim,
            rope_parameters=dict(self.rope_parameters),
            max_position_embeddings=self.max_position_embeddings,
        )
        return LlamaRotaryEmbedding(config)


KeysValues = tuple[Tensor, Tensor]
"""[B, H, T, D] each."""


class RMSNorm(nn.Module):
    """RMSNorm in float32, whatever autocast says."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size] in float32."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.epsilon)


class _Attention(nn.Module):
    def __init__(self, config: EagleConfig, inputs: int) -> None:
        super().__init__()
        size, width = config.hidden_size, config.head_dim
        heads, key_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = linear(inputs, heads * width)
        self.k_proj = linear(inputs, key_heads * width)
        self.v_proj = linear(inputs, key_heads * width)
        self.o_proj = linear(heads * width, size)
        epsilon = config.rms_norm_eps
        self.q_norm = RMSNorm(width, epsilon) if config.qk_norm else None
        self.k_norm = RMSNorm(width, epsilon) if config.qk_norm else None
        self.num_heads, self.num_key_heads, self.width = heads, key_heads, width
        self.scaling = width**-0.5

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, H, T, D], rotated."""
        query = self._split(self.q_proj(x))
        return _rotated(query if self.q_norm is None else self.q_norm(query), cos, sin)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> KeysValues:
        """Keys, rotated, and values, both repeated for each query head; [B, H, T, D]."""
        key, value = self._split(self.k_proj(x)), self._split(self.v_proj(x))
        key = _rotated(key if self.k_norm is None else self.k_norm(key), cos, sin)
        group = self.num_heads // self.num_key_heads
        return key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.width).transpose(1, 2)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[B, N, T, D] rotated by angles [B, 1, T, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class _MLP(nn.Module):
    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = linear(size, inner)
        self.up_proj = linear(size, inner)
        self.down_proj = linear(inner, size)

    def forward(self, x: Tensor) -> Tensor:
        """[..., E] -> [..., E]."""
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class EagleLayer(nn.Module):
    """A layer of the Llama family whose attention reads token and state.

    Args:
        config: of the head.
        joint: false for an ordinary layer behind such a one; it has no `hidden_norm`.
    """

    hidden_norm: RMSNorm

    def __init__(self, config: EagleConfig, *, joint: bool = True) -> None:
        super().__init__()
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.self_attn = _Attention(config, 2 * size if joint else size)
        self.mlp = _MLP(config)
        self.input_layernorm = RMSNorm(size, epsilon)
        if joint:
            self.hidden_norm = RMSNorm(size, epsilon)
        self.post_attention_layernorm = RMSNorm(size, epsilon)
        self.norm_before_residual = config.norm_before_residual

    def finish(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """[B, T, E] the stream in front of the layer, [B, H, T, D] -> [B, T, E] behind it."""
        x = residual + self.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


def at(x: Tensor, roots: Tensor) -> Tensor:
    """[B, T, n] at the indices [B, Q] -> [B, Q, n]."""
    return x.gather(1, roots.unsqueeze(-1).expand(-1, -1, x.shape[-1]).expand(len(x), -1, -1))


def attend(query: Tensor, levels: Sequence[KeysValues], mask: Tensor, scaling: float) -> Tensor:
    """[B, H, Q, D]: attention to the pairs of level 0, and to the same index of the others."""
    # Written out: on a CPU, the backward pass of PyTorch's fused attention takes three times as
    # long, and it has no way to see a key per query without a square mask for each level.
    (keys, values), *later = levels
    dtype = values.dtype
    scores = (query.to(dtype) @ keys.to(dtype).transpose(-1, -2)).float() * scaling  # [B, H, Q, T]
    own = [(query * key).sum(-1, keepdim=True).float() * scaling for key, _ in later]
    weights = torch.cat([scores.masked_fill(~mask, -torch.inf), *own], dim=-1).softmax(-1)
    weights = weights.to(dtype)
    mixed = weights[..., : keys.shape[-2]] @ values
    for index, (_, value) in enumerate(later, keys.shape[-2]):
        mixed = mixed + weights[..., index : index + 1] * value
    return mixed
