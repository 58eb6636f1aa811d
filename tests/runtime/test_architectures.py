"""The types of models that docs/models.md lists run as it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.tiny import CONTEXT, GPT2, GROUPED, LAYERS, VOCAB_SIZE, reference_greedy
from tokenleap import LLM, SamplingParams

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
PROMPT = [(7 * i * i + 3 * i) % VOCAB_SIZE for i in range(30)]
PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)

WINDOWED: dict[str, Any] = {**GROUPED, "sliding_window": 8}
NARROW: dict[str, Any] = {**GROUPED, "head_dim": 16}
HEADS: dict[str, Any] = {"head_dim": 32}  # as wide as the native runtime takes
WIDE: dict[str, Any] = {**WINDOWED, "hidden_size": 128}
GEMMA: dict[str, Any] = {**NARROW, "sliding_window": 8, "tie_word_embeddings": False}
LATE: dict[str, Any] = {"use_sliding_window": True, "max_window_layers": 1}
EXPERTS: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
FALCON: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GEMMA3N: dict[str, Any] = {
    **GEMMA,
    "intermediate_size": [128, 128],
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    "num_kv_shared_layers": 0,
    "activation_sparsity_pattern": [0.0, 0.0],
}
OPT: dict[str, Any] = {
    "hidden_size": 64,
    "ffn_dim": 128,
    "word_embed_proj_dim": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "init_std": 0.25,
}

FIELDS: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "mistral": WIDE,
    "qwen2": {**WIDE, **LATE},
    "qwen3": {**WIDE, **LATE, "head_dim": 32},
    "apertus": GROUPED,
    "arcee": GROUPED,
    "cohere": GROUPED,
    "cohere2": {**WINDOWED, "sliding_window_pattern": 2},
    "ernie4_5": NARROW,
    "exaone4": {**WINDOWED, "sliding_window_pattern": 2},
    "gemma": {**NARROW, **HEADS},
    "gemma2": {**GEMMA, **HEADS, "attn_logit_softcapping": 2.0},
    "gemma3_text": {**GEMMA, **HEADS, "sliding_window_pattern": 2},
    "gemma3n_text": GEMMA3N,
    "glm": NARROW,
    "glm4": NARROW,
    "gpt2": GPT2,
    "gpt_bigcode": GPT2,
    "gpt_neox": LAYERS,
    "granite": {**GROUPED, "hidden_size": 128, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    "granite_swa": WINDOWED,
    "helium": NARROW,
    "hunyuan_v1_dense": NARROW,
    "ministral": {**NARROW, "sliding_window": 8},
    "ministral3": {**NARROW, "sliding_window": 8},
    "nemotron": GROUPED,
    "olmo": GROUPED,
    "olmo2": {**GROUPED, "hidden_size": 128},
    "olmo3": WINDOWED,
    "opt": OPT,
    "persimmon": LAYERS,
    "phi": LAYERS,
    "phi3": WIDE,
    "seed_oss": NARROW,
    "smollm3": {**WIDE, **LATE},
    "starcoder2": WINDOWED,
    "vaultgemma": {**GEMMA, "attn_logit_softcapping": 2.0},
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4},
    "falcon": {**FALCON, "alibi": True},
    "mpt": {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": CONTEXT},
    "gpt_oss": {**GEMMA, **EXPERTS},
    "llama4_text": {**NARROW, **EXPERTS, "num_experts_per_tok": 1, "attention_chunk_size": 8},
    "mixtral": {**WINDOWED, **EXPERTS},
    "phimoe": {**WINDOWED, **EXPERTS},
    "qwen2_moe": {**WINDOWED, **LATE, **EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {**WINDOWED, **LATE, **EXPERTS},
}
"""Fields of the configurations, by type."""


def model_of(model_type: str) -> PreTrainedModel:
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    fields = {"initializer_range": 0.25, **special, **FIELDS[model_type]}
    config = AutoConfig.for_model(model_type, vocab_size=VOCAB_SIZE, **fields)
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    model.train(False)
    return model


def networks() -> dict[str, str]:
    """Type -> what the page says of its network."""
    table = PAGE.read_text(encoding="utf-8").split("| network | types |")[1].split("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    return {kind: row[0] for row in rows for kind in re.findall(r"`(\w+)`", row[1])}


def test_the_page_lists_what_is_tested() -> None:
    assert set(networks()) == set(FIELDS)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", FIELDS)
def test_greedy_output_is_that_of_generate(model_type: str) -> None:
    model, prompts = model_of(model_type), [PROMPT, PROMPT[:5]]
    expected = [reference_greedy(model, prompt, 16) for prompt in prompts]
    trees = {"model": model, "tree": [2, 1, 1]}
    lookups = {"method": "ngram", "prompt_lookup_min": 1}
    for drafting in (trees, lookups):
        llm = LLM(model, speculative_config={**drafting, "controller": "fixed"})
        outputs = llm.generate(prompts, PARAMS)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    native = networks()[model_type].startswith("native")
    assert (llm.runtime in ("native", "lean")) == native
    assert llm.bit_exact or "bits are not promised" in networks()[model_type]
