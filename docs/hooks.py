"""MkDocs hook: tables of options, written from the classes that check them."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from textwrap import dedent
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tokenleap.control import CONTROLLERS
from tokenleap.core.acceptance import RULES, AcceptanceRule
from tokenleap.core.config import Config
from tokenleap.drafters.online import OnlineOptions
from tokenleap.drafters.registry import METHODS
from tokenleap.training.method import TrainingSettings, training_methods

PAGE = "reference/options.md"

INTRODUCTION = """# Options

This page is generated from the classes that check the options. Those of a method are on
[its page](../methods.md). The options of a rule or a controller are given with its name:
`"acceptance": {"rule": "lenient", "lenience": 0.3}`. Options of [training](../training.md) are
`--set NAME=VALUE`, with JSON values.
"""

ONLINE = "Fields of a method's `online`. [What it does](../training.md#learning-while-serving)."
SETTINGS = "Some methods [have no use for some of them](../training.md#options), and refuse these."

LIMITS = {
    "ge": "at least",
    "gt": "above",
    "le": "at most",
    "lt": "below",
    "min_length": "length at least",
}

HEAD = "| option | type | default | allowed | meaning |\n|---|---|---|---|---|\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page to the site."""
    files.append(File.generated(config, PAGE, content=options_page()))
    return files


def on_page_markdown(markdown: str, page: Page, **unused: Any) -> str:
    """Add its options to the page of a method."""
    folder, _, name = page.file.src_uri.removesuffix(".md").rpartition("/")
    return markdown + method_options(name) if folder == "methods" and name in METHODS else markdown


def method_options(name: str) -> str:
    """The end of a method's page, as Markdown."""
    spec = METHODS[name]
    facts = (
        "Fields of `speculative_config`, next to those that "
        "[all methods have](../reference/parameters.md). `num_speculative_tokens` is "
        f"{spec.default_num_speculative_tokens} by default."
    )
    return f"\n## Options\n\n{facts}\n\n{_table(spec.options)}\n"


def options_page() -> str:
    """The options of acceptance rules, controllers and trainings, as Markdown."""
    parts = [INTRODUCTION, "## Acceptance rules\n"]
    parts += [_section(name, _rule(rule), rule.Options) for name, rule in RULES.items()]
    parts.append("## Controllers\n")
    parts += [
        _section(name, _sentence(controller.summary), controller.Options)
        for name, controller in CONTROLLERS.items()
    ]
    parts += ["## Learning while serving\n", _section("online", ONLINE, OnlineOptions)]
    parts += ["## Training\n", _section("all methods", SETTINGS, TrainingSettings)]
    parts += [
        _section(f"train {name}", _sentence(method.summary), method)
        for name, method in training_methods().items()
    ]
    return "\n".join(parts)


def _section(name: str, about: str, options: type[Config]) -> str:
    return f"### {name}\n\n{about}\n\n{_table(options)}\n"


def _table(options: type[Config]) -> str:
    rows = list(_rows(options))
    return HEAD + "\n".join(rows) if rows else "It has no options of its own."


def _rule(rule: type[AcceptanceRule]) -> str:
    return _sentence(inspect.cleandoc(rule.__doc__ or "").partition("\n")[0])


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}".rstrip(".") + "."


# Rows


def _rows(options: type[Config]) -> Iterator[str]:
    meanings = descriptions(options)
    for name in _own_first(options):
        field = options.model_fields[name]
        annotation = field.rebuild_annotation()
        cells = (
            f"`{field.alias or name}`",
            _type(annotation),
            _default(field.is_required(), field.default),
            "; ".join(_bounds(annotation)),
            _sentence(meanings[name]),
        )
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _own_first(options: type[Config]) -> list[str]:
    """Names of the fields: those of the class itself come before inherited ones."""
    declared = [name for kind in options.__mro__ for name in inspect.get_annotations(kind)]
    return [name for name in dict.fromkeys(declared) if name in options.model_fields]


def descriptions(options: type[Config]) -> dict[str, str]:
    """Meanings of fields, from `Args:` in the docstrings of a class and its bases."""
    found: dict[str, str] = {}
    for kind in reversed(options.__mro__):
        _, _, section = inspect.cleandoc(kind.__doc__ or "").partition("\nArgs:\n")
        section = dedent(re.split(r"\n\n\S", section)[0])
        for name, text in re.findall(r"^(\w+): (.*(?:\n .*)*)", section, re.MULTILINE):
            found[name] = " ".join(text.split())
    return found


def _default(required: bool, value: Any) -> str:
    if required or value == "":  # an empty path is refused
        return "required"
    if isinstance(value, str):
        return f'`"{value}"`'
    return f"`{dict(value)!r}`" if isinstance(value, Mapping) else f"`{value!r}`"


# Types and bounds


def _parts(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """An annotation without its metadata, and the metadata."""
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        return inner, tuple(metadata)
    return annotation, ()


def _type(annotation: Any) -> str:
    annotation, _ = _parts(annotation)
    arguments = [each for each in get_args(annotation) if each is not ...]
    if get_origin(annotation) is Literal:
        return " or ".join(f'`"{each}"`' for each in arguments)
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(map(_type, arguments))
    if annotation is type(None):
        return "`None`"
    if arguments and issubclass(get_origin(annotation), Mapping):
        return "dict"
    if arguments:
        return f"list of {_type(arguments[0])}"
    return getattr(annotation, "__name__", "any").lower()


def _bounds(annotation: Any) -> Iterator[str]:
    """Phrases such as "1 to 64", one for each alternative that is limited."""
    annotation, metadata = _parts(annotation)
    arguments = [each for each in get_args(annotation) if each is not ...]
    if get_origin(annotation) in (Union, types.UnionType):
        for each in arguments:
            yield from _bounds(each)
        return
    own = _range(metadata)
    if get_origin(annotation) is tuple:
        own += [f"each {phrase.removeprefix('each ')}" for phrase in _bounds(arguments[0])]
    if own:
        yield ", ".join(own)


def _range(metadata: Iterable[Any]) -> list[str]:
    limits = {
        name: value
        for each in metadata
        for name in ("ge", "gt", "le", "lt", "min_length")
        if (value := getattr(each, name, None)) is not None
    }
    phrases = []
    if "ge" in limits and "le" in limits:
        phrases.append(f"{limits.pop('ge')} to {limits.pop('le')}")
    return phrases + [f"{LIMITS[name]} {value}" for name, value in limits.items()]
