"""A trace as one self-contained HTML file: the trace viewer of the server's page with one trace.

The viewer is a few ES modules in `serve/static`, which browsers load as they are from the server.
A file on a disk cannot load modules, so they are joined into one script here. The page's policy
allows this script and this style by their hashes, and nothing else: no network, no other script.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from importlib import resources
from typing import TYPE_CHECKING

from jinja2 import Environment
from markupsafe import Markup

if TYPE_CHECKING:
    from tokenleap.trace import Trace

__all__ = ["html"]

_STATIC = resources.files("tokenleap") / "serve" / "static"
_ENTRY = "trace_page.js"
_IMPORT = re.compile(r'^import [^;]*? from "\./(?P<file>[a-z_]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=function|class|const)", re.MULTILINE)


def html(trace: Trace, title: str) -> str:
    """The page.

    Args:
        trace: what it shows.
        title: its heading.
    """
    style, script = _read("page.css"), "".join(_modules(_ENTRY, set()))
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hash(script)}",
            f"style-src {_hash(style)}",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    # A text is data in a script element, where only "<" could end the element.
    data = json.dumps(trace.as_dict()).replace("<", "\\u003c")
    template = Environment(autoescape=True, keep_trailing_newline=True).from_string(
        _read("trace.html")
    )
    return template.render(
        title=title,
        policy=Markup(policy),
        style=Markup(style),
        script=Markup(script),
        trace=Markup(data),
    )


def _read(name: str) -> str:
    return (_STATIC / name).read_text(encoding="utf-8")


def _modules(name: str, seen: set[str]) -> Iterator[str]:
    """The modules that this one imports, then itself, without imports and exports; each once."""
    if name in seen:
        return
    seen.add(name)
    source = _read(name)
    for found in _IMPORT.finditer(source):
        yield from _modules(found["file"], seen)
    yield _EXPORT.sub("", _IMPORT.sub("", source))


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
