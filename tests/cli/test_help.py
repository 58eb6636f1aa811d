"""Help is quick, complete and fits 80 columns."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from tests.cli.conftest import Run
from tokenleap import __version__
from tokenleap.cli import app
from tokenleap.training.method import TRAINABLE

COMMANDS = [
    *("generate", "chat", "demo", "doctor", "trace", "methods", "models", "plan", "tree"),
    *("tune-layers", "train", "check", "export", "ngrams", "datastore", "bench"),
]


LONG = ["generate", "chat", "serve", "demo", "plan", "bench", "tree", "tune-layers", "train"]


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


def options_in(page: str) -> set[str]:
    return set(re.findall(r"^│[ *]+(--[a-z][a-z0-9-]*)", page, re.MULTILINE))


@pytest.mark.parametrize("command", LONG)
def test_help_shows_the_options_that_matter(
    run: Run, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    found: Any = group.commands[command]
    options = {each.opts[0]: each for each in found.params if each.param_type_name == "option"}
    first = {name for name, each in options.items() if each.name in found.callback.first}
    assert len(first) == len(found.callback.first)  # each of them exists
    assert len(first) <= 10
    asked = {"--help", "--help-all"}
    assert options_in(run.done(command, "--help").stdout) == first | asked
    everything = options_in(run.done(command, "--help-all").stdout)
    assert everything == options.keys() | asked
    assert len(everything) > 12
    assert options_in(run.done(command, "--help").stdout) == first | asked  # still


def test_completion_offers_all_options() -> None:
    words = {"COMP_WORDS": "tokenleap generate --top", "COMP_CWORD": "2"}
    environment = {**words, "_TOKENLEAP_COMPLETE": "complete_bash"}
    offered = CliRunner().invoke(app, prog_name="tokenleap", env=environment).stdout
    assert offered.split() == ["--top-k", "--top-p"]


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
