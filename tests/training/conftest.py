"""Fixtures of the tests of training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState

from foretoken import LLM
from tests.training.world import chat_llm


@pytest.fixture(scope="session")
def llm() -> LLM:
    """A target with a chat template."""
    return chat_llm()


@pytest.fixture(autouse=True)
def fresh_accelerator() -> Iterator[None]:
    """Each test may choose its precision: Accelerate keeps the first choice of a process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
