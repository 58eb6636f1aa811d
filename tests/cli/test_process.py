"""The program as a process: signals, closed pipes, a real terminal; and under `torchrun`."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run, error_of
from tests.cli.terminal import COMMAND, Terminal, environment
from tests.programs import MAIN, Program

ENDLESS = ["--max-tokens", "8000", "--ignore-eos"]


def start(*arguments: object) -> Program:
    return Program(MAIN, *arguments, env=environment())


def test_ctrl_c_in_the_middle_of_a_stream(tiny: Path, tmp_path: Path) -> None:
    trace = tmp_path / "steps.json"
    with start("generate", "hello", "-m", tiny, *ENDLESS, "--trace", trace) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(10)
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait() == 130
        assert rest.endswith(b"\n")
        assert process.stderr.read() == b"interrupted\n"
    assert list(tmp_path.iterdir()) == []


DISTURBED = """
import logging, runpy, signal, sys, warnings
at, how = sys.argv.pop(1), sys.argv.pop(1)

class Lost:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

class Disturbance:
    def find_spec(self, name, *_):
        if name == at and how == "interrupt":
            signal.raise_signal(signal.SIGINT)
        elif name == at and how == "interrupt a destructor":
            Lost()
        elif name == at:
            logging.getLogger("a_library").warning("a line of a library")
            warnings.warn("a warning of a library")

sys.meta_path.insert(0, Disturbance())
runpy.run_module("tokenleap", run_name="__main__")
"""


def disturbed(*arguments: object) -> tuple[int, str, str]:
    """The end of a command that is disturbed when it imports a module."""
    command = [sys.executable, "-c", DISTURBED, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    return done.returncode, done.stdout, done.stderr


def test_ctrl_c_during_imports(tiny: Path) -> None:
    """Before anything has begun, the process simply ends."""
    given = ("generate", "hello", "-m", tiny)
    assert disturbed("rich", "interrupt", *given) == (-signal.SIGINT, "", "")
    assert disturbed("torch", "interrupt", *given) == (130, "", "interrupted\n")
    assert disturbed("torch", "interrupt a destructor", *given) == (130, "", "interrupted\n")


def test_no_warning_of_a_library_stands_above_an_error() -> None:
    code, shown, told = disturbed("transformers", "warn", "generate", "hello", "-m", "nothing")
    assert (code, shown) == (2, "")
    assert told.startswith("error: no model 'nothing'")
    assert told.count("\n") == 1


def test_a_reader_who_leaves(tiny: Path) -> None:
    with start("generate", "hello", "-m", tiny, *ENDLESS) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(10)
        process.stdout.close()
        assert process.wait() == 0
        assert process.stderr.read() == b""


def test_a_full_disk() -> None:
    with Path("/dev/full").open("wb") as full:
        result = subprocess.run(
            [*COMMAND, "models"],
            stdout=full,
            stderr=subprocess.PIPE,
            env=environment(),
            check=False,
        )
    assert result.returncode == 1
    assert result.stderr == b"error: [Errno 28] No space left on device\n"


def test_a_terminal(tiny: Path) -> None:
    with Terminal("generate", "hello", "-m", tiny, "--allowed-token-ids", "40,41") as terminal:
        assert terminal.end() == 0
    for text in ("Loading", "\x1b[38;5;28m", "accepted", "128 tokens (cut short)"):
        assert text in terminal.shown
    assert "Traceback" not in terminal.shown


def test_no_prompt_at_a_terminal() -> None:
    with Terminal("generate") as terminal:
        assert terminal.end() == 2
    assert "no prompt: give PROMPT, --file FILE, or pipe text in" in terminal.shown


# Under `torchrun`, commands that run in one process are refused, and one speaks for all.


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As if torchrun had started two processes; this is the first one."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    return monkeypatch


@pytest.mark.parametrize("command", ["serve", "chat", "bench", "demo", "models", "doctor"])
def test_commands_that_run_in_one_process(run: Run, two: pytest.MonkeyPatch, command: str) -> None:
    error = run.refused(command)
    message = f"torchrun has started 2 processes, and tokenleap {command} runs in one"
    assert message in error


def test_generate(run: Run, two: pytest.MonkeyPatch, tiny: Path) -> None:
    given = ["generate", "-m", tiny]
    result = run(*given, "hello")
    assert "add --tensor-parallel-size 2, or start it without torchrun" in error_of(result)
    result = run(*given, "--tensor-parallel-size", 2, stdin="hello")
    assert "several processes cannot share standard input: give PROMPT" in error_of(result)
    result = run(*given, "hello", "--tensor-parallel-size", 4)
    assert "--tensor-parallel-size: there are 2 processes, got 4: take 2" in error_of(result)
    two.setenv("RANK", "1")
    result = run(*given, "hello", "--n", 0, "--tensor-parallel-size", 1)
    assert result.stderr.startswith("error in process 1: torchrun has started 2 processes")


def test_other_tools_set_the_same_variables(run: Run, two: pytest.MonkeyPatch, tiny: Path) -> None:
    """Several servers in a cluster have nothing to do with each other."""
    two.delenv("TORCHELASTIC_RUN_ID")
    assert run("models").exit_code == 0
    result = run.done("generate", "hello", "-m", tiny, "--max-tokens", 2, "--quiet")
    assert result.stdout


def test_without_torchrun(run: Run, tiny: Path) -> None:
    result = run("generate", "hello", "-m", tiny, "--tensor-parallel-size", 2)
    message = "--tensor-parallel-size: 2 needs 2 processes: start it with torchrun --nproc-per-node"
    assert message in error_of(result)


MUTED = """
import os, sys
from tokenleap.cli.generate import mute_others
muted = mute_others(2)
print("something")
print(muted, file=sys.stderr)
"""


@pytest.mark.parametrize(("rank", "muted"), [("0", False), ("1", True)])
def test_others_are_muted(two: pytest.MonkeyPatch, rank: str, muted: bool) -> None:
    two.setenv("RANK", rank)
    done = subprocess.run([sys.executable, "-c", MUTED], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("" if muted else "something\n", f"{muted}\n")
