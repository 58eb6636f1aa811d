"""`tokenleap generate` for several prompts: a JSON object per line, in the order of the prompts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from tokenleap.cli.console import counting, errors, plain, say
from tokenleap.cli.line_results import LineResults
from tokenleap.cli.report import as_json_line
from tokenleap.core.peers import ALONE, Peers
from tokenleap.engine.lines import Line, error_of
from tokenleap.errors import TokenleapError

__all__ = ["generate_lines"]


def generate_lines(
    lines: Sequence[Line],
    settings: Mapping[str, Any],
    made: Callable[[Sequence[Line]], Generator[dict[str, Any], None, None]],
    results: LineResults | None,
    *,
    quiet: bool,
    peers: Peers = ALONE,
) -> None:
    """Generate for all lines; write each result as soon as those before it are done.

    Args:
        lines: what was read.
        settings: what all results depend on (`settings_of`).
        made: yields the results of lines in their order.
        results: where results go, which may have some already; None for standard output.
        quiet: show no bar.
        peers: the processes that generate together; the first one writes.

    Raises:
        PromptError: a line is no prompt. Then nothing is generated.
        TokenleapError: a request failed. The other lines are complete.
    """
    if results is None:
        places = list(range(len(lines)))
    else:
        places = peers.from_first(partial(results.begin, settings, lines))
    if not peers.is_first:
        results = None  # the first process writes
    failed = 0
    # A bar between the lines of a terminal would be in their way.
    quiet = quiet or (results is None and sys.stdout.isatty())
    try:
        with (
            counting(quiet=quiet) as show,
            closing(made([lines[place] for place in places])) as records,
        ):
            for done, place in enumerate(places, len(lines) - len(places)):
                show("lines", done, len(lines))
                record = next(records)
                failed += error_of(record) is not None
                _write(place, record, results)
    except KeyboardInterrupt:
        if results is not None:
            say(f"{results.path} has {results.count} of {len(lines)} lines: add --resume")
        raise
    finally:
        if results is not None:
            results.replace()
    if results is not None and errors().is_terminal and not quiet:
        errors().print(plain(f"{results.count} lines are in {results.path}.", "note"))
    if failed:
        raise TokenleapError(
            f"{failed} of {len(lines)} lines ended with an error: see their 'error'"
        )


def _write(place: int, record: dict[str, Any], results: LineResults | None) -> None:
    if results is not None:
        results.add(place, record)
        return
    print(as_json_line(record))
    sys.stdout.flush()
