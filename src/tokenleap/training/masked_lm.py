"""The networks of Spec-Drafters: encoder-decoders with a token for masks.

Masks differ by their positions alone, so the decoder learns its positions, also those of classes
that keep them fixed (Marian, Pegasus).

A drafter has the class of its target, so that it can start from the target's encoder. T5's relative
positions cannot tell later masks apart, so drafters of T5 are BARTs.
"""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForSeq2SeqLM, BartConfig, PreTrainedConfig, PreTrainedModel

from tokenleap.errors import CompatibilityError, ConfigError

__all__ = ["copy_target", "new_masked_lm"]

_WIDTHS = (
    *("d_model", "encoder_ffn_dim", "decoder_ffn_dim"),
    *("encoder_attention_heads", "decoder_attention_heads"),
)
_SPECIAL = (
    *("bos_token_id", "eos_token_id", "pad_token_id"),
    *("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id"),
)
_T5_POSITIONS = 1024
"""T5 has no limit; the drafter of one does not draft for longer texts."""


def new_masked_lm(
    target: PreTrainedConfig,
    vocab_size: int,
    num_masks: int,
    shape: str,
    *,
    halved: bool = False,
    dropout: float = 0.1,
    own_encoder: bool = True,
) -> PreTrainedModel:
    """A drafter with random weights, in float32.

    Args:
        target: the configuration of the target.
        vocab_size: V, of the target's outputs. The mask is token V.
        num_masks: k; there are positions for so many masks behind the longest text.
        shape: of a target with E encoder and D decoder layers: `full` has 2E and 2, `balanced`
            E + 1 and D + 1, `small` E and 2.
        halved: whether all widths are half of the target's.
        dropout: of the layers.
        own_encoder: whether it has an encoder. Without one, what belongs to an encoder alone has no
            gradients, since nothing reads it.

    Raises:
        CompatibilityError: there are no drafters for this architecture.
        ConfigError: its widths cannot be halved.
    """
    config: Any = _like_bart(target)
    encoder, decoder = config.encoder_layers, config.decoder_layers
    shapes = {"full": (2 * encoder, 2), "balanced": (encoder + 1, decoder + 1)}
    config.encoder_layers, config.decoder_layers = shapes.get(shape, (encoder, 2))
    if not own_encoder:
        config.encoder_layers = 0
    config.num_hidden_layers = config.encoder_layers
    config.max_position_embeddings += num_masks
    if getattr(config, "share_encoder_decoder_embeddings", True):
        config.vocab_size = vocab_size + 1
    if getattr(config, "decoder_vocab_size", None) is not None:
        config.decoder_vocab_size = vocab_size + 1
    config.dropout = dropout
    config.encoder_layerdrop = config.decoder_layerdrop = 0.0
    if halved:
        _halve(config)
    kind: Any = AutoModelForSeq2SeqLM
    lm: Any = kind.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    if not own_encoder:
        _freeze_encoder(lm)
    positions = lm.get_decoder().embed_positions
    if isinstance(positions, nn.Embedding):
        positions.weight.requires_grad_(True)
        lm._keys_to_ignore_on_save = None  # Marian would leave them out
    return cast(PreTrainedModel, lm)


def _freeze_encoder(lm: Any) -> None:
    """Learn nothing in what neither the decoder nor the output layer reads."""
    read = {
        id(w) for part in (lm.get_decoder(), lm.get_output_embeddings()) for w in part.parameters()
    }
    for weight in lm.parameters():
        weight.requires_grad_(id(weight) in read)


def _like_bart(target: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of a configuration with the fields of BART's."""
    if target.model_type == "whisper":
        raise CompatibilityError("a Spec-Drafter reads text, and this target reads audio.")
    if hasattr(target, "encoder_layers"):
        return deepcopy(target)
    given: Any = target
    special: dict[str, Any] = {name: getattr(target, name, None) for name in _SPECIAL}
    return BartConfig(
        vocab_size=given.vocab_size,
        d_model=given.d_model,
        encoder_layers=given.num_layers,
        decoder_layers=given.num_decoder_layers,
        encoder_attention_heads=given.num_heads,
        decoder_attention_heads=given.num_heads,
        encoder_ffn_dim=given.d_ff,
        decoder_ffn_dim=given.d_ff,
        max_position_embeddings=_T5_POSITIONS,
        **special,
    )


def _halve(config: Any) -> None:
    for name in _WIDTHS:
        width = getattr(config, name)
        if width % 2:
            raise ConfigError(f"size: the target's {name} is {width}, which cannot be halved.")
        setattr(config, name, width // 2)


@torch.no_grad()
def copy_target(target: PreTrainedModel, lm: PreTrainedModel) -> None:
    """Start from a target's encoder, embeddings, and some of its decoder layers.

    Decoder layers come from all depths of the target's, the first and the last among them: they
    have learnt which tokens of the source matter, which takes a decoder longest. Further layers
    stay random.

    Args:
        target: the target.
        lm: a drafter of the same class and width, which is changed.

    Raises:
        CompatibilityError: the drafter is of another class.
    """
    if type(target) is not type(lm):
        raise CompatibilityError(
            f"from_target: a drafter of {type(target).__name__} is a {type(lm).__name__}, which "
            "cannot have its layers: set it to false."
        )
    given = target.state_dict()
    depths = _spread(lm.config.decoder_layers, target.config.decoder_layers)
    for name, weight in lm.state_dict().items():
        source = _DECODER_LAYER.sub(lambda found: f"{found[1]}{depths[int(found[2])]}.", name)
        if source in given:
            # There is one token more, and there are more positions.
            places = tuple(slice(size) for size in given[source].shape)
            weight[places] = given[source].to(weight)


_DECODER_LAYER = re.compile(r"(decoder\.layers\.)(\d+)\.")


def _spread(count: int, depth: int) -> list[int]:
    """So many of `depth` layers, evenly spread; beyond that, layers that are not there."""
    if count > depth:
        return list(range(count))
    return [round(place * (depth - 1) / max(1, count - 1)) for place in range(count)]
