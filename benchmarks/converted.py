"""Checkpoints of fairseq and of `nn.Transformer`, as Transformers models.

fairseq pickles its options with the weights. The unpickler here makes stubs of every class that is
not PyTorch's or from `collections`, so fairseq is not needed. Read only files that you trust: this
is no protection.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GenerationConfig,
    M2M100Config,
    M2M100ForConditionalGeneration,
)

__all__ = ["converted_fairseq", "converted_stress", "fairseq_words", "joint_vocabulary"]

BOS, PAD, EOS, UNKNOWN = 0, 1, 2, 3
"""fairseq's special tokens."""


# fairseq


class _Stub:
    """Placeholder for an object of an unknown class."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] in ("torch", "collections"):
            return super().find_class(module, name)
        return type(name, (_Stub,), {})


_PICKLE = SimpleNamespace(
    __name__="stubs",
    Unpickler=_Unpickler,
    load=lambda file, **options: _Unpickler(file, **options).load(),
)


def joint_vocabulary(source: Path, target: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Word -> id of sources and of outputs, from fairseq's two dictionaries.

    The converted model has one embedding: ids of outputs come first, those of sources after them.
    The special tokens are those of the outputs.
    """
    reads, writes = (
        [line.rsplit(" ", 1)[0] for line in path.read_text("utf-8").splitlines() if line]
        for path in (source, target)
    )
    width = _padded(len(writes) + 4)
    return (
        {word: width + 4 + index for index, word in enumerate(reads)},
        {word: 4 + index for index, word in enumerate(writes)},
    )


def _padded(count: int) -> int:
    """Fairseq pads vocabularies to a multiple of 8."""
    return -(-count // 8) * 8


def converted_fairseq(checkpoint: Path, folder: Path) -> None:
    """Write a pre-norm fairseq Transformer with sinusoidal positions as an M2M100 folder.

    The two embeddings become one table. Output rows of source tokens are zero, and these tokens are
    suppressed. Sources end with EOS, with which the decoder starts, too.
    """
    loaded: Any = torch.load(
        checkpoint, map_location="cpu", pickle_module=_PICKLE, weights_only=False
    )
    weights: dict[str, Tensor] = loaded["model"]
    encoder, decoder = (weights[f"{side}.embed_tokens.weight"] for side in ("encoder", "decoder"))
    layers = {
        side: 1 + max(int(n.split(".")[2]) for n in weights if n.startswith(f"{side}.layers."))
        for side in ("encoder", "decoder")
    }
    size, width = len(encoder) + len(decoder), encoder.shape[1]
    config = M2M100Config(
        vocab_size=size,
        d_model=width,
        encoder_layers=layers["encoder"],
        decoder_layers=layers["decoder"],
        encoder_ffn_dim=len(weights["encoder.layers.0.fc1.weight"]),
        decoder_ffn_dim=len(weights["decoder.layers.0.fc1.weight"]),
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        max_position_embeddings=1024,
        activation_function="relu",
        scale_embedding=True,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
        bos_token_id=BOS,
        pad_token_id=PAD,
        eos_token_id=EOS,
        decoder_start_token_id=EOS,
        tie_word_embeddings=False,
    )
    model: Any = M2M100ForConditionalGeneration(config)
    table = torch.cat([decoder, encoder])
    special = encoder[: UNKNOWN + 1]
    own = model.state_dict()
    shared = {f"model.{name}": weight for name, weight in weights.items() if f"model.{name}" in own}
    # Sources have special tokens of their own, whose rows the encoder's table keeps.
    read = table.clone()
    read[: UNKNOWN + 1] = special
    shared["model.encoder.embed_tokens.weight"] = read
    shared["model.decoder.embed_tokens.weight"] = table
    shared["model.shared.weight"] = table
    head = torch.zeros(size, width)
    head[: len(decoder)] = weights["decoder.output_projection.weight"]
    shared["lm_head.weight"] = head
    missing = model.load_state_dict(shared, strict=False).missing_keys
    assert not missing, missing
    make: Any = GenerationConfig
    model.generation_config = make(
        bos_token_id=BOS,
        pad_token_id=PAD,
        eos_token_id=EOS,
        decoder_start_token_id=EOS,
        suppress_tokens=list(range(len(decoder), size)),
        renormalize_logits=True,
    )
    model.save_pretrained(folder)


def fairseq_words(text: str, codes: Path) -> list[str]:
    """The subwords of subword-nmt's byte-pair encoding: all but a word's last one end with "@@"."""
    lines = codes.read_text("utf-8").splitlines()[1:]
    ranks = {tuple(line.split(" ")): rank for rank, line in enumerate(lines)}
    found: list[str] = []
    for word in text.split():
        parts = [*word[:-1], word[-1] + "</w>"]
        while len(parts) > 1:
            pairs = list(itertools.pairwise(parts))
            best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)))
            if best not in ranks:
                break
            merged: list[str] = []
            for part in parts:
                if merged and (merged[-1], part) == best:
                    merged[-1] += part
                else:
                    merged.append(part)
            parts = merged
        found += [f"{part}@@" for part in parts[:-1]]
        found.append(parts[-1].removesuffix("</w>"))
    return found


# nn.Transformer


def converted_stress(weights: Mapping[str, Tensor]) -> BartForConditionalGeneration:
    """The stress marker of `ruaccent-predictor` as a BART.

    `nn.Transformer` has a norm after each stack although its layers end with norms. BART has none
    there, so the last layer's norm is both. That is no class of its own, so this model cannot be
    written as a folder.
    """
    size, width = weights["embed.char_embed.weight"].shape
    positions = weights["embed.pos_encoding"][0]
    config = BartConfig(
        vocab_size=size,
        d_model=width,
        encoder_layers=4,
        decoder_layers=4,
        encoder_ffn_dim=len(weights["transformer.encoder.layers.0.linear1.weight"]),
        decoder_ffn_dim=len(weights["transformer.decoder.layers.0.linear1.weight"]),
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        max_position_embeddings=len(positions),
        activation_function="relu",
        scale_embedding=True,
        dropout=0.0,
        bos_token_id=1,
        pad_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=1,
        forced_eos_token_id=None,
        tie_word_embeddings=False,
    )
    model: Any = BartForConditionalGeneration(config)
    own: dict[str, Tensor] = {}
    for side in ("encoder", "decoder"):
        for layer in range(4):
            theirs = f"transformer.{side}.layers.{layer}."
            ours = f"model.{side}.layers.{layer}."
            own |= _attention(weights, f"{theirs}self_attn.", f"{ours}self_attn.")
            norms = {"self_attn_layer_norm": "norm1", "final_layer_norm": "norm2"}
            if side == "decoder":
                own |= _attention(weights, f"{theirs}multihead_attn.", f"{ours}encoder_attn.")
                norms = {**norms, "encoder_attn_layer_norm": "norm2", "final_layer_norm": "norm3"}
            for name, given in {**norms, "fc1": "linear1", "fc2": "linear2"}.items():
                for part in ("weight", "bias"):
                    own[f"{ours}{name}.{part}"] = weights[f"{theirs}{given}.{part}"]
        unused = torch.zeros(2, width)
        own[f"model.{side}.embed_positions.weight"] = torch.cat([unused, positions])
        own[f"model.{side}.embed_tokens.weight"] = weights["embed.char_embed.weight"]
    own["model.shared.weight"] = weights["embed.char_embed.weight"]
    own["lm_head.weight"] = weights["output_proj.weight"]
    own["final_logits_bias"] = weights["output_proj.bias"][None]
    missing, unknown = model.load_state_dict(own, strict=False)
    assert not unknown, unknown
    assert all("layernorm_embedding" in name for name in missing), missing
    for side in ("encoder", "decoder"):
        stack = getattr(model.model, side)
        stack.layernorm_embedding = nn.Identity()
        last = nn.LayerNorm(width)
        last.load_state_dict(
            {part: weights[f"transformer.{side}.norm.{part}"] for part in ("weight", "bias")}
        )
        layer = stack.layers[-1]
        layer.final_layer_norm = nn.Sequential(layer.final_layer_norm, last)
    bart: BartForConditionalGeneration = model.train(False)
    return bart


def _attention(weights: Mapping[str, Tensor], theirs: str, ours: str) -> dict[str, Tensor]:
    """Query, key and value from one matrix."""
    found = {
        f"{ours}out_proj.{part}": weights[f"{theirs}out_proj.{part}"] for part in ("weight", "bias")
    }
    for part in ("weight", "bias"):
        thirds = weights[f"{theirs}in_proj_{part}"].chunk(3)
        for name, third in zip("qkv", thirds, strict=True):
            found[f"{ours}{name}_proj.{part}"] = third
    return found
