"""Fixtures of the tests of training."""

from __future__ import annotations

import pytest

from tests.training.world import chat_llm
from tokenleap import LLM


@pytest.fixture(scope="session")
def llm() -> LLM:
    """A target with a chat template."""
    return chat_llm()
