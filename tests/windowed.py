"""Tiny random models with attention windows, capped scores, sinks or ALiBi."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tests.tiny import CONTEXT, GROUPED, VOCAB_SIZE

WINDOW = 8
SLIDING: dict[str, Any] = {**GROUPED, "sliding_window": WINDOW}
NATIVE: dict[str, Any] = {**SLIDING, "hidden_size": 128}  # heads as wide as the C++ code takes
LATE: dict[str, Any] = {"use_sliding_window": True, "max_window_layers": 1}
GEMMA: dict[str, Any] = {**SLIDING, "head_dim": 16, "tie_word_embeddings": False}
EXPERTS: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
}
ALIBI: dict[str, Any] = {"hidden_size": 96, "initializer_range": 0.25}
FALCON: dict[str, Any] = {**ALIBI, "num_hidden_layers": 2, "num_attention_heads": 6}
CHUNKS: dict[str, Any] = {**GROUPED, "attention_chunk_size": WINDOW, "intermediate_size_mlp": 64}

WINDOWED: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", NATIVE),
    "qwen2": ("qwen2", {**NATIVE, **LATE}),
    "qwen3": ("qwen3", {**NATIVE, **LATE, "head_dim": 32}),
    "gemma2": ("gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 24}),
    "gemma3": ("gemma3_text", {**GEMMA, "sliding_window_pattern": 2}),
    "phi3": ("phi3", SLIDING),
    "cohere2": ("cohere2", {**SLIDING, "sliding_window_pattern": 2}),
    "gpt_oss": ("gpt_oss", {**SLIDING, **EXPERTS, "head_dim": 16}),
    "llama4": ("llama4_text", {**CHUNKS, **EXPERTS, "num_experts_per_tok": 1, "head_dim": 16}),
}
"""By name: the type, and the fields of its configuration."""

OWN_ATTENTION: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("bloom", {**ALIBI, "n_layer": 2, "n_head": 6}),
    "mpt": ("mpt", {"d_model": 96, "n_layers": 2, "n_heads": 6, "max_seq_len": CONTEXT}),
    "falcon": ("falcon", FALCON),
    "falcon, alibi": ("falcon", {**FALCON, "alibi": True, "multi_query": False, "bias": True}),
    "falcon, grouped": ("falcon", {**FALCON, "num_kv_heads": 3, "new_decoder_architecture": True}),
}


def windowed_config(name: str, **overrides: Any) -> PreTrainedConfig:
    """The configuration of a model of `WINDOWED` or `OWN_ATTENTION`."""
    model_type, fields = {**WINDOWED, **OWN_ATTENTION}[name]
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    return AutoConfig.for_model(
        model_type, vocab_size=VOCAB_SIZE, **{**special, **fields, **overrides}
    )


def windowed_model(
    name: str, dtype: torch.dtype = torch.float32, **overrides: Any
) -> PreTrainedModel:
    """A model of `WINDOWED` or `OWN_ATTENTION`; the same arguments give the same weights."""
    config = windowed_config(name, **overrides)
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith(("sinks", "Wqkv.weight", "wte.weight")):
            torch.nn.init.normal_(parameter, std=0.5)
    model.train(False)
    return model
