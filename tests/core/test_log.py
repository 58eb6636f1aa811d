"""`TOKENLEAP_LOG` shows log lines; without it, a program's own handlers get them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.tiny import tiny_model
from tokenleap import LLM, ConfigError
from tokenleap.engine.llm_engine import show_log_lines
from tokenleap.runtime import choose
from tokenleap.runtime.native import build

OURS = logging.getLogger("tokenleap")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    level = OURS.level
    yield
    OURS.setLevel(level)
    OURS.handlers.clear()


def test_nothing_is_set_up_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENLEAP_LOG", raising=False)
    show_log_lines()
    assert OURS.level == logging.NOTSET
    assert not OURS.handlers


def test_lines_on_standard_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOKENLEAP_LOG", "INFO")
    for _ in range(2):  # a second model adds no second handler
        show_log_lines()
    LLM(tiny_model())
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "INFO tokenleap.engine.llm_engine: LlamaForCausalLM runs on cpu" in lines[0]


def test_an_unknown_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENLEAP_LOG", "loud")
    with pytest.raises(ConfigError, match="TOKENLEAP_LOG: must be one of debug, info"):
        LLM(tiny_model())


def test_one_warning_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    choose._warn_once.cache_clear()
    build._library.cache_clear()
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    try:
        for _ in range(2):
            assert LLM(tiny_model(head_dim=32)).runtime == "lean"
    finally:
        build._library.cache_clear()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "no C++ compiler; install g++" in record.getMessage()
