"""`ServerState`: what all endpoints of an app share; and who may begin a request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, cached_property
from hashlib import sha256
from typing import Any, Protocol

from starlette.requests import Request
from transformers import PreTrainedTokenizerBase

from tokenleap.async_llm import AsyncLLM
from tokenleap.core.sequence import Scope
from tokenleap.engine.text_limit import TextLimit
from tokenleap.serve.errors import APIError, invalid, unknown_response
from tokenleap.serve.metrics import ServerMetrics
from tokenleap.serve.settings import Settings

__all__ = ["MAX_CONTEXTS", "Pieces", "ServerState", "shut_down", "state_of"]

MAX_STRATEGIES = 8
"""Most strategies of requests that are kept. Clients choose them, and each has its own memory."""


MAX_CONTEXTS = 4
"""Contexts that a text may fill if it is cut to its end, or only counted."""


class OpenRun(Protocol):
    """Outputs that were counted by `ServerState.enter`."""

    response_id: str | None

    @property
    def ended(self) -> bool:
        """Whether the engine has ended all of them."""
        ...

    def leave(self) -> None:
        """Count them off."""
        ...

    def stop(self) -> None:
        """End all of them where they are; the client gets what there is."""
        ...

    def cut_off(self, error: APIError) -> None:
        """End all of them; the client gets this error."""
        ...


class ServerState:
    """What all endpoints share.

    Args:
        llm: the engine.
        settings: limits and names.
        engine: the engine's name, a label of all metrics.

    Attributes:
        metrics: what Prometheus reads.
        created: when the server began, in seconds since 1970.
        open_sequences: outputs that were begun and have not ended.
        stopping: whether no more requests are taken.
        runs: what holds places for these outputs.

    Raises:
        ConfigError: the drafter learns from all requests, which these settings keep apart.
    """

    def __init__(self, llm: AsyncLLM, settings: Settings, engine: str = "0") -> None:
        settings.check_learning(llm.llm.speculative_config)
        self.llm, self.settings = llm, settings
        self.created = int(time.time())
        self.open_sequences = 0
        self.stopping = False
        self.runs: set[OpenRun] = set()
        self.metrics = ServerMetrics(llm.llm.engine, settings.model, engine)
        llm.llm.engine.strategies.most_kept = MAX_STRATEGIES
        llm.worker.observe = self.metrics.observe_step

    @property
    def alive(self) -> bool:
        """Whether the engine runs."""
        return self.llm.worker.alive

    @property
    def capacity(self) -> int:
        """Most outputs that run and wait."""
        return self.llm.llm.engine.options.max_num_seqs + self.settings.max_waiting

    @cached_property
    def text_limit(self) -> TextLimit:
        """The longest prompt that can fit; made off the loop, for it reads the vocabulary."""
        most = self.llm.llm.max_model_len
        if (source := self.llm.llm.engine.target.source_network) is not None:
            most = source.source_limit or MAX_CONTEXTS * most
        return TextLimit.of(self.llm.llm.tokenizer, most)

    def limit_of(self, body: Any) -> TextLimit:
        """The longest prompt of a request, which may be longer if it is cut."""
        cut = body.truncate_prompt_tokens is not None
        return replace(self.text_limit, times=MAX_CONTEXTS) if cut else self.text_limit

    @cached_property
    def pieces(self) -> Pieces:
        """The texts of single tokens."""
        return Pieces(self.llm.llm.tokenizer)

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served here.

        Raises:
            APIError: 404.
        """
        known = self.settings.served_model_names
        if name is not None and name not in known:
            message = f"the model '{name[:200]}' does not exist here; there is '{known[0]}'."
            raise APIError(404, message, param="model", code="model_not_found")

    def scope_of(self, request: Request, cache_salt: str | None) -> Scope:
        """What a request shares with others: those with its API key and its salt."""
        caller = getattr(request.state, "caller", "")
        digest = sha256(f"{caller} {cache_salt or ''}".encode()).hexdigest()
        private = cache_salt is None and not self.settings.share_drafts
        return Scope(digest, private)

    @staticmethod
    def client_of(request: Request) -> tuple[str | None, str | None]:
        """The client that threads take turns for: an API key at an address, as far as known."""
        address = None if request.client is None else request.client.host
        return getattr(request.state, "caller", None), address

    def check_open(self) -> None:
        """Refuse a request when the engine is closed.

        Raises:
            APIError: 503.
        """
        if not self.alive:
            raise shut_down()

    def enter(self, sequences: int) -> None:
        """Count outputs that are to begin; the caller counts them off with `leave`.

        Raises:
            APIError: there are too many (429), also if they were alone (400), or the server stops
                (503).
        """
        if self.stopping:
            raise shut_down()
        self.check_open()
        if sequences > self.capacity:
            raise invalid("n", f"at most {self.capacity} outputs fit into one request here.")
        if self.open_sequences + sequences > self.capacity:
            for run in self.runs:
                if run.ended:  # its client reads slowly, or not at all
                    run.leave()
        if self.open_sequences + sequences > self.capacity:
            self.metrics.refused()
            raise APIError(
                429,
                f"{self.open_sequences} outputs run or wait, and there is room for "
                f"{self.capacity}: try again later.",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        self.open_sequences += sequences

    def cut_off(self) -> None:
        """Tell the clients of all requests that the server shuts down before their end."""
        for run in list(self.runs):
            run.cut_off(shut_down())

    def stop(self, response_id: str) -> None:
        """End the outputs of a response that is being generated.

        Raises:
            APIError: 404.
        """
        run = next((run for run in self.runs if run.response_id == response_id), None)
        if run is None:
            raise unknown_response(response_id)
        run.stop()

    def leave(self, sequences: int) -> None:
        """Count outputs off."""
        self.open_sequences -= sequences


def shut_down() -> APIError:
    """The answer of a server that takes no more requests."""
    return APIError(503, "the server is shutting down.", headers={"Retry-After": "5"})


class Pieces:
    """The text that each token adds inside a text.

    Some tokenizers, such as Llama's, leave out the space at the beginning of a text. Here tokens
    have it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        def decoded(tokens: list[int]) -> str:
            assert tokenizer is not None
            return str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))

        @cache
        def piece(token: int) -> str:
            if tokenizer is None:
                return ""
            alone, twice = decoded([token]), decoded([token, token])
            return twice[len(alone) :] if twice.startswith(alone) else alone

        self.of = piece

    def all_of(self, tokens: Sequence[int]) -> list[str]:
        """The text of each of these tokens."""
        return [self.of(token) for token in tokens]


def state_of(request: Request) -> ServerState:
    """The state of the app that this request came to."""
    state = request.app.state.server
    assert isinstance(state, ServerState)
    return state
