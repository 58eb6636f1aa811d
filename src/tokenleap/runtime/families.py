"""The families that `native/` runs, and what each does differently from Llama: one table.

All are decoders with RMSNorm, rotary angles and a gated MLP. `llama.py` reads their weights, and
`packing_gguf.py` those of GGUF files. `lean.py` runs the first four only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

__all__ = ["FAMILIES", "Activation", "Family", "Norms", "Traits", "family_of"]


@dataclass(frozen=True)
class Norms:
    """The names of a layer's norms; None where nothing is normalised.

    Args:
        attention: of what the attention reads.
        attention_after: of what the attention adds to the residual stream.
        mlp: of what the MLP reads.
        mlp_after: of what the MLP adds to the residual stream.
    """

    attention: str | None = "input_layernorm"
    attention_after: str | None = None
    mlp: str | None = "post_attention_layernorm"
    mlp_after: str | None = None


class Activation(IntEnum):
    """What the gates of an MLP pass through; `Activation` in pass.h."""

    SILU = 0
    GELU_TANH = 1
    GELU = 2
    RELU = 3


@dataclass(frozen=True)
class Traits:
    """The numbers by which a model differs from Llama. The defaults are Llama's.

    Args:
        embedding_scale: factor of the embedding.
        learnt_scale: the same for ids behind the vocabulary (`Network.extend`).
        residual_scale: factor of what attention and MLP add to the residual stream.
        logit_scale: factor of the logits.
        logit_cap: c: the logits x become c tanh(x / c); 0 for none.
        score_cap: the same for the scores of attention.
        activation: of the MLP's gates.
        whole_norms: whether the queries of all heads are normalised together, and the keys.
    """

    embedding_scale: float = 1.0
    learnt_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0
    score_cap: float = 0.0
    activation: Activation = Activation.SILU
    whole_norms: bool = False

    def logits(self, products: Tensor) -> Tensor:
        """The logits, of the products of hidden states and output layer."""
        logits = products * self.logit_scale
        return (logits / self.logit_cap).tanh() * self.logit_cap if self.logit_cap else logits


@dataclass(frozen=True)
class Family:
    """What the modules of a family are called, and what they compute.

    Layers without rotary angles (SmolLM3) and windows are found in the modules and the
    configuration.

    Args:
        norms: the norms of a layer.
        merged: whether query, key and value are one linear layer, and gate and up one.
        norms_from_one: whether norms multiply by one plus their weights.
        whole_norms: see `Traits`.
        activation: the field of the configuration that names it, and its name.
        multipliers: whether the configuration has the factors of `Traits`.
        scaled_embedding: whether the embedding's module multiplies by a factor.
        caps_logits: whether the configuration may have a cap for the logits.
        caps_scores: the same for the scores.
    """

    norms: Norms = Norms()
    merged: bool = False
    norms_from_one: bool = False
    whole_norms: bool = False
    activation: tuple[str, str] = ("hidden_act", "silu")
    multipliers: bool = False
    scaled_embedding: bool = False
    caps_logits: bool = False
    caps_scores: bool = False

    @property
    def qkv(self) -> tuple[str, ...]:
        """The names of the attention's linear layers, without the output."""
        return ("qkv_proj",) if self.merged else ("q_proj", "k_proj", "v_proj")

    @property
    def gate_up(self) -> tuple[str, ...]:
        """The names of the MLP's linear layers, without the output."""
        return ("gate_up_proj",) if self.merged else ("gate_proj", "up_proj")

    def norm(self, weight: Tensor) -> Tensor:
        """What a norm multiplies by, of its weight; float32 unless that is the weight."""
        return 1 + weight.float() if self.norms_from_one else weight

    def traits(self, model: PreTrainedModel) -> Traits:
        """The numbers of a model; its weights may be on the meta device."""
        config: Any = model.config
        kind = _ACTIVATIONS[self.activation[1]]
        traits = Traits(activation=kind, whole_norms=self.whole_norms)
        if self.multipliers:
            traits = replace(
                traits,
                embedding_scale=config.embedding_multiplier,
                learnt_scale=config.embedding_multiplier,
                residual_scale=config.residual_multiplier,
                logit_scale=1 / config.logits_scaling,
            )
        if self.scaled_embedding:  # by a factor in the model's dtype
            embedding: Any = model.get_input_embeddings()
            scale = torch.tensor(embedding.scalar_embed_scale).to(model.dtype)
            traits = replace(traits, embedding_scale=float(scale))
        if self.caps_logits:
            traits = replace(traits, logit_cap=config.final_logit_softcapping or 0.0)
        if self.caps_scores:
            traits = replace(traits, score_cap=config.attn_logit_softcapping or 0.0)
        return traits


_AFTER = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_AROUND = Norms(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_GELU = "gelu_pytorch_tanh"
_ACTIVATIONS = {"silu": Activation.SILU, _GELU: Activation.GELU_TANH}
_GEMMA = Family(
    norms=_AROUND,
    norms_from_one=True,
    activation=("hidden_activation", _GELU),
    scaled_embedding=True,
    caps_logits=True,
)

FAMILIES = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(),
    "Qwen3ForCausalLM": Family(),
    "SmolLM3ForCausalLM": Family(),
    "Phi3ForCausalLM": Family(merged=True),
    "GraniteForCausalLM": Family(multipliers=True),
    "Olmo2ForCausalLM": Family(norms=_AFTER, whole_norms=True),
    "GemmaForCausalLM": Family(
        norms_from_one=True, activation=("hidden_act", _GELU), scaled_embedding=True
    ),
    "Gemma2ForCausalLM": replace(_GEMMA, caps_scores=True),
    "Gemma3ForCausalLM": _GEMMA,
}
"""The families by their models' classes."""


def family_of(model: PreTrainedModel) -> Family | None:
    """The family of a model; None if `native/` cannot run it.

    It cannot run subclasses, which may compute something else, nor other activations, nor rotary
    angles that depend on the length of the text or turn only a part of each head.
    """
    config: Any = model.config
    family = FAMILIES.get(type(model).__name__)
    if family is None or getattr(config, family.activation[0]) != family.activation[1]:
        return None
    if getattr(config, "use_bidirectional_attention", False):
        return None
    parameters = getattr(config, "rope_parameters", None) or {}
    by_kind = [rope for rope in parameters.values() if isinstance(rope, Mapping)]  # as Gemma 3
    fits = all(
        rope.get("rope_type") not in ("dynamic", "longrope")
        and (rope.get("partial_rotary_factor") or 1) == 1
        for rope in by_kind or [parameters]
    )
    return family if fits else None
