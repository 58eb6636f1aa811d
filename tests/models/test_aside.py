"""Models that are built beside a cache that cannot be written."""

from __future__ import annotations

import tempfile
from pathlib import Path
from threading import Event, Thread

import pytest

from tokenleap.models import resolver


@pytest.fixture(autouse=True)
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TOKENLEAP_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(resolver, "_built", {})


def test_two_threads_build_a_model_once(tmp_path: Path) -> None:
    """The second one comes while the first one builds, and gets the same folder."""
    second, filled, found = Event(), list[Path](), list[Path]()

    def fill(_scratch: Path, product: Path) -> dict[str, str]:
        filled.append(product)
        if len(filled) > 1:
            second.set()
        second.wait(0.1)
        (product / "config.json").write_text("{}")
        return {}

    def build() -> None:
        found.append(resolver.build_aside("m", "m.gguf", 1, fill))

    threads = [Thread(target=build) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(filled) == 1
    assert found[0] == found[1]
    assert (found[0] / "config.json").exists()
    assert len(list(tmp_path.glob("tokenleap-*"))) == 1


def test_another_model_does_not_wait() -> None:
    began, ends = Event(), Event()

    def waiting(_scratch: Path, _product: Path) -> dict[str, str]:
        began.set()
        ends.wait(60)
        return {}

    first = Thread(target=lambda: resolver.build_aside("one", "one.gguf", 1, waiting))
    first.start()
    began.wait(60)
    other = resolver.build_aside("other", "other.gguf", 1, lambda _scratch, _product: {})
    assert first.is_alive()
    ends.set()
    first.join(60)
    assert other.is_dir()


def test_what_failed_is_tried_again() -> None:
    def fails(_scratch: Path, _product: Path) -> dict[str, str]:
        raise KeyError

    with pytest.raises(KeyError):
        resolver.build_aside("m", "m.gguf", 1, fails)
    assert resolver.build_aside("m", "m.gguf", 1, lambda _scratch, _product: {}).is_dir()
