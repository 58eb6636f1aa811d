"""Chat templates say what Transformers says, and cannot use up memory or time."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2.exceptions import SecurityError, TemplateError

from tests.cli.conftest import ascii_tokenizer
from tokenleap.engine.prompts import conversation_text
from tokenleap.errors import PromptError
from tokenleap.models import chat_template
from tokenleap.models.chat_template import rendered, without_tools

MESSAGES = [
    {"role": "system", "content": "Be\nbrief"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi"},
]
PLAIN = [
    "{% for m in messages %}{{ m.role | upper ~ ': ' ~ m.content }}{{ '\n' * 2 }}{% endfor %}",
    "{% for m in messages %}{% if not loop.last %}{{ loop.index }}/{{ loop.length }} {% endif %}"
    "{{ m | tojson(indent=2) }}{% endfor %}",
    "{% macro of(m) %}<{{ m['content'].replace('l', 'L').center(9) }}>{% endmacro %}"
    "{% for m in messages[1:] if m.role != 'x' %}{{ of(m) }}{% else %}none{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 5000000 %}"
    "{% endfor %}{{ '%05d %s' % (ns.n, 'x') }} {{ '{:>4}'.format(ns.n) }} {{ ns.n | tojson }}",
    "{{ messages | map(attribute='role') | join(', ') | indent(2) }}{{ x is defined }}",
    "{% generation %}{{ messages[0].content }}{% endgeneration %}{{ bos_token }}",
]


@pytest.mark.parametrize("template", PLAIN)
def test_the_text_is_the_same(template: str) -> None:
    tokenizer = ascii_tokenizer(template)
    expected = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    assert expected
    assert rendered(tokenizer, MESSAGES) == expected


DOUBLED = (
    "{% set ns = namespace(x='xxxx') %}{% for i in range(60) %}{% set ns.x = ns.x OP ns.x %}"
    "{% endfor %}"
)
HUGE = [
    "{{ 'x' * 10**10 }}",
    "{{ [1] * 10**10 }}",
    "{{ 2 ** 10 ** 9 * 1 }}{{ 2 ** (10 ** 9) }}",
    "{{ 'x'.ljust(10**10) }}",
    "{{ 'x' | center(10**10) }}",
    "{% filter center(10**10) %}x{% endfilter %}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '%*d' % (10**10, 1) }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{{ '{:>{w}}'.format(1, w=10**10) }}",
    "{{ ('x' * 10**7).replace('x', 'y' * 10**7) }}",
    "{{ ('y' * 10**6).join(['x'] * 10**5) }}",
    "{{ (['x'] * 10**5) | join('y' * 10**6) }}",
    "{{ ('x\n' * 10**6) | indent(10**6) }}",
    "{{ [1] | tojson(indent=10**10) }}",
    "{{ 'x' | batch(10**10, 'x') | list }}",
    DOUBLED.replace("OP", "+"),
    DOUBLED.replace("OP", "~"),
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% endfor %}{{ ns.x }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}"
    + 5000 * "x"
    + "{% endfor %}{% endfor %}",
]


@pytest.mark.parametrize("template", HUGE)
def test_texts_that_would_be_huge_are_refused(template: str) -> None:
    with pytest.raises(SecurityError, match=r"too large|too much memory"):
        rendered(ascii_tokenizer(template), MESSAGES)


def test_the_refusal_of_a_huge_text_is_that_of_a_prompt() -> None:
    with pytest.raises(PromptError, match="the model's chat template refuses this: it makes a"):
        conversation_text(MESSAGES, ascii_tokenizer(HUGE[0]))


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_time_is_limited(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_SECONDS", 0.1)
    with pytest.raises(TemplateError, match="takes more than"):
        rendered(ascii_tokenizer(template), MESSAGES)


def test_elsewhere_nothing_is_counted() -> None:
    tokenizer: Any = ascii_tokenizer("{{ 'x' * 10**8 }}")
    assert len(tokenizer.apply_chat_template(MESSAGES, tokenize=False)) == 10**8


def test_without_tools_a_template_gets_the_messages_as_they_are() -> None:
    told = [{"role": "system", "content": "first"}, {"role": "system", "content": "second"}]
    named = {"role": "user", "content": "Hello", "name": "Eve"}
    assert without_tools([*told, named], ()) == [*told, named]
    first, *others = without_tools([*told, named], [{"type": "function"}])
    assert first["content"].startswith("first\n\n")
    assert others == [told[1], named]
