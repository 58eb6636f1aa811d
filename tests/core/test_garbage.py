"""Loading is not interrupted by searches for garbage, and leaves the collector as it was."""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

import tokenleap
from tests.tiny import tiny_model
from tokenleap.core.garbage import collected_later, kept
from tokenleap.models.loaded import LoadedModel


class Cycle:
    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Puts the collector back, whatever a test did to it. `conftest.py` has frozen objects."""
    enabled = gc.isenabled()
    gc.unfreeze()
    yield
    gc.unfreeze()
    (gc.enable if enabled else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_put_back(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()

    @collected_later()
    def load() -> None:
        assert not gc.isenabled()
        raise KeyError

    with pytest.raises(KeyError):
        load()
    assert gc.isenabled() == enabled


def test_nothing_is_searched_until_the_end_and_all_can_be_found_later() -> None:
    searches: list[int] = []

    def note(_phase: str, info: dict[str, int]) -> None:
        searches.append(info["generation"])

    gc.enable()
    with collected_later():
        gc.callbacks.append(note)
        kept = [Cycle() for _ in range(10_000)]
        gc.callbacks.remove(note)
    assert not searches
    cycle = weakref.ref(kept[0])
    assert cycle() is not None
    assert gc.is_tracked(kept)
    assert gc.get_freeze_count() == 0
    del kept
    gc.collect()
    assert cycle() is None


def test_new_objects_are_old_at_once() -> None:
    """So that the next search, which is among the young, has little to do."""
    gc.enable()
    with collected_later():
        kept = [Cycle() for _ in range(10_000)]
    assert sum(isinstance(each, Cycle) for each in gc.get_objects(generation=0)) == 0
    del kept


def test_what_the_caller_has_frozen_stays_frozen() -> None:
    gc.enable()
    gc.freeze()
    count = gc.get_freeze_count()
    with collected_later():
        pass
    assert gc.get_freeze_count() > 0.9 * count > 0  # some may have been freed by other threads


def test_what_is_kept_is_not_searched_until_the_end() -> None:
    cycle = weakref.ref(Cycle())
    with kept():
        assert gc.get_freeze_count() > 0
        gc.collect()
        assert cycle() is not None
        with kept():  # what the caller keeps stays so
            pass
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert cycle() is None


def test_nothing_is_searched_while_a_model_is_loaded() -> None:
    enabled: list[bool] = []

    def open_packed(*_: object) -> None:
        enabled.append(gc.isenabled())
        raise KeyError

    gc.enable()
    with pytest.raises(KeyError):
        LoadedModel.of("model", None, torch.float32, "cpu", open_packed)
    assert LoadedModel.of(tiny_model("llama"), None, "auto", "auto").tokenizer is None
    assert enabled == [False]
    assert gc.isenabled()


def test_nothing_is_searched_while_a_public_name_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    enabled: list[bool] = []

    def load(_module: str) -> SimpleNamespace:
        enabled.append(gc.isenabled())
        return SimpleNamespace(LLM=None)

    gc.enable()
    monkeypatch.setattr(tokenleap, "LLM", None)  # puts the class back
    monkeypatch.setattr(importlib, "import_module", load)
    assert tokenleap.__getattr__("LLM") is None
    assert enabled == [False]
    assert gc.isenabled()
