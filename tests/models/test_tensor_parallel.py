"""Models that cannot be spread over several processes are refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.tiny import tiny_model
from tokenleap import LLM
from tokenleap.errors import CompatibilityError, ConfigError
from tokenleap.models.load import check_processes, check_sharded, sharded
from tokenleap.runtime.choose import check_sharding


def started(monkeypatch: pytest.MonkeyPatch, processes: int) -> None:
    """As if torchrun had started so many."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(processes))


def test_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ConfigError, match="2 needs 2 processes: start it with torchrun --nproc-pe"):
        LLM(tmp_path, tensor_parallel_size=2)
    started(monkeypatch, 3)
    with pytest.raises(ConfigError, match="there are 3 processes, got 2: take 3, or start it with"):
        check_processes(2, "model", "auto")
    check_processes(1, "model", "auto")  # three that have nothing to do with each other
    started(monkeypatch, 2)
    check_processes(2, "model", "auto")
    with pytest.raises(ConfigError, match="is a GGUF file, which runs in one process"):
        LLM(tmp_path / "model.gguf", tensor_parallel_size=2)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    check_processes(2, "model", "cuda")
    for device in ("cpu", "cuda:1"):
        with pytest.raises(ConfigError, match=f"takes its own cuda, got '{device}'"):
            check_processes(2, "model", device)


@pytest.mark.parametrize("size", [0, -1, True, "2", 1.5, None])
def test_wrong_sizes(size: Any) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size: must be at least 1, got"):
        check_processes(size, "model", "auto")


def test_loaded_models() -> None:
    with pytest.raises(ConfigError, match="the loaded model is in one process, got 2: give the"):
        LLM(tiny_model(), tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("gpt2", {}, r"no plan \(tp_plan\) for models of the type 'gpt2'"),
        ("t5", {}, "'t5' is an encoder-decoder, which runs in one process"),
        ("llama", {"num_key_value_heads": 1}, "1 key-value heads, which 2 processes cannot share"),
        ("llama", {"num_attention_heads": 1}, "1 attention heads, which 2 processes cannot share"),
        ("phi3", {"num_key_value_heads": 1}, ""),  # all processes have all heads
        ("qwen3", {}, ""),
        ("mistral", {"num_key_value_heads": 2}, ""),
    ],
)
def test_architectures(model_type: str, fields: dict[str, Any], message: str) -> None:
    config = AutoConfig.for_model(model_type, **fields)
    if not message:
        check_sharded(config, 2)
        return
    with pytest.raises(CompatibilityError, match=message):
        check_sharded(config, 2)


@pytest.mark.parametrize(
    ("quantization", "runtime", "message"),
    [
        ("auto", "native", "runtime: native is for a model in one process, not for tensor_paralle"),
        ("auto", "cuda", "runtime: cuda is for a model in one process"),
        ("int8", "auto", "quantization: int8 is for a model in one process"),
        ("int4", "torch", "quantization: int4 is for a model in one process"),
    ],
)
def test_options(quantization: str, runtime: str, message: str) -> None:
    check_sharding(quantization, runtime, 1)
    with pytest.raises(ConfigError, match=message):
        LLM("model", quantization=quantization, runtime=runtime, tensor_parallel_size=2)


def test_nothing_else_is_asked_of_transformers_for_one_process() -> None:
    assert sharded(1) == {}
    assert sharded(2)["distributed_config"].tp_size == 2
