"""The weights of Llama and its relatives, in the form that `lean.py` and `native/` use.

Query, key and value are merged into one linear layer, and so are gate and up. `llama.py` says in
what a family differs from Llama. All other architectures run through their Transformers modules
(`module.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tokenleap.runtime.inputs import Window, layer_windows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The families that `native/` runs, and what each does differently from Llama: one table.
#
# All are decoders with RMSNorm, rotary angles and a gated MLP. `llama.py` reads their weights, and
# `packed.py` those of GGUF files. `lean.py` runs the first four only.


@dataclass(frozen=True)
class Norms:
    """The names of a layer's norms; None where nothing is normalised."""

    attention: str | None = "input_layernorm"
    attention_after: str | None = None
    mlp: str | None = "post_attention_layernorm"
    mlp_after: str | None = None


class Activation(IntEnum):
    """The activation of an MLP's gates; `Activation` in pass.h."""

    SILU = 0
    GELU_TANH = 1
    GELU = 2
    RELU = 3


@dataclass(frozen=True)
class Traits:
    """The numbers by which a model differs from Llama. The defaults are Llama's."""

    embedding_scale: float = 1.0
    learnt_scale: float = 1.0
    residual_scale: float = 1.0  # factor of what attention and MLP add
    logit_scale: float = 1.0
    logit_cap: float = 0.0  # c: the logits x become c tanh(x / c); 0 for none
    score_cap: float = 0.0
    activation: Activation = Activation.SILU
    whole_norms: bool = False  # queries of all heads are normalised together

    def logits(self, products: Tensor) -> Tensor:
        """The logits, of the products of hidden states and output layer."""
        logits = products * self.logit_scale
        return (logits / self.logit_cap).tanh() * self.logit_cap if self.logit_cap else logits


@dataclass(frozen=True)
class Family:
    """Names of a family's modules, and what they compute. The configuration tells windows."""

    norms: Norms = Norms()
    merged: bool = False  # query, key and value are one linear layer, and gate and up one
    norms_from_one: bool = False
    head_norms: bool = False  # queries and keys are normalised
    whole_norms: bool = False  # those of all heads at once
    skips_rotation: bool = False  # in some layers
    # the field of the configuration that names it, and its name
    activation: tuple[str, str] = ("hidden_act", "silu")
    multipliers: bool = False
    scaled_queries: bool = False  # by a number of the configuration
    scaled_embedding: bool = False
    caps_logits: bool = False  # the configuration may have a cap for the logits
    caps_scores: bool = False

    @property
    def linear_modules(self) -> dict[str, tuple[str, ...]]:
        """Field of `DecoderLayer` -> the modules below a layer that it merges."""
        qkv = ("qkv_proj",) if self.merged else ("q_proj", "k_proj", "v_proj")
        gate_up = ("gate_up_proj",) if self.merged else ("gate_proj", "up_proj")
        return {
            "qkv": tuple(f"self_attn.{name}" for name in qkv),
            "output": ("self_attn.o_proj",),
            "gate_up": tuple(f"mlp.{name}" for name in gate_up),
            "down": ("mlp.down_proj",),
        }

    @property
    def norm_modules(self) -> dict[str, str | None]:
        """Field of `DecoderLayer` -> the norm below a layer; layers may lack it."""
        return {
            "attention_norm": self.norms.attention,
            "query_norm": "self_attn.q_norm",
            "key_norm": "self_attn.k_norm",
            "mlp_norm": self.norms.mlp,
            "attention_after": self.norms.attention_after,
            "mlp_after": self.norms.mlp_after,
        }

    def norm(self, weight: Tensor) -> Tensor:
        """The factor of a norm, from its weight; float32 unless it is the weight itself."""
        return 1 + weight.float() if self.norms_from_one else weight

    def parts(self, layer: nn.Module) -> dict[str, Any]:
        """Field of `DecoderLayer` -> the weights of a layer; the merged ones are new copies."""
        modules: dict[str, Any] = dict(layer.named_modules())
        norms = {field: modules.get(name) for field, name in self.norm_modules.items() if name}
        return {
            **{
                field: LinearWeights.of(*(modules[name] for name in names))
                for field, names in self.linear_modules.items()
            },
            **{field: self.norm(x.weight.detach()) for field, x in norms.items() if x is not None},
        }

    def traits(self, config: Any, dtype: torch.dtype) -> Traits:
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
            scale = torch.tensor(config.hidden_size**0.5, device="cpu").to(dtype)
            traits = replace(traits, embedding_scale=float(scale))
        if self.caps_logits:
            traits = replace(traits, logit_cap=config.final_logit_softcapping or 0.0)
        if self.caps_scores:
            traits = replace(traits, score_cap=config.attn_logit_softcapping or 0.0)
        return traits

    def scaling(self, config: Any, width: int) -> float:
        """The factor of attention's scores."""
        if self.multipliers:
            return float(config.attention_multiplier)
        return float((config.query_pre_attn_scalar if self.scaled_queries else width) ** -0.5)


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
    scaled_queries=True,
    activation=("hidden_activation", _GELU),
    scaled_embedding=True,
    caps_logits=True,
)

FAMILIES = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(),
    "Qwen3ForCausalLM": Family(head_norms=True),
    "SmolLM3ForCausalLM": Family(skips_rotation=True),
    "Phi3ForCausalLM": Family(merged=True),
    "GraniteForCausalLM": Family(multipliers=True),
    "Olmo2ForCausalLM": Family(norms=_AFTER, head_norms=True, whole_norms=True),
    "GemmaForCausalLM": Family(
        norms_from_one=True, activation=("hidden_act", _GELU), scaled_embedding=True
    ),
    "Gemma2ForCausalLM": replace(_GEMMA, caps_scores=True),
    "Gemma3ForCausalLM": replace(_GEMMA, head_norms=True),
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


ARCHITECTURES = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
"""The classes that `lean.py` runs; `is_llama` looks at the configuration, too."""


def is_llama(model: PreTrainedModel) -> bool:
    """Whether `lean.py` can run this model, as `native/` can; see `family_of`."""
    return type(model).__name__ in ARCHITECTURES and family_of(model) is not None


@dataclass(frozen=True)
class LinearWeights:
    """`y = x W^T + b` with a weight [out, in] and a bias [out] or None."""

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


Linear = TypeVar("Linear")
Merged = TypeVar("Merged")


@dataclass(frozen=True)
class DecoderLayer(Generic[Linear, Merged]):
    """The parts of one decoder layer, in one of several forms.

    A new norm is a field here and a row of `norm_modules`, a new number a field here and in
    `LlamaSizes.numbers`. Each has a field of the same name of `Layer` in native/pass.h, with the
    code that reads it. E is the hidden size, H the number of query heads,
    G that of key heads, D the width of a head, and I the intermediate size. Linear layers with the
    same input are merged. Norms that an architecture does not have are None.
    """

    qkv: Merged  # E -> (H + 2 G) D
    output: Linear  # H D -> E
    gate_up: Merged  # E -> 2 I
    down: Linear  # I -> E
    attention_norm: Tensor | None = None  # [E]
    # [D]; [H D] if all heads are normalised at once (`whole_norms`)
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None  # [D] or [G D]
    mlp_norm: Tensor | None = None  # [E]
    attention_after: Tensor | None = None  # [E] of a norm of what the attention adds
    mlp_after: Tensor | None = None  # [E] of a norm of what the MLP adds
    window: Window | None = None
    rotates: bool = True


LayerWeights: TypeAlias = DecoderLayer[LinearWeights, LinearWeights]

LAYER_NORMS = tuple(Family().norm_modules)  # the fields of `DecoderLayer` that are norms


@dataclass(frozen=True)
class JointInput:
    """How a drafting head reads and hands on states (EAGLE-3).

    The state takes the place of the embedding at the beginning of the residual stream. The first
    layer's attention reads both, `[norm(embedding); norm(state)]`, so its `qkv` is 2 E -> (H + 2 G)
    D and its `attention_norm` is not used.
    """

    embedding_norm: Tensor  # [E], of the RMSNorm
    state_norm: Tensor  # [E], of the RMSNorm
    norm_before_residual: bool
    norm_output: bool  # the states handed on are those after the final norm


@dataclass(frozen=True)
class MixedInput:
    """How a drafting head of EAGLE-1 reads states: the stream begins with `linear` of both."""

    linear: LinearWeights


class DecoderSizes(Protocol):
    """What native code reads of a decoder besides its linear layers; letters as in `LayerWeights`.

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
    embedding: Tensor  # [V, E], in the dtype of the KV and of the inputs of linear layers
    norm: Tensor | None
    """[E] of the final norm; None if the output layer reads the residual stream as it is."""
    rotary: Rotary
    local_rotary: Rotary | None  # of layers with a window, if these have another one
    traits: Traits
    joint: JointInput | MixedInput | None
    """None for a language model, whose residual stream begins with the embedding."""


class DecoderWeights(DecoderSizes, Protocol):
    """A decoder that `lean.py` and `native/` can run."""

    head: LinearWeights  # E -> Vo

    def layer(self, index: int) -> LayerWeights: ...


class LlamaSizes:
    """`DecoderSizes` of a model of a family, by its configuration.

    `architecture` is a name in `FAMILIES`, and `norm` the weight of the final norm. Of two rotary
    embeddings, the second one is that of layers with a window.
    """

    def __init__(
        self,
        architecture: str,
        config: Any,
        embedding: Tensor,
        norm: Tensor,
        rotaries: Sequence[Rotary],
    ) -> None:
        self.heads: int = config.num_attention_heads
        self.key_heads: int = config.num_key_value_heads
        self.hidden_size: int = config.hidden_size
        self.inner_size: int = config.intermediate_size
        self.width = _head_width(config)
        self.epsilon: float = config.rms_norm_eps
        self.num_layers: int = config.num_hidden_layers
        self.family = FAMILIES[architecture]
        self.scaling = self.family.scaling(config, self.width)
        self.traits = self.family.traits(config, embedding.dtype)
        self.embedding = embedding
        self.norm: Tensor | None = self.family.norm(norm)
        self.rotary = rotaries[0]
        self.local_rotary = rotaries[1] if len(rotaries) > 1 else None
        self.joint: JointInput | MixedInput | None = None
        self._windows = layer_windows(config)
        every = (True,) * self.num_layers
        self._rotates = config.no_rope_layers if self.family.skips_rotation else every

    def numbers(self, index: int) -> dict[str, Any]:
        """The fields of a layer that are no tensors."""
        return {"window": self._windows[index], "rotates": bool(self._rotates[index])}

    @property
    def layer_shapes(self) -> dict[str, tuple[int, ...] | None]:
        """Field of `DecoderLayer` -> the shape of its weight; None if there is none."""
        queries, keys = self.heads * self.width, self.key_heads * self.width
        size, family = self.hidden_size, self.family
        norms = {field: (size,) if name else None for field, name in family.norm_modules.items()}
        for field, whole in (("query_norm", queries), ("key_norm", keys)):
            width = whole if family.whole_norms else self.width
            norms[field] = (width,) if family.head_norms else None
        return {
            **norms,
            "qkv": (queries + 2 * keys, size),
            "output": (size, queries),
            "gate_up": (2 * self.inner_size, size),
            "down": (size, self.inner_size),
        }


class LlamaWeights(LlamaSizes):
    """A model's sizes and weights. The weights of a layer are merged when `layer` is called."""

    def __init__(self, model: PreTrainedModel) -> None:
        body: Any = model.model
        embedding, norm = body.embed_tokens.weight.detach(), body.norm.weight.detach()
        kinds = sorted(getattr(body.rotary_emb, "layer_types", ())) or [None]  # Gemma 3 has two
        rotaries = [Rotary(body.rotary_emb, embedding.device, kind) for kind in kinds]
        super().__init__(type(model).__name__, model.config, embedding, norm, rotaries)
        self.head = LinearWeights.of(model.get_output_embeddings())  # type: ignore[no-untyped-call]
        self._layers = body.layers

    def layer(self, index: int) -> LayerWeights:
        """The weights of a layer; the merged ones are new copies."""
        return LayerWeights(**self.family.parts(self._layers[index]), **self.numbers(index))


class Rotary:
    """Rotary angles of one kind of layers, computed by a model's rotary embedding."""

    def __init__(
        self,
        compute: Callable[..., tuple[Tensor, Tensor]],
        device: torch.device,
        kind: str | None = None,
    ) -> None:
        self._compute, self._kind = compute, () if kind is None else (kind,)
        self._device = device

    def angles(self, first: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [size, D] for `size` positions from `first` on."""
        everywhere = torch.arange(first, first + size, device=self._device)[None]
        like = torch.empty(0, dtype=dtype, device=self._device)
        cos, sin = self._compute(like, everywhere, *self._kind)
        return cos[0], sin[0]


def rotaries_of(config: Any) -> list[Rotary]:
    """What the modules of a family compute, without them: angles in float32, on the CPU."""
    given, device = config.rope_parameters, torch.device("cpu")
    by_kind = any(isinstance(rope, Mapping) for rope in given.values())
    kinds = sorted(set(config.layer_types)) if by_kind else [None]
    return [Rotary(partial(_angles, *_frequencies(config, kind)), device) for kind in kinds]


def _head_width(config: Any) -> int:
    width: int | None = getattr(config, "head_dim", None)
    return width or int(config.hidden_size // config.num_attention_heads)


def _frequencies(config: Any, kind: str | None) -> tuple[Tensor, float]:
    rope = config.rope_parameters if kind is None else config.rope_parameters[kind]
    if rope["rope_type"] != "default":
        return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"), layer_type=kind)
    width = _head_width(config)
    places = torch.arange(0, width, 2, dtype=torch.float, device="cpu")
    return 1.0 / (rope["rope_theta"] ** (places / width)), 1.0


def _angles(
    frequencies: Tensor, factor: float, like: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [1, n, D] of positions [1, n]."""
    half = positions[..., None].float() * frequencies
    angles = torch.cat((half, half), dim=-1)
    return (angles.cos() * factor).to(like.dtype), (angles.sin() * factor).to(like.dtype)
