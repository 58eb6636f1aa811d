"""Threads that a process does not wait for."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from tokenleap import TokenleapError
from tokenleap.async_llm import Pool


def test_what_is_submitted_runs_and_errors_reach_who_waits() -> None:
    pool = Pool(2, "test")
    assert [pool.submit(partial(pow, n, 2)).result(60) for n in range(5)] == [0, 1, 4, 9, 16]
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 / 0).result(60)
    pool.close()


def test_closing_waits_for_nothing_and_refuses_the_rest() -> None:
    pool, begun, gate = Pool(1, "test"), threading.Event(), threading.Event()

    def slow() -> str:
        begun.set()
        gate.wait(60)
        return "done"

    runs, waits = pool.submit(slow), pool.submit(lambda: "never")
    assert begun.wait(60)
    pool.close()
    with pytest.raises(TokenleapError, match="closed"):
        waits.result(60)
    with pytest.raises(TokenleapError, match="closed"):
        pool.submit(lambda: "never")
    assert not runs.done()
    gate.set()
    assert runs.result(60) == "done"
    assert all(each.daemon for each in threading.enumerate() if each.name.startswith("test-"))


def test_clients_take_turns() -> None:
    pool, gate, ran = Pool(1, "test"), threading.Event(), list[str]()
    pool.submit(lambda: gate.wait(60))
    waits = [
        pool.submit(partial(ran.append, f"{client}{n}"), client)
        for client, calls in (("a", 3), ("b", 2), (None, 1))
        for n in range(calls)
    ]
    gate.set()
    for each in waits:
        each.result(60)
    assert ran == ["a0", "b0", "None0", "a1", "b1", "a2"]
    pool.close()
