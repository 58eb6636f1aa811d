"""The machine of a measurement: processor and versions. Does not import torch."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import platform
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import tokenleap
from tokenleap.core.extras import how_to_install
from tokenleap.runtime.choices import DRAFTING
from tokenleap.runtime.cores import available_cores


def host() -> dict[str, Any]:
    """Processor, what it can do, cores and versions."""
    return {
        "cpu": _cpu_model(),
        "instructions": " ".join(instructions()) or None,
        "cores": available_cores(),
        "python": platform.python_version(),
        "torch": package_version("torch"),
        "transformers": package_version("transformers"),
        "tokenleap": tokenleap.__version__,
        "source": source_digest(),
    }


def package_version(name: str) -> str | None:
    """The installed version of a distribution; None if there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    return _of_processor("model name") or platform.processor() or platform.machine()


def processor_flags() -> frozenset[str]:
    """Names of the processor's sets of instructions, as Linux has them; elsewhere none."""
    return frozenset((_of_processor("flags") or _of_processor("Features")).split())


def instructions() -> list[str]:
    """Those sets of instructions that decide how fast a model runs, by Linux's names."""
    known = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "avx_vnni", "amx_bf16", "asimd")
    flags = processor_flags()
    return [name for name in known if name in flags]


def _of_processor(field: str) -> str:
    """A field of the first core in Linux's table; empty if it is not there."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    values = (line.partition(":")[2].strip() for line in lines if line.startswith(field))
    return next(values, "")


def source_digest() -> str:
    """Twelve hexadecimal digits that change with every change of the package's source."""
    root = Path(tokenleap.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


# Energy by the machine's own counters: RAPL of the processor, NVML of NVIDIA GPUs.
#
# Where there is no counter, energy is reported as unavailable with the reason; it is never
# estimated.


POWERCAP = Path("/sys/class/powercap")


class Meter(Protocol):
    """A counter of energy."""

    def read(self) -> list[int]: ...

    def joules(self, before: list[int], after: list[int]) -> float: ...


@dataclass(frozen=True)
class RaplMeter:
    """Processor packages through Linux's powercap. Its counters of microjoules wrap around."""

    zones: tuple[Path, ...]

    def read(self) -> list[int]:
        return [_number(zone / "energy_uj") for zone in self.zones]

    def joules(self, before: list[int], after: list[int]) -> float:
        """Energy between two readings, at most one wrap apart."""
        ranges = [_number(zone / "max_energy_range_uj") for zone in self.zones]
        used = zip(before, after, ranges, strict=True)
        return sum((end - start) % (limit + 1) for start, end, limit in used) / 1e6


class NvmlMeter:
    """All NVIDIA GPUs, in millijoules since the driver was loaded."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._devices = [
            nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())
        ]

    def read(self) -> list[int]:
        read = self._nvml.nvmlDeviceGetTotalEnergyConsumption
        return [int(read(device)) for device in self._devices]

    def joules(self, before: list[int], after: list[int]) -> float:
        return (sum(after) - sum(before)) / 1e3


def open_meter(device: str, powercap: Path = POWERCAP) -> tuple[Meter | None, str]:
    """The energy counter of a device, or None; and its name, or the reason why there is none."""
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
        return None, f"unavailable: GPU counters need pynvml ({how_to_install('energy')})"
    try:
        nvml.nvmlInit()
        meter = NvmlMeter(nvml)
        meter.read()
    except nvml.NVMLError as error:
        return None, f"unavailable: {error}"
    return meter, "NVML, all GPUs together"


def _number(file: Path) -> int:
    return int(file.read_text(encoding="ascii"))


# Peak bytes of a process, and bytes of weights and KV computed from their shapes.
#
# Tables 8 and 9 of Xia et al., "Speculative Decoding" (2023), give peak memory by parts.


BYTES = {"int8": 34 / 32, "int4": 20 / 32, DRAFTING: 20 / 32}
"""Per quantized weight. Groups of 32 share a scale of 16 bits; int4 groups an offset, too."""


_DTYPE_BYTES = {"U8": 1, "BF16": 2, "F32": 4}


def peak_bytes(device: str) -> int:
    """Peak memory of this process: of the GPU if it computes there, else resident memory."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def weight_bytes(folder: Path, itemsize: int, quantization: str | None = None) -> int:
    """Bytes of the weights that one forward pass reads.

    An input embedding that is not tied to the output layer is left out, because a pass reads only
    a few of its rows. Quantized matrices count with the scales of their groups.
    """
    from safetensors import safe_open

    from tokenleap.drafters.heads.folder import first_of, read_tensors

    if (folder / "rest.safetensors").is_file():
        return _packed_bytes(folder)
    shapes: dict[str, list[int]] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "np") as tensors:
            shapes |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    if not shapes:  # a published head
        path = first_of(folder, "pytorch_model.bin", "medusa_lm_head.pt")
        shapes = {name: list(tensor.shape) for name, tensor in read_tensors(path).items()}
    untied = any(name.endswith("lm_head.weight") for name in shapes)
    total = 0.0
    for name, shape in shapes.items():
        if untied and name.endswith(("embed_tokens.weight", "wte.weight", "embed_in.weight")):
            continue
        quantized = len(shape) > 1 and quantization is not None
        # With int4 the output layer stays in int8, and so does the embedding tied to it.
        is_head = name.endswith(("lm_head.weight", "embed_tokens.weight"))
        form = "int8" if is_head else str(quantization)
        total += math.prod(shape) * (BYTES[form] if quantized else itemsize)
    return int(total)


def _packed_bytes(folder: Path) -> int:
    """Bytes that a pass reads of packed weights (`runtime/native/packed.py`)."""
    from safetensors import safe_open

    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "np") as tensors:
            for name in set(tensors.keys()) - {"embedding", "logits"}:
                part = tensors.get_slice(name)
                total += math.prod(part.get_shape()) * _DTYPE_BYTES[part.get_dtype()]
    return total


def kv_bytes(folder: Path, itemsize: int) -> int | None:
    """Bytes of one position's keys and values in all layers; None if config.json lacks sizes."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    layers = config.get("num_hidden_layers", config.get("n_layer"))
    heads = config.get("num_attention_heads", config.get("n_head"))
    hidden = config.get("hidden_size", config.get("n_embd"))
    if not (layers and heads and hidden):
        return None
    width = config.get("head_dim") or hidden // heads
    groups = config.get("num_key_value_heads") or heads
    return int(2 * layers * groups * width * itemsize)
