"""The program as a process: signals, closed pipes, a real terminal."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

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
