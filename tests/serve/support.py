"""A tiny model on a real server, in a thread of this process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
from prometheus_client.parser import text_string_to_metric_families
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tests.cli.conftest import ascii_tokenizer
from tests.engine.serving import assert_empty
from tests.tiny import tiny_model
from tokenleap import LLM, AsyncLLM
from tokenleap.serve.app import create_app
from tokenleap.serve.models import Models
from tokenleap.serve.run import TokenleapServer
from tokenleap.serve.running import ServerState
from tokenleap.serve.settings import Settings, bound_socket

MODEL = "tiny"
CONTEXT = 1024
LABELS = {"model_name": "tiny", "engine": "0"}


def tiny_parts() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model that writes printable ASCII, and its tokenizer with a chat template."""
    tokenizer = ascii_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer.get_vocab()), max_position_embeddings=CONTEXT)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model, tokenizer


def tiny_llm(**fields: Any) -> LLM:
    """The tiny model; it drafts."""
    model, tokenizer = tiny_parts()
    config = {"method": "ngram", "prompt_lookup_min": 1, "controller": "fixed"}
    return LLM(model, tokenizer=tokenizer, **{"speculative_config": config, **fields})


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that has to come within a minute."""
    ends = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.005)


class QuickServer(TokenleapServer):
    """Looks often whether it has to end: uvicorn's own does so ten times a second."""

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            await asyncio.sleep(0.005)


class Served:
    """A running server, as tests see it."""

    def __init__(self, llm: LLM, port: int, server: TokenleapServer, state: ServerState) -> None:
        self.llm, self.port, self.server, self.state = llm, port, server, state
        self.stopped = threading.Event()
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx2.Client(base_url=self.url, timeout=120)

    def post(self, path: str, **body: Any) -> httpx2.Response:
        return self.http.post(path, json={"model": MODEL, **body})

    def complete(self, prompt: Any = "hello", **body: Any) -> Any:
        """The response of /v1/completions, which must be 200."""
        fields = {"temperature": 0, "max_tokens": 8, **body}
        response = self.post("/v1/completions", prompt=prompt, **fields)
        assert response.status_code == 200, response.text
        return response.json()

    def refused(self, path: str, status: int = 400, **body: Any) -> Any:
        """The error object of a request that is refused."""
        response = self.post(path, **body)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


@contextmanager
def serving(llm: AsyncLLM | Models, settings: Settings) -> Iterator[Served]:
    """A server on a free port."""
    app = create_app(llm, settings)
    started = threading.Event()
    server = QuickServer(app, app.state.server, settings, started.set)
    with bound_socket("127.0.0.1", 0) as at:
        own: Any = llm.llm if isinstance(llm, AsyncLLM) else None
        found = Served(own, at.getsockname()[1], server, app.state.server)

        def run() -> None:
            asyncio.run(server.serve([at]))
            found.stopped.set()

        thread = threading.Thread(target=run)
        thread.start()
        assert started.wait(60)
        try:
            yield found
        finally:
            found.http.close()
            server.should_exit = True
            thread.join(60)
            llm.close()
    assert not thread.is_alive()


@contextmanager
def served(llm: LLM | None = None, **settings: Any) -> Iterator[Served]:
    """The same with one model; nothing may be left in the engine when it has ended."""
    llm = llm or tiny_llm()
    chosen = Settings(**{"served_model_names": (MODEL,), "log_format": "json", **settings})
    with serving(AsyncLLM(llm), chosen) as found:
        yield found
    assert found.state.open_sequences == 0
    assert_empty(llm)


def samples(running: Served) -> dict[str, float]:
    """All values without further labels; positions are part of the name."""
    response = running.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            assert LABELS.items() <= sample.labels.items()
            more = [value for key, value in sample.labels.items() if key not in LABELS]
            found["/".join([sample.name, *more])] = sample.value
    return found
