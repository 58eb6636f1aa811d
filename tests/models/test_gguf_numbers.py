"""A GGUF file keeps its quantization where a kernel's format allows."""

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

from tests.models.conftest import MakeGguf
from tests.tiny import tiny_model
from tokenleap import LLM
from tokenleap.cli import app, bench
from tokenleap.cli.options import ModelOptions
from tokenleap.core.tree import chain
from tokenleap.errors import ModelError
from tokenleap.models import cached, remove, resolve, resolver
from tokenleap.models.gguf import GgufFile
from tokenleap.runtime import packed as packing_gguf
from tokenleap.runtime.native import packed as packed_files
from tokenleap.runtime.native.pack import FORMAT_OF, K_FORMATS, Format, PackedWeights, pack_blocks
from tokenleap.runtime.packed import open_packed
from tokenleap.runtime.target import Target

LINEAR = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
TEXT = [3, 70, 150, 9, 201, 44, 8, 120]


@pytest.fixture
def random_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random numbers in formats that the gguf package cannot quantize to."""
    quantize = gguf.quantize

    def blocks(weight: Any, kind: Kind) -> Any:
        if kind not in K_FORMATS:
            return quantize(weight, kind)
        size = gguf.GGML_QUANT_SIZES[kind][1]
        random = np.random.default_rng(len(weight))
        made = random.integers(0, 256, (weight.size // 256, size)).astype(np.uint8)
        places = slice(size - 2, size) if kind is Kind.Q6_K else slice(0, 4)
        scales = made[:, places].view(np.float16)
        scales[:] = random.uniform(1e-4, 2e-4, scales.shape).astype(np.float16)
        return made.reshape(len(weight), -1)

    monkeypatch.setattr(gguf, "quantize", blocks)


def model(
    vocabulary: list[str], architecture: str, tied: bool = True, **fields: Any
) -> PreTrainedModel:
    fields = {"head_dim": 32, "vocab_size": len(vocabulary), **fields}
    made = tiny_model(architecture, tie_word_embeddings=tied, **fields)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "bias" in name:  # zeros prove nothing
                parameter.normal_()
    return made


@pytest.fixture
def written(make_gguf: MakeGguf, byte_vocabulary: list[str]) -> Any:
    """Writes a GGUF file of a tiny model; kinds are given by parts of GGUF's names."""

    def write(
        kinds: dict[str, Kind],
        name: str = "tiny.gguf",
        context: int = 64,
        architecture: str = "qwen3",
        **fields: Any,
    ) -> Path:
        made = model(byte_vocabulary, architecture, **fields)
        config: Any = made.config
        settings = {
            "context_length": context,
            "embedding_length": config.hidden_size,
            "feed_forward_length": config.intermediate_size,
            "attention.key_length": 32,
            "attention.value_length": 32,
            "rope.dimension_count": 32,
            "rope.freq_base": 10_000.0,
            "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        }
        settings = {f"{architecture}.{key}": value for key, value in settings.items()}
        layers = {f"blk.{index}.{part}" for index in range(2) for part in LINEAR}
        names = [*(f"{each}.weight" for each in layers), "token_embd.weight", "output.weight"]
        wanted = {each: kind for part, kind in kinds.items() for each in names if part in each}
        return make_gguf(architecture, name, model=made, settings=settings, quantize=wanted)

    return write


def unpacked(packed: PackedWeights) -> torch.Tensor:
    """[N, K] the numbers of a layer in int8, int4, int5 or those of K-quants."""
    if packed.format > Format.INT5:
        return k_unpacked(packed)
    weight, whole = packed.weight, packed.format is Format.INT8
    count, end = {Format.INT8: (1024, 1024), Format.INT4: (512, 512), Format.INT5: (512, 640)}[
        packed.format
    ]
    panels, groups, _ = weight.shape
    steps, rest = weight[..., :count], weight[..., end:].contiguous().view(torch.float16)
    if not whole:
        steps = torch.cat([steps & 15, steps >> 4], dim=-1)
    if packed.format is Format.INT5:
        places = torch.arange(8, dtype=torch.uint8)[:, None]
        fifth = weight[..., None, count:end] >> places & 1  # [P, G, 8, 128]
        steps = steps | fifth.flatten(2) << 4
    values = steps.view(panels, groups, 8, 32, 4).permute(0, 3, 1, 2, 4).float()
    values = values.reshape(panels, 32, groups, 32) - (128 if whole else 0)
    numbers = rest.view(panels, groups, -1, 32).permute(2, 0, 3, 1)[..., None].float()
    values = values * numbers[0] + (0 if whole else numbers[1])
    return values.reshape(panels * 32, groups * 32)[: packed.outputs]


def k_unpacked(packed: PackedWeights) -> torch.Tensor:
    """[N, K] the numbers of a K-quant, as `k_blocks.h` describes its formats."""
    more = {Format.Q4K: 0, Format.Q5K: 128, Format.Q6K: 256}[packed.format]
    count, size = packed.inputs // 32, 512 + more + 64
    panels = len(packed.weight)
    groups = packed.weight[:, : count * size].reshape(panels, count, size)
    factors = packed.weight[:, count * size :].contiguous().view(torch.float16).float()
    factors = factors.view(panels, count // 8, -1, 32).repeat_interleave(
        8, dim=1
    )  # [P, G, 1|2, 32]
    low = groups[..., :512]
    steps = torch.cat([low & 15, low >> 4], dim=-1).view(panels, count, 8, 32, 4)
    high = groups[..., 512 : 512 + more]
    for word in range(8):
        if packed.format is Format.Q5K:
            bits = high.view(panels, count, 32, 4) >> word & 1
            steps[:, :, word] |= bits << 4
        elif packed.format is Format.Q6K:
            bits = high.view(panels, count, 2, 32, 4)[:, :, word % 2] >> word // 2 * 2 & 3
            steps[:, :, word] |= bits << 4
    q = steps.permute(0, 3, 1, 2, 4).reshape(panels, 32, count, 32).float()
    whole = (
        groups[..., 512 + more :].view(panels, count, 2, 32).permute(2, 0, 3, 1)
    )  # [2, P, 32, G]
    d = factors[:, :, 0].transpose(1, 2)[..., None]
    if packed.format is Format.Q6K:
        scales = whole.contiguous().view(torch.int8).float().permute(1, 2, 3, 0)
        values = d * scales.repeat_interleave(16, dim=-1) * (q - 32)
    else:
        e = factors[:, :, 1].transpose(1, 2)[..., None]
        values = (d * whole[0, ..., None].float()) * q - e * whole[1, ..., None].float()
    return values.reshape(panels * 32, count * 32)[: packed.outputs]


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
    assert torch.equal(found, expected)


def test_a_scale_that_is_not_finite_is_refused() -> None:
    rows = np.zeros((32, 34), np.uint8)
    rows[5, :2] = np.array([np.inf], np.float16).view(np.uint8)
    assert pack_blocks(Kind.Q8_0, torch.from_numpy(rows), 32) is None


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("quantization", ["auto", "int4", "none"])
def test_weights_that_are_not_finite_are_named(
    written: Any, monkeypatch: pytest.MonkeyPatch, quantization: str
) -> None:
    quantize = gguf.quantize

    def damaged(weight: Any, kind: Kind) -> Any:
        blocks = quantize(weight, kind)
        blocks[5, :2] = np.array([np.nan], np.float16).view(np.uint8)  # a scale
        return blocks

    monkeypatch.setattr(gguf, "quantize", damaged)
    path = written({"blk.1.ffn_up": Kind.Q8_0})
    told = r"damaged: blk\.1\.ffn_up\.weight has weights that are not finite; get the file again"
    with pytest.raises(ModelError, match=told):
        LLM(path, quantization=quantization)
    assert cached() == []


@pytest.mark.usefixtures("own_cache")
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
        assert torch.equal(unpacked(*layer.qkv), torch.cat(parts))
        assert torch.equal(unpacked(layer.down), values[f"blk.{index}.ffn_down.weight"])
        gate, up = (values[f"blk.{index}.ffn_{part}.weight"] for part in ("gate", "up"))
        turns = torch.stack([gate.view(-1, 32, 64), up.view(-1, 32, 64)], dim=1)
        assert torch.equal(unpacked(*layer.gate_up), turns.flatten(0, 2))
        assert layer.mlp_norm is not None
        assert torch.equal(layer.mlp_norm, values[f"blk.{index}.ffn_norm.weight"])
    assert torch.equal(unpacked(packed.weights.head()), values["token_embd.weight"])
    dequantized = LLM(path, dtype=dtype, quantization="none")
    assert dequantized.engine.target.quantization is None
    assert difference(scores(own), scores(dequantized)) < 0.05  # inputs are rounded to int8


MIXED: dict[str, dict[str, Kind]] = {
    "Q4_K_M": {"attn_q": Kind.Q4_K, "attn_k": Kind.Q4_K, "attn_v": Kind.Q6_K, "ffn": Kind.Q4_K},
    "all different": {
        "attn_q": Kind.Q6_K,
        "attn_k": Kind.Q8_0,
        "attn_v": Kind.Q5_1,
        "ffn_gate": Kind.Q5_K,
        "ffn_up": Kind.Q6_K,
        "ffn_down": Kind.Q4_0,
    },
}
PARTS = {"Q4_K_M": (2, 1), "all different": (3, 2)}
"""How many matrices query, key and value are, and gate and up."""


@pytest.mark.usefixtures("own_cache", "random_blocks")
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
@pytest.mark.parametrize("kinds", MIXED)
def test_layers_whose_parts_differ_in_kind(
    kinds: str, architecture: str, written: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 256, "tied": False}
    path = written(MIXED[kinds], architecture=architecture, **wide)
    own = LLM(path, dtype="float32")
    assert own.bit_exact
    (entry,) = cached()
    assert entry.runs is not None
    assert "rounded" not in entry.runs
    monkeypatch.setattr(packing_gguf.GgufPacker, "run", never)
    packed = open_packed(path, own.dtype, own.device, quantization="auto", runtime="auto")
    assert packed is not None
    values = {each.name: torch.from_numpy(each.values()) for each in GgufFile.open(path).tensors}
    for index in range(2):
        layer = packed.weights.layer(index)
        assert (len(layer.qkv), len(layer.gate_up)) == PARTS[kinds]
        parts = [values[f"blk.{index}.attn_{part}.weight"] for part in "qkv"]
        assert torch.equal(torch.cat([unpacked(part) for part in layer.qkv]), torch.cat(parts))
        if len(layer.gate_up) == 2:
            for part, name in zip(layer.gate_up, ("gate", "up"), strict=True):
                assert torch.equal(unpacked(part), values[f"blk.{index}.ffn_{name}.weight"])
    dequantized = LLM(resolve(path), dtype="float32", quantization="none")
    mapped = LLM(path, dtype="float32")
    together = scores(mapped)
    assert torch.equal(together, scores(own))
    assert difference(together, scores(dequantized)) < 0.05  # inputs are rounded to int8
    target: Target = mapped.engine.target
    target.add(-1)
    for place, (token, expected) in enumerate(zip(TEXT, together, strict=True)):
        assert torch.equal(target.verify([-1], [chain([token])])[0].scores[0], expected), place
        target.prefill(-1, [token])


@pytest.mark.usefixtures("own_cache")
def test_floats_beside_other_kinds(written: Any) -> None:
    """They read inputs that are not rounded, so all of the layer does."""
    kinds = {"attn_q": Kind.Q8_0, "attn_v": Kind.F16, "ffn": Kind.Q4_0, "blk.1.ffn_down": Kind.F16}
    own = LLM(path := written(kinds), dtype="float32")
    (entry,) = cached()
    assert entry.runs is not None
    assert entry.runs == "Q8_0 as float32; F32 as float32; F16 as float32; Q4_0 as int4"
    assert difference(scores(own), scores(LLM(path, dtype="float32", quantization="none"))) < 0.05


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_other_numbers_are_those_of_the_dequantized_file(written: Any, quantization: str) -> None:
    path = written({"blk": Kind.Q8_0})
    found = scores(LLM(path, dtype="bfloat16", quantization=quantization))
    assert [entry.kind for entry in cached()] == ["packed"]  # nothing was dequantized on disk
    folder = resolve(path)
    expected = LLM(folder, dtype="bfloat16", quantization=quantization)
    assert torch.equal(found, scores(expected))


@pytest.mark.usefixtures("own_cache")
def test_a_file_without_quantized_numbers_is_loaded_as_a_whole(written: Any) -> None:
    llm = LLM(written({}), dtype="float32")
    assert llm.engine.target.quantization is None
    assert [entry.kind for entry in cached()] == ["model"]


@pytest.mark.usefixtures("own_cache")
def test_a_packed_file_is_not_read_again(written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written({"blk": Kind.Q8_0})
    expected = scores(LLM(path, dtype="float32"))
    monkeypatch.setattr(gguf.GGUFReader, "__init__", never)
    assert torch.equal(scores(LLM(path, dtype="float32")), expected)


@pytest.mark.usefixtures("own_cache")
def test_no_room_is_needed_for_what_is_not_packed(
    written: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type(shutil.disk_usage("/"))(total=10**9, used=10**9 - 1000, free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    path, device = written({}), torch.device("cpu")
    opened = open_packed(path, torch.float32, device, quantization="auto", runtime="native")
    assert opened is None


@pytest.mark.usefixtures("own_cache")
def test_what_reads_the_module_gets_the_dequantized_file(written: Any) -> None:
    path = written({"blk": Kind.Q4_0, "output": Kind.Q8_0}, tied=False)
    target = LLM(path, dtype="float32").engine.target
    weights = target.vocabulary_weights
    assert weights is not None
    values = {each.name: each for each in GgufFile.open(path).tensors}
    assert np.array_equal(weights[0].numpy(), values["token_embd.weight"].values())
    assert np.array_equal(weights[1].numpy(), values["output.weight"].values())


@pytest.mark.usefixtures("own_cache")
def test_a_full_disk(written: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written({"blk": Kind.Q8_0})

    def full(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(packing_gguf, "write", full)
    with pytest.raises(ModelError, match=r"the disk is full: .* needs .* free"):
        LLM(path, dtype="float32")
    assert not list((cache / "models").iterdir())


@pytest.mark.usefixtures("own_cache")
def test_a_cache_that_cannot_be_written(
    written: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = written({"blk": Kind.Q8_0})
    expected = scores(LLM(path, dtype="float32"))
    (tmp_path / "file").touch()
    monkeypatch.setenv("TOKENLEAP_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    with caplog.at_level("WARNING", logger="tokenleap"):
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
    resolver._built.clear()


@pytest.mark.usefixtures("own_cache")
def test_no_room_for_what_is_packed_aside(
    written: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written({"blk": Kind.Q8_0})
    (tmp_path / "file").touch()
    monkeypatch.setenv("TOKENLEAP_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    usage = type(shutil.disk_usage("/"))(total=10**9, used=10**9 - 1000, free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(ModelError, match=r"the disk is full: .*temporary.* needs"):
        LLM(path, dtype="float32")
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.usefixtures("own_cache")
def test_a_file_that_changes_while_it_runs(written: Any) -> None:
    llm = LLM(path := written({"blk": Kind.Q8_0}), dtype="float32")
    before = scores(llm)
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    os.truncate(path, 1000)
    assert torch.equal(scores(llm), before)


@pytest.mark.usefixtures("own_cache")
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


@pytest.mark.usefixtures("own_cache")
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


@pytest.mark.usefixtures("own_cache")
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
