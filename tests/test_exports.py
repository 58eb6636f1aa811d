"""The public names exist, are documented, and `import foretoken` stays light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import foretoken
from foretoken import errors


@pytest.mark.parametrize("name", foretoken.__all__)
def test_every_public_name_can_be_had_and_is_documented(name: str) -> None:
    value = getattr(foretoken, name)
    if isinstance(value, type):
        assert value.__doc__
        assert value.__module__.startswith("foretoken.")


def test_every_error_a_user_may_catch_is_public() -> None:
    assert set(errors.__all__) <= set(foretoken.__all__)


def test_dir_lists_them() -> None:
    assert dir(foretoken) == sorted(foretoken.__all__)


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        _ = foretoken.Llm


def test_import_does_not_load_torch() -> None:
    code = "import sys, foretoken; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_every_module_says_what_it_is_for() -> None:
    for path in Path(foretoken.__file__).parent.rglob("*.py"):
        assert path.read_text(encoding="utf-8").lstrip().startswith(('"""', 'r"""')), path
