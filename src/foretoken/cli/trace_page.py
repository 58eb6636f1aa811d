"""A trace as one self-contained HTML file: a row per step, with its draft and its verification."""

from __future__ import annotations

from jinja2 import Environment

from foretoken.cli.trace_view import TraceView

__all__ = ["html"]

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
:root { color-scheme: light dark; --line: #8884; --good: #0a7a2f; --bad: #c22; --new: #06c;
  --dim: #888; }
@media (prefers-color-scheme: dark) { :root { --good: #5c5; --bad: #f77; --new: #6af; } }
body { font: 16px/1.6 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: .3rem .8rem; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }
td.number { text-align: right; color: var(--dim); }
.token { white-space: pre-wrap; border-radius: .2rem; padding: 0 .1rem; margin-right: .1rem;
  box-shadow: inset 0 -1px var(--line); }
.accepted { color: var(--good); }
.rejected { color: var(--bad); text-decoration: line-through; }
.unreached { color: var(--dim); }
.correction { color: var(--new); font-weight: bold; }
.bonus { font-weight: bold; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p class="output">
{%- for step in view.steps %}{% for token in step.verified %}{{ piece(token) }}{% endfor %}
{%- endfor %}</p>
<p>{{ view.summary.tokens }} tokens in {{ view.summary.steps }} steps,
{{ view.summary.num_drafts }} with a draft. Mean acceptance length
{{ "%.2f" | format(view.summary.mean_acceptance_length) }}, acceptance rate
{{ "%.2f" | format(view.summary.acceptance_rate) }}.</p>
<p><span class="token accepted">accepted</span> <span class="token rejected">rejected</span>
<span class="token unreached">not reached</span>
<span class="token correction">correction</span> <span class="token bonus">bonus</span></p>
<table>
<thead><tr><th>step</th><th>draft</th><th>verification</th></tr></thead>
<tbody>
{% for step in view.steps %}
<tr>
<td class="number">{{ step.number }}</td>
<td>{% for indent, line in step.lines %}<div style="margin-left: {{ indent }}rem">
{%- for index in line %}{{ piece(step.draft[index]) }}{% endfor %}</div>{% endfor %}</td>
<td{% if step.reason %} title="{{ step.reason }}"{% endif %}>
{%- for token in step.verified %}{{ piece(token) }}{% endfor %}</td>
</tr>
{% endfor %}
</tbody>
</table>
<script type="application/json" id="trace">{{ view.as_dict() | tojson }}</script>
</body>
</html>
"""

MACRO = """{%- macro piece(token) -%}
<span class="token {{ token.kind }}"
{%- if token.q is not none %} title="q {{ "%.3f" | format(token.q) }}
{%- if token.p is not none %}, p {{ "%.3f" | format(token.p) }}{% endif %}"{% endif %}>
{{- token.text }}</span>
{%- endmacro -%}
"""


def html(view: TraceView, title: str) -> str:
    """The page.

    Args:
        view: what it shows.
        title: its heading.
    """
    template = Environment(autoescape=True).from_string(MACRO + PAGE)
    return template.render(view=view, title=title) + "\n"
