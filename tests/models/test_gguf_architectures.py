"""A GGUF file of every architecture computes the logits of the same Transformers model.

The files are written as llama.cpp's converter writes them (`convert_hf_to_gguf.py`): its names, its
order of query and key rows, and norms of Gemma plus one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.models.conftest import write_gguf
from tests.models.test_convert_tokenizer import sentencepiece_settings
from tests.tiny import reference_greedy
from tokenleap import LLM, SamplingParams
from tokenleap.core.tree import chain
from tokenleap.errors import ModelError
from tokenleap.models import cached, load_model, load_tokenizer, resolve
from tokenleap.models.gguf import ARCHITECTURES
from tokenleap.runtime.target import Target

CPU = torch.device("cpu")
HEADS, KEY_HEADS, HEAD_SIZE, CONTEXT = 4, 2, 32, 128
FLOATS = gguf.GGMLQuantizationType.F32
TOKENS = [3, 70, 150, 9, 201, 44, 8, 120, 77, 31, 5, 90]

EXPERTS = {"expert_count": 4, "expert_used_count": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # Transformers' type: llama.cpp's name, fields of the configuration, further settings
    "gemma2": (
        "gemma2",
        {"query_pre_attn_scalar": HEAD_SIZE, "sliding_window": 4},
        {
            "attention.sliding_window": 4,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3_text": (
        "gemma3",
        {
            "query_pre_attn_scalar": HEAD_SIZE,
            "sliding_window": 4,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "linear",
                    "factor": 8.0,
                    "rope_theta": 1e6,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
        {
            "attention.sliding_window": 4,
            "rope.freq_base": 1e6,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
    "phi3": (
        "phi3",
        {"sliding_window": 5, "original_max_position_embeddings": CONTEXT},
        {"attention.sliding_window": 5, "rope.scaling.original_context_length": CONTEXT},
    ),
    "granite": (
        "granite",
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
        {
            "attention.scale": 0.2,
            "embedding_scale": 3.0,
            "residual_scale": 0.5,
            "logit_scale": 2.0,
        },
    ),
    "olmo2": ("olmo2", {}, {}),
    "smollm3": ("smollm3", {}, {}),
    "llama": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 50_000.0,
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        },
        {},
    ),
    "qwen2_moe": (
        "qwen2moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 80,
        },
        {
            **EXPERTS,
            "expert_feed_forward_length": 48,
            "expert_shared_feed_forward_length": 80,
        },
    ),
    "qwen3_moe": (
        "qwen3moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
        },
        {**EXPERTS, "expert_feed_forward_length": 48},
    ),
    "mixtral": ("llama", {"num_local_experts": 4, "num_experts_per_tok": 2}, EXPERTS),
}
TOGETHER = {"phi3", "olmo2", "qwen2_moe"}
"""Families whose heads are together as wide as the hidden states."""
TIED = {"gemma2", "gemma3_text", "smollm3"}
PAIRS = {"granite", "smollm3", "mixtral", "llama"}
"""Families whose query and key rows the converter puts side by side."""


def _hidden_size(model_type: str) -> int:
    return HEADS * HEAD_SIZE if model_type in TOGETHER else 64


def made(model_type: str, vocabulary: int, layers: int) -> PreTrainedModel:
    fields = FAMILIES[model_type][1]
    config = AutoConfig.for_model(
        model_type,
        **{
            "vocab_size": vocabulary,
            "hidden_size": _hidden_size(model_type),
            "intermediate_size": 96,
            "num_hidden_layers": layers,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KEY_HEADS,
            "head_dim": HEAD_SIZE,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0},
            "tie_word_embeddings": model_type in TIED,
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
            **fields,
        },
    )
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # multiples of 2^-10, which stay exact when one is added
            parameter.normal_(0, 0.02 if "embed" in name else 0.1).mul_(1024).round_().div_(1024)
    model.train(False)
    return model


def tensors(model_type: str, model: PreTrainedModel) -> dict[str, np.ndarray[Any, Any]]:
    """The weights as llama.cpp's converter writes them."""
    architecture = FAMILIES[model_type][0]
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], model.config.num_hidden_layers)
    found = {"rope_freqs.weight": _divisors()} if model_type == "llama" else {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and model_type in TIED:
            continue
        stem, _, suffix = name.rpartition(".")
        weight = parameter.numpy()
        if ".experts." in name:
            halves = np.split(weight, 2, axis=1) if suffix == "gate_up_proj" else [weight]
            parts = ["gate", "up"] if suffix == "gate_up_proj" else ["down"]
            block = stem.split(".")[2]
            for part, half in zip(parts, halves, strict=True):
                found[f"blk.{block}.ffn_{part}_exps.weight"] = np.ascontiguousarray(half)
            continue
        if model_type.startswith("gemma") and name.endswith("norm.weight"):
            weight = weight + 1
        if model_type in PAIRS and stem.endswith(("q_proj", "k_proj")):
            heads = HEADS if stem.endswith("q_proj") else KEY_HEADS
            halves = weight.reshape(heads, 2, len(weight) // heads // 2, weight.shape[1])
            weight = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))
        to = f"{names.get_name(stem)}.{suffix}"
        found[to] = weight[0] if to.endswith("gate_inp_shexp.weight") else weight
    return found


def _divisors() -> np.ndarray[Any, Any]:
    """What llama.cpp's converter divides the angles of Llama 3.2 by."""
    found = []
    for dimension in range(0, HEAD_SIZE, 2):
        wavelength = 2 * math.pi * 50_000 ** (dimension / HEAD_SIZE)
        share = (8192 / wavelength - 1) / (4 - 1)
        found.append(1 / ((1 - share) / 32 + share) if 0 < share < 1 else 32 if share < 0 else 1)
    assert len(set(found)) > 3
    return np.array(found, np.float32)


SPLITS = {"granite": "refact", "olmo2": "dbrx", "smollm3": "llama-bpe", "llama": "llama-bpe"}
"""Tokenizers that the families' files name; others have that of Qwen2."""
SENTENCEPIECE = {"gemma2", "gemma3_text", "phi3", "mixtral"}


def _settings(model_type: str, layers: int, vocabulary: list[str]) -> dict[str, Any]:
    """All settings of a file."""
    architecture, _, more = FAMILIES[model_type]
    own = {
        "context_length": CONTEXT,
        "block_count": layers,
        "embedding_length": _hidden_size(model_type),
        "feed_forward_length": 96,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KEY_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.key_length": HEAD_SIZE,
        "attention.value_length": HEAD_SIZE,
        "rope.freq_base": 50_000.0,
        **more,
    }
    if model_type in SENTENCEPIECE:
        text = sentencepiece_settings(not model_type.startswith("gemma"))
    else:
        text = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": SPLITS.get(model_type, "qwen2"),
            "tokenizer.ggml.tokens": vocabulary,
            "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(vocabulary) - 3),
            "tokenizer.ggml.merges": ["Ġ t", "h e"],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.add_bos_token": False,
        }
    named = {f"{architecture}.{name}": value for name, value in own.items()}
    return {**named, **text, "tokenizer.ggml.eos_token_id": 2}


@pytest.fixture
def write(tmp_path: Path, byte_vocabulary: list[str]) -> Callable[..., tuple[Path, Any]]:
    """Writes a family's file; returns it and the model."""

    def make(
        model_type: str,
        layers: int = 2,
        kind: gguf.GGMLQuantizationType = FLOATS,
        **more: Any,
    ) -> tuple[Path, PreTrainedModel]:
        settings = _settings(model_type, layers, byte_vocabulary) | more
        model = made(model_type, len(settings["tokenizer.ggml.tokens"]), layers)
        path = tmp_path / f"{model_type}.gguf"
        weights = tensors(model_type, model)
        kinds = {
            name: kind if name != "token_embd.weight" and each.shape[1] % 32 == 0 else FLOATS
            for name, each in weights.items()
            if each.ndim == 2
        }
        write_gguf(path, FAMILIES[model_type][0], settings, weights, kinds)
        return path, model

    return make


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_same_logits(model_type: str, write: Any) -> None:
    # With 7 layers, Gemma 3 has one that sees all, and SmolLM3 one without positions.
    path, model = write(model_type, layers=7 if model_type in ("gemma3_text", "smollm3") else 2)
    loaded = load_model(resolve(path), torch.float32, CPU)
    assert type(loaded) is type(model)
    ids = torch.tensor([TOKENS])
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert loaded.generation_config is not None
    assert loaded.generation_config.eos_token_id == 2
    tokenizer = load_tokenizer(resolve(path))
    assert tokenizer is not None
    for text in ("the  then 12345", " it's\n\n\tI'LL (é🎉中文)"):
        decoded = tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True)
        assert decoded == text


NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=1)


@pytest.mark.usefixtures("own_cache")  # or the library would be compiled for the test's cache
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_speculation_changes_nothing(model_type: str, write: Any) -> None:
    path, model = write(model_type)
    llm = LLM(path, dtype="float32", speculative_config=NGRAM)
    assert llm.runtime != "native"
    (entry,) = cached()
    assert entry.runs == f"dequantized; {model_type} has no native runtime"
    (found,) = llm.generate([TOKENS], GREEDY)
    assert list(found.token_ids) == reference_greedy(model, TOKENS, 8)


NATIVE = {each.model_type for each in ARCHITECTURES if each.native} & FAMILIES.keys()


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("model_type", sorted(NATIVE))
def test_it_runs_in_its_own_numbers(model_type: str, write: Any) -> None:
    layers = 4 if model_type == "smollm3" else 2  # the fourth has no positions
    path, _ = write(model_type, layers=layers, kind=gguf.GGMLQuantizationType.Q8_0)
    own = LLM(path, dtype="float32", speculative_config=NGRAM)
    assert own.runtime == "native"
    assert own.bit_exact
    (entry,) = cached()
    assert entry.runs is not None
    assert "Q8_0 as int8" in entry.runs
    assert "rounded" not in entry.runs
    (found,), (plain,) = (
        llm.generate([TOKENS], GREEDY) for llm in (own, LLM(path, dtype="float32"))
    )
    assert found.token_ids == plain.token_ids
    assert found.logprobs == plain.logprobs
    whole = load_model(resolve(path), torch.float32, CPU)
    target: Target = own.engine.target
    target.add(-1)
    scores = target.verify([-1], [chain(TOKENS)])[0].scores
    with torch.no_grad():
        expected = whole(torch.tensor([TOKENS])).logits[0]
    assert (scores - expected).abs().mean() < 0.05 * expected.std()  # inputs are rounded to int8


def test_mistral_is_no_mixtral(write: Any) -> None:
    path, _ = write("mixtral", **{"llama.expert_count": None, "llama.expert_used_count": None})
    with pytest.raises(ModelError, match=r"lacks .*, blk\.0\.ffn_down\.weight"):
        resolve(path)


@pytest.mark.parametrize("pattern", [3, [True, True, False, True]])
def test_a_pattern_of_windows(pattern: Any, write: Any) -> None:
    settings = {
        "gemma3.attention.sliding_window_pattern": pattern,
        "gemma3.rope.freq_base_swa": 5e4,
    }
    path, _ = write("gemma3_text", layers=4, **settings)
    config: Any = AutoConfig.from_pretrained(resolve(path))
    see = ["full" if each == "full_attention" else "window" for each in config.layer_types]
    assert see == ["window", "window", "full", "window"]
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 5e4


def test_a_stretched_context_is_refused(write: Any) -> None:
    settings = {"phi3.rope.scaling.original_context_length": 64}
    with pytest.raises(ModelError, match="stretches its context"):
        resolve(write("phi3", **settings)[0])


def test_a_setting_that_differs_between_layers_is_refused(write: Any) -> None:
    settings = {"granite.attention.head_count_kv": [1, 2]}
    with pytest.raises(ModelError, match=r"another attention\.head_count_kv in each layer"):
        resolve(write("granite", **settings)[0])
