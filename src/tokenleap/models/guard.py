"""Calls into Transformers: suppress its messages, and turn its exceptions into `ModelError`.

`load` and `convert` run such calls in `guarded`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from tokenleap.errors import ModelError, TokenleapError
from tokenleap.models.disk import full_disk, tells_of_full_disk

__all__ = ["guarded", "silent"]


@contextmanager
def silent() -> Iterator[None]:
    """Suppress Transformers' messages and progress bars; restore its own settings afterwards."""
    from transformers.utils import logging as messages

    verbosity, bars = messages.get_verbosity(), messages.is_progress_bar_enabled()
    messages.set_verbosity(logging.ERROR)
    messages.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        messages.set_verbosity(verbosity)
        if bars:
            messages.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def guarded(failure: str) -> Iterator[None]:
    """Suppress Transformers' messages, and turn its exceptions into `ModelError`.

    The caller checks what matters of what Transformers would warn about; the rest would only
    confuse. Transformers' own settings are restored afterwards.

    Args:
        failure: What failed, as the start of the error's message.

    Raises:
        ModelError: In place of any exception that is not our own.
        OSError: If the disk is full, whichever library noticed it.
    """
    try:
        with silent():
            yield
    except (TokenleapError, AssertionError):
        raise
    except Exception as error:
        if tells_of_full_disk(str(error)):
            raise full_disk() from error
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(f"{failure}: {lines[0]}") from error
