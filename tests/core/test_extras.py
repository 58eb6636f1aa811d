"""Extras and the hints that install them."""

from __future__ import annotations

from pathlib import Path

import tokenleap
from tokenleap.core.extras import extras, how_to_install, requirements


def test_every_extra_brings_packages_of_others() -> None:
    for extra in extras():
        names = {each.name for each in requirements(extra)}
        assert names, extra
        assert "tokenleap" not in names


def test_an_extra_brings_what_extras_inside_it_bring() -> None:
    inner = requirements("serve")
    assert [str(each) for each in requirements("ray")][: len(inner)] == list(map(str, inner))
    assert requirements("ray")[-1].name == "ray"


def test_an_unknown_extra_brings_nothing() -> None:
    assert requirements("no-such-extra") == []


def test_the_command_can_be_pasted_into_a_shell() -> None:
    assert how_to_install("plots").startswith("pip install 'matplotlib<")


def test_no_message_installs_our_name_from_an_index() -> None:
    """While the package is not on PyPI, somebody else's could have its name."""
    for path in Path(tokenleap.__file__).parent.rglob("*.py"):
        for hint in ("pip install tokenleap", "pip install 'tokenleap"):
            assert hint not in path.read_text(encoding="utf-8"), path
