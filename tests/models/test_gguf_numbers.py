"""A GGUF file runs in its own numbers, where a kernel's format has them."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import PreTrainedModel
from typer.testing import CliRunner

from foretoken import LLM, SamplingParams
from foretoken.cli import app, bench
from foretoken.cli.options import ModelOptions
from foretoken.core.tree import chain
from foretoken.errors import ModelError
from foretoken.models import aside, cached, remove, resolve
from foretoken.models.gguf_file import GgufFile
from foretoken.runtime import packed, packing_gguf
from foretoken.runtime.native import build, packed_files
from foretoken.runtime.native.gguf_blocks import EXACT, FORMAT_OF, pack_blocks
from foretoken.runtime.native.pack import Format, PackedWeights
from foretoken.runtime.packed import open_packed
from foretoken.runtime.target import Target
from tests.models.conftest import MakeGguf
from tests.tiny import tiny_model

LINEAR = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
TEXT = [3, 70, 150, 9, 201, 44, 8, 120]


@pytest.fixture
def native(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The native library, which is not compiled again for the test's own cache."""
    monkeypatch.delenv("FORETOKEN_CACHE")
    try:
        library = build.library()
    except build.NativeLibraryError as error:
        pytest.skip(f"no native library here: {error}")
    monkeypatch.setattr(build, "_library", lambda *_flags: library)
    monkeypatch.setenv("FORETOKEN_CACHE", str(cache))


@pytest.fixture
def random_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random numbers in formats that the gguf package cannot quantize to."""
    quantize = gguf.quantize

    def blocks(weight: Any, kind: Kind) -> Any:
        if kind not in (Kind.Q4_K, Kind.Q6_K):
            return quantize(weight, kind)
        size = gguf.GGML_QUANT_SIZES[kind][1]
        random = np.random.default_rng(len(weight))
        made = random.integers(0, 256, (weight.size // 256, size)).astype(np.uint8)
        places = slice(0, 4) if kind is Kind.Q4_K else slice(size - 2, size)
        scales = made[:, places].view(np.float16)
        scales[:] = random.uniform(1e-4, 2e-4, scales.shape).astype(np.float16)
        return made.reshape(len(weight), -1)

    monkeypatch.setattr(gguf, "quantize", blocks)


def model(vocabulary: list[str], tied: bool = True, **fields: Any) -> PreTrainedModel:
    size = len(vocabulary)
    return tiny_model("qwen3", head_dim=32, vocab_size=size, tie_word_embeddings=tied, **fields)


@pytest.fixture
def written(make_gguf: MakeGguf, byte_vocabulary: list[str]) -> Any:
    """Writes a GGUF file of a tiny model; kinds are given by parts of GGUF's names."""

    def write(
        kinds: dict[str, Kind], name: str = "tiny.gguf", context: int = 64, **fields: Any
    ) -> Path:
        made = model(byte_vocabulary, **fields)
        config: Any = made.config
        settings = {
            "qwen3.context_length": context,
            "qwen3.embedding_length": config.hidden_size,
            "qwen3.feed_forward_length": config.intermediate_size,
            "qwen3.attention.key_length": 32,
            "qwen3.attention.value_length": 32,
            "qwen3.rope.dimension_count": 32,
            "qwen3.rope.freq_base": 10_000.0,
            "qwen3.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        }
        layers = {f"blk.{index}.{part}" for index in range(2) for part in LINEAR}
        names = [*(f"{each}.weight" for each in layers), "token_embd.weight", "output.weight"]
        wanted = {each: kind for part, kind in kinds.items() for each in names if part in each}
        return make_gguf("qwen3", name, model=made, settings=settings, quantize=wanted)

    return write


def unpacked(packed: PackedWeights) -> torch.Tensor:
    """[N, K] the numbers of an int8 or int4 layer."""
    weight, count = packed.weight, 1024 if packed.format is Format.INT8 else 512
    panels, groups, _ = weight.shape
    steps, rest = weight[..., :count], weight[..., count:].contiguous().view(torch.float16)
    if packed.format is Format.INT4:
        steps = torch.cat([steps & 15, steps >> 4], dim=-1)
    values = steps.view(panels, groups, 8, 32, 4).permute(0, 3, 1, 2, 4).float()
    values = values.reshape(panels, 32, groups, 32) - (128 if packed.format is Format.INT8 else 0)
    numbers = rest.view(panels, groups, -1, 32).permute(2, 0, 3, 1)[..., None].float()
    values = values * numbers[0] + (numbers[1] if packed.format is Format.INT4 else 0)
    return values.reshape(panels * 32, groups * 32)[: packed.outputs]


def scores(llm: LLM) -> torch.Tensor:
    target: Target = llm.engine.target
    target.add(-1)
    try:
        return target.verify([-1], [chain(TEXT)])[0].scores.clone()
    finally:
        target.remove(-1)


def never(*_arguments: object) -> None:
    raise AssertionError("packed again")


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Mean error in standard deviations."""
    return float((found - expected).abs().mean() / expected.std())


@pytest.mark.parametrize("kind", sorted(FORMAT_OF))
def test_blocks_keep_their_numbers(kind: Kind, random_blocks: None) -> None:
    weights = np.random.default_rng(0).normal(0, 1, (70, 512)).astype(np.float32)
    rows = gguf.quantize(weights, kind)
    expected = torch.from_numpy(gguf.dequantize(rows, kind))
    packed = pack_blocks(kind, torch.from_numpy(np.ascontiguousarray(rows)), 512)
    assert packed is not None
    assert packed.format is FORMAT_OF[kind]
    found = unpacked(packed)
    if kind in EXACT:
        assert torch.equal(found, expected)
    else:  # a scale and a least number are each rounded by at most 2^-12 of themselves
        assert (found - expected).abs().max() < 2**-11 * expected.abs().max() * 2


def test_a_scale_that_is_not_finite_is_refused() -> None:
    rows = np.zeros((32, 34), np.uint8)
    rows[5, :2] = np.array([np.inf], np.float16).view(np.uint8)
    assert pack_blocks(Kind.Q8_0, torch.from_numpy(rows), 32) is None


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_runs_in_its_own_numbers(written: Any, dtype: str) -> None:
    path = written({"blk": Kind.Q4_1, "token_embd": Kind.Q8_0})
    own = LLM(path, dtype=dtype)
    assert own.engine.target.quantization == "gguf"
    assert own.bit_exact
    (entry,) = cached()
    assert entry.runs == "Q4_1 as int4; Q8_0 as int8"
    packed = open_packed(path, own.dtype, own.device, quantization="auto", runtime="auto")
    assert packed is not None
    values = {each.name: torch.from_numpy(each.values()) for each in GgufFile.open(path).tensors}
    for index in range(2):
        layer = packed.weights.layer(index)
        parts = [values[f"blk.{index}.attn_{part}.weight"] for part in "qkv"]
        assert torch.equal(unpacked(layer.qkv), torch.cat(parts))
        assert torch.equal(unpacked(layer.down), values[f"blk.{index}.ffn_down.weight"])
        gate, up = (values[f"blk.{index}.ffn_{part}.weight"] for part in ("gate", "up"))
        turns = torch.stack([gate.view(-1, 32, 64), up.view(-1, 32, 64)], dim=1)
        assert torch.equal(unpacked(layer.gate_up), turns.flatten(0, 2))
        assert torch.equal(layer.mlp_norm, values[f"blk.{index}.ffn_norm.weight"])
    assert torch.equal(unpacked(packed.weights.head()), values["token_embd.weight"])
    dequantized = LLM(path, dtype=dtype, quantization="none")
    assert dequantized.engine.target.quantization is None
    assert difference(scores(own), scores(dequantized)) < 0.05  # inputs are rounded to int8


@pytest.mark.usefixtures("native", "random_blocks")
def test_kinds_may_differ(written: Any) -> None:
    kinds = {
        "attn_q": Kind.Q4_K,
        "attn_k": Kind.Q6_K,
        "attn_v": Kind.Q4_0,
        "attn_output": Kind.Q5_1,
        "ffn_gate": Kind.Q4_K,
        "ffn_up": Kind.Q4_K,
        "blk.0.ffn_down": Kind.F16,
        "blk.1.ffn_down": Kind.Q6_K,
        "output": Kind.F16,
    }
    wide = {"hidden_size": 256, "intermediate_size": 256, "tied": False}
    own = LLM(path := written(kinds, **wide), dtype="float32")
    (entry,) = cached()
    assert entry.runs is not None
    assert "F16 as float32" in entry.runs
    assert "Q6_K as int8, rounded" in entry.runs
    assert own.bit_exact
    dequantized = LLM(path, dtype="float32", quantization="none")
    assert difference(scores(own), scores(dequantized)) < 0.05
    greedy = SamplingParams(temperature=0, max_tokens=6)
    ngram = {"method": "ngram", "num_speculative_tokens": 3}
    first, second = (
        llm.generate([TEXT], greedy)[0].token_ids
        for llm in (own, LLM(path, dtype="float32", speculative_config=ngram))
    )
    assert first == second


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_other_numbers_are_those_of_the_dequantized_file(written: Any, quantization: str) -> None:
    path = written({"blk": Kind.Q8_0})
    found = scores(LLM(path, dtype="bfloat16", quantization=quantization))
    assert [entry.kind for entry in cached()] == ["packed"]  # nothing was dequantized on disk
    folder = resolve(path)
    expected = LLM(folder, dtype="bfloat16", quantization=quantization)
    assert torch.equal(found, scores(expected))


@pytest.mark.usefixtures("native")
def test_a_file_without_quantized_numbers_is_loaded_as_a_whole(written: Any) -> None:
    llm = LLM(written({}), dtype="float32")
    assert llm.engine.target.quantization is None
    assert [entry.kind for entry in cached()] == ["model"]


@pytest.mark.usefixtures("native")
def test_what_reads_the_module_gets_the_dequantized_file(written: Any) -> None:
    path = written({"blk": Kind.Q4_0, "output": Kind.Q8_0}, tied=False)
    target = LLM(path, dtype="float32").engine.target
    weights = target.vocabulary_weights
    assert weights is not None
    values = {each.name: each for each in GgufFile.open(path).tensors}
    assert np.array_equal(weights[0].numpy(), values["token_embd.weight"].values())
    assert np.array_equal(weights[1].numpy(), values["output.weight"].values())


@pytest.mark.usefixtures("native")
def test_a_full_disk(written: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written({"blk": Kind.Q8_0})

    def full(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(packing_gguf, "write", full)
    with pytest.raises(ModelError, match=r"the disk is full: .* needs .* free"):
        LLM(path, dtype="float32")
    assert not list((cache / "models").iterdir())


@pytest.mark.usefixtures("native")
def test_a_cache_that_cannot_be_written(
    written: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = written({"blk": Kind.Q8_0})
    expected = scores(LLM(path, dtype="float32"))
    (tmp_path / "file").touch()
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    with caplog.at_level("WARNING", logger="foretoken"):
        llms = [LLM(path, dtype="float32") for _ in range(2)]
        whole = LLM(path, dtype="float32", quantization="none")
    assert [torch.equal(scores(llm), expected) for llm in llms] == [True, True]
    assert whole.engine.target.quantization is None
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2  # one for each form
    for message in messages:
        assert message.startswith("cannot write the cache folder")
        assert message.endswith(f"{path} is prepared at every start.")
    monkeypatch.setattr(packing_gguf.GgufPacker, "run", never)
    assert torch.equal(scores(LLM(path, dtype="float32")), expected)
    aside._built.clear()


@pytest.mark.usefixtures("native")
def test_no_room_for_what_is_packed_aside(
    written: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written({"blk": Kind.Q8_0})
    (tmp_path / "file").touch()
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    usage = type(shutil.disk_usage("/"))(total=10**9, used=10**9 - 1000, free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(ModelError, match=r"the disk is full: .*temporary.* needs"):
        LLM(path, dtype="float32")
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.usefixtures("native")
def test_a_file_that_changes_while_it_runs(written: Any) -> None:
    llm = LLM(path := written({"blk": Kind.Q8_0}), dtype="float32")
    before = scores(llm)
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    os.truncate(path, 1000)
    assert torch.equal(scores(llm), before)


@pytest.mark.usefixtures("native")
def test_a_file_that_changes_while_it_is_packed(
    written: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written({"blk": Kind.Q8_0})
    run = packing_gguf.GgufPacker.run

    def touching(self: packing_gguf.GgufPacker) -> str:
        os.utime(path, ns=(1, 1))
        return run(self)

    monkeypatch.setattr(packing_gguf.GgufPacker, "run", touching)
    with pytest.raises(ModelError, match="has changed while it was read"):
        LLM(path, dtype="float32")
    assert not list((cache / "models").iterdir())


@pytest.mark.usefixtures("native")
def test_packed_files_that_are_deleted_before_they_are_mapped(
    written: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written({"blk": Kind.Q8_0})
    expected = scores(LLM(path, dtype="float32"))
    layers: list[int] = []
    layer_file = packed_files.layer_file

    def deleting(folder: Path, index: int) -> Path:
        layers.append(index)
        if len(layers) == 2:  # another process replaces the folder after the first layer
            remove(folder.name)
        return layer_file(folder, index)

    monkeypatch.setattr(packed_files, "layer_file", deleting)
    assert torch.equal(scores(LLM(path, dtype="float32")), expected)
    assert layers[:2] == [0, 1]


@pytest.mark.usefixtures("native")
def test_an_older_layout_is_packed_anew(written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written({"blk": Kind.Q8_0})
    with monkeypatch.context() as patched:
        patched.setattr(packed, "LAYOUT_VERSION", packed_files.LAYOUT_VERSION - 1)
        expected = scores(LLM(path, dtype="float32"))
    (old,) = cached()
    (old.folder / "layer-00000.safetensors").write_bytes(b"of another layout")
    assert torch.equal(scores(LLM(path, dtype="float32")), expected)
    (new,) = cached()
    assert new.name != old.name


@pytest.mark.usefixtures("native")
def test_demo_and_bench_run_it_in_its_own_numbers(written: Any, cache: Path) -> None:
    path = written({"blk": Kind.Q8_0}, context=8192, max_position_embeddings=8192)
    options = ["--rounds", "1", "--max-tokens", "4", "--dtype", "float32"]
    result = CliRunner().invoke(app, ["demo", "-m", str(path), *options])
    assert result.exit_code == 0, result.output
    assert [entry.kind for entry in cached()] == ["packed"]
    target = ModelOptions(model=str(path))
    assert bench._quantization(target) == "auto"
    assert bench._found(str(path), "auto") is None
    assert bench._quantization(replace(target, quantization="none")) is None
    assert bench._found(str(path), None) == resolve(path)


@pytest.mark.usefixtures("native")
def test_a_changed_file_is_packed_anew(written: Any) -> None:
    first = scores(LLM(written({"blk": Kind.Q8_0}), dtype="float32"))
    path = written({"blk": Kind.Q8_0}, seed=1)
    os.utime(path, ns=(1, 1))
    assert not torch.equal(scores(LLM(path, dtype="float32")), first)
    assert len(cached()) == 1


def test_a_file_that_shrinks_while_it_is_read(written: Any) -> None:
    path = written({"blk": Kind.Q8_0})
    file = GgufFile.open(path)
    os.truncate(path, path.stat().st_size - 100)
    last = max(file.tensors, key=lambda tensor: tensor.offset)
    with pytest.raises(ModelError, match="is truncated; get the file again"):
        last.rows()


def test_the_fast_reader_reads_what_the_package_reads(written: Any) -> None:
    path = written({"blk": Kind.Q8_0})
    expected, found = gguf.GGUFReader(path), GgufFile.read(path)
    names = list(expected.fields)
    assert names == list(found.reader.fields)
    for name in names:
        assert found.get(name) == expected.fields[name].contents()
    assert [each.name for each in found.tensors] == [each.name for each in expected.tensors]
    for mine, theirs in zip(found.tensors, expected.tensors, strict=True):
        values = gguf.dequantize(theirs.data, theirs.tensor_type)
        assert np.array_equal(mine.values(), values)


@pytest.mark.usefixtures("native")
def test_all_parts_of_a_split_file_are_read(written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"blk": Kind.Q8_0}
    whole = scores(LLM(written(kinds, "whole.gguf"), dtype="float32"))
    split = partial(gguf.GGUFWriter, split_max_tensors=9)
    monkeypatch.setattr(gguf, "GGUFWriter", split)
    first = written(kinds, "split.gguf")
    parts = sorted(first.parent.glob("split-*.gguf"))
    assert len(parts) > 1
    for part in parts[:2]:
        assert torch.equal(scores(LLM(part, dtype="float32")), whole)
    assert resolve(parts[0]) == resolve(parts[1])
    moved = parts[1].rename(first.with_name("other.gguf"))
    with pytest.raises(ModelError, match=f"{parts[1].name} is not beside it; get all parts"):
        LLM(parts[0], dtype="float32")
    with pytest.raises(ModelError, match=r"is one of \d parts, but is not named like"):
        LLM(moved, dtype="float32")
    alone = parts[0].rename(first.with_name("one.gguf"))
    with pytest.raises(ModelError, match=r"is one of \d parts, but is not named like"):
        LLM(alone, dtype="float32")


def test_unknown_quantizations_are_named(written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written({"attn_q": Kind.Q8_0})
    content = path.read_bytes()
    name = b"blk.0.attn_q.weight"
    at = content.index(name) + len(name) + 4 + 2 * 8  # dimensions come before the kind
    assert content[at : at + 4] == int(Kind.Q8_0).to_bytes(4, "little")
    path.write_bytes(content[:at] + (99).to_bytes(4, "little") + content[at + 4 :])
    with pytest.raises(ModelError, match="of the unknown quantization 99; get the model in"):
        resolve(path)
    path.write_bytes(content)
    monkeypatch.delitem(gguf.quants._type_traits, Kind.Q8_0)
    with pytest.raises(ModelError, match=r"has blk\.0\.attn_q\.weight in Q8_0, a quantization"):
        resolve(path)
