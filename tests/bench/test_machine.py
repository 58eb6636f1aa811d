"""Counters of a make-believe machine."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.heads import published_medusa
from tests.tiny import VOCAB_SIZE, tiny_model
from tokenleap.bench.machine import BYTES, open_meter, weight_bytes
from tokenleap.runtime.choices import QUANTIZATIONS
from tokenleap.runtime.llama import LinearWeights
from tokenleap.runtime.native.pack import Format, pack


def zone(powercap: Path, name: str, energy: int, limit: int = 999) -> Path:
    folder = powercap / name
    folder.mkdir()
    (folder / "energy_uj").write_text(f"{energy}\n")
    (folder / "max_energy_range_uj").write_text(f"{limit}\n")
    return folder


def test_packages_are_added_up_and_wrap_around(tmp_path: Path) -> None:
    first = zone(tmp_path, "intel-rapl:0", 990)
    zone(tmp_path, "intel-rapl:0:0", 5)  # a part of the package
    second = zone(tmp_path, "intel-rapl:1", 100)
    meter, said = open_meter("cpu", tmp_path)
    assert meter is not None
    assert said == "RAPL, 2 processor package(s)"
    before = meter.read()
    (first / "energy_uj").write_text("10")
    (second / "energy_uj").write_text("300")
    assert meter.joules(before, meter.read()) == pytest.approx((20 + 200) / 1e6)


@pytest.mark.parametrize(
    ("there", "told"), [(False, "this machine shows no RAPL counter"), (True, "energy_uj")]
)
def test_a_counter_that_is_missing_or_cannot_be_read(
    tmp_path: Path, there: bool, told: str
) -> None:
    if there:
        (tmp_path / "intel-rapl:0").mkdir()
    meter, said = open_meter("cpu", tmp_path)
    assert meter is None
    assert said.startswith("unavailable: ")
    assert told in said


class NVMLError(Exception):
    pass


def fake_nvml(readings: list[int] | None) -> Any:
    def read(_: int) -> int:
        if readings is None:
            raise NVMLError("Not Supported")
        return readings.pop(0)

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetTotalEnergyConsumption=read,
    )


def test_a_gpu_counts_millijoules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([0, 1000, 4000]))
    meter, said = open_meter("cuda:0")
    assert meter is not None
    assert said.startswith("NVML")
    assert meter.joules(meter.read(), meter.read()) == 3


def test_a_gpu_without_counter_or_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(None))
    assert open_meter("cuda") == (None, "unavailable: Not Supported")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    meter, said = open_meter("cuda")
    assert meter is None
    assert "pip install 'nvidia-ml-py>" in said


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_quantized_weight(quantization: str) -> None:
    layer = LinearWeights(torch.randn(64, 96), None)
    packed = pack(layer, Format[quantization.upper()]).weight
    assert packed.numel() * packed.element_size() == 64 * 96 * BYTES[quantization]


@pytest.mark.parametrize("tied", [True, False])
def test_the_weights_of_a_pass(tmp_path: Path, tied: bool) -> None:
    """Matrices are quantized, the head to int8, norms not at all.

    An embedding that is only looked up does not count.
    """
    model = tiny_model(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    named = dict(model.named_parameters())
    if not tied:
        del named["model.embed_tokens.weight"]
    head = model.get_output_embeddings().weight.numel()  # type: ignore[no-untyped-call]
    matrices = sum(p.numel() for p in named.values() if p.dim() > 1)
    others = sum(p.numel() for p in named.values() if p.dim() == 1)
    assert weight_bytes(tmp_path, 2) == 2 * (matrices + others)
    for quantization, each in BYTES.items():
        expected = (matrices - head) * each + head * BYTES["int8"] + 2 * others
        assert weight_bytes(tmp_path, 2, quantization) == expected


def test_the_weights_of_a_published_head(tmp_path: Path) -> None:
    folder = published_medusa(tmp_path / "head", size=32)
    assert weight_bytes(folder, 4) == 2 * 4 * (32 * 32 + 32 + 32 * VOCAB_SIZE)
