"""Self-drafting: what is left out is left out, on the target's own KV."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.drafting import drafter_of, request_of, tokens_of
from tests.matrix import PROMPTS, tiny_llm
from tests.tiny import VOCAB_SIZE, tiny_model
from tokenleap import CompatibilityError, ConfigError, SamplingParams, SpeculativeConfig


def first_draft(method: str, **fields: Any) -> tuple[int, ...]:
    """Greedy draft of four tokens after the first prompt."""
    llm = tiny_llm(tiny_model(num_hidden_layers=4), method, **fields)
    request = request_of(PROMPTS[0], SamplingParams(temperature=0), VOCAB_SIZE)
    llm.engine.target.add(request.key)
    llm.engine.target.prefill(request.key, request.token_ids[:-1])
    return tuple(tokens_of(drafter_of(llm), request, 4))


def greedy_of_the_first(layers: int) -> tuple[int, ...]:
    """The same from a model cut by hand, token by token and without a cache."""
    model = tiny_model(num_hidden_layers=4)
    del model.model.layers[layers:]
    tokens = list(PROMPTS[0])
    for _ in range(4):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tuple(tokens[len(PROMPTS[0]) :])


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_an_exit_is_the_first_layers_with_norm_and_head(layers: int) -> None:
    assert first_draft("early_exit", exit_layer=layers) == greedy_of_the_first(layers)


def test_half_of_the_layers_by_default() -> None:
    assert first_draft("early_exit") == first_draft("early_exit", exit_layer=2)


def test_skipping_the_last_layers_whole_is_an_exit() -> None:
    skipped = first_draft("layer_skip", skip_attention=[2, 3], skip_mlp=[2, 3])
    assert skipped == first_draft("early_exit", exit_layer=2)


def test_every_second_layer_by_default() -> None:
    skipped = first_draft("layer_skip", skip_attention=[1], skip_mlp=[1])
    assert first_draft("layer_skip") == skipped


def test_weights_and_cache_are_there_once() -> None:
    llm = tiny_llm(tiny_model("lean"), "early_exit")
    llm.generate(PROMPTS, SamplingParams(max_tokens=8))
    scorer = drafter_of(llm)._scorer  # type: ignore[attr-defined]
    assert scorer._model._slab is llm.engine.target._slab
    ours: Any = scorer._model.network
    whole: Any = llm.engine.target.network
    assert ours._embedding is whole._embedding
    assert all(a.qkv is b.qkv for a, b in zip(ours._layers, whole._layers, strict=False))


def test_it_drafts_trees_too() -> None:
    params = SamplingParams(temperature=0, max_tokens=30)
    plain = tiny_llm(tiny_model()).generate(PROMPTS, params)
    trees = tiny_llm(tiny_model(), "early_exit", gamma=None, tree=[3, 2], exit_layer=1)
    assert [o.token_ids for o in trees.generate(PROMPTS, params)] == [o.token_ids for o in plain]


@pytest.mark.parametrize(
    ("method", "fields", "message"),
    [
        ("early_exit", {"exit_layer": 2}, "exit_layer: must be 1 to 1 for this model of 2 layers"),
        ("early_exit", {"exit_layer": 0}, "exit_layer"),
        ("layer_skip", {"skip_mlp": [2]}, "skip_mlp: must be 0 to 1 for this model of 2 layers"),
        ("layer_skip", {"skip_attention": [-1]}, "skip_attention"),
    ],
)
def test_layers_out_of_range(method: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny_llm(tiny_model(), method, **fields)
    assert message in str(caught.value)


# Files of `tokenleap tune-layers`

TUNED = {
    "format": "tokenleap-layers-1",
    "skip_attention": [1],
    "skip_mlp": [1, 2],
    "num_hidden_layers": 4,
    "num_speculative_tokens": 6,
    "measured": {"speedup": 0.9},
}


def layers_file(folder: Path, **changes: Any) -> Path:
    file = folder / "layers.json"
    file.write_text(json.dumps({**TUNED, **changes}))
    return file


def test_a_file_says_what_to_skip(tmp_path: Path) -> None:
    file = layers_file(tmp_path)
    by_hand = first_draft("layer_skip", skip_attention=[1], skip_mlp=[1, 2])
    assert first_draft("layer_skip", layers=str(file)) == by_hand
    assert first_draft("layer_skip", layers=file) == by_hand
    assert by_hand != first_draft("layer_skip")


def test_one_kind_alone_is_not_the_default(tmp_path: Path) -> None:
    file = layers_file(tmp_path, skip_attention=[], skip_mlp=[2])
    assert first_draft("layer_skip", layers=file) == first_draft("layer_skip", skip_mlp=[2])


def test_the_draft_length_is_the_files_unless_given(tmp_path: Path) -> None:
    def gamma(**fields: Any) -> int:
        return SpeculativeConfig.parse({"method": "layer_skip", **fields}).gamma

    file = str(layers_file(tmp_path))
    assert gamma(layers=file) == 6
    assert gamma(layers=file, num_speculative_tokens=2) == 2
    assert gamma(layers=file, tree=[2, 1]) == 4  # a tree has its nodes
    assert gamma() == 3


@pytest.mark.parametrize("field", ["skip_attention", "skip_mlp"])
def test_a_file_and_indices_contradict(tmp_path: Path, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        first_draft("layer_skip", layers=layers_file(tmp_path), **{field: []})
    assert f"says what to skip: remove {field}" in str(caught.value)


def test_a_file_for_another_depth(tmp_path: Path) -> None:
    with pytest.raises(CompatibilityError) as caught:
        tiny_llm(tiny_model(), "layer_skip", layers=layers_file(tmp_path))
    assert "was made for a model of 4 layers and this one has 2" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a valid layers file"),
        (b'{"format": "tokenleap-layers-1"', "is not a valid layers file"),
        (b"\xff", "is not a valid layers file"),
        (b"[" * 100_000, "is not a valid layers file"),
        (b'["tokenleap-layers-1"]', "is not a valid layers file"),
        (b'{"skip_mlp": [1]}', "is not a valid layers file"),
        (b'{"format": "tokenleap-layers-2"}', "is not a valid layers file"),
        (b'{"format": "tokenleap-layers-1"}', "is damaged (skip_attention: field required"),
    ],
)
def test_files_of_another_kind(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "layers.json"
    file.write_bytes(content)
    assert f"{file} {message}" in refusal(file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"skip_mlp": [4]}, "skip_mlp: layer 4 of 4 layers"),
        ({"skip_mlp": [-1]}, "skip_mlp: "),
        ({"skip_mlp": "1"}, "skip_mlp: "),
        ({"skip_attention": [], "skip_mlp": []}, "it leaves nothing out"),
        ({"num_hidden_layers": 4.5}, "num_hidden_layers: "),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens: "),
        ({"measured": None}, "measured: "),
        ({"skip": [1]}, "has no field 'skip'"),
        ({"self": 1}, "is damaged ("),
    ],
)
def test_damaged_files(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    found = refusal(layers_file(tmp_path, **changes))
    assert "is damaged (" in found
    assert message in found
    assert found.endswith("make it again with 'tokenleap tune-layers'.")


def test_no_file_at_all(tmp_path: Path) -> None:
    assert refusal(tmp_path / "absent") == f"cannot read {tmp_path / 'absent'}: " + (
        "No such file or directory"
    )
    assert "Is a directory" in refusal(tmp_path)


def refusal(file: Path) -> str:
    """The one line that is said before any model is looked at."""
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig.parse({"method": "layer_skip", "layers": file})
    assert "\n" not in str(caught.value)
    return str(caught.value)
