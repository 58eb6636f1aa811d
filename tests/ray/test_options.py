"""`--replicas` and `--ray-address`: what is refused at once, with Ray and without."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest

import foretoken.ray
from foretoken.errors import ForetokenError
from foretoken.ray.cluster import cluster
from tests.cli.conftest import Run, error_of, run

__all__ = ["run"]

SERVE = ("serve", "no-such-model", "--port", 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--replicas", "0"], "--replicas: there must be at least 1, got 0"),
        (["--replicas", "2:1"], "--replicas: MIN is above MAX in 2:1"),
        (["--replicas", "two"], "--replicas: must be a number, or MIN:MAX such as 1:4, got two"),
        (["--ray-address", "10.0.0.1:6379"], "--ray-address is for replicas: add --replicas N"),
    ],
)
def test_wrong_options(run: Run, arguments: list[str], message: str) -> None:
    for command in (SERVE, ("generate", "--jsonl", "hello")):
        result = run(*command, *arguments)
        assert result.exit_code == 2
        assert message in error_of(result)


def test_replicas_are_for_several_prompts(run: Run) -> None:
    result = run("generate", "hello", "--replicas", 2)
    assert result.exit_code == 2
    assert "--replicas is for several prompts" in error_of(result)


def test_a_port_in_use(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = run("serve", "no-such-model", "--port", port, "--replicas", 2)
    assert result.exit_code == 1
    assert "Address already in use: choose another --port" in error_of(result)


def test_ray_is_missing(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    prompts = tmp_path / "in.txt"
    prompts.write_text("hello\n")
    for command in (SERVE, ("generate", "--jsonl", "--file", prompts)):
        result = run(*command, "--replicas", 2)
        assert result.exit_code == 1
        assert "pip install 'foretoken[ray]'" in error_of(result)
    with pytest.raises(ForetokenError, match=r"foretoken\[ray\]"):
        foretoken.ray.generate(None, "smollm2-135m")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:{}", "there is no Ray cluster at 127.0.0.1:.*Connection refused"),
        ("ray://127.0.0.1:10001", "ray_address: must be HOST:PORT"),
        ("somewhere", "ray_address: must be HOST:PORT"),
        ("127.0.0.1:99999", "ray_address: must be HOST:PORT"),
    ],
)
def test_an_address_without_a_cluster(
    monkeypatch: pytest.MonkeyPatch, address: str, message: str
) -> None:
    monkeypatch.setattr("foretoken.ray.cluster.check_installed", lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    with pytest.raises(ForetokenError, match=message), cluster(address.format(port)):
        pass


def test_there_is_only_generate() -> None:
    wrong: Any = foretoken.ray
    with pytest.raises(AttributeError, match="no attribute 'serve'"):
        _ = wrong.serve
