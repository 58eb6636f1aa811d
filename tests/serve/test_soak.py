"""Many requests at once, some wrong or given up: every answer is that of a request alone."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx2
import pytest

from foretoken import SamplingParams
from tests.serve.support import MODEL, Served, served, tiny_llm

CLIENTS = 24


def body_of(rng: random.Random) -> dict[str, Any]:
    prompt = "".join(rng.choices("ab cd", k=rng.randint(1, 150)))
    return {
        "model": MODEL,
        "prompt": prompt,
        "seed": rng.randrange(5),
        "temperature": rng.choice([0.0, 1.0]),
        "max_tokens": rng.randint(1, 40),
        "ignore_eos": True,
    }


def alone(running: Served, body: dict[str, Any]) -> str:
    names = ("seed", "temperature", "max_tokens", "ignore_eos")
    params = SamplingParams(**{name: body[name] for name in names})
    return running.llm.generate(body["prompt"], params)[0].text


async def one(client: httpx2.AsyncClient, rng: random.Random) -> tuple[dict[str, Any], str] | None:
    """A request of some kind; its body and text if it was answered."""
    body, kind = body_of(rng), rng.choice(["whole", "stream", "leave", "wrong", "config"])
    if kind == "wrong":
        wrong = rng.choice([b"{", b'{"model": "x"}', json.dumps(body | {"n": 99}).encode()])
        response = await client.post("/v1/completions", content=wrong)
        assert response.status_code in (400, 404)
        return None
    if kind == "config":
        body["speculative_config"] = {"method": rng.choice(["none", "suffix", "copy"])}
    if kind in ("whole", "config"):
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return body, response.json()["choices"][0]["text"]
    text = ""
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
                if kind == "leave":
                    return None
    return body, text


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("requests", [48, pytest.param(5000, marks=pytest.mark.slow)])
def test_many_requests(requests: int) -> None:
    rng = random.Random(0)
    seeds = [rng.random() for _ in range(requests)]

    async def all_of_them(running: Served) -> list[Any]:
        limit = asyncio.Semaphore(CLIENTS)
        async with httpx2.AsyncClient(base_url=running.url, timeout=250) as client:

            async def limited(seed: float) -> Any:
                async with limit:
                    return await one(client, random.Random(seed))

            return await asyncio.gather(*map(limited, seeds))

    with served(tiny_llm(max_num_seqs=6, kv_cache_memory="1MiB")) as running:
        answered = [each for each in asyncio.run(all_of_them(running)) if each is not None]
    assert len(answered) > requests / 3
    for body, text in answered:
        assert text == alone(running, body)
