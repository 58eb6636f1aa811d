"""Tiny random models of real Transformers classes, big enough in spread that context matters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tokenleap.runtime.cpu import linear_layer
from tokenleap.runtime.network import Network
from tokenleap.runtime.passes import Passes

VOCAB_SIZE = 96
CONTEXT = 256

LAYERS: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.25,
}
GROUPED = {**LAYERS, "num_key_value_heads": 2}
GPT2 = {
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 4,
    "n_positions": CONTEXT,
    "initializer_range": 0.25,
}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**GROUPED, "head_dim": 32}),  # runs natively, where that is possible
    "lean": ("llama", GROUPED),  # its heads are too narrow for that
    "qwen2": ("qwen2", GROUPED),
    "qwen3": ("qwen3", {**GROUPED, "head_dim": 16}),
    "mistral": ("mistral", {**GROUPED, "sliding_window": None}),
    "gpt2": ("gpt2", GPT2),
    "gpt_neox": ("gpt_neox", LAYERS),
    "gemma": ("gemma", {**GROUPED, "head_dim": 16}),
    "phi": ("phi", LAYERS),
}


def needs_packed(dtype: torch.dtype) -> None:
    """Skip a test if PyTorch has no packed layers of this dtype on this processor."""
    if linear_layer(dtype, torch.device("cpu"), None) is None:
        pytest.skip(f"PyTorch packs no layers in {dtype} on this processor")


def tiny_model(
    architecture: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    vocab_size: int = VOCAB_SIZE,
    **overrides: Any,
) -> PreTrainedModel:
    """A model with random weights; the same arguments give the same weights."""
    model_type, fields = ARCHITECTURES[architecture]
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = AutoConfig.for_model(
        model_type, vocab_size=vocab_size, **{**special, **fields, **overrides}
    )
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    model.train(False)
    return model


def passes_of(model: PreTrainedModel, network: Network, *prompts: list[int]) -> Passes:
    """Rows 0, 1, ... of a network of this model, with these prompts."""
    passes = Passes(network, CONTEXT, model.dtype, torch.device("cpu"))
    for key, prompt in enumerate(prompts):
        passes.add(key)
        passes.prefill(key, prompt)
    return passes


def reference_greedy(model: PreTrainedModel, prompt: list[int], max_tokens: int) -> list[int]:
    """The output of Transformers' `generate()`."""
    ids = torch.tensor([prompt])
    output = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, and 95 is special: `VOCAB_SIZE` in all."""
    # Byte-level BPE writes Ġ for a space.
    names = ["Ġ", *(chr(code) for code in range(33, 127)), "<special>"]
    model = BPE(vocab={name: index for index, name in enumerate(names)}, merges=[])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<special>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]
