"""`tokenleap methods` and `tokenleap doctor`: what there is to choose from, and this machine."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from tokenleap.cli.console import display, plain, show_json, working
from tokenleap.cli.options import JsonOption
from tokenleap.cli.root import examples

METHODS_EXAMPLES = examples("tokenleap methods", "tokenleap methods --json")

_NAME_CELLS = 12


def methods(
    json_output: JsonOption = False,
) -> None:
    """List drafters, acceptance rules and controllers."""
    with working("Starting", quiet=json_output):
        from tokenleap import control
        from tokenleap.core import acceptance
        from tokenleap.drafters import registry

        drafters = _listed(registry.METHODS, registry.PLUGINS, _drafter)
        rules = _listed(acceptance.RULES, acceptance.PLUGINS, _rule_facts)
        controllers = _listed(control.CONTROLLERS, control.PLUGINS, _controller)
    if json_output:
        show_json({"methods": drafters, "acceptance": rules, "controllers": controllers})
        return
    _show_names(
        "--method", "tokens", [(d, str(d.get("num_speculative_tokens", ""))) for d in drafters]
    )
    display().print()
    kinds = {True: "lossless", False: "lossy", None: ""}
    _show_names("--acceptance", "output", [(rule, kinds[rule.get("lossless")]) for rule in rules])
    display().print()
    _show_names("--controller", "", [(controller, "") for controller in controllers])


def _listed(
    known: Iterable[str], group: str, describe: Callable[[str], dict[str, Any]]
) -> list[dict[str, Any]]:
    """The parts of a kind, also other packages'; of one that they fail to bring, what is wrong."""
    from tokenleap.core.config import plugin_names
    from tokenleap.errors import ConfigError

    found = []
    for name in dict.fromkeys([*known, *plugin_names(group)]):
        try:
            found.append({"name": name, **describe(name)})
        except ConfigError as error:
            found.append({"name": name, "summary": str(error), "fields": []})
    return found


def _drafter(name: str) -> dict[str, Any]:
    from tokenleap.drafters.registry import drafter_spec

    spec = drafter_spec(name)
    return {
        "num_speculative_tokens": spec.default_num_speculative_tokens,
        "summary": spec.summary,
        "fields": spec.options.field_names(),
    }


def _rule_facts(name: str) -> dict[str, Any]:
    from tokenleap.core.acceptance import rule_class

    rule = rule_class(name)
    summary = inspect.cleandoc(rule.__doc__ or "").partition("\n")[0].rstrip(".")
    return {"lossless": rule.lossless, "summary": summary, "fields": rule.Options.field_names()}


def _controller(name: str) -> dict[str, Any]:
    from tokenleap.control import controller_class

    controller = controller_class(name)
    return {"summary": controller.summary, "fields": controller.Options.field_names()}


def _show_names(name: str, second: str, rows: list[tuple[dict[str, Any], str]]) -> None:
    """A table of names; `second` heads its second column."""
    table = Table(box=None, pad_edge=False, header_style="head", padding=(0, 3, 0, 0))
    table.add_column(name, no_wrap=True, min_width=_NAME_CELLS)
    table.add_column(second, no_wrap=True, min_width=len("lossless"))
    table.add_column("")
    for row, cell in rows:
        text = plain(row["summary"])
        if row["fields"]:
            text.append_text(plain("\n" + ", ".join(row["fields"]), "note"))
        table.add_row(row["name"], cell, text)
    display().print(table)


DOCTOR_EXAMPLES = examples("tokenleap doctor", "tokenleap doctor --json")

_GIB = 2**30
_FOR_DEVELOPERS = {"dev", "docs"}


@dataclass(frozen=True)
class _Finding:
    """A fact about the machine, and advice if it could be better."""

    name: str
    value: str
    advice: str = ""


def doctor(
    json_output: JsonOption = False,
) -> None:
    """Say what this machine has, what will run on it, and what would be faster."""
    with working("Looking", quiet=json_output):
        findings = [
            *_processor(),
            _memory(),
            _gpu(),
            _native(),
            _dtype(),
            _threads(),
            _cache(),
            *_extras(),
        ]
    if json_output:
        show_json({"findings": [asdict(finding) for finding in findings]})
        return
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 3, 0, 0))
    table.add_column(no_wrap=True, style="head")
    table.add_column(overflow="fold")
    for finding in findings:
        value = plain(finding.value)
        if finding.advice:
            value.append_text(plain(f"\n{finding.advice}", "correction"))
        table.add_row(plain(finding.name), value)
    display().print(table)


def _processor() -> list[_Finding]:
    from tokenleap.bench.machine import host, instructions
    from tokenleap.runtime.cores import available_cores

    all_cores = os.cpu_count() or 1
    cores = f"{available_cores()} of {all_cores}"
    found, advice = instructions(), ""
    if "avx2" not in found and "asimd" not in found:
        advice = "Without AVX2, the native runtime uses portable code, which is slower."
    return [
        _Finding("processor", str(host()["cpu"])),
        _Finding("cores", cores),
        _Finding("instructions", ", ".join(found) or "none that matter here", advice),
    ]


def _memory() -> _Finding:
    import psutil

    memory = psutil.virtual_memory()
    text = f"{memory.available / _GIB:.1f} GiB free of {memory.total / _GIB:.1f} GiB"
    tight = "Close other programs, or use --quantization int4." if memory.percent > 80 else ""
    return _Finding("memory", text, tight)


def _gpu() -> _Finding:
    import torch

    if not torch.cuda.is_available():
        return _Finding("GPU", "none that PyTorch can use")
    name = torch.cuda.get_device_name()
    free, total = torch.cuda.mem_get_info()
    return _Finding("GPU", f"{name}, {free / _GIB:.1f} GiB free of {total / _GIB:.1f} GiB")


def _native() -> _Finding:
    from tokenleap.runtime.native.build import library_origin, why_no_library

    missing = why_no_library()
    if missing is None:
        what = "Llama and its relatives, and encoder-decoders, run in C++ on the CPU"
        return _Finding("native runtime", f"ready, {library_origin()}: {what}")
    return _Finding(
        "native runtime",
        f"not available: {missing}",
        "All models run on PyTorch's operations instead, which are several times slower.",
    )


def _dtype() -> _Finding:
    from tokenleap.models.support import default_device, default_dtype

    device = default_device("auto")
    dtype = str(default_dtype("auto", device)).removeprefix("torch.")
    if dtype == "float32":
        dtype += ": the processor has no instructions for bfloat16"
    return _Finding("defaults", f"models run on {device}, in {dtype}")


def _threads() -> _Finding:
    import torch

    from tokenleap.runtime.cores import available_cores

    threads, cores = torch.get_num_threads(), available_cores()
    many = f"There are only {cores} cores: set OMP_NUM_THREADS to that." if threads > cores else ""
    return _Finding("threads", f"{threads} for the passes", many)


def _cache() -> _Finding:
    import shutil

    from tokenleap.models import cache_dir, cached
    from tokenleap.models.store import bytes_text

    folder = cache_dir()
    place = next(each for each in (folder, *folder.parents) if each.exists())
    used, free = sum(model.size_bytes for model in cached()), shutil.disk_usage(place).free
    text = f"{folder}: {bytes_text(used)} of models; {bytes_text(free)} of disk are free"
    low = "Free some disk: converting a model needs its size twice." if free < 2 * _GIB else ""
    return _Finding("cache", text, low)


def _extras() -> list[_Finding]:
    from tokenleap.bench.machine import package_version
    from tokenleap.core.extras import extras, how_to_install, requirements

    found = []
    for extra in extras():
        if extra not in _FOR_DEVELOPERS:
            missing = any(package_version(each.name) is None for each in requirements(extra))
            how = f"not installed: {how_to_install(extra)}" if missing else "installed"
            found.append(_Finding(f"extra {extra}", how))
    return found
