"""Progress bars know the amount of work, never exceed it, and reach the end; --threads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import pytest
import torch
import typer
from rich.console import Console

from tests.cli.conftest import Run, error_of
from tokenleap.cli import app
from tokenleap.cli.console import THEME, counting, working
from tokenleap.errors import TokenleapError
from tokenleap.runtime.native import build

SHORT = ("--max-tokens", 8)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """All that was shown: what is being done, how much of it is done, how much there is."""
    calls: list[tuple[str, int, int]] = []

    @contextmanager
    def counting(*, quiet: bool = False) -> Iterator[Callable[[str, int, int], object]]:
        yield lambda *call: calls.append(call)

    for name in ("plan", "prompts", "bench"):
        monkeypatch.setattr(f"tokenleap.cli.{name}.counting", counting)
    return calls


def counts(shown: list[tuple[str, int, int]], total: int) -> list[int]:
    assert {each[2] for each in shown} == {total}
    return [done for _, done, _ in shown]


def test_plan_counts_prompts_and_runs(
    run: Run, tiny: Path, prompts: Path, shown: list[tuple[str, int, int]]
) -> None:
    given = ("plan", "-m", tiny, "--measure", "--prompts", prompts, *SHORT)
    run.done(*given, "--gammas", "1,2", "--rounds", 2)
    assert counts(shown, 14) == list(range(15))  # 2 prompts, then 2 rounds of 3 lengths
    assert shown[-1][0] == "speed, round 2 of 2"
    shown.clear()
    run.done(*given, "--lenience", "1,0.5")
    assert counts(shown, 2) == [0, 1, 2]


def test_lines_are_counted(run: Run, tiny: Path, shown: list[tuple[str, int, int]]) -> None:
    run.done("generate", "-m", tiny, *SHORT, "--jsonl", stdin="hello\nhi")
    assert counts(shown, 2) == [0, 1]


def test_a_terminal_gets_a_bar_with_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal in (True, False):
        text = StringIO()
        stderr = Console(
            file=text, width=80, force_terminal=terminal, theme=THEME, color_system=None
        )
        monkeypatch.setattr("tokenleap.cli.console.errors", lambda console=stderr: console)
        with counting() as show:
            show("lines", 1, 2)
        found = re.search(r"1/2 .*(-:--:--|0:00:\d\d).* lines", text.getvalue())
        assert bool(found) == terminal
        assert terminal or not text.getvalue().strip()


def test_every_command_that_runs_a_model_takes_threads() -> None:
    commands = typer.main.get_group(app).commands
    taking = {
        name
        for name, command in commands.items()
        if "threads" in {parameter.name for parameter in command.params}
    }
    models = {
        name
        for name, command in commands.items()
        if "runtime" in {parameter.name for parameter in command.params}
    }
    assert taking == models
    assert taking >= {"generate", "chat", "demo", "bench", "plan", "tree", "train", "check"}


@pytest.mark.parametrize("command", [("generate", "hello", *SHORT), ("demo", *SHORT)])
def test_threads(
    run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[object, ...]
) -> None:
    def asked(threads: int) -> None:
        assert threads == 3
        raise TokenleapError("these threads")

    monkeypatch.setattr(torch, "set_num_threads", asked)
    result = run(*command, "-m", tiny, "--threads", 3)
    assert error_of(result) == "error: these threads"
    assert run(*command, "-m", tiny, "--threads", 0).exit_code == 2


@pytest.mark.parametrize("quiet", [False, True])
def test_compiling_is_said(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    quiet: bool,
) -> None:
    monkeypatch.setattr(build, "_run", lambda command, **_: Path(command[-1]).touch())
    with working("Loading", quiet=quiet):
        build._compile("g++", (), tmp_path / "library.so")
    said = "compiling the native runtime, about 20 s, once (g++)\n"
    assert capsys.readouterr().err == ("" if quiet else said)
    build._compile("g++", (), tmp_path / "library.so")
    assert capsys.readouterr().err == ""
