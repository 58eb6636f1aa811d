"""docs/training.md names every method; tests/test_docs.py has the options."""

from __future__ import annotations

from pathlib import Path

from tokenleap.training.methods import TRAINING_METHODS

TEXT = (Path(__file__).parents[2] / "docs/training.md").read_text(encoding="utf-8")


def test_every_method_is_in_the_first_table() -> None:
    for name, method in TRAINING_METHODS.items():
        assert f"| `{name}` | {method.summary} |" in TEXT


def test_the_size_of_features_is_the_documented_one() -> None:
    from tokenleap.training.features import bytes_per_token

    for layers, size in ((1, 64), (3, 576), (2, 4096)):
        assert bytes_per_token(layers, size) == layers * (size + 2 * size // 32) + 100
