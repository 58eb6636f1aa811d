"""Who takes part, and what is refused before the work."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from tokenleap.bench.contestants import PEERS, Setting, check_same_model, methods, peers
from tokenleap.errors import ConfigError, ModelError

WHOLE = Setting("model", draft_model="small", gguf="model.gguf")


@pytest.fixture
def everything_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)


def test_the_baseline_is_always_first_and_nobody_is_twice() -> None:
    assert [one.label for one in methods(["ngram", "none", "ngram"], None, None)] == [
        "none",
        "ngram",
    ]


def test_a_method_as_json_with_a_quantization_of_its_own() -> None:
    text = '{"method": "ngram", "prompt_lookup_max": 3, "quantization": "int8"}'
    none, ngram = methods([text], None, None)
    assert ngram.config == {"method": "ngram", "prompt_lookup_max": 3}
    assert (none.quantization, ngram.quantization) == (None, "int8")
    assert ngram.label == 'ngram {"prompt_lookup_max": 3, "quantization": "int8"}'


def test_a_model_alone_is_a_draft_model() -> None:
    assert methods(['{"model": "m"}'], None, None)[1].config == {
        "method": "draft_model",
        "model": "m",
    }


def test_a_draft_model_goes_to_methods_that_take_one() -> None:
    _, ngram, drafted = methods(["ngram", "draft_model"], "small", "int8")
    assert "model" not in ngram.config
    assert drafted.config["model"] == "small"
    assert drafted.quantization == "int8"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "not JSON"),
        pytest.param('{"a":' * 100_000, "not JSON", id="deep"),
        ("{}", 'give "method"'),
        ("engram", "did you mean 'ngram'"),
        ('{"method": "ngram", "window": 3}', "has no field 'window'"),
        ("draft_model", "needs a draft model"),
    ],
)
def test_a_wrong_method_is_refused(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        methods([text], None, None)


@pytest.mark.usefixtures("everything_installed")
def test_a_family_is_all_its_configurations() -> None:
    chosen = peers("transformers,llama.cpp,openvino", WHOLE)
    assert [one.label for one in chosen] == list(PEERS)
    assert [one.label for one in peers("openvino-lookup, transformers-plain", WHOLE)] == [
        "openvino-lookup",
        "transformers-plain",
    ]
    assert peers("", WHOLE) == []


@pytest.mark.usefixtures("everything_installed")
def test_a_family_leaves_out_what_has_no_draft_model() -> None:
    labels = [one.label for one in peers("transformers", Setting("model"))]
    assert labels == ["transformers-plain", "transformers-lookup"]


@pytest.mark.usefixtures("everything_installed")
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("llama.cpp", "llama.cpp needs --gguf"),
        ("openvino-plain", "openvino-plain needs --gguf"),
        ("transformers-assistant", "needs --draft-model"),
        ("llama", "unknown peer 'llama': did you mean 'llama.cpp'?"),
    ],
)
def test_a_peer_that_lacks_something_is_refused(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        peers(text, Setting("model"))


@pytest.mark.parametrize("family", ["llama.cpp", "openvino"])
def test_a_peer_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    known: Any = importlib.util.find_spec
    absent = ("llama_cpp", "openvino_genai")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in absent else known(name)
    )
    with pytest.raises(ConfigError, match="or pip install 'llama-cpp-python<"):
        peers(family, WHOLE)


@pytest.mark.parametrize("text", ["none", " none ", "", ","])
def test_no_peers(text: str) -> None:
    assert peers(text, Setting("tiny")) == []


def test_none_stands_alone_among_peers() -> None:
    with pytest.raises(ConfigError, match="'none' means no peers"):
        peers("none,transformers", Setting("tiny"))


SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 97}


def folder_of(path: Path, **config: Any) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    return path


def gguf_of(path: Path, architecture: str = "llama", tokens: int = 97) -> Path:
    file = path / "model.gguf"
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(2)
    writer.add_embedding_length(64)
    writer.add_token_list([str(number) for number in range(tokens)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("llama", {"model_type": "llama", **SIZES}),
        ("llama", {"model_type": "mistral", **SIZES}),
        ("gptneox", {"model_type": "gpt_neox", **SIZES}),
        ("gpt2", {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "vocab_size": 97}),
        ("gemma3", {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **SIZES}}),
        ("whatever", {"model_type": "something_new", **SIZES}),
        ("llama", {"model_type": "llama"}),
    ],
)
def test_the_same_model(tmp_path: Path, architecture: str, config: dict[str, Any]) -> None:
    check_same_model(gguf_of(tmp_path, architecture), folder_of(tmp_path, **config))


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"model_type": "qwen2", **SIZES}, "architecture llama, not qwen2"),
        ({"model_type": "llama", **SIZES, "num_hidden_layers": 30}, "layers 2, not 30"),
        ({"model_type": "llama", **SIZES, "hidden_size": 576}, "hidden size 64, not 576"),
        ({"model_type": "llama", **SIZES, "vocab_size": 49152}, "vocabulary 97, not 49152"),
    ],
)
def test_another_model(tmp_path: Path, config: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=rf"is another model than the one in .*: {told}[.]$"):
        check_same_model(gguf_of(tmp_path), folder_of(tmp_path, **config))


def test_a_file_that_ends_too_soon(tmp_path: Path) -> None:
    file = gguf_of(tmp_path)
    file.write_bytes(file.read_bytes()[:60])
    with pytest.raises(
        ModelError, match=r"damaged: its 60 bytes do not hold .*; get the file again$"
    ):
        check_same_model(file, folder_of(tmp_path, model_type="llama", **SIZES))
