"""The wheel is complete: it works outside the checkout, C++ sources and entry point included.

It is made as without a compiler, and compiles at first use. `make wheel` makes the whole one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.tiny import tiny_model

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content."""
    folder = tmp_path_factory.mktemp("wheel")
    # Without isolation, since tests do not reach for the network.
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    done = subprocess.run(
        [*command, str(ROOT)],
        env={**os.environ, "CXX": "false"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


def run(unpacked: Path, *arguments: str) -> str:
    """Python on the wheel's content, in a folder from which the checkout cannot be seen."""
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=unpacked.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_has_everything_it_needs(unpacked: Path) -> None:
    native = ROOT / "src/tokenleap/runtime/native"
    sources = {path.name for path in native.iterdir() if path.suffix in (".cpp", ".h", ".json")}
    packed = {path.name for path in (unpacked / "tokenleap/runtime/native").iterdir()}
    assert sources <= packed
    assert (unpacked / "tokenleap/py.typed").exists()
    head = unpacked / "tokenleap/drafters/heads/pretrained/smollm2-135m"
    assert {path.name for path in head.iterdir()} == {"config.json", "model.safetensors"}
    page = {path.name for path in (ROOT / "src/tokenleap/serve/static").iterdir()}
    assert page == {path.name for path in (unpacked / "tokenleap/serve/static").iterdir()}
    assert not list(unpacked.glob("tests*"))


def test_it_generates_outside_the_checkout(unpacked: Path, tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    script = (
        "import tokenleap, sys\n"
        "from tokenleap import LLM, SamplingParams\n"
        "llm = LLM(sys.argv[1], speculative_config={'method': 'ngram'})\n"
        "out = llm.generate([[1, 2, 1, 2]], SamplingParams(temperature=0, max_tokens=4))[0]\n"
        "print(tokenleap.__file__, llm.runtime, len(out.token_ids))\n"
    )
    home, _, tokens = run(unpacked, "-c", script, str(tmp_path / "model")).split()
    assert Path(home).is_relative_to(unpacked)
    assert tokens == "4"


def test_python_m_tokenleap(unpacked: Path) -> None:
    assert "generate" in run(unpacked, "-m", "tokenleap", "--help")


def test_any_index_has_the_pinned_versions_and_they_are_in_the_declared_ranges() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert [name for name, version in pins.items() if "+" in version] == []  # such as 2.13.0+cpu
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = chain(project["dependencies"], *project["optional-dependencies"].values())
    for each in map(Requirement, declared):
        pinned = versions.get(canonicalize_name(each.name))
        assert pinned is None or each.specifier.contains(pinned), each
