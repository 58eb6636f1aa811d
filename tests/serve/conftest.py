"""One running server for the tests that need no settings of their own."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.cli.conftest import run
from tests.serve.support import Served, served

__all__ = ["run"]


@pytest.fixture(autouse=True)
def one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests without a seed have the same one in every run."""
    monkeypatch.setattr("tokenleap.request.fresh_seed", lambda: 1)


@pytest.fixture(scope="session")
def server() -> Iterator[Served]:
    with served() as running:
        yield running


@pytest.fixture(scope="session")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made
