"""Embeddings are those of Transformers' last hidden states, pooled as the model's folder says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoConfig, AutoModelForCausalLM, OPTConfig

from tests.cli.conftest import ascii_tokenizer, save_tiny
from tests.engine.serving import assert_empty
from tokenleap import LLM, CompatibilityError, ModelError, SamplingParams
from tokenleap.runtime.target import final_norm

MODES = ("cls_token", "max_tokens", "mean_tokens", "weightedmean_tokens", "lasttoken")


def pooled_folder(folder: Path, *modes: str, normalizes: bool = True, **pooling: Any) -> Path:
    """The tiny model, as sentence-transformers would save it."""
    save_tiny(folder)
    steps = ["Transformer", "Pooling", *(["Normalize"] if normalizes else [])]
    kinds = [
        {"idx": index, "name": str(index), "path": f"{index}_{step}" if index else "", "type": kind}
        for index, step in enumerate(steps)
        if (kind := f"sentence_transformers.models.{step}")
    ]
    (folder / "modules.json").write_text(json.dumps(kinds))
    (folder / "1_Pooling").mkdir()
    fields = {f"pooling_mode_{mode}": mode in modes for mode in MODES} | pooling
    (folder / "1_Pooling/config.json").write_text(json.dumps(fields))
    return folder


def expected(folder: Path, ids: list[int]) -> dict[str, Tensor]:
    """The vector of each mode, from Transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder).model
    with torch.no_grad():
        states = model(torch.tensor([ids])).last_hidden_state[0]
    places = torch.arange(1.0, len(ids) + 1)
    return {
        "cls_token": states[0],
        "max_tokens": states.amax(0),
        "mean_tokens": states.mean(0),
        "weightedmean_tokens": places @ states / places.sum(),
        "lasttoken": states[-1],
    }


def test_all_modes_are_those_of_transformers(tmp_path: Path) -> None:
    folder = pooled_folder(tmp_path, *MODES, normalizes=False)
    llm = LLM(folder, dtype="float32", max_num_batched_tokens=16)  # a text comes in pieces
    text = "the quick brown fox jumps over the lazy dog, and again"
    (vector,) = llm.engine.embed([text])
    wanted = torch.cat(list(expected(folder, ascii_tokenizer().encode(text)).values()))
    assert vector.dtype == torch.float32
    torch.testing.assert_close(vector, wanted, rtol=1e-4, atol=1e-4)
    assert_empty(llm)


def test_bits_do_not_depend_on_neighbours_or_pieces(tmp_path: Path) -> None:
    folder = pooled_folder(tmp_path, "mean_tokens")
    texts = ["one text", "another one, which is longer than that", "x"]
    alone = [vector for text in texts for vector in LLM(folder).engine.embed([text])]
    llm = LLM(folder, max_num_batched_tokens=7, max_num_seqs=2)
    engine = llm.engine
    engine.add_request("hello", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    engine.step()
    together = engine.embed(texts)  # drives the other request, too
    while engine.has_unfinished_requests():
        engine.step()
    assert all(torch.equal(*pair) for pair in zip(alone, together, strict=True))
    for vector, text in zip(alone, texts, strict=True):
        wanted = expected(folder, ascii_tokenizer().encode(text))["mean_tokens"]
        assert vector.norm() == pytest.approx(1)
        assert vector @ normalize(wanted, dim=0) > 0.99  # the model may run in bfloat16
    assert_empty(llm)


def test_a_model_without_pooling_is_refused(tmp_path: Path) -> None:
    llm = LLM(save_tiny(tmp_path))
    with pytest.raises(CompatibilityError, match=r"makes no embeddings.*modules\.json"):
        llm.engine.embed(["a text"])


@pytest.mark.parametrize(
    ("kinds", "pooling", "error", "says"),
    [
        (["Transformer", "Pooling", "Dense"], {}, CompatibilityError, "Dense"),
        (["Transformer", "Pooling"], {}, CompatibilityError, r"pooling \[\]"),
        (["Transformer", "Pooling"], [], ModelError, r"config\.json"),
        ("no list", {}, ModelError, r"modules\.json"),
    ],
)
def test_a_wrong_folder_is_refused_in_one_line(
    tmp_path: Path, kinds: Any, pooling: Any, error: type[Exception], says: str
) -> None:
    folder = pooled_folder(tmp_path)
    steps = [{"path": f"{n}_{kind}", "type": f"x.{kind}"} for n, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(steps if isinstance(kinds, list) else kinds))
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    with pytest.raises(error, match=says) as caught:
        LLM(folder).engine.embed(["a text"])
    assert "\n" not in str(caught.value)


def test_a_text_beyond_the_models_own_limit_is_refused(tmp_path: Path) -> None:
    folder = pooled_folder(tmp_path, pooling_mode="lasttoken")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 5}')
    llm = LLM(folder)
    (vector,) = llm.engine.embed([[1, 2, 3, 4, 5]])
    assert vector.shape == (64,)
    with pytest.raises(ValueError, match="6 tokens, which leaves no room"):
        llm.engine.embed([[1, 2, 3, 4, 5, 6]])


def test_which_norm_comes_before_the_output_layer() -> None:
    """Not the last one that a module has, and none where a projection follows."""
    made: Any = AutoModelForCausalLM.from_config
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"vocab_size": 96, "max_position_embeddings": 64}
    projected = OPTConfig(**sizes, ffn_dim=64, word_embed_proj_dim=32)
    assert final_norm(made(projected)) is None
    sizes |= {"intermediate_size": 128, "num_key_value_heads": 1, "head_dim": 32}
    sizes |= {"global_head_dim": 32, "layer_types": ["full_attention"], "num_kv_shared_layers": 0}
    several = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96}
    norm: Any = final_norm(made(AutoConfig.for_model("gemma4_text", **sizes, **several)))
    assert norm.weight.shape == (64,)
