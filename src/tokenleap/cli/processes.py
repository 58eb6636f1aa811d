"""What commands do where `torchrun` has started them several times: one speaks for all."""

from __future__ import annotations

import os

from tokenleap.cli.prompt import STDIN
from tokenleap.cli.root import UsageError
from tokenleap.core.peers import num_processes, own_rank

__all__ = ["check_alone", "check_together", "mute_others"]

TOGETHER = ("generate", "train")
"""Commands that several processes can run together."""


def check_alone(command: str | None) -> None:
    """Refuse several processes of a command that runs in one.

    Raises:
        UsageError: there are several.
    """
    processes = _num_started()
    if processes > 1 and command is not None and command not in TOGETHER:
        raise UsageError(
            f"torchrun has started {processes} processes, and tokenleap {command} runs in one: "
            "start it without torchrun"
        )


def check_together(size: int | None, prompt: str | None, *, has_file: bool) -> None:
    """Refuse what several processes of `generate` cannot do together.

    Args:
        size: --tensor-parallel-size; None if it was not given.
        prompt: PROMPT, or "-" for standard input, or None.
        has_file: whether a file has the prompt, or all prompts.

    Raises:
        UsageError: the model is to run in one process, or only one could read the prompt.
    """
    processes = _num_started()
    if processes > 1 and (size or 1) == 1:
        raise UsageError(
            f"torchrun has started {processes} processes, which would all do the same: add "
            f"--tensor-parallel-size {processes}, or start it without torchrun"
        )
    if (size or 1) > 1 and not has_file and prompt in (None, STDIN):
        raise UsageError(
            "several processes cannot share standard input: give PROMPT or a file with it"
        )


def mute_others(size: int | None) -> bool:
    """Discard what this process writes on standard output, unless it is the first one.

    Args:
        size: --tensor-parallel-size; None if it was not given.

    Returns:
        Whether it is discarded.
    """
    if (size or 1) == 1 or own_rank() == 0:
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    return True


def _num_started() -> int:
    """How many processes torchrun has started; other tools set the same variables, too."""
    return num_processes() if "TORCHELASTIC_RUN_ID" in os.environ else 1
