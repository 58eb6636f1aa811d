"""Packed weights are written once and mapped afterwards; the numbers are those packed in memory."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.models.test_store import flip
from tests.tiny import tiny_model
from tokenleap import LLM, SamplingParams
from tokenleap.errors import CompatibilityError, ConfigError, ModelError
from tokenleap.models import cached, load_model, remove, resolve, store
from tokenleap.models.loaded import FolderWeights
from tokenleap.runtime import packed
from tokenleap.runtime.native import build
from tokenleap.runtime.native.packed import LAYOUT_VERSION

PROMPT = [1, 2, 3, 4]
GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=2)


@pytest.fixture(autouse=True)
def cache(own_cache: Path) -> Path:
    return own_cache


def made(architecture: str = "llama", **fields: Any) -> PreTrainedModel:
    return tiny_model(architecture, head_dim=32, vocab_size=100, **fields)


def saved(folder: Path, *arguments: str, **fields: Any) -> Path:
    made(*arguments, **fields).save_pretrained(folder)
    return folder


def output(llm: LLM) -> tuple[Any, Any]:
    (found,) = llm.generate([PROMPT], GREEDY)
    return found.token_ids, found.logprobs


def whole(folder: Path, quantization: str, dtype: torch.dtype = torch.float32) -> LLM:
    """The model packed in memory."""
    return LLM(load_model(folder, dtype, torch.device("cpu")), quantization=quantization)


def opened(folder: Path, quantization: str = "int8", **fields: Any) -> LLM:
    return LLM(folder, quantization=quantization, dtype="float32", **fields)


def never(*_arguments: object) -> None:
    raise AssertionError("packed again")


@pytest.mark.parametrize(
    ("architecture", "tied", "quantization", "dtype"),
    [
        ("llama", True, "int8", torch.float32),
        ("qwen2", False, "int4", torch.bfloat16),
        ("qwen3", True, "int4", torch.float32),
    ],
)
def test_mapped_weights_are_those_packed_in_memory(
    architecture: str,
    tied: bool,
    quantization: str,
    dtype: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = saved(tmp_path / "model", architecture, tie_word_embeddings=tied)
    monkeypatch.setattr(packed, "HEAD_ROWS", 64)  # two pieces
    LLM(folder, quantization=quantization, dtype=dtype)
    monkeypatch.setattr(packed.RoundingPacker, "run", never)
    mapped = LLM(folder, quantization=quantization, dtype=dtype)
    expected = whole(folder, quantization, dtype)
    assert output(mapped) == output(expected)
    assert mapped.bit_exact
    vocabulary = mapped.engine.target.vocabulary_weights
    assert vocabulary is not None
    again = load_model(folder, dtype, torch.device("cpu"))
    assert torch.equal(vocabulary[0], again.get_parameter("model.embed_tokens.weight"))
    assert torch.equal(vocabulary[1], again.get_output_embeddings().weight)  # type: ignore[no-untyped-call]


def test_the_files_are_mapped(tmp_path: Path) -> None:
    llm = opened(saved(tmp_path / "model"))
    (entry,) = cached()
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("this system does not tell what is mapped")
    assert str(entry.folder / "layer-00000.safetensors") in maps.read_text()
    before = output(llm)
    remove(entry.name)  # the system keeps what is mapped
    assert output(llm) == before


def test_a_draft_model_is_mapped_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = saved(tmp_path / "target"), saved(tmp_path / "draft", seed=1)
    config = {"model": str(draft), "num_speculative_tokens": 2}
    first = output(opened(target, speculative_config=config))
    assert {entry.source for entry in cached()} == {str(target), str(draft)}
    monkeypatch.setattr(packed.RoundingPacker, "run", never)
    assert output(opened(target, speculative_config=config)) == first
    assert output(opened(target)) == first


def test_a_changed_model_is_packed_anew(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    first = output(opened(folder))
    saved(folder, seed=1)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert output(opened(folder)) == output(whole(folder, "int8")) != first
    assert len(cached()) == 1


def test_an_older_layout_is_packed_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path / "model")
    monkeypatch.setattr(packed, "LAYOUT_VERSION", LAYOUT_VERSION - 1)
    opened(folder)
    (old,) = cached()
    (old.folder / "layer-00000.safetensors").chmod(0o644)
    (old.folder / "layer-00000.safetensors").write_bytes(b"of another layout")
    monkeypatch.undo()
    monkeypatch.setenv("TOKENLEAP_CACHE", str(tmp_path / "cache"))
    assert output(opened(folder)) == output(whole(folder, "int8"))
    assert len(cached()) == 1


def test_a_damaged_file_is_made_again(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    first = output(opened(folder))
    (entry,) = cached()
    (entry.folder / "layer-00001.safetensors").chmod(0o644)
    os.truncate(entry.folder / "layer-00001.safetensors", 1000)
    assert output(opened(folder)) == first


def test_files_are_read_only(tmp_path: Path) -> None:
    opened(saved(tmp_path / "model"))
    (entry,) = cached()
    files = list(entry.folder.glob("*.safetensors"))
    assert files
    assert not any(path.stat().st_mode & 0o222 for path in files)


@pytest.mark.parametrize("name", ["layer-00001", "rest"])
def test_a_flipped_bit_is_found(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In every region of a file; it is packed again, and one line says so."""
    folder = saved(tmp_path / "model")
    first = output(opened(folder))
    (entry,) = cached()
    path = entry.folder / f"{name}.safetensors"
    size = path.stat().st_size
    for number, place in enumerate([0, 9, 40, 200, size // 3, size // 2, size - 1]):
        flip(path, place, number)
        assert output(opened(folder)) == first
        (message,) = caplog.messages
        assert message == f"{entry.folder} is damaged, and is made again from {folder}"
        caplog.clear()


def rewritten(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the header of a packed file, and its checksum."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    assert len(text) <= end - 8
    path.chmod(0o644)
    path.write_bytes(content[:8] + text.ljust(end - 8) + content[end:])
    manifest = path.parent / "manifest.json"
    known = json.loads(manifest.read_text())
    known["sums"][path.name] = store._sum_of(path)
    manifest.chmod(0o644)
    manifest.write_text(json.dumps(known))


@pytest.fixture(scope="module")
def packed_once(
    native_library: None, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A model's folder, and the cache with its packed weights."""
    base = tmp_path_factory.mktemp("packed")
    library = build.library()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_library", lambda *_flags: library)
        patch.setenv("TOKENLEAP_CACHE", str(base / "cache"))
        opened(saved(base / "model"))
    return base / "model", base / "cache"


def linear(name: str, text: str) -> Callable[[dict[str, Any]], object]:
    return lambda header: header["__metadata__"].update({name: text})


def tensor(name: str, **fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda header: header[name].update(fields)


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("layer-00000", linear("down", "[2,0,64]")),
        ("layer-00000", linear("down", "[2,128,0]")),
        ("layer-00000", linear("down", "[2,-128,-64]")),
        ("layer-00000", linear("down", "[2,64,128]")),
        ("layer-00000", linear("down", "[3,128,64]")),
        ("layer-00000", linear("down", "[9,128,64]")),
        ("layer-00000", linear("down", "[2,1e9,64]")),
        ("layer-00000", linear("down", "[2,99999999999,1]")),
        ("layer-00000", linear("down", '["2",1,1]')),
        ("layer-00000", linear("down", "{}")),
        ("layer-00000", linear("down", "[[[[[[[[")),
        ("layer-00000", linear("qkv.0", "[2,64,64]")),
        ("layer-00000", linear("qkv.0", "[0,64,160]")),
        ("layer-00000", lambda header: header["__metadata__"].pop("qkv.0")),
        ("layer-00000", lambda header: header["__metadata__"].pop("output")),
        ("layer-00000", lambda header: header.update(another=header.pop("mlp_norm"))),
        ("layer-00000", tensor("mlp_norm", shape=[32, 2])),
        ("layer-00000", tensor("mlp_norm", dtype="I32")),
        ("rest", tensor("embedding", shape=[64, 100])),
        ("rest", tensor("embedding", shape=[100, 64, 1])),
        ("rest", tensor("embedding", dtype="U32")),
        ("rest", tensor("embedding", dtype="BF16", shape=[200, 64])),
        ("rest", linear("head", "[2,64,96]")),
    ],
)
def test_wrong_metadata_is_refused(
    file: str,
    change: Callable[[dict[str, Any]], object],
    packed_once: tuple[Path, Path],
    cache: Path,
) -> None:
    """Even with the right checksum: the kernels would read past the end, or divide by zero."""
    folder, before = packed_once
    shutil.copytree(before, cache)
    (entry,) = cached()
    path = entry.folder / f"{file}.safetensors"
    rewritten(path, change)
    with pytest.raises(ModelError, match=f"{path} is damaged: .* delete it, to pack") as caught:
        opened(folder)
    assert "\n" not in str(caught.value)


def test_a_full_disk_leaves_nothing_and_the_model_runs(
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = saved(tmp_path / "model")

    def full(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(packed, "write", full)  # the last file
    with caplog.at_level("WARNING", logger="tokenleap"):
        assert output(opened(folder)) == output(whole(folder, "int8"))
    (message,) = [record.getMessage() for record in caplog.records]
    assert "packed in memory" in message
    assert "the disk is full" in message
    assert not list((cache / "models").iterdir())


def test_a_model_that_changes_while_it_is_packed(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path / "model")
    read = FolderWeights.read

    def touching(self: FolderWeights, name: str, *arguments: Any) -> torch.Tensor:
        if name == "model.norm.weight":
            os.utime(folder / "model.safetensors", ns=(1, 1))
        return read(self, name, *arguments)

    monkeypatch.setattr(FolderWeights, "read", touching)
    with pytest.raises(ModelError, match="has changed while it was read"):
        opened(folder)
    assert not list((cache / "models").iterdir())


def test_packed_once_by_two_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path / "model")
    runs: list[int] = []
    run = packed.RoundingPacker.run

    def counted(self: Any) -> None:
        runs.append(1)
        run(self)

    monkeypatch.setattr(packed.RoundingPacker, "run", counted)
    found: list[object] = []

    def work() -> None:
        found.append(output(opened(folder)))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert runs == [1]
    assert found[0] == found[1]


def test_damaged_weights_are_named(tmp_path: Path, cache: Path) -> None:
    model = made()
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.down_proj.weight")[0, 0] = torch.nan
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(CompatibilityError, match=r"damaged: model\.layers\.1\.mlp\.down_proj"):
        opened(tmp_path / "model")
    assert not list((cache / "models").iterdir())


def test_missing_weights_are_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    saved(tmp_path / "other", num_hidden_layers=1)
    (tmp_path / "other/model.safetensors").replace(folder / "model.safetensors")
    with pytest.raises(ModelError, match="lacks 9 weights of its model"):
        opened(folder)


def test_packed_weights_stand_for_the_folder(tmp_path: Path) -> None:
    opened(saved(tmp_path / "model"))
    (entry,) = cached()
    assert entry.kind == "packed"
    assert entry.name.startswith("model.int8-float32-")
    assert entry.size_bytes == sum(
        path.stat().st_size for path in entry.folder.glob("*.safetensors")
    )
    assert resolve(entry.name) == tmp_path / "model"
    assert store.find(entry.name) is None  # it is of another kind


def test_what_the_native_runtime_cannot_run_is_loaded_as_a_whole(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_model(head_dim=16).save_pretrained(folder)
    assert opened(folder).runtime == "lean"
    opened(saved(tmp_path / "other"), runtime="torch")
    LLM(tmp_path / "other", dtype="float32")
    assert not cached()


@pytest.mark.parametrize(
    ("wanted", "runs"),
    [(None, "int4-draft"), ("int4", "int4-draft"), ("int8", "int8"), ("none", None)],
)
def test_the_quantization_of_a_draft_model(
    wanted: str | None, runs: str | None, tmp_path: Path
) -> None:
    """By default int4 beside a target in int4, and then its output layer is in int4, too."""
    target, draft = saved(tmp_path / "target"), saved(tmp_path / "draft", seed=1)
    config = {"model": str(draft), "draft_quantization": wanted, "controller": "fixed"}
    llm = opened(target, "int4", speculative_config=config)
    drafter: Any = llm.engine._speculation.default.drafter
    model = drafter.scorer._model
    assert model.quantization == runs
    formats = {"int4-draft": 3, "int8": 2, None: 0}
    assert model.network._decoder.head.format == formats[runs]
    assert output(llm) == output(opened(target, "int4"))


def test_a_lent_model_keeps_its_quantization(tmp_path: Path) -> None:
    target = saved(tmp_path / "target")
    with pytest.raises(ConfigError, match="draft_quantization: the LLM that drafts keeps its own"):
        opened(target, speculative_config={"model": opened(target), "draft_quantization": "int8"})


def test_a_model_by_the_name_of_its_packed_weights(tmp_path: Path) -> None:
    """It runs as it was packed; a draft model, too."""
    rounded = LLM(saved(tmp_path), quantization="int8", dtype="float32")
    (name,) = (entry.name for entry in cached())
    named = LLM(name)
    assert output(named) == output(rounded)
    assert (named.dtype, named.engine.target.quantization) == (torch.float32, "int8")
    with pytest.raises(ConfigError, match=r"quantization: .* has int8 weights .*, not int4"):
        LLM(name, quantization="int4")
    drafting = {"model": name, "num_speculative_tokens": 2}
    assert output(LLM(tmp_path, dtype="float32", speculative_config=drafting)) == output(
        LLM(tmp_path, dtype="float32")
    )
    assert [entry.name for entry in cached()] == [name]
    with pytest.raises(ConfigError, match=r"draft_quantization: .* has int8 weights, not int4"):
        LLM(tmp_path, speculative_config=drafting | {"draft_quantization": "int4"})


def test_sizes_are_compared_with_the_weights_before_a_model_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = saved(tmp_path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 10**9}))
    monkeypatch.setattr(packed, "skeleton", never)
    with pytest.raises(ModelError, match="describes 1000000000 layers"):
        opened(tmp_path)
