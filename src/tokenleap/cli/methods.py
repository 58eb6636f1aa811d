"""`tokenleap methods`: the names `--method`, `--acceptance` and `--controller` know."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Annotated, Any

import typer
from rich.table import Table

from tokenleap.cli.console import as_json, display, plain, working
from tokenleap.cli.root import examples

__all__ = ["EXAMPLES", "methods"]

EXAMPLES = examples("tokenleap methods", "tokenleap methods --json")

_NAME_CELLS = 12


def methods(
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List drafters, acceptance rules and controllers."""
    with working("Starting", quiet=json_output):
        from tokenleap import control
        from tokenleap.core import acceptance
        from tokenleap.drafters import registry

        plugins = _plugins(registry.PLUGINS, registry.METHODS)
        drafters = [_listed(name, _drafter) for name in (*registry.METHODS, *plugins)]
        plugins = _plugins(acceptance.PLUGINS, acceptance.RULES)
        rules = [_listed(name, _rule) for name in (*acceptance.RULES, *plugins)]
        plugins = _plugins(control.PLUGINS, control.CONTROLLERS)
        controllers = [_listed(name, _controller) for name in (*control.CONTROLLERS, *plugins)]
    if json_output:
        print(as_json({"methods": drafters, "acceptance": rules, "controllers": controllers}))
        return
    _show("--method", "tokens", [(d, str(d.get("num_speculative_tokens", ""))) for d in drafters])
    display().print()
    kinds = {True: "lossless", False: "lossy", None: ""}
    _show("--acceptance", "output", [(rule, kinds[rule.get("lossless")]) for rule in rules])
    display().print()
    _show("--controller", "", [(controller, "") for controller in controllers])


def _plugins(group: str, known: Collection[str]) -> list[str]:
    """Names that other packages add to those that are known here."""
    from tokenleap.core.config import plugin_names

    return [name for name in dict.fromkeys(plugin_names(group)) if name not in known]


def _listed(name: str, describe: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """A part by its name; of one that another package fails to bring, what is wrong with it."""
    from tokenleap.errors import ConfigError

    try:
        return {"name": name, **describe(name)}
    except ConfigError as error:
        return {"name": name, "summary": str(error), "fields": []}


def _drafter(name: str) -> dict[str, Any]:
    from tokenleap.drafters.registry import drafter_spec

    spec = drafter_spec(name)
    return {
        "num_speculative_tokens": spec.default_num_speculative_tokens,
        "summary": spec.summary,
        "fields": spec.options.field_names(),
    }


def _rule(name: str) -> dict[str, Any]:
    from tokenleap.core.acceptance import rule_class

    rule = rule_class(name)
    summary = inspect.cleandoc(rule.__doc__ or "").partition("\n")[0].rstrip(".")
    return {"lossless": rule.lossless, "summary": summary, "fields": rule.Options.field_names()}


def _controller(name: str) -> dict[str, Any]:
    from tokenleap.control import controller_class

    controller = controller_class(name)
    return {"summary": controller.summary, "fields": controller.Options.field_names()}


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
