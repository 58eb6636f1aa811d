"""A comparison as a self-contained HTML file: tables, remarks and plots."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment

from tokenleap.bench.figures import can_draw, draw_all
from tokenleap.bench.ran import facts_line
from tokenleap.bench.report import notes, tables
from tokenleap.bench.summary import Results

__all__ = ["html"]

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>tokenleap bench</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { padding: .2rem .8rem; border-bottom: 1px solid #ccc; text-align: right; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 2rem 0; }
img { width: 100%; height: auto; }
</style>
</head>
<body>
<h1>tokenleap bench</h1>
<p>{{ facts }}</p>
{% for title, header, rows in tables %}
<h2>{{ title }}</h2>
<table>
<thead><tr>{% for cell in header %}<th>{{ cell }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table>
{% endfor %}
{% for title, picture in plots.items() %}
<figure>
<figcaption>{{ title }}</figcaption>
<img alt="{{ title }}" src="data:image/svg+xml;base64,{{ picture }}">
</figure>
{% else %}
<p>Plots need Matplotlib: pip install 'tokenleap[plots]', then run again with --resume.</p>
{% endfor %}
<h2>Remarks</h2>
<ul>
{% for note in notes %}
<li>{{ note }}</li>
{% endfor %}
</ul>
</body>
</html>
"""


def html(results: Results, settings: Mapping[str, Any]) -> str:
    """The page; without Matplotlib it has a line that says so in place of the plots.

    Args:
        results: what was measured.
        settings: the journal's header.
    """
    template = Environment(autoescape=True, trim_blocks=True).from_string(PAGE)
    return template.render(
        facts=facts_line(settings, results),
        tables=tables(results),
        notes=notes(results),
        plots=_pictures(results) if can_draw() else {},
    )


def _pictures(results: Results) -> dict[str, str]:
    """As separate images: the ids of several inline SVGs would collide."""
    plots = draw_all(results)
    return {title: base64.b64encode(svg.encode()).decode() for title, svg in plots.items()}
