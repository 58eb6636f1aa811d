"""Help is quick, complete and fits 80 columns."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.cli.conftest import Run, error_of
from tokenleap import __version__

COMMANDS = [
    *(
        "generate",
        "chat",
        "demo",
        "doctor",
        "trace",
        "methods",
        "models",
        "plan",
        "tree",
        "tune-layers",
    ),
    *("train", "check", "ngrams", "datastore", "bench"),
]


def test_no_heavy_import() -> None:
    code = (
        "import sys; from tokenleap.cli import app\n"
        "for words in ('--help', 'generate --help', 'train --help', 'models', ''):\n"
        "    try: app(words.split())\n"
        "    except SystemExit: pass\n"
        "    assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), words"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_examples(
    run: Run, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for flag in ("--help", "-h"):
        result = run(command, flag)
        assert result.exit_code == 0
        assert f"$ tokenleap {command}" in result.stdout or command == "trace"
        assert "Examples" in result.stdout
        assert max(map(len, result.stdout.splitlines())) <= 80
        assert result.stderr == ""


def test_without_a_command_there_is_help(run: Run) -> None:
    result = run()
    assert result.exit_code == 0
    assert all(command in result.stdout for command in COMMANDS)


def test_version(run: Run) -> None:
    assert run("--version").stdout == f"tokenleap {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["generat"],
            "no such command 'generat': did you mean 'generate'?",
        ),
        (["generate", "--sed", "1"], "no such option: --sed"),
        (["generate", "--n", "x", "hi"], "invalid value for '--n'"),
        (["generate", "hi", "ho"], "unexpected extra argument"),
        (["trace"], "missing argument 'FILE'"),
        (["models", "burn"], "no such command 'burn'"),
        (["demo", "--rounds", "0"], "invalid value for '--rounds'"),
    ],
)
def test_wrong_use_is_one_line_and_2(run: Run, arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in error_of(result)
    assert result.stdout == ""


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
