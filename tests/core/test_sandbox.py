"""A confined process writes into its folder, and reaches nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import ctypes, json, os, socket, sys, threading
from pathlib import Path
from tokenleap.core.sandbox import confine

inside, outside = Path(sys.argv[1]), Path(sys.argv[2])
forbidden = confine(inside)
file = outside / "file"
tries = {
    "write": lambda: (outside / "new").write_text("x"),
    "append": lambda: file.open("a"),
    "empty": lambda: os.truncate(file, 0),
    "delete": file.unlink,
    "move out": lambda: os.rename(inside / "mine", outside / "mine"),
    "link": lambda: (outside / "link").symlink_to(file),
    "folder": lambda: (outside / "folder").mkdir(),
    "chmod": lambda: file.chmod(0o777),
    "utime": lambda: os.utime(file),
    "socket": socket.socket,
    "fork": os.fork,
    "thread": lambda: threading.Thread(target=print).start(),
    "run": lambda: os.execv("/bin/true", ["true"]),
    "kill": lambda: os.kill(os.getppid(), 0),
}
(inside / "mine").write_text("x")
left = []
for name, act in tries.items():
    try:
        act()
        left.append(name)
    except (OSError, RuntimeError):
        pass
print(json.dumps([forbidden, left, file.read_text()]))
"""


def test_confine(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    (outside / "file").write_text("kept")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, inside, outside], capture_output=True, text=True, check=True
    )
    forbidden, left, kept = json.loads(done.stdout.splitlines()[-1])
    if set(forbidden) != {"files", "system calls"}:
        pytest.skip(f"this system can forbid {forbidden} only")
    assert left == []
    assert kept == "kept"
    assert [path.name for path in outside.iterdir()] == ["file"]
