"""Requests of a server leave memory for later ones, and no text leaks to others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.drafting import drafter_of
from tests.serve.support import MODEL, Served, served, tiny_llm
from tokenleap import ConfigError, SpeculativeConfig
from tokenleap.drafters.lookahead import RecycleDrafter
from tokenleap.drafters.online import OnlineOptions
from tokenleap.drafters.suffix import SuffixDrafter
from tokenleap.engine.prefix_cache import BLOCK
from tokenleap.serve.settings import Settings
from tokenleap.trace import WITHHELD, Trace

KEYS = ("first-key", "second-key")
FIXED = {"controller": "fixed"}
BOTH = [{"method": "suffix"}, {"method": "recycle"}]
METHODS: dict[str, dict[str, Any]] = {
    "suffix": {"method": "suffix", **FIXED},
    "branching": {"method": "suffix", "branching": True, "num_speculative_tokens": 8, **FIXED},
    "recycle": {"method": "recycle", "num_speculative_tokens": 16, **FIXED},
    "ensemble": {"method": "ensemble", "drafters": BOTH, **FIXED},
    "switch": {"method": "switch", "drafters": BOTH, **FIXED},
    "hybrid": {"method": "hybrid", "drafter": {"method": "draft_model"}, **FIXED},
}
PROMPT = [*range(10, 20)]
KNOWN = 3
"""Tokens of the secret that the attacker knows."""


def config_of(method: str) -> dict[str, Any]:
    """With the target as a draft model, where the method needs one."""
    twin = {"model": tiny_llm(speculative_config=None)} if method == "hybrid" else {}
    return {**METHODS[method], **twin}


def secret_of(running: Served, **fields: Any) -> list[int]:
    """The tokens of an answer that only its client may know."""
    sampled = {"temperature": 1.0, "seed": 3, "max_tokens": 24, "ignore_eos": True}
    answer = running.complete(PROMPT, **sampled, return_token_ids=True, **fields)
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def attack(running: Served, secret: list[int], **fields: Any) -> Any:
    """Trace and metrics of an attacker, who knows how the secret begins."""
    other = [token for token in range(20, 90) if token not in secret][:8]
    assert len({*other, *secret[:KNOWN]}) == 8 + KNOWN, "nothing occurs twice"
    asked = {"trace": True, "metrics": True}
    prompt = [*other, *secret[:KNOWN]]
    answer = running.complete(prompt, tokenleap=asked, max_tokens=12, **fields)
    return answer["choices"][0]["tokenleap"]


def stolen(details: Any, secret: list[int]) -> bool:
    """Whether the first draft has what follows in the secret."""
    drafted = details["trace"]["steps"][0]["drafted"]
    return bool(drafted) and drafted[0] == secret[KNOWN]


@pytest.mark.parametrize("method", METHODS)
def test_nothing_of_one_request_reaches_another(method: str) -> None:
    """The attack: feed what is known, and read the rest from the rejected drafts."""
    with served(tiny_llm(speculative_config=config_of(method))) as running:
        secret = secret_of(running)
        secret_of(running, cache_salt="salted")
        for _ in range(3):
            details = attack(running, secret)
            assert not stolen(details, secret)
            if method != "hybrid":  # which drafts with a model, too
                assert not details["trace"]["steps"][0]["drafted"]
            assert details["metrics"]["accepted_earlier_tokens"] == 0


def key(number: int) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[number]}"}


CASES = [
    # Whether --share-drafts, the victim's key and salt, the attacker's, and whether they share
    pytest.param(False, (0, None), (0, None), False, id="same key"),
    pytest.param(False, (0, "a"), (0, "a"), True, id="same key and salt"),
    pytest.param(False, (0, "a"), (0, "b"), False, id="another salt"),
    pytest.param(False, (0, "a"), (0, None), False, id="no salt"),
    pytest.param(False, (0, "a"), (1, "a"), False, id="another key"),
    pytest.param(True, (0, None), (0, None), True, id="shared, same key"),
    pytest.param(True, (0, None), (1, None), False, id="shared, another key"),
    pytest.param(True, (0, "a"), (0, None), False, id="shared, a salt"),
    pytest.param(True, (0, "a"), (1, "a"), False, id="shared, same salt, another key"),
]


@pytest.fixture(scope="module")
def keyed(request: pytest.FixtureRequest) -> Iterator[Served]:
    """A server with two keys, with --share-drafts or without."""
    llm = tiny_llm(speculative_config=METHODS["suffix"])
    with served(llm, api_keys=KEYS, share_drafts=request.param) as running:
        yield running


def salted(running: Served, who: tuple[int, str | None]) -> dict[str, str]:
    """The salt of a request, which comes with this key."""
    running.http.headers.update(key(who[0]))
    return {} if who[1] is None else {"cache_salt": who[1]}


@pytest.mark.parametrize(
    ("keyed", "victim", "attacker", "shares"), CASES, indirect=["keyed"], scope="module"
)
def test_who_shares_drafts(
    keyed: Served,
    victim: tuple[int, str | None],
    attacker: tuple[int, str | None],
    shares: bool,
) -> None:
    keyed.llm.reset_drafter_memory()
    secret = secret_of(keyed, **salted(keyed, victim))
    details = attack(keyed, secret, **salted(keyed, attacker))
    step = details["trace"]["steps"][0]
    assert bool(step["drafted"]) is shares
    # Even who shares drafts is shown none that were not accepted.
    accepted = {step["drafted"][index] for index in step["accepted"]}
    assert {*step["drafted"]} - accepted <= {WITHHELD}
    again = {"temperature": 1.0, "seed": 3, "max_tokens": 24, "ignore_eos": True}
    answer = keyed.complete(PROMPT, **again, tokenleap={"metrics": True}, **salted(keyed, attacker))
    metrics = answer["choices"][0]["tokenleap"]["metrics"]
    assert (metrics["accepted_earlier_tokens"] > 12) is shares


@pytest.mark.parametrize("keyed", [True], indirect=True, scope="module")
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_prefixes_are_found_by_key_and_salt(keyed: Served, path: str) -> None:
    text = (f"{path} " * BLOCK)[: 3 * BLOCK]
    fields: dict[str, Any] = {"prompt": text, "max_tokens": 2}
    if path != "/v1/completions":
        messages = [{"role": "user", "content": text}]
        fields = {"messages": messages, "max_tokens": 2}
    if path == "/v1/responses":
        fields = {"input": text, "max_output_tokens": 2}

    def cached(*who: Any) -> int:
        response = keyed.post(path, **fields, **salted(keyed, who))
        assert response.status_code == 200, response.text
        usage = response.json()["usage"]
        details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
        return int(details["cached_tokens"] > 0)

    whos = ((0, None), (1, None), (0, "a"), (0, "b"), (1, "a"))
    assert [cached(*who) for who in whos] == [0] * 5
    assert [cached(*who) for who in whos] == [1] * 5


@pytest.mark.parametrize("salt", ["", 3, "a" * 1001])
def test_a_salt_is_a_text(server: Served, salt: object) -> None:
    assert server.refused("/v1/completions", prompt="a", cache_salt=salt)["param"] == "cache_salt"


def test_a_salt_of_any_characters(server: Served) -> None:
    for salt in ("é \x00", "\ud800"):
        body = {"model": MODEL, "prompt": "a", "max_tokens": 2, "cache_salt": salt}
        answer = server.http.post("/v1/completions", content=json.dumps(body))
        assert answer.status_code == (400 if salt == "\ud800" else 200), answer.text


def test_any_number_of_salts_is_bounded() -> None:
    config = {**METHODS["suffix"], "suffix_decoding_max_cached_requests": 5}
    llm = tiny_llm(speculative_config=config, prefix_cache_memory="1MiB")
    with served(llm) as running:
        for number in range(12):
            running.complete("hello " * 20, cache_salt=f"salt {number}")
            running.complete("hello " * 20)
    drafter = drafter_of(llm)
    assert isinstance(drafter, SuffixDrafter)
    assert len(drafter._earlier) == len(drafter._earlier._tries) == 5
    prefixes = llm.engine._scheduler._prefixes
    assert prefixes is not None
    assert prefixes.num_bytes <= 2**20


def test_a_private_request_leaves_nothing() -> None:
    llm = tiny_llm(speculative_config=METHODS["recycle"])
    with served(llm) as running:
        secret_of(running)
        drafter = drafter_of(llm)
        assert isinstance(drafter, RecycleDrafter)
        assert len(drafter._memory) == 0
        secret_of(running, cache_salt="mine")
        assert len(drafter._memory) > 0


# Traces


def test_a_shared_trace_tells_nothing_of_what_was_not_accepted() -> None:
    """Neither the tokens, nor the numbers and pieces that they could be read from."""
    with served(tiny_llm(speculative_config=METHODS["suffix"]), share_drafts=True) as running:
        secret = secret_of(running)
        trace = attack(running, secret)["trace"]
        own = attack(running, secret, cache_salt="none has drafted here")["trace"]
    assert json.loads(json.dumps(Trace.from_dict(trace).as_dict())) == trace
    step = trace["steps"][0]
    size = len(step["drafted"])
    assert step["drafted"] == [WITHHELD] * size
    assert size > 2
    assert step["p"] == step["q"] == [None] * size
    assert step["reason"].startswith("withheld")
    assert step["candidates"][1:] == [[]] * size
    assert [q for *_, q in step["candidates"][0]] == [None] * len(step["candidates"][0])
    assert [place[:3] for place in step["candidates"][0]] == [
        place[:3] for place in own["steps"][0]["candidates"][0]
    ]
    known = {str(token) for token in Trace.from_dict(own).tokens()}
    assert {*trace["pieces"]} - known <= {str(WITHHELD)}


def test_a_private_trace_is_whole() -> None:
    llm = tiny_llm()  # it looks up in the request's own text
    params: dict[str, Any] = {"prompt": "one two one two one", "max_tokens": 12, "temperature": 0}
    with served(llm) as running:
        trace = running.complete(**params, tokenleap={"trace": True})["choices"][0]["tokenleap"]
    steps = trace["trace"]["steps"]
    assert any(step["rejected"] for step in steps)
    assert WITHHELD not in {token for step in steps for token in step["drafted"]}


def test_without_traces() -> None:
    with served(traces=False) as running:
        messages = [{"role": "user", "content": "a"}]
        prompts: dict[str, Any] = {"completions": {"prompt": "a"}}
        prompts["chat/completions"] = {"messages": messages}
        for path, fields in prompts.items():
            error = running.refused(f"/v1/{path}", **fields, tokenleap={"trace": True})
            assert error["param"] == "tokenleap"
            assert "--no-traces" in error["message"]
        (model,) = running.http.get("/v1/models").json()["data"]
        assert model["traces"] is False
        answer = running.complete(tokenleap={"metrics": True, "tokens": True, "trace": False})
        assert answer["choices"][0]["tokenleap"]["metrics"]["generated_tokens"] == 8


# Learning


def test_who_learns_from_all_must_share() -> None:
    config = SpeculativeConfig(method="suffix").model_copy(update={"online": OnlineOptions()})
    names: dict[str, Any] = {"served_model_names": (MODEL,)}
    Settings(**names).check_learning(None)
    Settings(**names, api_keys=("one",), share_drafts=True).check_learning(config)
    with pytest.raises(ConfigError, match=r"online: .* serve with --share-drafts"):
        Settings(**names).check_learning(config)
    with pytest.raises(ConfigError, match=r"online: .* 2 API keys: serve with one"):
        Settings(**names, api_keys=KEYS, share_drafts=True).check_learning(config)
