"""The network of EAGLE-3: fused hidden states and one decoder layer (Li et al., arXiv 2503.01840).

The head reads pairs: the hidden states of the target at position t, and the token at t + 1. It
predicts the token at t + 2. For committed tokens the state is

    f_t = fc [norm(h_t^1); ...; norm(h_t^A)],   h_t^a entering layer `aux_layers[a]` of the target.

After the last committed token the state is the head's own output of the pair before. One layer of
the Llama family computes on such pairs; its attention reads [norm(e); norm(f)], twice as wide as
the residual stream. Tensor names are those of the `speculators` format, so `state_dict()` is what a
checkpoint holds.

Checkpoints are read into this module, and it is the oracle of what drafts: `runtime/` computes the
same with the kernels of its decoders (see `eagle.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenleap.drafters.heads.state_net import linear, normed

if TYPE_CHECKING:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


@dataclass(frozen=True)
class EagleConfig:
    """Sizes and variants of an EAGLE-3 head.

    Args:
        aux_layers: ids of the target's layers whose inputs are fused (see `runtime.network.Need`).
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
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

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
        joint: false for an ordinary layer after such a one; it has no `hidden_norm`.
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
        """[B, T, E] the stream before the layer, [B, H, T, D] -> [B, T, E] after it."""
        x = residual + self.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


def at(x: Tensor, roots: Tensor) -> Tensor:
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


def default_layers(num_layers: int) -> tuple[int, ...]:
    """The layers whose inputs are fused if nothing is said: a low, a middle and a high one."""
    middle, high = num_layers // 2, max(0, num_layers - 3)
    return tuple(sorted({min(2, num_layers - 1), middle, high}))


class EagleNet(nn.Module):
    """The head as a PyTorch module, in float32.

    Args:
        embedding: [V, E] the target's, shared and not trained.
        head: [Vd, E] the target's output rows of the draft vocabulary, shared and not trained.
        draft_tokens: [Vd] the target's ids of the draft vocabulary, ascending.
    """

    KIND: ClassVar[str] = "an EAGLE-3 head"
    """Its name in messages."""

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
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    @property
    def layer(self) -> EagleLayer:
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

        At level k, index r stands for the k-th token drafted after a root, a pair of level 0. It
        sees the pairs up to the root, and of levels 1 to k its own index only.

        Args:
            tokens: [B, T] the token of each pair at level 0, [B, Q] of each root's draft at the
                others.
            states: [B, T, E] at level 0: `fuse`; else [B, Q, E]: the states that the level before
                left.
            positions: [B, T] or [B, Q] of the tokens.
            mask: [B, 1, Q, T] which pairs of level 0 each root sees.
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


# The network of P-EAGLE: an EAGLE-3 head that drafts a block in one pass (arXiv 2602.01469).
#
# The tokens of a block do not depend on each other. After the pair of the last committed token,
# with the target's own state, stand pairs of a mask token and a learnt state:
#
#     f_mask = fc [norm(m^1); ...; norm(m^A)],   m = `mask_hidden`.
#
# The d-th of them sees the committed pairs and the d - 1 before it, and predicts the token d places
# after the first drafted one. The first layer is EAGLE-3's; ordinary ones may follow it. Tensor
# names are those of the `speculators` format ("peagle").


@dataclass(frozen=True)
class ParallelConfig(EagleConfig):
    """See `EagleConfig`.

    Args:
        mask_token_id: the token of the pairs after the last committed one.
        depths: most tokens of a draft, as many as were learnt.
    """

    num_layers: int = 1
    mask_token_id: int = 0
    depths: int = 8


@dataclass
class _Level:
    """Pairs of one level of all drafts; level 0 has those of the text.

    Args:
        stream: [B, n, E] the residual stream.
        read: [B, n, 2 E] or [B, n, E] what the next attention reads.
        angles: cosines and sines [B, n, D] of the positions.
        mask: [B, 1, n, T] which pairs of the text each of them sees.
    """

    stream: Tensor
    read: Tensor
    angles: tuple[Tensor, Tensor]
    mask: Tensor

    @property
    def turns(self) -> tuple[Tensor, Tensor]:
        """[B, 1, n, D] each."""
        cos, sin = self.angles
        return cos[:, None], sin[:, None]

    def at(self, roots: Tensor) -> _Level:
        cos, sin = (at(each, roots) for each in self.angles)
        mask = self.mask.expand(len(roots), -1, -1, -1)
        seen = at(mask.squeeze(1), roots).unsqueeze(1)
        return _Level(at(self.stream, roots), at(self.read, roots), (cos, sin), seen)


class ParallelNet(EagleNet):
    """See `EagleNet`; `block` takes the place of `forward`."""

    config: ParallelConfig

    def __init__(
        self, config: ParallelConfig, embedding: Tensor, head: Tensor, draft_tokens: Tensor
    ) -> None:
        super().__init__(config, embedding, head, draft_tokens)
        more = [EagleLayer(config, joint=False) for _ in range(config.num_layers - 1)]
        self.layers.extend(more)
        size = len(config.aux_layers) * config.hidden_size
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, size))

    def initialise(self) -> None:
        super().initialise()
        nn.init.normal_(self.mask_hidden)

    def mask_features(self) -> Tensor:
        """[A, E] what stands for the hidden states of the target's layers."""
        return self.mask_hidden.view(len(self.config.aux_layers), -1)

    def block(
        self, tokens: Tensor, states: Tensor, roots: Tensor, sizes: Sequence[int]
    ) -> list[Tensor]:
        """All levels of drafts from many pairs of texts at once.

        Args:
            tokens: [B, T] the token of each pair.
            states: [B, T, E] its state: `fuse`.
            roots: [B, Q] the pairs from which drafts start.

        Returns:
            [L] outputs [B, sizes[l], E] before the final norm.
        """
        levels = self._levels(tokens, states, roots, sizes)
        for index, layer in enumerate(cast("list[EagleLayer]", list(self.layers))):
            if index:
                for level in levels:
                    level.read = layer.input_layernorm(level.stream)
            last = index + 1 == len(self.layers)
            self._advance(layer, levels, roots if last else None)
        return [level.stream for level in levels]

    def _levels(
        self, tokens: Tensor, states: Tensor, roots: Tensor, sizes: Sequence[int]
    ) -> list[_Level]:
        places = torch.arange(tokens.shape[1], device=tokens.device)[None]  # [1, T]
        levels = [self._level(tokens, states, places.expand_as(tokens), places)]
        mask_state = self.fuse(self.mask_features())
        for depth, size in enumerate(sizes[1:], 1):
            seeing = roots[:, :size]
            masks = torch.full_like(seeing, self.config.mask_token_id)
            state = mask_state.expand(*masks.shape, -1)
            levels.append(self._level(masks, state, seeing + depth, places, seeing))
        return levels

    def _level(
        self,
        tokens: Tensor,
        states: Tensor,
        positions: Tensor,
        places: Tensor,
        seeing: Tensor | None = None,
    ) -> _Level:
        """Pairs [B, n] at positions [B, n] that see the pairs of the text up to `seeing` [B, n]."""
        read, stream = self.joined(tokens, states)
        cos, sin = self.rotary(read, positions)
        up_to = (positions if seeing is None else seeing).unsqueeze(-1)
        mask = (places <= up_to).unsqueeze(1)
        return _Level(stream, read, (cos, sin), mask)

    def _advance(self, layer: EagleLayer, levels: list[_Level], roots: Tensor | None) -> None:
        """Compute a layer; of the pairs of the text, only the roots if these are given."""
        attention = layer.self_attn
        keys_values = [attention.keys_values(level.read, *level.turns) for level in levels]
        if roots is not None:
            levels[0] = levels[0].at(roots)
        for depth, level in enumerate(levels):
            size = level.read.shape[1]
            above = [
                (keys[:, :, :size], values[:, :, :size])
                for keys, values in keys_values[1 : depth + 1]
            ]
            query = attention.queries(level.read, *level.turns)
            mixed = attend(query, [keys_values[0], *above], level.mask, attention.scaling)
            level.stream = layer.finish(level.stream, mixed)


# The network of EAGLE-1: one layer on features and tokens (Li et al., arXiv 2401.15077).
#
# A feature is what the target's output layer reads: its last hidden state, after the final norm.
# From the feature at position t and the token at t + 1, the head predicts the feature at t + 1:
#
#     x = fc [e(t + 1); f(t)] + b,  f(t + 1) = layer(x),  logits = (target's output rows) f(t + 1).
#
# The layer is one of the Llama family without a norm before its attention, and there is no final
# norm. EAGLE-2 drafts other trees with the same heads, and HASS trains them on several levels.


@dataclass(frozen=True)
class FeatureConfig(EagleConfig):
    """Sizes of an EAGLE-1 head; see `EagleConfig`, whose norms it does not have."""

    norm_before_residual: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    fc_bias: bool = True


class FeatureNet(EagleNet):
    """See `EagleNet`; its states are features.

    Args:
        final_norm: the target's, shared and not trained; None if no hidden states will be read.
    """

    KIND: ClassVar[str] = "an EAGLE-1 head"

    config: FeatureConfig

    def __init__(
        self,
        config: FeatureConfig,
        embedding: Tensor,
        head: Tensor,
        draft_tokens: Tensor,
        final_norm: nn.Module | None = None,
    ) -> None:
        super().__init__(config, embedding, head, draft_tokens)
        size = config.hidden_size
        self.fc = linear(2 * size, size, bias=config.fc_bias)
        layer = EagleLayer(config, joint=False)
        del layer.input_layernorm, self.norm
        self.layers = nn.ModuleList([layer])
        self._final_norm = [final_norm]  # in a list, so that its weights are not among these

    @property
    def final_norm(self) -> nn.Module:
        """The target's norm before its output layer."""
        (norm,) = self._final_norm
        assert norm is not None
        return norm

    def initialise(self) -> None:
        super().initialise()
        if self.fc.bias is not None:
            nn.init.zeros_(self.fc.bias)

    def fuse(self, hidden: Tensor) -> Tensor:
        """The features [..., E] of the hidden states [..., 1, E] before the final norm."""
        return normed(self.final_norm, hidden.squeeze(-2))

    def joined(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """See `EagleNet.joined`: the attention reads the residual stream as it is."""
        x = self.fc(torch.cat([self.embedding[tokens].to(states.dtype), states], dim=-1)).float()
        return x, x

    def next_states(self, outputs: Tensor) -> Tensor:
        return outputs

    def logits(self, outputs: Tensor) -> Tensor:
        return F.linear(outputs.to(self.head.dtype), self.head).float()
