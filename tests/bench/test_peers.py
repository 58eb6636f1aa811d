"""Adapters on a tiny model, and on make-believe modules of peers that are not installed here."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.cli.conftest import save_tiny
from tests.tiny import tiny_tokenizer
from tests.tiny_seq2seq import tiny_seq2seq
from tokenleap.bench.contestants import BASELINE, OWN, Contestant, Setting
from tokenleap.bench.peers import runner
from tokenleap.bench.worker import serve

PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 9]]


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    folder = save_tiny(tmp_path_factory.mktemp("tiny"))
    return Setting(
        str(folder), dtype="float32", device="cpu", draft_model=str(folder), max_prompt_tokens=64
    )


def tokens_of(contestant: Contestant, setting: Setting, prompts: list[list[int]]) -> list[Any]:
    return [output["token_ids"] for output in runner(contestant, setting).generate(prompts, 12)]


@pytest.mark.parametrize("mode", ["plain", "lookup", "assistant"])
def test_transformers_gives_our_tokens(setting: Setting, mode: str) -> None:
    kind = f"transformers-{mode}"
    expected = tokens_of(BASELINE, setting, PROMPTS[:1])
    assert tokens_of(Contestant(kind, kind), setting, PROMPTS[:1]) == expected


def test_transformers_gives_our_tokens_for_a_batch(setting: Setting) -> None:
    peer = Contestant("transformers-plain", "transformers-plain")
    assert runner(peer, setting).facts()["batches"]
    lookup = runner(Contestant("l", "transformers-lookup"), setting).facts()
    assert (lookup["batches"], "one prompt" in lookup["no_batches"]) == (False, True)
    assert tokens_of(peer, setting, PROMPTS) == tokens_of(BASELINE, setting, PROMPTS)


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_transformers_gives_our_tokens_for_sources_of_different_lengths(
    family: str, tmp_path: Path
) -> None:
    tiny_seq2seq(family).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    setting = Setting(str(tmp_path), dtype="float32", device="cpu", max_prompt_tokens=64)
    peer = Contestant("transformers-plain", "transformers-plain")
    assert tokens_of(peer, setting, PROMPTS) == tokens_of(BASELINE, setting, PROMPTS)


def test_our_own_facts_and_counts(setting: Setting) -> None:
    fields = {"method": "draft_model", "model": setting.draft_model, "num_speculative_tokens": 3}
    own = runner(Contestant("d", OWN, fields), setting)
    facts = own.facts()
    assert facts["lossless"]
    assert facts["draft_bytes"] == facts["weight_bytes"] > 0
    (output,) = own.generate(PROMPTS[:1], 12)
    assert len(output["token_ids"]) == 12
    assert output["accepted"] == sum(int(n) * c for n, c in output["accepted_lengths"].items())
    assert output["drafts"] == sum(output["accepted_lengths"].values())
    assert output["passes"] == sum(map(len, output["verify_seconds"].values()))
    assert not output["branched"]


def test_a_prompt_that_comes_again_is_computed_again(setting: Setting) -> None:
    own = runner(BASELINE, setting)
    for _ in range(2):
        (output,) = own.generate([list(range(5, 85))], 2)
        assert output["cached_prompt_tokens"] == 0


def test_a_tree_has_branches(setting: Setting) -> None:
    fields = {"method": "draft_model", "model": setting.draft_model, "tree": [2, 1]}
    (output,) = runner(Contestant("t", OWN, fields), setting).generate(PROMPTS[:1], 6)
    assert output["branched"]


class FakeLlama:
    """Counts up from the prompt's last token; remembers how it was made."""

    made: dict[str, Any]

    def __init__(self, **options: Any) -> None:
        type(self).made = options
        self.resets = 0

    def reset(self) -> None:
        self.resets += 1

    def generate(self, tokens: list[int], *, temp: float, repeat_penalty: float) -> Iterator[int]:
        assert (temp, repeat_penalty) == (0.0, 1.0)
        assert self.resets, "the KV of the prompt before is gone"
        while True:
            tokens.append(tokens[-1] + 1)
            yield tokens[-1]


@pytest.fixture
def gguf(tmp_path: Path, setting: Setting) -> Setting:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"x" * 100)
    return Setting(setting.model, gguf=str(file), threads=3, max_prompt_tokens=64, max_tokens=36)


def test_llama_cpp(gguf: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    library, speculative = ModuleType("llama_cpp"), ModuleType("llama_cpp.llama_speculative")
    library.Llama = FakeLlama  # type: ignore[attr-defined]
    speculative.LlamaPromptLookupDecoding = lambda **options: options  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llama_cpp", library)
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_speculative", speculative)
    plain = runner(Contestant("l", "llama.cpp-plain"), gguf)
    (output,) = plain.generate([[1, 2, 3]], 4)
    assert output["token_ids"] == [4, 5, 6, 7]
    assert output["prefill_seconds"] > 0
    assert output["decode_tokens"] == 3
    assert plain.facts()["weight_bytes"] == 100
    assert "one prompt at a time" in plain.facts()["no_batches"]
    assert FakeLlama.made["draft_model"] is None
    assert FakeLlama.made["n_threads"] == FakeLlama.made["n_threads_batch"] == 3
    assert FakeLlama.made["n_ctx"] >= 100
    runner(Contestant("l", "llama.cpp-lookup"), gguf)
    assert FakeLlama.made["draft_model"] == {"num_pred_tokens": 2}


class FakePipeline:
    made: tuple[Any, ...]

    def __init__(self, path: str, device: str, **options: Any) -> None:
        type(self).made = (path, device, options)

    def generate(self, inputs: Any, config: Any) -> Any:
        assert inputs.shape == (1, 3)
        assert config.ignore_eos
        assert not config.do_sample
        metrics = SimpleNamespace(get_ttft=lambda: SimpleNamespace(mean=2000.0))
        return SimpleNamespace(tokens=[[7] * config.max_new_tokens], perf_metrics=metrics)


def test_openvino(gguf: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    library, tensors = ModuleType("openvino_genai"), ModuleType("openvino")
    library.SchedulerConfig = SimpleNamespace  # type: ignore[attr-defined]
    library.GenerationConfig = SimpleNamespace  # type: ignore[attr-defined]
    library.LLMPipeline = FakePipeline  # type: ignore[attr-defined]
    tensors.Tensor = np.asarray  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "openvino_genai", library)
    monkeypatch.setitem(sys.modules, "openvino", tensors)
    for mode in ("plain", "lookup"):
        peer = runner(Contestant("o", f"openvino-{mode}"), gguf)
        (output,) = peer.generate([[1, 2, 3]], 4)
        assert output["token_ids"] == [7] * 4
        assert output["prefill_seconds"] == 2
        path, device, options = FakePipeline.made
        assert (path, device, options["INFERENCE_NUM_THREADS"]) == (gguf.gguf, "CPU", 3)
        assert options["scheduler_config"].enable_prefix_caching is False
        assert options.get("prompt_lookup", False) is (mode == "lookup")


def answers(*requests: dict[str, Any]) -> list[dict[str, Any]]:
    written = io.StringIO()
    serve(io.StringIO("".join(json.dumps(request) + "\n" for request in requests)), written)
    return [json.loads(line) for line in written.getvalue().splitlines()]


def test_a_worker_answers_line_by_line(setting: Setting) -> None:
    loaded, encoded, generated, forgotten, streamed, memory = answers(
        {"contestant": {"label": "none", "kind": OWN, "config": {}}, "setting": vars(setting)},
        {"command": "encode", "texts": ["hello", "x" * 500], "max_model_len": 8192},
        {"command": "generate", "prompts": [[1, 2, 3]], "max_tokens": 4},
        {"command": "forget"},
        {"command": "stream", "size": 4_000_000},
        {"command": "memory"},
    )
    assert loaded["answer"]["device"] == "cpu"
    assert forgotten == {"answer": None}
    assert [len(ids) for ids in encoded["answer"]] == [len("user: hello\nassistant: "), 64]
    assert len(generated["answer"]["outputs"][0]["token_ids"]) == 4
    assert generated["answer"]["seconds"] > 0
    assert 0 < streamed["answer"] < 1
    assert memory["answer"]["peak_bytes"] >= loaded["answer"]["peak_bytes"]


def test_a_worker_that_cannot_load_says_why(setting: Setting) -> None:
    fields = {**vars(setting), "dtype": "float12"}
    (answer,) = answers({"contestant": {"label": "none", "kind": OWN}, "setting": fields})
    assert "float12" in answer["error"]
