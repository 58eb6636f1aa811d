"""docs/training.md describes every option with its default."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tokenleap.core.config import Config
from tokenleap.training.methods import TRAINING_METHODS
from tokenleap.training.settings import TrainingSettings

TEXT = (Path(__file__).parents[2] / "docs/training.md").read_text(encoding="utf-8")


def rows(head: str) -> list[list[str]]:
    """The cells of each row of the table that has this head."""
    _, _, rest = TEXT.partition(head)
    table = re.match(r"\|[-|]+\|\n((?:\|.*\n)+)", rest)
    assert table is not None, head
    return [line.strip("| ").split(" | ") for line in table[1].splitlines()]


def methods_in(cell: str) -> set[str]:
    """The methods that a cell names, or all but these."""
    named = set(re.findall(r"`(\w+)`", cell))
    assert named <= set(TRAINING_METHODS)
    return set(TRAINING_METHODS) - named if cell.startswith("all but") else named


def defaults(kind: type[Config]) -> dict[str, str]:
    values = {name: field.default for name, field in kind.model_fields.items()}
    return {
        name: value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
        for name, value in values.items()
    }


def test_the_table_of_settings_is_complete() -> None:
    table = {name.strip("`"): default for name, default, _ in rows("| option | default | |\n")}
    assert table == defaults(TrainingSettings)


def test_the_table_of_methods_is_complete() -> None:
    table: dict[str, dict[str, str]] = {name: {} for name in TRAINING_METHODS}
    for option, methods, default, meaning in rows("| option | methods | default | |\n"):
        assert meaning
        for name in methods_in(methods):
            assert option not in table[name], (option, name)
            table[name][option.strip("`")] = default
    assert table == {name: defaults(kind.Options) for name, kind in TRAINING_METHODS.items()}


def test_every_method_is_in_the_first_table() -> None:
    for name, method in TRAINING_METHODS.items():
        assert f"| `{name}` | {method.summary} |" in TEXT


def test_the_size_of_features_is_the_documented_one() -> None:
    from tokenleap.training.features import bytes_per_token

    for layers, size in ((1, 64), (3, 576), (2, 4096)):
        assert bytes_per_token(layers, size) == layers * (size + 2 * size // 32) + 100
