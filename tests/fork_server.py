"""Imports PyTorch and Transformers once, and forks for every program that it is told to run.

`tests/programs.py` starts it, with a socket as its standard input. It imports nothing of the tests
but their clock.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import runpy
import signal
import socket
import sys
import termios
import traceback
from pathlib import Path
from typing import Any


def serve(connection: socket.socket) -> None:
    """Fork until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that runs the tests
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers vanish by themselves
    while True:
        size = int.from_bytes(connection.recv(4), "big")
        if not size:
            return
        message, files, _, _ = socket.recv_fds(connection, size, 4, socket.MSG_WAITALL)
        if os.fork() == 0:
            connection.close()
            keep(json.loads(message), files)
            os._exit(0)
        for file in files:
            os.close(file)


def keep(request: dict[str, Any], files: list[int]) -> None:
    """Run the program in a child; tell its number and, when it has ended, its exit code."""
    report = files.pop()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.close(report)
        os._exit(run(request, files))
    for file in files:
        os.close(file)
    os.write(report, f"{pid}\n".encode())
    _, status = os.waitpid(pid, 0)
    os.write(report, f"{os.waitstatus_to_exitcode(status)}\n".encode())


def run(request: dict[str, Any], files: list[int]) -> int:
    """Do what `python -c CODE ARGUMENTS` does, and return the exit code."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["folder"])
    path = request["env"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [each for each in path if each not in sys.path]
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.closerange(3, max(files) + 1)
    if request["terminal"]:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(line_buffering=True)
    sys.argv = ["-c", *request["arguments"]]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 0
    try:
        exec(compile(request["code"], "<string>", "exec"), {"__name__": "__main__"})
        sys.stdout.flush()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    sys.path[0] = ""  # and not the tests' folder
    # What a generating program imports:
    import transformers.generation.utils
    import transformers.models.auto.modeling_auto
    import transformers.models.auto.tokenization_auto
    import transformers.models.llama.modeling_llama  # noqa: F401

    import tokenleap.cli
    import tokenleap.llm  # noqa: F401

    # The clock of the suite, which is not imported as a part of it.
    clocks = runpy.run_path(str(Path(__file__).with_name("clocks.py")))
    clocks["WorkClock"]().install(setattr)

    serve(socket.socket(fileno=os.dup(0)))
