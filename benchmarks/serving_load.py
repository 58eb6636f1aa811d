"""An open-loop load: requests are sent when they are due, however many still run.

All contestants are asked by this one client, over HTTP, with OpenAI's streaming chat API. Times are
counted from when a request was due, so a client that is late is no advantage to the server.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx2

from benchmarks import BenchmarkError
from tokenleap.bench.prompts_file import Prompt

__all__ = ["Answer", "Burst", "arrivals", "send"]


@dataclass(frozen=True)
class Answer:
    """The answer to one request.

    Args:
        prompt: the prompt's id.
        text: the answer.
        first: seconds from when the request was due to its first text.
        last: the same to its last text.
        tokens: of the text; counted after the load, with one tokenizer for all contestants.
        error: why there is no answer.
    """

    prompt: str
    text: str
    first: float
    last: float
    tokens: int = 0
    error: str | None = None

    @property
    def per_token(self) -> float:
        """Seconds per token after the first one."""
        return (self.last - self.first) / max(self.tokens - 1, 1)


@dataclass(frozen=True)
class Burst:
    """The answers of one contestant to the requests of one round at one rate.

    Args:
        answers: in the order of the requests.
        seconds: from the first arrival to the end of the last answer.
    """

    answers: Sequence[Answer]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all answers over the time of the burst."""
        return sum(answer.tokens for answer in self.answers) / self.seconds

    def goodput(self, first: float, per_token: float) -> float:
        """Requests per second that kept both limits, in seconds."""
        kept = [
            answer
            for answer in self.answers
            if answer.error is None and answer.first <= first and answer.per_token <= per_token
        ]
        return len(kept) / self.seconds


def arrivals(count: int, rate: float, seed: str) -> list[float]:
    """When requests are due: a Poisson process of `rate` per second that begins at 0."""
    gaps, due = random.Random(seed), [0.0]
    while len(due) < count:
        due.append(due[-1] + gaps.expovariate(rate))
    return due


async def send(
    url: str, prompts: Sequence[Prompt], due: Sequence[float], max_tokens: int, temperature: float
) -> Burst:
    """Send a chat request for each prompt when it is due, and read the streams.

    Args:
        url: the server's, without `/v1`.
        prompts: one per request.
        due: seconds from now.
        max_tokens: of each answer.
        temperature: of each answer.

    Raises:
        BenchmarkError: the server cannot count tokens.
    """
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx2.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
        began = time.perf_counter()

        async def one(prompt: Prompt, at: float) -> Answer:
            await asyncio.sleep(began + at - time.perf_counter())
            body = {
                "messages": [{"role": "user", "content": prompt.text}],
                "max_tokens": max_tokens,
                "temperature": temperature,
                "seed": prompt.seed,
                "stream": True,
            }
            try:
                return await _read(client, prompt, body, began + at)
            except (httpx2.HTTPError, ValueError, LookupError) as error:
                now = time.perf_counter() - began - at
                return Answer(prompt.id, "", now, now, error=str(error) or repr(error))

        pairs = zip(prompts, due, strict=True)
        answers = await asyncio.gather(*(one(*pair) for pair in pairs))
        return Burst(answers, time.perf_counter() - began)


async def _read(
    client: httpx2.AsyncClient, prompt: Prompt, body: dict[str, object], due: float
) -> Answer:
    text, first, last = "", 0.0, 0.0
    async with client.stream("POST", "/v1/chat/completions", json={"model": "m", **body}) as got:
        if got.status_code != 200:
            await got.aread()
            raise BenchmarkError(f"status {got.status_code}: {got.text[:200]}")
        async for line in got.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise BenchmarkError(str(chunk["error"]))
            for choice in chunk["choices"]:
                piece = choice["delta"].get("content") or ""
                if piece:
                    last = time.perf_counter() - due
                    first = first or last
                    text += piece
    if not text:
        raise BenchmarkError("no text")
    return Answer(prompt.id, text, first, last)
