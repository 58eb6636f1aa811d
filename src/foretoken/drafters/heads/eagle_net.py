"""The network of EAGLE-3: fused hidden states and one decoder layer (Li et al., arXiv 2503.01840).

The head reads pairs: the hidden states of the target at position t, and the token at t + 1. It
predicts the token at t + 2. For committed tokens the state is

    f_t = fc [norm(h_t^1); ...; norm(h_t^A)],   h_t^a entering layer `aux_layers[a]` of the target.

Behind the last committed token the state is the head's own output of the pair before. One layer of
the Llama family computes on such pairs; its attention reads [norm(e); norm(f)], twice as wide as
the residual stream. Tensor names are those of the `speculators` format, so `state_dict()` is what a
checkpoint holds.

Checkpoints are read into this module, and it is the oracle of what drafts: `runtime/` computes the
same with the kernels of its decoders (see `eagle.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from foretoken.drafters.heads.state_net import linear

__all__ = [
    "EagleConfig",
    "EagleLayer",
    "EagleNet",
    "KeysValues",
    "RMSNorm",
    "at",
    "attend",
    "default_layers",
]


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


def default_layers(num_layers: int) -> tuple[int, ...]:
    """The layers whose inputs are fused if nothing is said: a low, a middle and a high one.

    Args:
        num_layers: of the target.
    """
    middle, high = num_layers // 2, max(0, num_layers - 3)
    return tuple(sorted({min(2, num_layers - 1), middle, high}))


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


class EagleNet(nn.Module):
    """The head as a PyTorch module, in float32.

    Args:
        config: its sizes.
        embedding: [V, E] the target's, shared and not trained.
        head: [Vd, E] the target's output rows of the draft vocabulary, shared and not trained.
        draft_tokens: [Vd] the target's ids of the draft vocabulary, ascending.
    """

    KIND: ClassVar[str] = "an EAGLE-3 head"
    """What messages call it."""

    d2t: Tensor
    t2d: Tensor
    embedding: Tensor
    head: Tensor

    def __init__(
        self, config: EagleConfig, embedding: Tensor, head: Tensor, draft_tokens: Tensor
    ) -> None:
        super().__init__()
        size, epsilon, count = config.hidden_size, config.rms_norm_eps, len(config.aux_layers)
        self.config = config
        self.layers = nn.ModuleList([EagleLayer(config)])
        self.fc = linear(count * size, size)
        norms = [RMSNorm(size, epsilon) for _ in range(count if config.fc_norm else 0)]
        self.fc_norm = nn.ModuleList(norms)
        self.norm = RMSNorm(size, epsilon)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("head", head, persistent=False)
        self.register_buffer("d2t", draft_tokens - torch.arange(len(draft_tokens)))
        known = torch.zeros(config.vocab_size, dtype=torch.bool)
        known[draft_tokens] = True
        self.register_buffer("t2d", known)
        self.rotary = config.rotary()

    def initialise(self) -> None:
        """Draw random weights, for training; without it those of linear layers are undefined."""
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    @property
    def layer(self) -> EagleLayer:
        """The only layer."""
        return cast("EagleLayer", self.layers[0])

    @property
    def draft_tokens(self) -> Tensor:
        """[Vd] the target's ids of the draft vocabulary, ascending."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def fuse(self, hidden: Tensor) -> Tensor:
        """The states of committed tokens.

        Args:
            hidden: [..., A, E] the target's hidden states of `aux_layers`.

        Returns:
            [..., E].
        """
        if self.config.fc_norm:
            parts = [norm(hidden[..., i, :]) for i, norm in enumerate(self.fc_norm)]
            fused: Tensor = self.fc(torch.cat(parts, dim=-1))
        else:
            fused = self.fc(hidden.float().flatten(-2))
        return fused.float()

    def joined(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Pairs [B, T] and [B, T, E] -> what the attention reads, and the residual stream."""
        layer = self.layer
        state = layer.hidden_norm(states)
        x = torch.cat([layer.input_layernorm(self.embedding[tokens]), state], dim=-1)
        return x, state if layer.norm_before_residual else states

    def forward(
        self,
        tokens: Tensor,
        states: Tensor,
        positions: Tensor,
        mask: Tensor,
        earlier: Sequence[KeysValues] = (),
        roots: Tensor | None = None,
    ) -> tuple[Tensor, list[KeysValues]]:
        """One level of drafting from many pairs at once (training-time test).

        At level k, index r stands for the k-th token drafted behind a root, a pair of level 0. It
        sees the pairs up to the root, and of levels 1 to k its own index only.

        Args:
            tokens: [B, T] the token of each pair at level 0, [B, Q] of each root's draft at the
                others.
            states: [B, T, E] at level 0: `fuse`; else [B, Q, E]: the states that the level before
                left.
            positions: [B, T] or [B, Q] of the tokens.
            mask: [B, 1, Q, T] which pairs of level 0 each root sees.
            earlier: the keys and values of the levels before.
            roots: [B, Q] at level 0 the pairs from which drafts start; None means all, so Q = T.

        Returns:
            The outputs [B, Q, E] before the final norm, and the keys and values of all levels.
        """
        layer = self.layer
        attention = layer.self_attn
        x, residual = self.joined(tokens, states)
        cos, sin = self.rotary(residual, positions)
        own = attention.keys_values(x, cos[:, None], sin[:, None])
        if roots is not None:
            x, residual, cos, sin = (at(each, roots) for each in (x, residual, cos, sin))
        query = attention.queries(x, cos[:, None], sin[:, None])
        levels = [*earlier, own]
        mixed = attend(query, levels, mask, attention.scaling)
        return layer.finish(residual, mixed), levels

    def next_states(self, outputs: Tensor) -> Tensor:
        """[..., E] outputs of a level -> the states of the next one."""
        normed: Tensor = self.norm(outputs)
        return normed if self.config.norm_output else outputs

    def logits(self, outputs: Tensor) -> Tensor:
        """[..., E] outputs of a level -> [..., Vd] logits of the draft vocabulary, in float32."""
        normed: Tensor = self.norm(outputs)
        return F.linear(normed.to(self.head.dtype), self.head).float()


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
