"""Energy by the machine's own counters: RAPL of the processor, NVML of NVIDIA GPUs.

Where there is no counter, energy is reported as unavailable with the reason; it is never estimated.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

__all__ = ["Meter", "NvmlMeter", "RaplMeter", "open_meter"]

POWERCAP = Path("/sys/class/powercap")


class Meter(Protocol):
    """A counter of energy."""

    def read(self) -> list[int]:
        """The counters' current values, in any unit."""
        ...

    def joules(self, before: list[int], after: list[int]) -> float:
        """Energy between two readings."""
        ...


@dataclass(frozen=True)
class RaplMeter:
    """Processor packages through Linux's powercap. Its counters of microjoules wrap around.

    Args:
        zones: one folder per package.
    """

    zones: tuple[Path, ...]

    def read(self) -> list[int]:
        """Microjoules of every package."""
        return [_number(zone / "energy_uj") for zone in self.zones]

    def joules(self, before: list[int], after: list[int]) -> float:
        """Energy between two readings, at most one wrap apart."""
        ranges = [_number(zone / "max_energy_range_uj") for zone in self.zones]
        used = zip(before, after, ranges, strict=True)
        return sum((end - start) % (limit + 1) for start, end, limit in used) / 1e6


class NvmlMeter:
    """All NVIDIA GPUs, in millijoules since the driver was loaded.

    Args:
        nvml: the module `pynvml`, initialised.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._devices = [
            nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())
        ]

    def read(self) -> list[int]:
        """Millijoules of every GPU."""
        read = self._nvml.nvmlDeviceGetTotalEnergyConsumption
        return [int(read(device)) for device in self._devices]

    def joules(self, before: list[int], after: list[int]) -> float:
        """Energy between two readings."""
        return (sum(after) - sum(before)) / 1e3


def open_meter(device: str, powercap: Path = POWERCAP) -> tuple[Meter | None, str]:
    """The energy counter of a device, or None; and its name, or the reason why there is none.

    Args:
        device: "cpu" or "cuda...".
        powercap: where Linux shows RAPL.
    """
    return _nvml() if device.startswith("cuda") else _rapl(powercap)


def _rapl(powercap: Path) -> tuple[Meter | None, str]:
    zones = tuple(sorted(powercap.glob("intel-rapl:[0-9]*")))
    packages = tuple(zone for zone in zones if zone.name.count(":") == 1)
    if not packages:
        return None, f"unavailable: this machine shows no RAPL counter in {powercap}"
    meter = RaplMeter(packages)
    try:
        meter.read()
    except OSError as error:
        return None, f"unavailable: {error.filename}: {error.strerror}"
    return meter, f"RAPL, {len(packages)} processor package(s)"


def _nvml() -> tuple[Meter | None, str]:
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None, "unavailable: GPU counters need pynvml (pip install 'tokenleap[energy]')"
    try:
        nvml.nvmlInit()
        meter = NvmlMeter(nvml)
        meter.read()
    except nvml.NVMLError as error:
        return None, f"unavailable: {error}"
    return meter, "NVML, all GPUs together"


def _number(file: Path) -> int:
    return int(file.read_text(encoding="ascii"))
