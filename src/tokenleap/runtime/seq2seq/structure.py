"""Finds the parts of a Transformers encoder-decoder that networks compute with.

Two layouts are known. BART's layers have named sublayers, and an embedding per position; mBART,
Marian, M2M100, Pegasus and Whisper have the same. T5's layers are lists of sublayers, and relative
positions bias its attention; mT5 and UMT5 have the same. Architectures that have all these parts,
but combine them in another way, do not pass the checks of `probing.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenleap.errors import CompatibilityError
from tokenleap.runtime.inputs import PassInputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# How the decoder of an encoder-decoder knows the positions of a pass's nodes.
#
# Transformers' decoders count positions from the length of the cache, the same for a whole batch.
# Nodes of trees, and rows of different length, need positions of their own.


class Positions(Protocol):
    def embedding(self, inputs: PassInputs) -> Tensor | None:
        """[T, E] added to the embeddings of the nodes; None if nothing is."""
        ...

    def bias(self, positions: Tensor, mask: Tensor) -> Tensor | None:
        """The addition [L or 1, B, H, padded_rows(N), S] to the scores of self-attention, or None.

        Of positions [B, N] and a mask [B, 1, padded_rows(N), S]; L is 1 if all layers have the
        same.
        """
        ...


@dataclass(frozen=True)
class TablePositions:
    """An embedding per position [positions, E], but for the token `without` (M2M100's padding)."""

    table: Tensor
    without: int | None = None

    def embedding(self, inputs: PassInputs) -> Tensor:
        positions = inputs.flat(inputs.positions)
        # The padding of a row at the end of the context may have positions past the table.
        found = F.embedding(positions.clamp(max=len(self.table) - 1), self.table)
        if self.without is None:
            return found
        bare = inputs.flat(inputs.tokens) == self.without
        return found.masked_fill(bare[:, None], 0)

    def bias(self, positions: Tensor, mask: Tensor) -> None: ...


@dataclass(frozen=True)
class RelativePositions:
    """A bias on attention scores for each distance between a node and what it sees (T5).

    `by_distance` is [L or 1, H, distances]; the last one holds for larger distances. The first
    `behind` are for what follows a node.
    """

    by_distance: Tensor
    behind: int = 0

    @classmethod
    def of(cls, attentions: Sequence[Any], *, both_ways: bool = False) -> RelativePositions:
        """The biases of T5's self-attention: those of the first layer, or each layer's own."""
        from transformers.models.t5.modeling_t5 import T5Attention

        first, own = (
            attentions[0],
            [each for each in attentions if each.has_relative_attention_bias],
        )
        if len(own) not in (1, len(attentions)):
            raise TypeError("some of its layers share their relative positions")
        largest = int(first.relative_attention_max_distance)
        behind = largest if both_ways else 0
        buckets = T5Attention._relative_position_bucket(  # type: ignore[no-untyped-call]
            -torch.arange(-behind, largest + 1),
            bidirectional=both_ways,
            num_buckets=first.relative_attention_num_buckets,
            max_distance=largest,
        )
        weights = [each.relative_attention_bias.weight.detach() for each in own]
        by_layer = torch.stack([weight[buckets.to(weight.device)].T for weight in weights])
        return cls(by_layer.contiguous(), behind)

    def embedding(self, inputs: PassInputs) -> None: ...

    def bias(self, positions: Tensor, mask: Tensor) -> Tensor:
        """See `Positions.bias`.

        What a node sees is a path, in order. So the position of a slot is the number of slots that
        the node sees before it, wherever the slots of other branches lie.
        """
        ranks = (mask[:, 0] == 0).cumsum(-1) - 1  # [B, padded N, S]
        padded = F.pad(positions, (0, ranks.shape[1] - positions.shape[1]))
        distances = padded[:, :, None] - ranks + self.behind
        distances = distances.clamp(0, self.by_distance.shape[2] - 1)
        return self.by_distance[:, :, distances].transpose(1, 2)


@dataclass(frozen=True)
class AttentionParts:
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    output: nn.Linear
    heads: int
    scaling: float


@dataclass(frozen=True, kw_only=True)
class LayerParts:
    """One layer: self-attention and MLP, each with its norm."""

    attention: AttentionParts
    attention_norm: nn.Module
    # one, or two whose results are multiplied after the first's activation
    up: tuple[nn.Linear, ...]
    activation: nn.Module
    down: nn.Linear
    mlp_norm: nn.Module


@dataclass(frozen=True, kw_only=True)
class DecoderLayerParts(LayerParts):
    """One decoder layer, which also has a cross-attention between the two others."""

    cross: AttentionParts
    cross_norm: nn.Module


@dataclass(frozen=True, kw_only=True)
class Stack:
    """An encoder, or what a decoder has in common with one."""

    layers: tuple[LayerParts, ...]
    embedding: nn.Module
    embedding_scale: float
    embedding_norm: nn.Module | None
    positions: Positions
    norm_first: bool  # sublayers' norms precede them, or follow the residual sum
    final_norm: nn.Module


@dataclass(frozen=True, kw_only=True)
class Structure(Stack):
    """The parts of an encoder-decoder: its decoder, and more."""

    layers: tuple[DecoderLayerParts, ...]
    encoder: PreTrainedModel
    head: nn.Linear
    logits_bias: Tensor | None  # [V]


class Scaled(nn.Module):
    """A norm, and a factor on its result."""

    def __init__(self, norm: nn.Module, factor: float) -> None:
        super().__init__()
        self.norm, self.factor = norm, factor

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.norm(x) * self.factor
        return scaled


def describe(model: PreTrainedModel) -> Structure:
    name = type(model).__name__
    parts: Any = model
    if model.main_input_name != "input_ids" and model.config.model_type != "whisper":
        raise CompatibilityError(f"{name} reads '{model.main_input_name}', which is not supported.")
    with _refusing(name):
        decoder = parts.get_decoder()
        relative = hasattr(decoder, "block")
        return _relative(parts, decoder) if relative else _with_table(parts, decoder)


def describe_encoder(model: PreTrainedModel) -> Stack | None:
    """The parts of an encoder; None if it reads audio, has no layers, or is of an unknown kind."""
    parts: Any = model
    encoder = parts.get_encoder()
    if not len(getattr(encoder, "block", getattr(encoder, "layers", ()))):
        return None
    with suppress(AttributeError, IndexError, TypeError):
        if hasattr(encoder, "block"):
            layers = tuple(LayerParts(**_listed_parts(block.layer)) for block in encoder.block)
            positions = _relative_positions(encoder, both_ways=True)
            return Stack(layers=layers, **_listed_stack(encoder), positions=positions)
        layers = tuple(LayerParts(**_named_parts(layer)) for layer in encoder.layers)
        return Stack(layers=layers, **_named_stack(parts, encoder))
    return None


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    try:
        yield
    except (AttributeError, IndexError, TypeError) as error:
        raise CompatibilityError(
            f"{name} is an encoder-decoder of an unknown kind: {str(error).splitlines()[0]}. The "
            "layouts of BART and T5 are known."
        ) from error


def _with_table(model: Any, decoder: Any) -> Structure:
    """BART's layout."""
    bias = getattr(model, "final_logits_bias", None)
    return Structure(
        encoder=model.get_encoder(),
        layers=tuple(_named_layer(layer) for layer in decoder.layers),
        head=_head(model),
        logits_bias=None if bias is None else bias[0].detach(),
        **_named_stack(model, decoder),
    )


def _named_stack(model: Any, stack: Any) -> dict[str, Any]:
    final_norm = getattr(stack, "layer_norm", None)
    # Whisper has a scale that it does not use, and others' embeddings scale by themselves.
    scales = not hasattr(stack.embed_tokens, "embed_scale") and model.config.model_type != "whisper"
    return {
        "embedding": stack.embed_tokens,
        "embedding_scale": float(getattr(stack, "embed_scale", 1.0)) if scales else 1.0,
        "embedding_norm": getattr(stack, "layernorm_embedding", None),
        "positions": _table(model, stack.embed_positions),
        "norm_first": final_norm is not None,
        "final_norm": nn.Identity() if final_norm is None else final_norm,
    }


def _head(model: Any) -> nn.Linear:
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise TypeError(f"its output layer is a {type(head).__name__}")
    return head


def _table(model: Any, embedding: Any) -> TablePositions:
    without = None if isinstance(embedding, nn.Embedding) else int(embedding.padding_idx)
    return TablePositions(position_table(model, embedding).detach(), without)


def position_table(model: Any, embedding: Any) -> Tensor:
    """[positions, E] the embedding of each position; M2M100 makes its own, of any length."""
    if isinstance(embedding, nn.Embedding):
        return embedding.weight[getattr(embedding, "offset", 0) :]
    padding = int(embedding.padding_idx)
    size = padding + 1 + int(model.config.max_position_embeddings)
    rows: Tensor = embedding.get_embedding(size, embedding.embedding_dim, padding)
    return rows.to(embedding.weights)[padding + 1 :]


def _named_layer(layer: Any) -> DecoderLayerParts:
    return DecoderLayerParts(
        cross=_named_attention(layer.encoder_attn),
        cross_norm=layer.encoder_attn_layer_norm,
        **_named_parts(layer),
    )


def _named_parts(layer: Any) -> dict[str, Any]:
    return {
        "attention": _named_attention(layer.self_attn),
        "attention_norm": layer.self_attn_layer_norm,
        "up": (layer.fc1,),
        "activation": layer.activation_fn,
        "down": layer.fc2,
        "mlp_norm": layer.final_layer_norm,
    }


def _named_attention(part: Any) -> AttentionParts:
    linears = part.q_proj, part.k_proj, part.v_proj, part.out_proj
    return AttentionParts(*linears, int(part.num_heads), float(part.scaling))


def _relative(model: Any, decoder: Any) -> Structure:
    """T5's layout."""
    fields = _listed_stack(decoder)
    if _scales_outputs(model.config):
        fields["final_norm"] = Scaled(decoder.final_layer_norm, model.config.d_model**-0.5)
    return Structure(
        encoder=model.get_encoder(),
        layers=tuple(_listed_decoder_layer(block.layer) for block in decoder.block),
        positions=_relative_positions(decoder),
        head=_head(model),
        logits_bias=None,
        **fields,
    )


def _scales_outputs(config: Any) -> bool:
    """Whether the decoder's outputs are scaled before the output layer; mT5's never are."""
    tied = config.model_type == "umt5" and config.tie_word_embeddings
    return bool(tied or getattr(config, "scale_decoder_outputs", False))


def _relative_positions(stack: Any, *, both_ways: bool = False) -> RelativePositions:
    attentions = [block.layer[0].SelfAttention for block in stack.block]
    return RelativePositions.of(attentions, both_ways=both_ways)


def _listed_stack(stack: Any) -> dict[str, Any]:
    return {
        "embedding": stack.embed_tokens,
        "embedding_scale": 1.0,
        "embedding_norm": None,
        "norm_first": True,
        "final_norm": stack.final_layer_norm,
    }


def _listed_decoder_layer(parts: Any) -> DecoderLayerParts:
    return DecoderLayerParts(
        cross=_listed_attention(parts[1].EncDecAttention),
        cross_norm=parts[1].layer_norm,
        **_listed_parts(parts),
    )


def _listed_parts(parts: Any) -> dict[str, Any]:
    mlp = parts[-1].DenseReluDense
    return {
        "attention": _listed_attention(parts[0].SelfAttention),
        "attention_norm": parts[0].layer_norm,
        "up": (mlp.wi_0, mlp.wi_1) if hasattr(mlp, "wi_0") else (mlp.wi,),
        "activation": mlp.act,
        "down": mlp.wo,
        "mlp_norm": parts[-1].layer_norm,
    }


def _listed_attention(part: Any) -> AttentionParts:
    return AttentionParts(part.q, part.k, part.v, part.o, int(part.n_heads), float(part.scaling))
