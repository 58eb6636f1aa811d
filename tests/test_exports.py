"""The public names exist, are documented, and `import tokenleap` stays light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tokenleap
from tokenleap import errors


@pytest.mark.parametrize("name", tokenleap.__all__)
def test_every_public_name_can_be_had_and_is_documented(name: str) -> None:
    value = getattr(tokenleap, name)
    if isinstance(value, type):
        assert value.__doc__
        assert value.__module__.startswith("tokenleap.")


def test_every_error_a_user_may_catch_is_public() -> None:
    assert set(errors.__all__) <= set(tokenleap.__all__)


def test_dir_lists_them() -> None:
    assert dir(tokenleap) == sorted(tokenleap.__all__)


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        _ = tokenleap.Llm


def test_import_does_not_load_torch() -> None:
    code = "import sys, tokenleap; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_every_module_says_what_it_is_for() -> None:
    for path in Path(tokenleap.__file__).parent.rglob("*.py"):
        assert path.read_text(encoding="utf-8").lstrip().startswith(('"""', 'r"""')), path
