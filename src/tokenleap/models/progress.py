"""Progress on stderr: a bar on a terminal, one plain line elsewhere.

Downloads, conversions and the building of corpora report with it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["bytes_text", "progress", "say"]


def say(line: str) -> None:
    """Print one line on stderr; stdout belongs to the caller."""
    print(line, file=sys.stderr, flush=True)


def bytes_text(count: int) -> str:
    """A number of bytes as people write it, in decimal units: `93 MB`."""
    amount = float(count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if amount < 999.5:  # 999.5 and more would print as 1000
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.3g} TB"


@contextmanager
def progress(doing: str, usually: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show the progress of long work.

    Args:
        doing: The work, as the start of a sentence ("Fetching smollm2-135m").
        usually: Its usual time, for output without a bar ("under a minute").
        total_bytes: Bytes to process.

    Yields:
        A function to call with the bytes done so far, counted from the start.
    """
    if not sys.stderr.isatty():
        say(f"{doing} ({bytes_text(total_bytes)}, usually {usually}) ...")
        yield lambda _done: None
        return
    # Importing Rich takes a tenth of a second, so it is imported only for a bar.
    from rich import progress as rich_progress
    from rich.console import Console

    with rich_progress.Progress(
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.DownloadColumn(),
        rich_progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task(doing, total=total_bytes)
        yield lambda done: bar.update(task, completed=min(done, total_bytes))
