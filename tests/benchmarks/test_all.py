from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import all as everything
from tests.benchmarks.program import run


def test_the_page_has_a_place_for_every_section() -> None:
    page = everything.RESULTS.read_text(encoding="utf-8")
    places = re.findall(r"^<!-- (\w+) -->$.*?^<!-- end of \1 -->$", page, re.S | re.M)
    assert sorted(places) == sorted(everything.SECTIONS)


def test_sections_are_measured_once_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, commands = tmp_path / "results.md", list[list[str]]()
    page.write_text("# Results\n<!-- int4 -->\nold\n<!-- end of int4 -->\nafter\n")
    monkeypatch.setattr(everything, "RESULTS", page)

    def called(command: list[str], **_: Any) -> Any:
        if command[0] != "git":
            commands.append(command)
        return subprocess.CompletedProcess(command, 0, "`python -m x`\n\n| new |")

    monkeypatch.setattr(subprocess, "run", called)
    prompts = tmp_path / "prompts.jsonl"
    prompts.touch()
    arguments = ["--prompts", str(prompts), "--output", str(tmp_path / "out"), "--hours", "4"]
    for _ in range(2):
        done = run(everything.main, [*arguments, "--only", "int4", "--only", "draft_model"])
        assert done.exit_code == 0
        assert "draft_model: not measured without --large, --draft-model" in done.stderr
    ((*_, amount),) = commands
    assert amount == "10"  # twice as many in twice the time
    text = page.read_text()
    assert text.startswith("# Results\n<!-- int4 -->\n\n`python -m x`\n\n| new |")
    assert text.endswith("<!-- end of int4 -->\nafter\n")
    assert "old" not in text


def test_a_command_that_fails_keeps_the_old_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 3, "half")
    )
    arguments = ["--prompts", str(tmp_path), "--output", str(tmp_path / "out"), "--only", "int4"]
    done = run(everything.main, arguments)
    assert "int4: ended with status 3" in done.stderr
    assert not list((tmp_path / "out").iterdir())
    assert "no section 'x'" in run(everything.main, [*arguments, "--only", "x"]).stderr


def test_broken_promises_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def called(command: list[str], **_: Any) -> Any:
        return subprocess.CompletedProcess(command, command[0] != "git", "| 0.9 |")

    page = tmp_path / "results.md"
    page.write_text("<!-- int4 -->\n<!-- end of int4 -->\n")
    monkeypatch.setattr(everything, "RESULTS", page)
    monkeypatch.setattr(subprocess, "run", called)
    arguments = ["--prompts", str(tmp_path), "--output", str(tmp_path / "out"), "--only", "int4"]
    assert "int4: measured, and a promise is broken" in run(everything.main, arguments).stderr
    assert "| 0.9 |" in page.read_text()


def test_the_page_shows_some_tables_of_a_benchmark_and_no_folders() -> None:
    printed = "# tokenleap bench\n\nfacts\n\n## Speed\n\n| 5 tokens/s |\n\n## Steps\n\n| b |\n"
    command = 'tokenleap bench /home/me/p.jsonl --method \'{"model": "/home/me/head"}\''
    assert everything._shown(command, printed) == (
        '`tokenleap bench p.jsonl --method \'{"model": "head"}\'`\n\nfacts\n\n'
        "**Speed**\n\n| 5 tokens/s |"
    )
    printed = "`python -m benchmarks.serving --prompts /home/p.jsonl`\n\n1 client"
    assert everything._shown("x", printed) == printed.replace("/home/", "")


def test_an_interrupted_benchmark_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def called(command: list[str], **_: Any) -> Any:
        commands.append(command)
        (tmp_path / "out/methods").mkdir(exist_ok=True)
        (tmp_path / "out/methods/results.jsonl").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", called)
    arguments = ["--prompts", str(tmp_path), "--gguf", "f", "--output", str(tmp_path / "out")]
    for _ in range(2):
        run(everything.main, [*arguments, "--only", "methods"])
    assert commands[1] == [*commands[0], "--resume"]
