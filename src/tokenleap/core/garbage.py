"""Python's search for garbage in cycles, put off while what stays is made, or spared that.

It walks over all objects again whenever their number has grown by a quarter. Importing PyTorch and
Transformers, or reading a vocabulary, makes hundreds of thousands that stay.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collected_later() -> Iterator[None]:
    """Search for no garbage now, unless asked to; afterwards it goes on if it did before."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # what is frozen is the caller's
            gc.freeze()  # both together let the new objects count as old, which is not slow
            gc.unfreeze()
        gc.enable()


@contextmanager
def kept() -> Iterator[None]:
    """Search for no garbage among the objects that are there now: a search takes 0.3 seconds."""
    if gc.get_freeze_count():  # what is frozen is the caller's
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
