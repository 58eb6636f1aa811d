"""The weights of Llama, Mistral, Qwen2 and Qwen3, in the form that `lean.py` and `native/` use.

Query, key and value are merged into one linear layer, and so are gate and up. All other
architectures run through their Transformers modules (`module.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foretoken.runtime.windows import Window, layer_windows

__all__ = [
    "ARCHITECTURES",
    "DecoderWeights",
    "JointInput",
    "LayerWeights",
    "LinearWeights",
    "LlamaWeights",
    "MixedInput",
    "Rotary",
    "is_llama",
]

ARCHITECTURES = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
"""Their classes; `is_llama` looks at the configuration, too."""


def is_llama(model: PreTrainedModel) -> bool:
    """Whether `lean.py` and `native/` can run this model.

    They cannot run subclasses, which may compute something else, nor other activations than SiLU,
    nor rotary angles that depend on the length of the text.
    """
    config: Any = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    fixed_angles = rope.get("rope_type") not in ("dynamic", "longrope")
    return type(model).__name__ in ARCHITECTURES and config.hidden_act == "silu" and fixed_angles


@dataclass(frozen=True)
class LinearWeights:
    """`y = x W^T + b`.

    Args:
        weight: [out, in].
        bias: [out] or None.
    """

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, *parts: Any) -> LinearWeights:
        """Merge `nn.Linear` layers that have the same input; a single one is not copied."""
        if len(parts) == 1:
            (part,) = parts
            return cls(part.weight.detach(), None if part.bias is None else part.bias.detach())
        weight = torch.cat([part.weight.detach() for part in parts])
        if all(part.bias is None for part in parts):
            return cls(weight, None)
        biases = [
            torch.zeros_like(part.weight[:, 0]) if part.bias is None else part.bias
            for part in parts
        ]
        return cls(weight, torch.cat(biases).detach())


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one decoder layer.

    E is the hidden size, H the number of query heads, G that of key heads, D the width of a head,
    and I the intermediate size.

    Args:
        attention_norm: [E], or None if the attention reads the residual stream as it is.
        qkv: E -> (H + 2 G) D.
        query_norm: [D], or None if the architecture does not normalise heads.
        key_norm: as `query_norm`.
        output: H D -> E.
        mlp_norm: [E].
        gate_up: E -> 2 I.
        down: I -> E.
        window: what the attention sees; None for the whole text.
    """

    attention_norm: Tensor | None
    qkv: LinearWeights
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: LinearWeights
    mlp_norm: Tensor
    gate_up: LinearWeights
    down: LinearWeights
    window: Window | None = None


@dataclass(frozen=True)
class JointInput:
    """How a drafting head reads and hands on states (EAGLE-3).

    The state takes the place of the embedding at the beginning of the residual stream. The first
    layer's attention reads both, `[norm(embedding); norm(state)]`, so its `qkv` is 2 E -> (H + 2 G)
    D and its `attention_norm` is not used.

    Args:
        embedding_norm: [E] weight of the embedding's RMSNorm.
        state_norm: [E] weight of the state's RMSNorm.
        norm_before_residual: whether the residual stream begins with the normalised state.
        norm_output: whether the states handed on, which are the hidden states behind the last
            layer, are those after the final norm.
    """

    embedding_norm: Tensor
    state_norm: Tensor
    norm_before_residual: bool
    norm_output: bool


@dataclass(frozen=True)
class MixedInput:
    """How a drafting head of EAGLE-1 reads states: the stream begins with `linear` of both.

    Args:
        linear: [embedding; state], 2 E -> E.
    """

    linear: LinearWeights


class DecoderWeights(Protocol):
    """What `lean.py` and `native/` read of a decoder; letters are those of `LayerWeights`.

    V is the size of the vocabulary that can be read, and Vo of the one that can be predicted.
    """

    heads: int
    key_heads: int
    hidden_size: int
    inner_size: int
    width: int
    scaling: float
    epsilon: float
    num_layers: int
    embedding: Tensor
    """[V, E], in the dtype of the KV and of the inputs of linear layers."""
    norm: Tensor | None
    """[E] of the final norm; None if the output layer reads the residual stream as it is."""
    head: LinearWeights
    """E -> Vo."""
    rotary: Rotary
    joint: JointInput | MixedInput | None
    """None for a language model, whose residual stream begins with the embedding."""

    def layer(self, index: int) -> LayerWeights:
        """The weights of a layer."""
        ...


class LlamaWeights:
    """A model's sizes and weights. The weights of a layer are merged when `layer` is called.

    Args:
        model: a model for which `is_llama` is true.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config: Any = model.config
        body: Any = model.model
        self.heads: int = config.num_attention_heads
        self.key_heads: int = config.num_key_value_heads
        self.hidden_size: int = config.hidden_size
        self.inner_size: int = config.intermediate_size
        attention = body.layers[0].self_attn
        self.width: int = attention.head_dim
        self.scaling: float = attention.scaling
        self.epsilon: float = config.rms_norm_eps
        self.embedding: Tensor = body.embed_tokens.weight.detach()  # [V, E]
        self.norm: Tensor | None = body.norm.weight.detach()  # [E]
        head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self.head = LinearWeights.of(head)
        self.num_layers = len(body.layers)
        self._layers = body.layers
        self.windows = layer_windows(config)
        self.rotary = Rotary(body.rotary_emb, self.embedding.device)
        self.joint: JointInput | MixedInput | None = None

    def layer(self, index: int) -> LayerWeights:
        """The weights of a layer; the merged ones are new copies."""
        layer = self._layers[index]
        attention, mlp = layer.self_attn, layer.mlp
        return LayerWeights(
            attention_norm=layer.input_layernorm.weight.detach(),
            qkv=LinearWeights.of(attention.q_proj, attention.k_proj, attention.v_proj),
            query_norm=_norm_of(attention, "q_norm"),
            key_norm=_norm_of(attention, "k_norm"),
            output=LinearWeights.of(attention.o_proj),
            mlp_norm=layer.post_attention_layernorm.weight.detach(),
            gate_up=LinearWeights.of(mlp.gate_proj, mlp.up_proj),
            down=LinearWeights.of(mlp.down_proj),
            window=self.windows[index],
        )


class Rotary:
    """Rotary angles, computed by the model's own rotary embedding.

    Args:
        module: the rotary embedding; it knows the frequencies and the scaling.
        device: device of the angles.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module = module
        self._device = device

    def angles(self, first: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [size, D] for `size` positions from `first` on."""
        everywhere = torch.arange(first, first + size, device=self._device)[None]
        like = torch.empty(0, dtype=dtype, device=self._device)
        cos, sin = self._module(like, everywhere)
        return cos[0], sin[0]


def _norm_of(attention: Any, name: str) -> Tensor | None:
    norm = getattr(attention, name, None)
    return None if norm is None else norm.weight.detach()
