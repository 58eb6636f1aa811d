"""Limits of each API key: requests and tokens per minute, and requests at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from tests.serve.support import MODEL, Served, served, until
from tokenleap import ConfigError
from tokenleap.serve import app
from tokenleap.serve.settings import KEY_LIMITS, Settings

BODY: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 8, "ignore_eos": True}
TOKENS = 5 + 8
ENDLESS = BODY | {"max_tokens": 900, "stream": True}


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


@contextmanager
def limited(**limits: Any) -> Iterator[tuple[Served, Callable[..., httpx2.Response]]]:
    with served(api_keys=("a", "b"), **limits) as running:

        def asked(by: str, path: str = "/v1/completions", **body: Any) -> httpx2.Response:
            return running.http.post(path, json=BODY | body, headers=key(by))

        yield running, asked


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets seconds pass for the limits; no others do."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
    monkeypatch.setattr(app, "time", clock)

    def let(seconds: float) -> None:
        now[0] += seconds

    return let


def rates(answer: httpx2.Response) -> list[str]:
    """Limit, what remains, and when all of it does again."""
    assert len({name for name in answer.headers if name.startswith("x-ratelimit-")}) == 3
    found = (
        each for each in ("requests", "tokens") if f"x-ratelimit-limit-{each}" in answer.headers
    )
    what = next(found)
    return [
        answer.headers[f"x-ratelimit-{part}-{what}"] for part in ("limit", "remaining", "reset")
    ]


def test_requests_per_minute(later: Callable[[float], None]) -> None:
    with limited(rpm_limit=3) as (running, asked):
        assert rates(asked("a")) == ["3", "2", "20.000s"]
        assert asked("a", colour=1).status_code == 400  # a wrong request counts, too
        assert rates(asked("a")) == ["3", "0", "60.000s"]
        refused = asked("a")
        assert refused.status_code == 429
        assert refused.headers["Retry-After"] == "20"
        assert rates(refused) == ["3", "0", "60.000s"]
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert "3 requests per minute" in error["message"]
        models = running.http.get("/v1/models", headers=key("a"))
        assert (models.status_code, "x-ratelimit-limit-requests" in models.headers) == (200, False)
        assert asked("b").status_code == 200
        assert asked("nobody").status_code == 401
        later(20)
        assert [asked("a").status_code for _ in range(2)] == [200, 429]


def test_tokens_per_minute(later: Callable[[float], None]) -> None:
    with limited(tpm_limit=20) as (_, asked):
        assert [asked("a").status_code for _ in range(3)] == [200, 200, 429]
        assert asked("a").headers["Retry-After"] == str(3 * (2 * TOKENS - 20 + 1))
        assert asked("b").status_code == 200
        later(60)
        assert rates(asked("a", "/tokenize", max_tokens=None, ignore_eos=None))[1] == "14"


def test_tokens_of_a_client_that_goes_away(later: Callable[[float], None]) -> None:
    """A client that goes away pays for what was computed."""
    with limited(tpm_limit=1000) as (running, asked):

        def remaining() -> int:
            return int(rates(asked("a", "/tokenize", max_tokens=None, ignore_eos=None))[1])

        url, headers = "/v1/completions", key("a")
        with running.http.stream("POST", url, json=ENDLESS, headers=headers) as response:
            next(response.iter_text())
        until(lambda: running.state.open_sequences == 0)
        until(lambda: remaining() < 1000 - 5)


def test_requests_at_a_time() -> None:
    """A flood of one key takes none of the others' places."""
    with limited(max_parallel_requests=2) as (running, asked):
        flood = [
            running.http.stream("POST", "/v1/completions", json=ENDLESS, headers=key("a"))
            for _ in range(2)
        ]
        with flood[0] as first, flood[1] as second:
            assert (first.status_code, second.status_code) == (200, 200)
            for _ in range(20):
                refused = asked("a")
                assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
            assert running.state.open_sequences <= 2
            assert asked("b").status_code == 200
            pieces = first.iter_text()  # kept: without it, the response would be closed
            response_id = next(pieces).split('"id":"')[1].split('"')[0]
            stop = f"/v1/completions/{response_id}/cancel"
            assert running.http.post(stop, headers=key("a")).status_code == 204
        until(lambda: asked("a").status_code == 200)


@pytest.mark.parametrize("name", KEY_LIMITS)
def test_limits_of_keys_need_keys(name: str) -> None:
    limit: Any = {name: 5}
    with pytest.raises(ConfigError, match=f"{name} limits each API key.*give --api-key"):
        Settings(served_model_names=(MODEL,), **limit)
