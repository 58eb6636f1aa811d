"""Tiny random encoder-decoders of real Transformers classes, which do read their sources."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers import AutoModelForSeq2SeqLM as TextModel
from transformers import AutoModelForSpeechSeq2Seq as SpeechModel

from tokenleap.core.references import Source

VOCAB_SIZE = 96
SOURCE_LIMIT = CONTEXT = 256
FRAMES = 40  # of audio; the encoder halves them
BINS = 8

STACKS: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "init_std": 0.5,
}
BART: dict[str, Any] = {
    **STACKS,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
T5: dict[str, Any] = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 3,
    "num_decoder_layers": 3,  # generate() fails if the stacks differ
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "initializer_factor": 3.0,
}
MARIAN = {"pad_token_id": 95, "eos_token_id": 0, "decoder_start_token_id": 95}
PEGASUS = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
AUDIO = {
    **STACKS,
    "num_mel_bins": BINS,
    "max_source_positions": FRAMES // 2,
    "max_target_positions": CONTEXT,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}

WIDE: dict[str, Any] = {
    "d_model": 64,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
}
WIDE_T5: dict[str, Any] = {"d_model": 64, "d_kv": 32}
"""Fields for sizes that the native runtime supports."""

CALM = {"init_std": 0.35}
"""Wide layers add up more numbers, so weights are smaller for sums of the same size."""

SEQ2SEQ: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": ("bart", {**BART, "forced_eos_token_id": 2, "scale_embedding": True}),
    "bart_wide": ("bart", {**BART, **WIDE, **CALM, "forced_eos_token_id": 2}),
    "mbart": ("mbart", {**BART, "forced_eos_token_id": 2}),
    "mbart_wide": ("mbart", {**BART, **WIDE, **CALM, "forced_eos_token_id": 2}),
    "marian": ("marian", {**BART, **MARIAN, "forced_eos_token_id": 0, "scale_embedding": True}),
    "m2m_100": ("m2m_100", BART),
    "pegasus": ("pegasus", {**BART, **PEGASUS, "forced_eos_token_id": 1}),
    "t5": ("t5", T5),
    "t5_v1_1": ("t5", {**T5, **GATED}),
    "umt5": ("umt5", {**T5, **GATED}),
    "t5_wide": ("t5", {**T5, **WIDE_T5, "initializer_factor": 2.0}),
    "whisper": ("whisper", AUDIO),
}
"""Name -> model type and fields of its configuration."""

NATIVE = tuple(name for name in SEQ2SEQ if not name.endswith("_wide"))
"""The ones to widen by `wide_fields`, so that the native runtime can run them."""

TEXT = tuple(name for name in SEQ2SEQ if name != "whisper")
"""The ones that read text."""


def wide_fields(name: str) -> dict[str, Any]:
    """Fields of one of `NATIVE` for sizes that the native runtime supports.

    Weights are small enough not to magnify rounding errors from layer to layer.
    """
    if "t5" in name:
        return {**WIDE_T5, "initializer_factor": 1.5}
    return {**WIDE, "init_std": 0.25}


def seq2seq_config(name: str, *, vocab_size: int = VOCAB_SIZE, **overrides: Any) -> Any:
    """The configuration of one of `SEQ2SEQ`."""
    model_type, fields = SEQ2SEQ[name]
    return AutoConfig.for_model(model_type, vocab_size=vocab_size, **{**fields, **overrides})


def tiny_seq2seq(
    name: str = "bart",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    eos_bias: float = 0.0,
    **overrides: Any,
) -> PreTrainedModel:
    """A model with random weights; the same arguments give the same weights.

    Args:
        name: one of `SEQ2SEQ`.
        seed: of the weights.
        dtype: of the weights.
        eos_bias: added to the logit of the token that ends the output. It stays in memory: the
            classes without a logits bias do not save it.
        **overrides: fields of the configuration.
    """
    config: PreTrainedConfig = seq2seq_config(name, **overrides)
    torch.manual_seed(seed)
    kind: Any = SpeechModel if config.model_type == "whisper" else TextModel
    model: Any = kind.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or "bias" in parameter_name:  # else ones and zeros
                parameter.add_(0.1 * torch.randn(parameter.shape))
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.normal_(std=0.3)
    if eos_bias:
        _add_to_logit(model, config.eos_token_id, eos_bias)
    model.train(False).requires_grad_(False)
    tiny: PreTrainedModel = model
    return tiny


def _add_to_logit(model: Any, token: int | list[int] | None, bias: float) -> None:
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias[:, token] += bias
        return
    head = model.get_output_embeddings()
    head.bias = nn.Parameter(torch.zeros(head.out_features, dtype=head.weight.dtype))
    with torch.no_grad():
        head.bias[token] = bias


def tiny_source(name: str = "bart", length: int = 9, seed: int = 1) -> Source:
    """A random source for a model of `SEQ2SEQ`; audio always has `FRAMES` frames."""
    generator = torch.Generator().manual_seed(seed)
    if name == "whisper":
        return Source.of_audio(torch.randn(BINS, FRAMES, generator=generator))
    tokens = torch.randint(5, VOCAB_SIZE - 2, (length,), generator=generator)
    return Source(tuple(tokens.tolist()))


def reference_logits(model: PreTrainedModel, source: Source, tokens: list[int]) -> Tensor:
    """[n, V] of the model's own forward pass over n tokens of the decoder."""
    inputs = source.inputs(model.device, model.dtype)
    with torch.inference_mode():
        logits: Tensor = model(**inputs, decoder_input_ids=torch.tensor([tokens])).logits[0]
    return logits


def reference_outputs(
    model: PreTrainedModel, source: Source, max_tokens: int, **options: Any
) -> list[int]:
    """The output of `generate()` after the decoder's start token, greedy by default."""
    settings = {"max_new_tokens": max_tokens, "do_sample": False, "num_beams": 1, **options}
    inputs = source.inputs(model.device, model.dtype)
    output = model.generate(**inputs, **settings)  # type: ignore[operator]
    tokens: list[int] = output[0].tolist()
    return tokens if source.features is not None else tokens[1:]  # Whisper's cuts the start itself
