"""What a request needs before its first step: its source, its prompt's KV and log-probabilities.

The encoder of an encoder-decoder reads a request's source before the prompt, once and alone. The
prompt is computed in chunks, from the longest prefix on that the prefix cache has. The cache has no
logits, so the prompt of a request that wants its log-probabilities is computed in full. `Scheduler`
says which request is next, and how many tokens are computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tokenleap.core import clock
from tokenleap.core.checks import check_finite
from tokenleap.core.logprobs import TokenLogprobs, log_probs_of
from tokenleap.engine.prefix_cache import Beginning, PrefixCache
from tokenleap.request import Request
from tokenleap.runtime.source_network import RowState
from tokenleap.runtime.target import Target
from tokenleap.speculation import Speculation

__all__ = ["Prefill"]


class Prefill:
    """Computes the sources and prompts of running requests.

    Args:
        target: the model being accelerated.
        speculation: how the requests speculate; drafters see the prompts' hidden states.
        prefix_cache: KV of earlier prompts; None computes every prompt in full.
        running: the requests that have rows; their sources are shared.
    """

    def __init__(
        self,
        target: Target,
        speculation: Speculation,
        prefix_cache: PrefixCache | None,
        running: Sequence[Request],
    ) -> None:
        self._target = target
        self._reads_source = target.reads_source
        self._speculation = speculation
        self._prefixes = prefix_cache
        self._running = running
        self._hidden: dict[int, list[Mapping[int, Tensor]]] = {}  # request key -> prompt chunks

    def is_ready(self, request: Request) -> bool:
        """Whether all that the next step reads is computed."""
        return not self._num_missing(request) and self.has_source(request)

    def _num_missing(self, request: Request) -> int:
        """Tokens whose KV must still be computed. The last token needs none yet (invariant 1)."""
        return len(request.token_ids) - 1 - self._target.cached(request.key)

    def forget(self, request: Request) -> None:
        """Forget the chunks of a request that has lost its row."""
        self._hidden.pop(request.key, None)

    # Sources

    def has_source(self, request: Request) -> bool:
        """Whether the request's row has what its decoder reads."""
        return not self._reads_source or self._target.has_source(request.key)

    def missing_state_bytes(self, requests: Sequence[Request]) -> int:
        """Bytes of the sources that no row has yet. Requests with the same one share them."""
        if not self._reads_source:
            return 0
        read = {_beginning(r) for r in self._running if self.has_source(r)}
        missing = {_beginning(r) for r in requests} - read
        return sum(self._target.state_bytes(source) for _, source in missing)

    def _read_source(self, request: Request) -> int:
        """Give the request's row its source; returns the positions that the encoder computed."""
        source, key = request.source, request.key
        assert source is not None, "requests of an encoder-decoder have one"
        known = self._known_state(_beginning(request))
        if known is not None:
            self._target.share_state(key, known)
            if not request.metrics.preemptions:
                request.metrics.cached_source_tokens = len(source)
            return 0
        began = clock.now()
        self._target.encode(key, source)
        request.metrics.encode_seconds += clock.now() - began
        if self._prefixes is not None:
            self._prefixes.keep_state(_beginning(request), self._target.row_state(key))
        return len(source)

    def _known_state(self, beginning: Beginning) -> RowState | None:
        """What the encoder made of a source that a running request has read, or an earlier one."""
        for other in self._running:
            if _beginning(other) == beginning and self.has_source(other):
                return self._target.row_state(other.key)
        return None if self._prefixes is None else self._prefixes.state_of(beginning)

    # Prompts

    def compute(self, request: Request, limit: int) -> int:
        """Read a request's source, and compute at most `limit` tokens; returns how many, or 1."""
        began = clock.now()
        spent = 0 if self.has_source(request) else self._read_source(request)
        if spent < limit and self._num_missing(request):
            spent += self._prefill_tokens(request, limit - spent)
        request.metrics.prefill_seconds += clock.now() - began
        return max(1, spent)

    def _prefill_tokens(self, request: Request, limit: int) -> int:
        """Compute at most `limit` tokens of a request; returns how many."""
        layers = self._speculation.hidden_layers([request])
        if not self._target.cached(request.key):
            self._restore_prefix(request, layers)
        start = self._target.cached(request.key)
        tokens = request.token_ids[start:-1][:limit]
        reader = _ScoreReader(request, start) if request.num_unscored else None
        hidden = self._target.prefill(request.key, tokens, layers, None, reader)
        if reader is not None:
            reader.keep()
        self._show_hidden(request, start, hidden)
        if not self._num_missing(request):
            self._store_prefix(request)
        self._speculation.prefilled(request)
        return len(tokens)

    def _restore_prefix(self, request: Request, layers: tuple[int, ...]) -> None:
        """Take the KV of the prompt's longest cached prefix; the last token needs none yet."""
        if self._prefixes is None or not request.reads_prefixes:
            return
        wanted = request.prompt_ids[: len(request.token_ids) - 1]
        num_tokens, hidden = self._prefixes.restore(
            request.key, wanted, layers, _beginning(request)
        )
        self._show_hidden(request, 0, hidden)
        if not request.metrics.preemptions:
            request.metrics.cached_prompt_tokens = num_tokens

    def _show_hidden(self, request: Request, start: int, hidden: Mapping[int, Tensor]) -> None:
        """Show a prompt's hidden states to the drafter, and keep them for the prefix cache."""
        if not hidden:
            return
        self._speculation.observe_prefill(request, start, hidden)
        if self._prefixes is not None:
            self._hidden.setdefault(request.key, []).append(hidden)

    def _store_prefix(self, request: Request) -> None:
        """Cache a prompt's KV, with its hidden states if the drafter asked for them."""
        chunks = self._hidden.pop(request.key, [])
        if self._prefixes is None:
            return
        layers = chunks[0] if chunks else ()
        hidden = {layer: torch.cat([chunk[layer] for chunk in chunks]) for layer in layers}
        stop = min(self._target.cached(request.key), len(request.prompt_ids))
        if any(len(states) < stop for states in hidden.values()):
            hidden = {}  # the drafter failed, and the later chunks have none
        self._prefixes.store(request.key, request.prompt_ids[:stop], hidden, _beginning(request))


def _beginning(request: Request) -> Beginning:
    return request.scope.salt, request.source


class _ScoreReader:
    """Takes the log-probabilities of a prompt's tokens from the logits before them.

    Only a few numbers of each row of logits are kept. The request has them once the whole chunk is
    computed, since a chunk that fails is computed again.

    Args:
        request: the request.
        start: position of the chunk's first token.
    """

    def __init__(self, request: Request, start: int) -> None:
        assert request.prompt_scores is not None
        assert request.params.prompt_logprobs is not None
        self._known = request.prompt_scores
        self._tokens = request.prompt_ids[1:]  # position i predicts the token at i
        self._num_top = request.params.prompt_logprobs
        self._position = start
        self._found: list[TokenLogprobs] = []

    def __call__(self, logits: Tensor) -> None:
        """Read the logits [n, V] of the next positions.

        Raises:
            RequestError: the largest logit of a position is not finite.
        """
        for row in logits:
            if len(self._known) <= self._position < len(self._tokens):
                log_probs = log_probs_of(row)
                check_finite(log_probs.max())
                token = self._tokens[self._position]
                self._found.append(TokenLogprobs.of(log_probs, token, self._num_top))
            self._position += 1

    def keep(self) -> None:
        """Give the request what was found."""
        self._known += self._found
