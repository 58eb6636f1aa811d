"""The results of `tokenleap bench` on a terminal: tables that fit its width."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from tokenleap.cli.console import display, plain

if TYPE_CHECKING:
    from tokenleap.bench.summary import Results

__all__ = ["fitted", "show_results"]

_WRAPPED = ((60, 60), (40, 20), (30, 14), (24, 10), (24, 0))
"""How wide the labels of contestants and the names of columns may be, from wide to narrow."""

_GAP = 2


def show_results(results: Results, settings: Mapping[str, Any]) -> None:
    """Print what ran, all tables and all remarks.

    Args:
        results: what was measured.
        settings: the journal's header.
    """
    from tokenleap.bench.ran import facts_line
    from tokenleap.bench.report import notes, tables

    console = display()
    console.print(plain(facts_line(settings, results), "note"))
    for title, header, rows in tables(results):
        for number, part in enumerate(fitted(header, rows, console.width)):
            console.print()
            more = " (continued)" if number else ""
            console.print(plain(f"{title}{more}", "head"))
            console.print(part)
    console.print()
    _show_notes(console, notes(results))


def fitted(header: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[Table]:
    """A table as one that fits, or as several with the same first column.

    Where it would be too wide, labels and names of columns wrap, then intervals go to a second line
    of their cells. If that is not enough, the table is cut between columns.

    Args:
        header: names of the columns.
        rows: the cells.
        width: cells of the terminal.
    """
    whole = [list(column) for column in zip(header, *rows, strict=True)]
    stacked = [whole[0], *([name, *map(_below, cells)] for name, *cells in whole[1:])]
    for given in (whole, stacked):
        for label_cells, name_cells in _WRAPPED:
            columns = _wrapped_columns(given, label_cells, name_cells)
            widths = [max(map(_widest_line, column)) for column in columns]
            if sum(widths) + _GAP * (len(columns) - 1) <= width:
                return [_table(columns, widths)]
    return [
        _table([columns[0], *columns[start:end]], [widths[0], *widths[start:end]])
        for start, end in pairwise(_cuts(widths, width))
    ]


def _wrapped_columns(
    columns: Sequence[Sequence[str]], label_cells: int, name_cells: int
) -> list[list[str]]:
    """The columns with lines of at most so many cells, unless a word or another cell is longer."""
    labels = [_wrapped(cell, label_cells) for cell in columns[0]]
    wrapped = [labels]
    for name, *cells in columns[1:]:
        longest = max(map(_widest_line, cells), default=0)
        wrapped.append([_wrapped(name, max(longest, name_cells)), *cells])
    return wrapped


def _cuts(widths: Sequence[int], width: int) -> list[int]:
    """Where a table is cut: the first column of each part, and the number of columns."""
    cuts, used = [1], widths[0]
    for at, size in enumerate(widths[1:], 1):
        if used + _GAP + size > width and at > cuts[-1]:
            cuts.append(at)
            used = widths[0]
        used += _GAP + size
    return [*cuts, len(widths)]


def _table(columns: Sequence[Sequence[str]], widths: Sequence[int]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="head", padding=(0, _GAP, 0, 0))
    for index, (column, width) in enumerate(zip(columns, widths, strict=True)):
        name = plain(column[0])
        table.add_column(name, justify="right" if index else "left", width=width, vertical="top")
    for row in zip(*(column[1:] for column in columns), strict=True):
        table.add_row(*map(plain, row))
    return table


def _wrapped(text: str, width: int) -> str:
    """Text in lines of at most so many cells, if its words allow that; they break at hyphens."""
    longest = max((len(part) for part in text.replace("-", "- ").split()), default=1)
    return "\n".join(textwrap.wrap(text, max(width, longest), break_long_words=False))


def _below(cell: str) -> str:
    """A cell with its interval, or what stands in brackets, on a second line."""
    return cell.replace(" [", "\n[").replace(" (", "\n(")


def _widest_line(cell: str) -> int:
    return max(map(cell_len, cell.split("\n")))


def _show_notes(console: Console, notes: Sequence[str]) -> None:
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column()
    grid.add_column()
    for note in notes:
        grid.add_row("-", plain(note))
    console.print(grid)
