"""Limits that a process sets itself before it reads what a stranger wrote.

It imports nothing but Python, so that such a process starts fast. `trial.py` and
`models/pickles.py` use it.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import struct
import time
from pathlib import Path


def limit(seconds: float, megabytes: int) -> None:
    """Limit this process to so much more CPU time and memory, as far as the system can."""
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _set(resource.RLIMIT_CPU, math.ceil(time.process_time() + seconds))
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # macOS
        return
    _set(resource.RLIMIT_AS, pages * resource.getpagesize() + (megabytes << 20))


def _set(kind: int, most: int) -> None:
    import resource

    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def end_with(parent: int) -> None:
    """End this process when its parent has ended, on Linux."""
    if platform.system() == "Linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def confine(folder: Path) -> list[str]:
    """Forbid this process, as far as Linux can, to write outside `folder` and to reach others.

    It needs no rights, and cannot be undone. Files may still be read.

    Returns:
        What is in force: "files" (Landlock: nothing is written, made or deleted outside the
        folder), "system calls" (seccomp: no sockets, processes, threads, signals, and no changes
        of permissions).
    """
    if platform.system() != "Linux" or len([*Path("/proc/self/task").iterdir()]) > 1:
        return []  # it would hold for one thread only
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return []
    steps = {"files": _confine_files(libc, folder), "system calls": _confine_calls(libc)}
    return [name for name, done in steps.items() if done]


_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38

# Landlock: https://docs.kernel.org/userspace-api/landlock.html. All systems number its calls alike.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_READ_FILE, _READ_DIR, _REFER, _TRUNCATE = 1 << 2, 1 << 3, 1 << 13, 1 << 14


def _confine_files(libc: ctypes.CDLL, folder: Path) -> bool:
    version = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < 3:  # the first ones let a process empty files
        return False
    handled = ((1 << 13) - 1 | _REFER | _TRUNCATE) & ~(_READ_FILE | _READ_DIR)
    rules = libc.syscall(_CREATE_RULESET, struct.pack("=Q", handled), ctypes.c_size_t(8), 0)
    if rules < 0:
        return False
    place = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    try:
        made = libc.syscall(_ADD_RULE, rules, 1, struct.pack("=Qi", handled & ~1, place), 0)
        return bool(made == 0 and libc.syscall(_RESTRICT_SELF, rules, 0) == 0)
    finally:
        os.close(place)
        os.close(rules)


# Seccomp: the numbers of system calls, by machine.
_CALLS = {
    "x86_64": (
        0xC000003E,
        (41, 53),  # socket, socketpair
        (56, 57, 58, 59, 322, 435),  # clone, fork, vfork, execve, execveat, clone3
        (62, 129, 200, 234, 297, 424),  # kill and its kin
        (101, 310, 311, 438),  # ptrace, process_vm_readv, process_vm_writev, pidfd_getfd
        (90, 91, 268, 452, 92, 93, 94, 260),  # chmod and chown
        (132, 188, 189, 190, 235, 261, 280),  # utimes and setxattr
        (425,),  # io_uring_setup
    ),
    "aarch64": (
        0xC00000B7,
        (198, 199),
        (220, 221, 281, 435),
        (129, 130, 131, 138, 240, 424),
        (117, 270, 271, 438),
        (52, 53, 452, 54, 55),
        (5, 6, 7, 88),
        (425,),
    ),
}


def _confine_calls(libc: ctypes.CDLL) -> bool:
    """Let the system calls of the table fail with EPERM."""
    if platform.machine() not in _CALLS or struct.calcsize("P") != 8:
        return False
    machine, *groups = _CALLS[platform.machine()]
    numbers = [number for group in groups for number in group]
    load, equal, above, give = 0x20, 0x15, 0x35, 0x06
    kill, fail, allow = 0x8000_0000, 0x0005_0001, 0x7FFF_0000
    last = len(numbers)
    program = [
        (load, 0, 0, 4),
        (equal, 1, 0, machine),
        (give, 0, 0, kill),
        (load, 0, 0, 0),
        (above, last + 1, 0, 0x4000_0000),  # another table of numbers, on x86_64
        *((equal, last - at, 0, number) for at, number in enumerate(numbers)),
        (give, 0, 0, allow),
        (give, 0, 0, fail),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in program))
    head = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    return bool(libc.prctl(_PR_SET_SECCOMP, 2, head, 0, 0) == 0)
