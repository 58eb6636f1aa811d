"""`foretoken methods`: the names `--method`, `--acceptance` and `--controller` know."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from foretoken.cli.console import display, plain, working
from foretoken.cli.report import as_json
from foretoken.cli.root import examples

if TYPE_CHECKING:
    from foretoken.control import Controller
    from foretoken.core.acceptance import AcceptanceRule

__all__ = ["EXAMPLES", "methods"]

EXAMPLES = examples("foretoken methods", "foretoken methods --json")

_NAME_CELLS = 12


def methods(
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List drafters, acceptance rules and controllers."""
    with working("Starting", quiet=json_output):
        from foretoken.control import CONTROLLERS
        from foretoken.core.acceptance import RULES
        from foretoken.drafters.registry import METHODS

    drafters = [
        {
            "name": name,
            "num_speculative_tokens": spec.default_num_speculative_tokens,
            "summary": spec.summary,
            "fields": spec.options.field_names(),
        }
        for name, spec in METHODS.items()
    ]
    rules = [
        {"name": name, "lossless": rule.lossless, **_described(name, rule)}
        for name, rule in RULES.items()
    ]
    controllers = [
        {"name": name, **_described(name, controller)} for name, controller in CONTROLLERS.items()
    ]
    if json_output:
        print(as_json({"methods": drafters, "acceptance": rules, "controllers": controllers}))
        return
    _show("--method", "tokens", [(d, str(d["num_speculative_tokens"])) for d in drafters])
    display().print()
    _show("--acceptance", "output", [(r, "lossless" if r["lossless"] else "lossy") for r in rules])
    display().print()
    _show("--controller", "", [(controller, "") for controller in controllers])


def _described(name: str, part: type[AcceptanceRule] | type[Controller]) -> dict[str, Any]:
    """What its module says of it first, and its own fields."""
    text = inspect.getdoc(inspect.getmodule(part)) or ""
    summary = text.partition("\n")[0].removeprefix(f"`{name}`: ").rstrip(".")
    return {"summary": summary, "fields": part.Options.field_names()}


def _show(name: str, second: str, rows: list[tuple[dict[str, Any], str]]) -> None:
    """A table of names; `second` heads its second column."""
    table = Table(box=None, pad_edge=False, header_style="head", padding=(0, 3, 0, 0))
    table.add_column(name, no_wrap=True, min_width=_NAME_CELLS)
    table.add_column(second, no_wrap=True, min_width=len("lossless"))
    table.add_column("")
    for row, cell in rows:
        text = plain(row["summary"])
        if row["fields"]:
            text.append_text(plain("\n" + ", ".join(row["fields"]), "note"))
        table.add_row(row["name"], cell, text)
    display().print(table)
