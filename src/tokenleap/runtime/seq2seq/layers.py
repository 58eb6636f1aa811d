"""The decoder layers of `Seq2SeqNetwork`, made of the parts that `structure.py` found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor, nn

from tokenleap.runtime.lean import Linear, LinearLayer
from tokenleap.runtime.llama import LinearWeights
from tokenleap.runtime.seq2seq.structure import AttentionParts, DecoderLayerParts, LayerParts

__all__ = ["Elementwise", "Layer", "head_of", "layer_of", "source_layer_of"]

Elementwise: TypeAlias = Callable[[Tensor], Tensor]
"""[T, E] -> [T, E]: a norm or an activation."""


@dataclass(frozen=True)
class Layer:
    """One decoder layer: see `DecoderLayerParts`.

    Args:
        index: the layer's index in the slab and in row states.
        attends: whether both attentions run.
        computes: whether the MLP runs.
    """

    index: int
    attention_norm: Elementwise
    qkv: Linear
    output: Linear
    cross_norm: Elementwise
    cross_query: Linear
    cross_output: Linear
    mlp_norm: Elementwise
    up: Linear
    activation: Elementwise
    gated: bool
    down: Linear
    attends: bool = True
    computes: bool = True

    def mlp(self, x: Tensor) -> Tensor:
        """[T, E] -> [T, E]."""
        up = self.up(x)
        if not self.gated:
            return self.down(self.activation(up))
        gate, up = up.chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)


def layer_of(index: int, parts: DecoderLayerParts, kind: type[LinearLayer]) -> Layer:
    """One layer; `index` is its place."""
    # `forward` itself, because `nn.Module.__call__` would add overhead ten times a layer.
    attention, cross = parts.attention, parts.cross
    return Layer(
        index=index,
        attention_norm=parts.attention_norm.forward,
        qkv=_joint((attention.query, attention.key, attention.value), kind),
        output=_joint((attention.output,), kind),
        cross_norm=parts.cross_norm.forward,
        cross_query=_joint((cross.query,), kind),
        cross_output=_joint((cross.output,), kind),
        mlp_norm=parts.mlp_norm.forward,
        up=_joint(parts.up, kind),
        activation=parts.activation.forward,
        gated=len(parts.up) > 1,
        down=_down_of(parts, kind),
    )


def _down_of(parts: LayerParts, kind: type[LinearLayer]) -> Linear:
    """T5 in float16 keeps this one layer in float32, since its results exceed float16."""
    dtype = parts.down.weight.dtype
    down = _joint((parts.down,), kind)
    return down if parts.up[0].weight.dtype == dtype else lambda x: down(x.to(dtype))


def source_layer_of(cross: AttentionParts, kind: type[LinearLayer]) -> Linear:
    """[n, E] -> [n, 2 H D]: keys and values of source positions."""
    return _joint((cross.key, cross.value), kind)


def _joint(linears: tuple[nn.Linear, ...], kind: type[LinearLayer]) -> Linear:
    """One product in place of several with the same input."""
    weights = LinearWeights.of(*linears)
    return kind(weights.weight, weights.bias).forward


def head_of(head: nn.Linear, more: Tensor | None, kind: type[LinearLayer]) -> Linear:
    """The output layer [T, E] -> [T, V], with `more` [V] added to its logits."""
    biases = [bias for bias in (head.bias, more) if bias is not None]
    total = sum(biases[1:], biases[0]).to(head.weight.dtype) if biases else None
    return kind(head.weight, total).forward
