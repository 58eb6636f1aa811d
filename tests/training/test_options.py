"""docs/training.md describes every option with its default."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tokenleap.core.config import Config
from tokenleap.training.method import TRAINABLE, TrainingSettings, training_class, training_methods

TEXT = (Path(__file__).parents[2] / "docs/training.md").read_text(encoding="utf-8")


def tables() -> list[dict[str, str]]:
    """Name -> default in every table of options, in order."""
    head = re.escape("| option | default | |\n|---|---|---|\n")
    return [
        dict(re.findall(r"^\| `(\w+)` \| (\S+) \| \S", rows, re.MULTILINE))
        for rows in re.findall(rf"{head}((?:\|.*\n)+)", TEXT)
    ]


def defaults(kind: type[Config]) -> dict[str, str]:
    values = {name: field.default for name, field in kind.model_fields.items()}
    return {
        name: value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
        for name, value in values.items()
    }


def test_the_tables_have_every_option_and_its_default() -> None:
    named = [
        re.findall(r"`(\w+)`", line) for line in re.findall(r"^Of (`.*):$", TEXT, re.MULTILINE)
    ]
    settings, *of_methods = tables()
    assert settings == defaults(TrainingSettings)
    assert sorted(name for names in named for name in names) == sorted(TRAINABLE)
    for names, table in zip(named, of_methods, strict=True):
        for name in names:
            assert table == defaults(training_class(name)), name


def test_every_method_is_in_the_first_table() -> None:
    for name, method in training_methods().items():
        assert f"| `{name}` | {method.summary} |" in TEXT


def test_the_size_of_features_is_the_documented_one() -> None:
    from tokenleap.training.features import bytes_per_token

    for layers, size in ((1, 64), (3, 576), (2, 4096)):
        assert bytes_per_token(layers, size) == layers * (size + 2 * size // 32) + 100
