"""`--replicas` and `--ray-address`: what is refused at once, with Ray and without."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import tokenleap.ray
from tests.cli.conftest import Run, error_of, run
from tokenleap.cli import options as ray_options
from tokenleap.cli.options import arguments_for_replicas, as_given
from tokenleap.config import SpeculativeConfig
from tokenleap.errors import TokenleapError
from tokenleap.ray import cluster as cluster_module
from tokenleap.ray.cluster import cluster, watched

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
        assert "this needs ray: pip install 'fastapi<" in error_of(result)
    with pytest.raises(TokenleapError, match=r"'ray\[data,serve\]<"):
        tokenleap.ray.generate(None, "smollm2-135m")


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
    monkeypatch.setattr("tokenleap.ray.cluster.check_installed", lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    with pytest.raises(TokenleapError, match=message), cluster(address.format(port)):
        pass


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("AuthenticationError", "refuses the token: AuthenticationError: a wrong token"),
        ("RaySystemError", "there is no Ray cluster at auto.*a wrong token"),
        ("Exception", "there is no Ray cluster at auto.*a wrong token"),  # of a slow machine
    ],
)
def test_errors_of_ray_are_one_line(
    monkeypatch: pytest.MonkeyPatch, kind: str, message: str
) -> None:
    errors = ModuleType("ray.exceptions")
    errors.RayError = type("RayError", (Exception,), {})  # type: ignore[attr-defined]
    errors.Exception = Exception  # type: ignore[attr-defined]
    for name in ("AuthenticationError", "RaySystemError"):
        setattr(errors, name, type(name, (errors.RayError,), {}))

    def init(**_: object) -> None:
        raise getattr(errors, kind)("a wrong token\nand a stack")

    stand_in: Any = ModuleType("ray")
    stand_in.exceptions, stand_in.init = errors, init
    stand_in.is_initialized, stand_in.shutdown = bool, bool
    monkeypatch.setitem(sys.modules, "ray", stand_in)
    monkeypatch.setattr("tokenleap.ray.cluster.check_installed", lambda: None)
    with pytest.raises(TokenleapError, match=message) as raised, cluster("auto"):
        pass
    assert "\n" not in str(raised.value)


def test_a_cluster_is_lost_after_its_time_however_long_each_look_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine that has gone refuses no connection, so each look takes 5 seconds."""
    stand_in: Any = ModuleType("ray")
    stand_in.get_runtime_context = lambda: SimpleNamespace(gcs_address="10.0.0.1:6379")
    monkeypatch.setitem(sys.modules, "ray", stand_in)
    now, looks = [0.0], list[str]()

    def answers(address: str) -> bool:
        looks.append(address)
        now[0] += 5
        return len(looks) == 2  # asked after 5 seconds

    monkeypatch.setattr(cluster_module, "answers", answers)
    monkeypatch.setattr(cluster_module, "_EVERY", 0.001)
    monkeypatch.setattr(cluster_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with watched() as alive:
        while alive():
            time.sleep(0.001)
    assert now == [5 + cluster_module.LOST_SECONDS]
    assert len(looks) == 4


def test_paths_are_absolute_for_replicas_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray_options, "llm_arguments", lambda *_: {})
    for name in ("target", "draft", "pile", "ngram"):
        Path(name).mkdir()
    inner = [
        {"method": "rest", "datastore": "pile"},
        {"model": "draft"},
        {"method": "ngram"},  # is no path
        {"model": "an/id"},
    ]
    fields = {"method": "switch", "drafters": inner, "num_speculative_tokens": 3}
    config = SpeculativeConfig.parse(fields)
    options: Any = SimpleNamespace(model="target")
    found = arguments_for_replicas(options, config)
    assert found["model"] == str(tmp_path / "target")
    there = found["speculative_config"].as_dict()
    rest, draft, ngram, other = there["drafters"]
    assert rest["datastore"] == str(tmp_path / "pile")
    assert draft["model"] == str(tmp_path / "draft")
    assert (ngram["method"], other["model"]) == ("ngram", "an/id")
    settings = as_given({"speculative_config": there, "dtype": "x"}, config)
    assert settings == {"speculative_config": config.as_dict(), "dtype": "x"}


def test_there_is_only_generate() -> None:
    wrong: Any = tokenleap.ray
    with pytest.raises(AttributeError, match="no attribute 'serve'"):
        _ = wrong.serve
