"""Which replica gets a request, and how many cores each has: without Ray."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tokenleap.errors import ConfigError
from tokenleap.ray.cluster import (
    BLOCK,
    MOST_BLOCKS,
    Call,
    PrefixMemory,
    Replicas,
    Share,
    beside,
    joined,
    prompt_keys,
    share_of,
)

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


def keys(path: str, **body: Any) -> list[int]:
    return prompt_keys(path, json.dumps(body).encode())


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


class TestKeys:
    def test_a_conversation_that_goes_on_begins_the_same(self) -> None:
        asked = [message("system", "be brief " * 20), message("user", "why? " * 20)]
        first = keys(CHAT, messages=asked)
        more = [*asked, message("assistant", "because " * 20), message("user", "and then?")]
        second = keys(CHAT, messages=more)
        assert len(second) > len(first) > 3
        assert second[: len(first) - 1] == first[:-1]
        assert keys(CHAT, messages=asked, tools=[{"type": "function"}])[0] != first[0]

    @pytest.mark.parametrize("field", ["prompt", "other"])
    def test_what_the_model_does_not_read_changes_nothing(self, field: str) -> None:
        plain = keys(TEXT, prompt="x" * 100)
        assert (keys(TEXT, prompt="x" * 100, n=2) == plain) == (field != "n")
        assert (keys(TEXT, **{"prompt": "x" * 100, field: "y" * 100}) == plain) == (
            field == "other"
        )

    def test_what_caches_keep_apart_is_not_routed_together(self) -> None:
        body = {"prompt": "x" * 200}
        asked = [json.dumps({**body, **salt}).encode() for salt in ({}, {"cache_salt": "a"})]
        found = [prompt_keys(TEXT, each, caller) for each in asked for caller in ("", "one", "two")]
        assert len({key for each in found for key in each}) == sum(map(len, found)) == 6 * 4
        assert found[4] == prompt_keys(TEXT, asked[1], "one")

    def test_a_replica_knows_whose_request_it_is(self) -> None:
        scope = {"type": "http", "state": {"caller": "one", "log": {}}}
        assert Call.of(scope, b"").as_scope()["state"] == {"caller": "one"}
        assert Call.of({"type": "http"}, b"").as_scope()["state"] == {"caller": ""}

    def test_each_endpoint_has_its_own_fields(self) -> None:
        assert keys(RESPONSES, instructions="a", input="b") == keys(TEXT, prompt="ab")
        assert len(keys(TEXT, prompt=list(range(100)))) > 3
        assert len(keys(TEXT, prompt="x" * BLOCK * (MOST_BLOCKS + 7))) == MOST_BLOCKS
        assert keys("/v1/models", prompt="x") == []

    @pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff", b"{}", b'{"prompt": null}'])
    def test_a_body_that_will_be_refused_has_none(self, body: bytes) -> None:
        assert prompt_keys(TEXT, body) == []

    def test_a_body_that_can_be_read_and_not_written_has_none(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def deep(_: object) -> str:
            raise RecursionError

        monkeypatch.setattr("tokenleap.ray.cluster._text", deep)
        assert keys(TEXT, prompt=[[1]]) == []


class TestMemory:
    def test_the_one_that_has_seen_most_comes_first(self) -> None:
        memory = PrefixMemory()
        memory.saw([1, 2], "a")
        memory.saw([1, 2, 3], "b")
        memory.saw([9], "c")
        loads = {"a": 0, "b": 0, "c": 0}
        assert memory.ranked([1, 2, 3, 4], loads) == ["b", "a", "c"]
        assert memory.ranked([1, 2, 9], {"a": 1, "b": 0, "c": 0})[0] == "b"  # equal: by load
        assert memory.ranked([7], {"a": 2, "b": 1, "c": 0}) == ["c", "b", "a"]

    def test_a_busy_one_comes_last(self) -> None:
        memory = PrefixMemory()
        memory.saw([1], "a")
        assert memory.ranked([1], {"a": 4, "b": 1}) == ["a", "b"]
        assert memory.ranked([1], {"a": 5, "b": 1}) == ["b", "a"]

    def test_new_beginnings_are_spread_and_alike_for_all_who_route(self) -> None:
        first, second = PrefixMemory(), PrefixMemory()
        loads = {"a": 0, "b": 0}
        chosen = [first.ranked([key], loads)[0] for key in range(50)]
        assert chosen == [
            second.ranked([key], dict(reversed(loads.items())))[0] for key in range(50)
        ]
        assert 10 < chosen.count("a") < 40

    def test_what_has_gone_is_forgotten(self) -> None:
        memory = PrefixMemory()
        memory.saw([1, 2], "a")
        memory.saw([1], "b")
        memory.keep({"b"})
        assert memory.ranked([1, 2], {"a": 0, "b": 0})[0] == "b"

    def test_it_does_not_grow_for_ever(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tokenleap.ray.cluster.MOST_KEYS", 3)
        memory = PrefixMemory()
        for key in (1, 2, 3, 1, 4):
            memory.saw([key], "a")
        loads = {"a": 1, "b": 0}
        assert [memory.ranked([key], loads)[0] for key in (1, 2, 3, 4)] == ["a", "b", "a", "a"]


class TestPlan:
    @pytest.mark.parametrize(
        ("text", "least", "most", "shown"),
        [
            ("2", 2, 2, "2 replicas"),
            (1, 1, 1, "1 replica"),
            ("1:4", 1, 4, "1 to 4 replicas"),
        ],
    )
    def test_numbers_and_ranges(self, text: Any, least: int, most: int, shown: str) -> None:
        found = Replicas.parse(text)
        assert (found.least, found.most, str(found)) == (least, most, shown)

    @pytest.mark.parametrize("text", ["0", "0:2", "3:2", "-1", "x", "1:", "", "1:2:3", "٢"])
    def test_what_is_neither(self, text: str) -> None:
        with pytest.raises(ConfigError, match=r"^replicas: "):
            Replicas.parse(text)

    @pytest.mark.parametrize(
        ("cores", "replicas", "threads", "expected"),
        [
            ([2], "2", None, 1),
            ([2], "1", None, 2),
            ([8], "3", None, 2),
            ([8, 4], "3", None, 4),
            ([8, 4], "1:4", None, 2),
            ([16], "2", 3, 3),
        ],
    )
    def test_equal_shares(
        self, cores: list[float], replicas: str, threads: int | None, expected: int
    ) -> None:
        wanted = Replicas.parse(replicas)
        assert share_of(cores, [0], wanted, device="auto", threads=threads) == Share(expected)

    @pytest.mark.parametrize(
        ("cores", "gpus", "device", "threads", "message"),
        [
            ([1], [0], "auto", None, "2 need a core each, and there are 1: take fewer"),
            ([], [], "auto", None, "there are 0"),
            ([4], [0], "cpu", 3, "2 need 3 cores each, and there are 4: .* fewer threads"),
            ([4], [1], "auto", None, "2 need a GPU each, and there are 1: .* device cpu"),
            ([4], [0], "cuda", None, "2 need a GPU each, and there are 0"),
        ],
    )
    def test_no_room(
        self, cores: list[float], gpus: list[float], device: str, threads: int | None, message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            share_of(cores, gpus, Replicas.parse(2), device=device, threads=threads)

    def test_gpus(self) -> None:
        two = Replicas.parse(2)
        assert share_of([8], [2], two, device="auto", threads=None) == Share(4, 1)
        assert share_of([8], [2], two, device="cpu", threads=None) == Share(4, 0)


@pytest.mark.parametrize(
    ("cores", "count", "expected"),
    [([1], 1, 0), ([2], 1, 1), ([2], 2, 0.5), ([8], 2, 3), ([1, 1], 2, 0), ([2, 1], 3, 0.5)],
)
def test_a_core_is_left_for_other_stages(cores: list[float], count: int, expected: float) -> None:
    wanted = Replicas.parse(count)
    share = share_of(cores, [0], wanted, device="auto", threads=None)
    assert beside(share, cores) == expected
    assert count * expected <= sum(cores) - 1


def test_pages_of_metrics_are_joined_metric_by_metric() -> None:
    page = '# HELP a_total A.\n# TYPE a_total counter\na_total{{engine="{0}"}} 1.0\n'
    page += '# HELP b B.\n# TYPE b gauge\nb{{engine="{0}"}} {0}.0\n'
    found = joined([page.format(0), page.format(1), ""])
    assert found.splitlines() == [
        "# HELP a_total A.",
        "# TYPE a_total counter",
        'a_total{engine="0"} 1.0',
        'a_total{engine="1"} 1.0',
        "# HELP b B.",
        "# TYPE b gauge",
        'b{engine="0"} 0.0',
        'b{engine="1"} 1.0',
    ]
