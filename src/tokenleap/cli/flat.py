"""Dataclasses of options as parameters of a command.

    @flat
    def generate(prompt: ..., model: ModelOptions, sampling: SamplingOptions) -> None: ...

Typer accepts single parameters only. `flat` shows it the fields of the dataclasses instead, and
builds the dataclasses when the command is called. Commands that share options use it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints

import typer

from tokenleap.cli.advice import flag
from tokenleap.cli.root import UsageError

__all__ = ["flat", "in_panel", "refuse_given"]


def in_panel(panel: str, text: str, *names: str, **settings: Any) -> Any:
    """A Typer option in a panel of the help page."""
    return typer.Option(*names, help=text, rich_help_panel=panel, **settings)


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """The command with every dataclass parameter replaced by the dataclass's fields."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Callable[..., Any]] = {
        name: kind for name, kind in hints.items() if isinstance(kind, type) and is_dataclass(kind)
    }
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        parameters += _fields(groups[name]) if name in groups else [parameter]

    @wraps(command)
    def run(**values: Any) -> None:
        for name, kind in groups.items():
            fields = [parameter.name for parameter in _fields(kind)]
            values[name] = kind(**{field: values.pop(field) for field in fields})
        command(**values)

    only = inspect.Parameter.KEYWORD_ONLY
    shown = [p.replace(kind=only, annotation=hints.get(p.name, p.annotation)) for p in parameters]
    run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return run


def refuse_given(reason: str, *options: Any) -> None:
    """Refuse options that would have no effect.

    Args:
        reason: why they would have none.
        options: dataclasses of options, whose fields must all have their defaults.

    Raises:
        UsageError: a field differs from its default.
    """
    for group in options:
        for item in fields(group):
            if getattr(group, item.name) != item.default:
                raise UsageError(f"{flag(item.name)}: {reason}")


def _fields(kind: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a dataclass's constructor, with evaluated annotations."""
    hints = get_type_hints(kind, include_extras=True)
    parameters = inspect.signature(kind).parameters.values()
    return [parameter.replace(annotation=hints[parameter.name]) for parameter in parameters]
