"""Fixtures of the whole suite.

Tiny models gain nothing from threads, and threads that outnumber the cores make every parallel
region wait for the scheduler; so each test process computes on one thread.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Generator, Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # PyTorch is imported before Tokenleap sets it
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # whatever is asked for must be on the disk

from pathlib import Path

import hypothesis
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tests.clocks import WorkClock
from tests.measurements import SHORT, measure_with
from tokenleap import models
from tokenleap.core import clock
from tokenleap.drafters.base import Drafter
from tokenleap.models.support import default_dtype
from tokenleap.request import Request
from tokenleap.runtime.native import build
from tokenleap.runtime.native.build import why_no_library
from tokenleap.speculation import Guard

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

# A shell's background job starts with SIGINT ignored. So would all programs that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run, and no clock: neither a time for an example nor for making one.
hypothesis.settings.register_profile(
    "suite",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=50,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("suite")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import and collect without the garbage collector.

    Nor does it look at all of that again later: half a million objects, each time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def short_measurements() -> Iterator[None]:
    """Time each pass once where a controller asks what it costs: that took half of many tests."""
    with pytest.MonkeyPatch.context() as patch:
        measure_with(patch, SHORT)
        yield


@pytest.fixture(scope="session", autouse=True)
def work_clock() -> Iterator[None]:
    """No measured time decides what is drafted, so that a busy machine drafts as an idle one."""
    with pytest.MonkeyPatch.context() as patch:
        WorkClock().install(patch.setattr)
        yield


@pytest.fixture
def real_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock as outside the tests."""
    monkeypatch.setattr(clock, "now", time.perf_counter)


@pytest.fixture(scope="session", autouse=True)
def our_own_assertions() -> Iterator[None]:
    """An assertion of a drafter of ours fails the test, instead of only ending the drafts."""
    give_up = Guard.give_up

    def strict(guard: Guard, drafter: Drafter, request: Request, error: Exception) -> None:
        if isinstance(error, AssertionError) and type(drafter).__module__.startswith("tokenleap."):
            raise error
        give_up(guard, drafter, request, error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Guard, "give_up", strict)
        yield


@pytest.fixture(scope="session")
def native_library() -> None:
    """Skip what needs the native runtime where it cannot be compiled."""
    if (reason := why_no_library()) is not None:
        pytest.skip(f"no native library here: {reason}")


@pytest.fixture
def own_cache(native_library: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder; the native library is not compiled again for it."""
    library = build.library()
    monkeypatch.setattr(build, "_library", lambda *_flags: library)
    monkeypatch.setenv("TOKENLEAP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's converted folder; fetched and converted if it is not cached yet."""
    return models.resolve("smollm2-135m")


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_path: Path) -> PreTrainedTokenizerBase:
    tokenizer = models.load_tokenizer(smollm2_path)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="session")
def smollm2_float32(smollm2_path: Path) -> PreTrainedModel:
    return models.load_model(smollm2_path, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="session")
def smollm2_auto(smollm2_path: Path) -> PreTrainedModel:
    """In the dtype that `LLM` takes on this processor."""
    cpu = torch.device("cpu")
    return models.load_model(smollm2_path, default_dtype("auto", cpu), cpu)
