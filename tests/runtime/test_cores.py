"""How many cores, threads and how much memory a process takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tokenleap.cli.options import ModelOptions
from tokenleap.runtime.cores import available_cores, memory_limit
from tokenleap.runtime.native import network as threads


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


def groups(folder: Path, line: str, **files: str) -> tuple[Path, Path]:
    """The file of a process's groups, and a root with files; `__` in a name is a folder."""
    for name, text in files.items():
        path = folder / "root" / name.replace("__", "/").replace("-", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "own").write_text(line)
    return folder / "own", folder / "root"


def test_affinity_alone(tmp_path: Path) -> None:
    assert available_cores(tmp_path / "missing", tmp_path) == 8
    assert available_cores(*groups(tmp_path, "0::/a\n", **{"a__cpu-max": "max 100000\n"})) == 8


@pytest.mark.parametrize(
    ("quota", "expected"), [("150000 100000", 2), ("50000 100000", 1), ("9900000 100000", 8)]
)
def test_quota(tmp_path: Path, quota: str, expected: int) -> None:
    assert available_cores(*groups(tmp_path, "0::/a\n", **{"a__cpu-max": quota})) == expected


def test_quota_of_a_group_above(tmp_path: Path) -> None:
    files = {"a__b__cpu-max": "max 100000", "a__cpu-max": "300000 100000"}
    assert available_cores(*groups(tmp_path, "0::/a/b\n", **files)) == 3


def test_quota_of_version_1(tmp_path: Path) -> None:
    files = {"cpu__cpu-cfs_quota_us": "400000\n", "cpu__cpu-cfs_period_us": "100000\n"}
    line = "5:memory:/x\n3:cpu,cpuacct:/docker/of-the-host\n"
    assert available_cores(*groups(tmp_path, line, **files)) == 4
    (tmp_path / "root/cpu/cpu.cfs_quota_us").write_text("-1\n")
    assert available_cores(tmp_path / "own", tmp_path / "root") == 8


def test_memory(tmp_path: Path) -> None:
    assert memory_limit(tmp_path / "missing", tmp_path) == sys.maxsize
    files = {"a__b__memory-max": "max\n", "a__memory-max": "4096\n"}
    assert memory_limit(*groups(tmp_path, "0::/a/b\n", **files)) == 4096
    old = {"memory__memory-limit_in_bytes": "2048\n"}
    line = "5:memory:/x\n3:cpu,cpuacct:/x\n"
    assert memory_limit(*groups(tmp_path, line, **old)) == 2048


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quota bounds PyTorch's own number, not one that somebody chose."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "_CORES", 2)
    monkeypatch.setattr(threads, "_default", 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert threads.num_threads() == 2
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    assert threads.num_threads() == 5
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert threads.num_threads() == 8


def test_a_number_that_the_user_chose_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even PyTorch's own number, which `tokenleap --threads` may set."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "_CORES", 2)
    monkeypatch.setattr(threads, "_default", 8)
    asked = list[int]()
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert threads.num_threads() == 2
    ModelOptions("m", threads=8).set_threads()
    assert asked == [8]
    assert threads.num_threads() == 8


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "20000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_spinning_is_bounded_unless_somebody_chose(given: dict[str, str], expected: str) -> None:
    script = "import os, tokenleap; print(os.environ.get('GOMP_SPINCOUNT'))"
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {k: v for k, v in os.environ.items() if k not in names} | given
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == expected


PEER = """
import os, sys
from types import ModuleType
from unittest.mock import patch
import tokenleap
from tokenleap.bench import worker
from tokenleap.bench.contestants import Contestant, Setting
from tokenleap.bench.worker import Worker

with patch("subprocess.Popen") as started:
    worker.Process(Contestant("a", "transformers-plain"), Setting("m"))
print(started.call_args.kwargs["env"].get("GOMP_SPINCOUNT"), os.environ.get("GOMP_SPINCOUNT"))
for kind in ("tokenleap", "transformers-plain"):
    peers, own = ModuleType("tokenleap.bench.peers"), ModuleType("tokenleap.bench.own")
    own.OwnRunner = object
    peers.runner = lambda *_: own.OwnRunner()
    with patch.dict(sys.modules, {peers.__name__: peers, own.__name__: own}):
        Worker(Contestant("a", kind), Setting("m"))
    print(os.environ.get("GOMP_SPINCOUNT"))
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize(
    ("given", "expected"), [({}, "None 20000 20000 None"), ({"GOMP_SPINCOUNT": "7"}, "7 7 7 7")]
)
def test_peers_spin_as_without_us(given: dict[str, str], expected: str) -> None:
    """Neither from the parent nor by importing us do they get the bound; a user's choice stays."""
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {k: v for k, v in os.environ.items() if k not in names} | given
    done = subprocess.run(
        [sys.executable, "-c", PEER], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == expected.split()
