"""The sampler's distribution (invariant 6): logits become p per node, over that node's own path.

A `Sampler` belongs to one request. The order of its operations is vLLM's: allowed tokens, bias,
the minimum length, the grammar, penalties; then temperature, min-p, top-k, top-p. Every operation
works on one [V] row, so that a distribution has the same bits however many nodes are verified
beside it (invariant 7).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from foretoken.core.distribution import Distribution
from foretoken.core.grammar import Grammar
from foretoken.core.params import GREEDY_BELOW, SamplingParams
from foretoken.core.tree import TokenTree
from foretoken.errors import ConfigError, RequestError

__all__ = ["Sampler", "TreeDistributions", "truncate"]

_NUCLEUS_CANDIDATES = 1024
"""Tokens among which a nucleus is looked for before the whole vocabulary is sorted."""


class Sampler:
    """Turns one position's logits into p under a request's parameters.

    Args:
        params: the sampling parameters.
        vocab_size: V, the width of the logits.
        prompt_ids: tokens that the repetition penalty counts besides the output.
        eos_token_ids: end-of-sequence tokens, forbidden before `min_tokens`.
        grammar: what `params.structured_outputs` allows after any output; None without them.

    Raises:
        ConfigError: a parameter names a token outside the vocabulary, or nothing is left to draw.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        prompt_ids: Sequence[int],
        eos_token_ids: Sequence[int] = (),
        grammar: Grammar | None = None,
    ) -> None:
        assert (grammar is None) == (params.form is None)
        self.params = params
        self.grammar = grammar
        self.vocab_size = vocab_size
        self.stop_ids = () if params.ignore_eos else tuple(eos_token_ids)
        self.stop_ids = (*self.stop_ids, *params.stop_token_ids)
        for field in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            check_token_ids(field, getattr(params, field) or (), vocab_size)
        allowed = params.allowed_token_ids
        if allowed is not None and params.min_tokens and set(allowed) <= set(self.stop_ids):
            raise ConfigError(
                "allowed_token_ids: only tokens that end the output are allowed, and min_tokens "
                f"forbids them before token {params.min_tokens}."
            )
        self._prompt_tokens = torch.tensor(sorted(set(prompt_ids)), dtype=torch.long)

    @cached_property
    def plain_greedy(self) -> bool:
        """Whether p is one-hot at the argmax of the raw logits, so one call serves all nodes."""
        return self.params.greedy and not self._reshapes

    @cached_property
    def _penalises(self) -> bool:
        params = self.params
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0)

    @cached_property
    def _reshapes(self) -> bool:
        params = self.params
        masks = params.logit_bias or params.allowed_token_ids is not None or params.min_tokens
        return bool(masks) or self._penalises or self.grammar is not None

    @cached_property
    def _bias(self) -> Tensor | None:
        """[V] what allowed_token_ids and logit_bias add, or None."""
        params = self.params
        if params.allowed_token_ids is None and not params.logit_bias:
            return None
        bias = torch.zeros(self.vocab_size)
        if params.allowed_token_ids is not None:
            bias.fill_(-torch.inf)
            bias[list(params.allowed_token_ids)] = 0
        for token, value in (params.logit_bias or {}).items():
            bias[token] += value
        return bias

    def shaped(self, logits: Tensor, output_ids: Sequence[int]) -> Tensor:
        """Logits after masks, bias and penalties, before temperature.

        Args:
            logits: [V] of one position.
            output_ids: every token generated before that position, drafted ones included.

        Returns:
            [V], float32 (float64 if the logits are).
        """
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if not self._reshapes:
            return logits
        logits = logits.clone()
        if self._bias is not None:
            logits += self._bias.to(logits)
        if len(output_ids) < self.params.min_tokens and self.stop_ids:
            logits[list(self.stop_ids)] = -torch.inf
        if self.grammar is not None:
            allowed = self.grammar.allowed(output_ids)
            # Below a drafted token that the grammar forbids nothing can be accepted: any
            # distribution will do there.
            if allowed is not None:
                logits.masked_fill_(~allowed.to(logits.device), -torch.inf)
        return self._penalise(logits, output_ids) if self._penalises else logits

    def _penalise(self, logits: Tensor, output_ids: Sequence[int]) -> Tensor:
        params, device = self.params, logits.device
        output = torch.tensor(output_ids, dtype=torch.long, device=device)
        if params.repetition_penalty != 1:
            seen = torch.unique(torch.cat([self._prompt_tokens.to(device), output]))
            values = logits[seen]
            factor = params.repetition_penalty
            logits[seen] = torch.where(values > 0, values / factor, values * factor)
        if len(output_ids):
            tokens, counts = torch.unique(output, return_counts=True)
            logits[tokens] -= params.presence_penalty + params.frequency_penalty * counts
        return logits

    def distribution(
        self, logits: Tensor, output_ids: Sequence[int], temperature: float | None = None
    ) -> Distribution:
        """P at one position; arguments as in `shaped`.

        `temperature` overrides the request's (a drafter may draw hotter or colder).
        """
        temperature = self.params.temperature if temperature is None else temperature
        logits = self.shaped(logits, output_ids)
        if temperature < GREEDY_BELOW:
            best = logits.max(-1)
            check_finite(best.values)
            return Distribution.one_hot(int(best.indices))
        return truncate(logits / temperature, self.params)

    def untempered(self, logits: Tensor, output_ids: Sequence[int]) -> Distribution:
        """The distribution at temperature 1, not truncated: lossy rules compare it when greedy."""
        return Distribution.of(self.shaped(logits, output_ids).softmax(-1))


def truncate(logits: Tensor, params: SamplingParams) -> Distribution:
    """The distribution left by min-p, top-k and top-p, in this order, as in vLLM.

    Args:
        logits: [V], already divided by the temperature.
        params: only min_p, top_k and top_p are read.
    """
    if params.min_p > 0:
        probs = logits.softmax(-1)
        logits = logits.masked_fill(probs < params.min_p * probs.max(), -torch.inf)
    if 1 <= params.top_k < len(logits):
        # Tokens as likely as the k-th stay, as in Transformers.
        logits = logits.masked_fill(logits < logits.topk(params.top_k).values[-1], -torch.inf)
    distribution = Distribution.of(logits.softmax(-1))
    return distribution if params.top_p == 1 else nucleus(distribution, params.top_p)


def nucleus(distribution: Distribution, top_p: float) -> Distribution:
    """The distribution on the smallest set of its most probable tokens whose mass reaches `top_p`.

    Sorting a whole vocabulary takes milliseconds and the set is small as a rule, so the search
    begins among the likeliest tokens.
    """
    size = len(distribution.probs)
    for count in (_NUCLEUS_CANDIDATES, size):
        probs, order = distribution.probs.topk(min(count, size))  # [k] descending
        before = probs.cumsum(-1) - probs  # mass of the tokens ahead of each
        if count >= size or float(before[-1]) >= top_p:
            break
    keep = before < top_p
    keep[0] = True  # however small top_p is: in float32 it may be 0
    kept = order[keep].sort().values
    probs = distribution.probs[kept]
    return Distribution(probs / probs.sum(), distribution.tokens[kept])


def check_finite(logit: Tensor) -> None:
    """Refuse a largest logit that is not a number, or infinite.

    Raises:
        RequestError: the model overflowed, or masks left no token.
    """
    if not math.isfinite(logit):
        raise RequestError(
            f"the largest logit is {float(logit)}: the model, or the sampling "
            "parameters (logit_bias, penalties, masks), leave no token that can be drawn."
        )


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise ConfigError if a token id lies outside the vocabulary."""
    for token in token_ids:
        if token >= vocab_size:
            raise ConfigError(
                f"{field}: token id {token} is outside the vocabulary (0 to {vocab_size - 1})."
            )


def _argmax(logits: Tensor) -> list[int]:
    """The token of the largest logit of each row [n, V], the first of equals."""
    if logits.device.type == "cpu" and logits.dtype in (torch.float32, torch.float64):
        return list(map(int, logits.numpy().argmax(-1)))  # several times faster than PyTorch's
    # Six times faster than argmax in bfloat16.
    indices: list[int] = logits.max(-1).indices.tolist()
    return indices


class TreeDistributions:
    """p at every node of one row's tree, computed only where an acceptance rule looks.

    A rule walks down one path, so most distributions of a tree are never needed; each that is costs
    a few [V] operations. Plain greedy rows are the exception: all that matters is the largest
    logit.

    Args:
        logits: [n+1, V] after every node of the tree, root first.
        tree: the verified tree.
        sampler: the request's sampler.
        output_ids: tokens generated so far, the root included if it was generated.
        argmax: of each node the token of the largest logit, the first of equals, if known.
    """

    def __init__(
        self,
        logits: Tensor,
        tree: TokenTree,
        sampler: Sampler,
        output_ids: Sequence[int],
        argmax: Sequence[int] | None = None,
    ) -> None:
        assert len(logits) == len(tree)
        self._logits = logits
        self._tree = tree
        self._sampler = sampler
        self._output_ids = output_ids
        self._distributions: dict[int, Distribution] = {}
        self._certain: Sequence[int] | None = None  # the only possible token after each node
        if sampler.plain_greedy:
            self._certain = _argmax(logits) if argmax is None else argmax

    @property
    def greedy(self) -> bool:
        """Whether the temperature is 0."""
        return self._sampler.params.greedy

    def __getitem__(self, node: int) -> Distribution:
        if self._certain is not None:
            token = self._certain[node]
            check_finite(self._logits[node, token])
            return Distribution.one_hot(token)
        if node not in self._distributions:
            self._distributions[node] = self._sampler.distribution(
                self._logits[node], self._output(node)
            )
        return self._distributions[node]

    def untempered(self, node: int) -> Distribution:
        """The distribution of a node at temperature 1, without truncation (for lossy rules)."""
        return self._sampler.untempered(self._logits[node], self._output(node))

    def _output(self, node: int) -> list[int]:
        return [*self._output_ids, *self._tree.path_tokens(node)]

    def reached(self, node: int) -> bool:
        """Whether the distribution of this node is known."""
        return self._certain is not None or node in self._distributions

    def prob(self, node: int, token: int) -> float:
        """Probability of a token after a node."""
        if self._certain is not None:
            return float(self._certain[node] == token)
        return self[node].prob(token)

    def log_probs(self, node: int) -> Tensor:
        """[V] log-probabilities under the model itself, for `SamplingParams.logprobs`."""
        logits = self._logits[node]
        return (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
