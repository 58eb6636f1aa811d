"""Counters of a make-believe machine."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tokenleap.bench.machine import open_meter


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


def test_no_counter_is_said(tmp_path: Path) -> None:
    meter, said = open_meter("cpu", tmp_path)
    assert meter is None
    assert said.startswith("unavailable: this machine shows no RAPL counter")


def test_a_counter_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "intel-rapl:0").mkdir()
    meter, said = open_meter("cpu", tmp_path)
    assert meter is None
    assert "energy_uj" in said


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
    assert "pip install 'tokenleap[energy]'" in said
