"""A folder becomes a model with all its weights and without running anything, or an error."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models.folders import CPU, refusal
from tokenleap.errors import ModelError
from tokenleap.models import load_model, load_tokenizer, resolve


@pytest.fixture
def folder(make_model: Any, tmp_path: Path) -> Path:
    """A small intact model folder."""
    make_model(tied=False).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    path = folder / "model.safetensors"
    weights = {**load_file(path), **changes}
    kept = {name: weight for name, weight in weights.items() if weight is not None}
    save_file(kept, path, metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_comes_ready_for_inference(
    dtype: torch.dtype, folder: Path, make_model: Any
) -> None:
    model = load_model(folder, dtype, CPU)
    expected = make_model(tied=False).state_dict()
    assert not model.training
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, expected[name].to(dtype))
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_transformers_settings_are_left_as_they_were(folder: Path) -> None:
    messages = transformers.utils.logging
    before = messages.get_verbosity(), messages.is_progress_bar_enabled()
    load_model(folder, torch.float32, CPU)
    refusal(folder.parent)
    assert (messages.get_verbosity(), messages.is_progress_bar_enabled()) == before


def test_nothing_is_printed(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load_model(folder, torch.float32, CPU)
    assert capfd.readouterr() == ("", "")


def test_tied_weights_may_be_left_out(make_model: Any, tmp_path: Path) -> None:
    make_model(tied=True).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    model: Any = load_model(tmp_path, torch.float32, CPU)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_pickles_are_never_opened(folder: Path, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "exploded",)

    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    assert "tokenleap models convert" in refusal(folder)
    with pytest.raises(ModelError, match="tokenleap models convert"):
        resolve(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "pytorch_model.bin"}}))
    assert "index.json: lm_head.weight: " in refusal(folder)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("where", [(), ("text_config",)])
@pytest.mark.parametrize("name", ["attn_implementation", "experts_implementation"])
def test_code_of_the_hub_is_never_run(where: tuple[str, ...], name: str, folder: Path) -> None:
    """Transformers would fetch kernels that config.json names, if their package is installed."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for value in ("kernels-community/flash-attn", {"": "any/kernel"}):
        inner: Any = {name: value}
        for each in where:
            inner = {each: inner}
        path.write_text(json.dumps({**config, **inner}))
        assert f"names code on the Hugging Face Hub ({name})" in refusal(folder)
        with pytest.raises(ModelError, match="names code on the Hugging Face Hub"):
            resolve(folder)


def test_an_incomplete_folder_is_refused(folder: Path) -> None:
    (folder / "config.json").rename(folder / "moved")
    assert "has no config.json" in refusal(folder)
    (folder / "config.json").write_text("{ not json")
    assert "is not valid JSON" in refusal(folder)
    (folder / "config.json").write_text("[]")
    assert "is not a JSON object" in refusal(folder)
    (folder / "moved").rename(folder / "config.json")
    (folder / "model.safetensors").unlink()
    assert "has no weights" in refusal(folder)


@pytest.mark.parametrize("kept", [0.0, 0.0001, 0.01, 0.5, 0.999])
def test_truncated_weights_are_refused(kept: float, folder: Path) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    assert "model.safetensors is truncated or damaged" in refusal(folder)


def test_weights_are_never_made_up(folder: Path) -> None:
    edit_weights(folder, {"model.layers.1.mlp.up_proj.weight": None, "lm_head.weight": None})
    assert "lacks 2 weights of its model, lm_head.weight first" in refusal(folder)


def test_weights_of_another_shape_are_refused(folder: Path) -> None:
    edit_weights(folder, {"model.norm.weight": torch.ones(8)})
    assert "model.norm.weight is (8,), expected (64,)" in refusal(folder)


def test_missing_shards_are_named(make_model: Any, tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path, max_shard_size="100KB")
    load_model(tmp_path, torch.float32, CPU)
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert f"weight files, {shard.name} first" in refusal(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert "has no weight_map" in refusal(tmp_path)


def test_remote_code_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    auto_map = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    edit_config(folder, auto_map=auto_map)
    load_model(folder, torch.float32, CPU)  # Transformers has its own code for it
    edit_config(folder, model_type="brand-new", auto_map=auto_map)
    assert "needs Python code of its own" in refusal(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"num_hidden_layers": 10**9},
            "1000000000 layers, and its weights are 21 tens",
        ),
        (
            {"num_hidden_layers": 10**9, "quantization_config": {"quant_method": "fp8"}},
            "1000000000 layers, and its weights are 21 tens",
        ),
        ({"text_config": {"num_hidden_layers": 10**9}}, "1000000000 layers"),
        ({"vision_config": {"hidden_size": 10**9}}, "model of at least 1000000000 numbers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: .*greater than 0"),
        ({"hidden_size": 10**6, "head_dim": 10**6}, "model of at least .* numbers"),
        ({"num_labels": 10**12}, "num_labels: "),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key-value heads"),
        ({"num_key_value_heads": 8}, "4 attention heads cannot share 8 key-value heads"),
        ({"max_position_embeddings": 10**9}, "max_position_embeddings: .*less than or equal"),
        (
            {"max_position_embeddings": 10**6, "rope_parameters": None, "rope_theta": None},
            "a context of 1000000 tokens without rotary embeddings",
        ),
        ({"relative_attention_max_distance": 10**8}, "relative_attention_max_distance: "),
        ({"relative_attention_num_buckets": 0}, "relative_attention_num_buckets: "),
        ({"sliding_window": [4]}, "sliding_window: .*integer"),
        ({"eos_token_id": 0.5}, "eos_token_id"),
        ({"max_position_embeddings": 0}, "max_position_embeddings: .*greater than 0"),
        ({"rope_theta": 0}, "rope_theta: .*greater than 0"),
        ({"rope_parameters": {"rope_theta": float("inf")}}, "rope_theta: .*finite"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "factor: .*greater than 0"),
        ({"deep": json.loads("[" * 300 + "]" * 300)}, "is nested deeper than 100 levels"),
    ],
)
def test_configurations_of_no_model_are_refused(
    fields: dict[str, Any], message: str, folder: Path
) -> None:
    edit_config(folder, **fields)
    assert re.search(message, refusal(folder))


def test_a_config_that_is_nested_too_deeply_to_parse(folder: Path) -> None:
    (folder / "config.json").write_text('{"a": ' + "[" * 100_000)
    assert "is not valid JSON" in refusal(folder)


def test_a_generation_config_is_checked_too(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": 0.5}')
    assert "generation_config.json: eos_token_id" in refusal(folder)


@pytest.mark.parametrize("names", [["model.safetensors"], "../x.safetensors", 3, None])
def test_an_index_names_files(names: Any, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "x.safetensors")
    index = {"weight_map": {"model.norm.weight": names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "index.json: model.norm.weight: " in refusal(folder)


def test_unknown_models_are_refused(folder: Path) -> None:
    edit_config(folder, model_type="brand-new")
    assert "cannot load the model in" in refusal(folder)
    edit_config(folder, model_type="clip_vision_model")
    assert "cannot load the model in" in refusal(folder)


def test_a_bidirectional_model_is_no_language_model(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
    )
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)
    assert "is a BertForMaskedLM, not a causal language model" in refusal(tmp_path)


def test_a_device_that_is_not_there_is_reported(folder: Path) -> None:
    device = torch.device("cuda", 99)
    with pytest.raises(ModelError, match=r"cannot put the model in .* on cuda:99: "):
        load_model(folder, torch.float32, device)


def test_a_folder_without_tokenizer_files_has_none(folder: Path) -> None:
    assert load_tokenizer(folder) is None


def test_a_broken_tokenizer_is_refused(make_gguf: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(resolve(make_gguf()), tmp_path / "copy")
    assert load_tokenizer(folder) is not None
    (folder / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ModelError, match="cannot load the tokenizer in") as raised:
        load_tokenizer(folder)
    assert "\n" not in str(raised.value)


def test_a_tokenizer_that_panics_is_refused(make_gguf: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(resolve(make_gguf()), tmp_path / "copy")
    path = folder / "tokenizer.json"
    cut = {"type": "FixedLength", "length": 0}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pre_tokenizer": cut}))
    with pytest.raises(ModelError, match=r"cannot load the tokenizer in .*: ") as raised:
        load_tokenizer(folder)
    assert "\n" not in str(raised.value)


def test_a_tokenizer_config_is_checked(make_gguf: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(resolve(make_gguf()), tmp_path / "copy")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": "long"}))
    with pytest.raises(ModelError, match=r"tokenizer_config.json: model_max_length: "):
        load_tokenizer(folder)


@pytest.mark.model
def test_the_default_model_is_what_its_makers_describe() -> None:
    folder = resolve("smollm2-135m")
    model: Any = load_model(folder, torch.float32, CPU)
    config = model.config
    assert (config.model_type, config.num_hidden_layers, config.hidden_size) == ("llama", 30, 576)
    assert (config.num_attention_heads, config.num_key_value_heads) == (9, 3)
    assert (config.max_position_embeddings, config.vocab_size) == (8192, 49152)
    assert config.rope_parameters["rope_theta"] == 100_000
    assert config.rms_norm_eps == 1e-5
    assert config.tie_word_embeddings
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008

    tokenizer: Any = load_tokenizer(folder)
    assert tokenizer is not None
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [
        0,
        1,
        2,
    ]
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    text = tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
    assert text == "The capital of France is Paris.<|im_end|>"
