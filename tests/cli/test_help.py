"""Help is quick, complete and fits 80 columns."""

from __future__ import annotations

import json

import pytest

from tests.cli.conftest import Run
from tokenleap import __version__
from tokenleap.training.method import TRAINABLE

COMMANDS = [
    *("generate", "chat", "demo", "doctor", "trace", "methods", "models", "plan", "tree"),
    *("tune-layers", "train", "check", "export", "ngrams", "datastore", "bench"),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_examples(
    run: Run, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = run.done(command, "--help")
    assert f"$ tokenleap {command}" in result.stdout or command == "trace"
    assert "Examples" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert result.stderr == ""
    if command == "train":
        assert all(name in result.stdout for name in TRAINABLE)
        assert run(command, "-h").stdout == result.stdout


def test_without_a_command_there_is_help(run: Run) -> None:
    result = run.done()
    assert all(command in result.stdout for command in COMMANDS)


def test_version(run: Run) -> None:
    assert run("--version").stdout == f"tokenleap {__version__}\n"


def test_methods(run: Run) -> None:
    from tokenleap.control import CONTROLLERS
    from tokenleap.core.acceptance import RULES
    from tokenleap.drafters.registry import METHODS

    shown = run("methods").stdout
    assert all(name in shown for name in (*METHODS, *RULES, *CONTROLLERS))
    assert "lossless" in shown
    assert "lossy" in shown
    listed = json.loads(run("methods", "--json").stdout)
    assert [method["name"] for method in listed["methods"]] == list(METHODS)
    assert [rule["lossless"] for rule in listed["acceptance"]] == [
        rule.lossless for rule in RULES.values()
    ]
    assert all(one["summary"] for kind in listed.values() for one in kind)
