"""The sampler: turns the logits at a node into p, over that node's own path (invariant 6).

Each request owns one `Sampler`. `TreeDistributions` computes p for acceptance rules, and drafters
with a model compute q with the same sampler. The order of operations is vLLM's: allowed tokens,
bias, minimum length, grammar, penalties, bad words (vLLM's come earlier, which makes no
difference); then the model's own rules (`rules.py`), temperature, min-p, top-k, top-p. Every
operation works on one [V] row. A distribution therefore has the same bits for any number of
verified nodes (invariant 7).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from tokenleap.core.distribution import (
    Distribution,
    LazyDistribution,
    Limits,
    log_probs_of,
    truncate,
)
from tokenleap.core.grammar import Grammar
from tokenleap.core.noise import LogitsDraw, Noise, drawn_from_logits, draws_from_logits
from tokenleap.core.params import GREEDY_BELOW, SamplingParams
from tokenleap.core.rules import OutputRules, TokenSet, ends_with
from tokenleap.core.tree import TokenTree
from tokenleap.errors import ConfigError, RequestError


class Sampler:
    """Turns the logits of one position into p under a request's sampling parameters.

    `rules` is what the model's generation config rules out. The repetition penalty applies to the
    prompt's tokens, too.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        prompt_ids: Sequence[int],
        eos_token_ids: Sequence[int] = (),
        grammar: Grammar | None = None,
        rules: OutputRules | None = None,
        bad_words: BadWords | None = None,
    ) -> None:
        assert (grammar is None) == (params.form is None)
        assert (bad_words is None) == (not params.bad_words)
        self.params = params
        self.grammar = grammar
        self.rules = rules
        self._masks = tuple(mask for mask in (bad_words, rules) if mask is not None)
        self.vocab_size = vocab_size
        self.stop_ids = () if params.ignore_eos else tuple(eos_token_ids)
        self.stop_ids = (*self.stop_ids, *params.stop_token_ids)
        self._not_before = [*eos_token_ids, *params.stop_token_ids]  # `min_tokens`
        for field in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            check_token_ids(field, getattr(params, field) or (), vocab_size)
        allowed = params.allowed_token_ids
        if allowed is not None and len(allowed) > vocab_size:
            raise ConfigError(
                f"allowed_token_ids: {len(allowed)} ids, and the vocabulary has {vocab_size}: give "
                "each once."
            )
        if allowed is not None and params.min_tokens and set(allowed) <= set(self._not_before):
            raise ConfigError(
                "allowed_token_ids: only tokens that end the output are allowed, and min_tokens "
                f"forbids them before token {params.min_tokens}."
            )
        if grammar is not None and rules is not None and rules.first is not None:
            raise ConfigError(
                f"structured_outputs: every output of this model begins with token {rules.first}, "
                "which is in no such form: give that token in the decoder's prompt."
            )
        self._prompt_tokens = torch.tensor(sorted(set(prompt_ids)), dtype=torch.long)

    @cached_property
    def plain_greedy(self) -> bool:
        """Whether p is one-hot at the argmax of the raw logits, wherever that is kept (`keeps`).

        One argmax call then serves all nodes of a tree.
        """
        return self.params.greedy and not self.params_change_logits

    @property
    def has_masks(self) -> bool:
        """Whether bad words or the model's own rules may forbid the argmax of a position."""
        return bool(self._masks)

    def keeps(self, token: int, output_ids: Sequence[int]) -> bool:
        """Whether bad words and the model's own rules leave a largest logit the largest."""
        return all(mask.keep(token, output_ids) for mask in self._masks)

    @cached_property
    def _repetition_penalty(self) -> float:
        given = "repetition_penalty" in self.params.model_fields_set
        own = self.params.repetition_penalty
        return own if given or self.rules is None else self.rules.repetition_penalty

    @cached_property
    def _penalises(self) -> bool:
        params = self.params
        penalties = (self._repetition_penalty, params.presence_penalty, params.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0)

    @cached_property
    def changes_logits(self) -> bool:
        return self.params_change_logits or self.has_masks

    @cached_property
    def params_change_logits(self) -> bool:
        """Whether anything besides the masks changes the logits."""
        params = self.params
        masks = params.logit_bias or params.allowed_token_ids is not None or params.min_tokens
        shifts = self.rules is not None and self.rules.shifts
        return bool(masks) or self._penalises or shifts or self.grammar is not None

    @cached_property
    def _bias(self) -> Tensor | None:
        """[V] the sum of `logit_bias` and the mask of `allowed_token_ids`; None without both."""
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
        """The logits [V] after masks, bias and penalties, before temperature.

        They are in float32, or in float64 if the input is.
        """
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if not self.changes_logits:
            return logits
        logits = logits.clone()
        if self._bias is not None:
            logits += self._bias.to(logits)
        if len(output_ids) < self.params.min_tokens and self._not_before:
            logits[self._not_before] = -torch.inf
        if self.grammar is not None:
            allowed = self.grammar.allowed(output_ids)
            # None: a drafted token on the path is forbidden. It cannot be accepted, so the
            # distribution below it does not matter.
            if allowed is not None:
                logits.masked_fill_(~allowed.to(logits.device), -torch.inf)
        if self.rules is not None and self.rules.shifts:
            logits = self.rules.shift(logits, output_ids)
        if self._penalises:
            logits = self._penalise(logits, output_ids)
        for mask in self._masks:
            logits = mask.apply(logits, output_ids)
        return logits

    def _penalise(self, logits: Tensor, output_ids: Sequence[int]) -> Tensor:
        params, device = self.params, logits.device
        output = torch.tensor(output_ids, dtype=torch.long, device=device)
        if self._repetition_penalty != 1:
            seen = torch.cat([self._prompt_tokens.to(device), output])
            values = logits[seen]  # of a token that is there twice, twice the same
            factor = self._repetition_penalty
            logits[seen] = torch.where(values > 0, values / factor, values * factor)
        if len(output) and (params.presence_penalty or params.frequency_penalty):
            tokens, counts = torch.unique(output, return_counts=True)
            logits[tokens] -= params.presence_penalty + params.frequency_penalty * counts
        return logits

    def distribution(
        self,
        logits: Tensor,
        output_ids: Sequence[int],
        temperature: float | None = None,
        limits: Limits | None = None,
    ) -> Distribution:
        """p from the target's logits [V], or q from a draft model's."""
        temperature = self.params.temperature if temperature is None else temperature
        shaped = self.shaped(logits, output_ids)
        if temperature < GREEDY_BELOW:
            best = shaped.max(-1)
            if not math.isfinite(best.values):
                raise self._failure(logits)
            return Distribution.one_hot(int(best.indices))
        limits = self.params if limits is None else limits
        try:
            return truncate(shaped / temperature, limits)
        except RequestError:
            highest = shaped.max()
            if not math.isfinite(highest):
                raise self._failure(logits) from None
            # Only the division has overflowed.
            return truncate((shaped - highest) / temperature, limits)

    def _failure(self, logits: Tensor) -> RequestError:
        """Why no token can be drawn, by the logits [V] as the model gave them."""
        try:
            check_finite(logits.max())
        except RequestError as error:
            return error
        return RequestError(
            "logit_bias, penalties and masks leave no token that can be drawn: relax them.",
            by_parameters=True,
        )

    def untempered(self, logits: Tensor, output_ids: Sequence[int]) -> Distribution:
        """The distribution at temperature 1, without truncation (for lossy rules)."""
        return Distribution.of(self.shaped(logits, output_ids).softmax(-1))


def draw_roots(ps: Iterable[TreeDistributions]) -> None:
    """Draw the tokens after the roots of several trees together, which is faster."""
    found: list[tuple[TreeDistributions, SampledNode, LogitsDraw]] = []
    for p in ps:
        with suppress(Exception):  # reading p has the same error, which is of this request alone
            if (root := p.sampled(0)) is not None:
                found.append((p, root, root.draw()))
    tokens = drawn_from_logits([draw for _, _, draw in found])
    for (p, root, _), token in zip(found, tokens, strict=True):
        p.know_root(root, token)


def _argmax(logits: Tensor) -> list[int]:
    """The token of the largest logit in each row of [n, V]; the smallest token id on a tie."""
    if logits.device.type == "cpu" and logits.dtype in (torch.float32, torch.float64):
        return list(map(int, logits.numpy().argmax(-1)))  # several times faster than PyTorch's
    # In bfloat16 `max` is six times faster than `argmax`.
    indices: list[int] = logits.max(-1).indices.tolist()
    return indices


class SampledNode(NamedTuple):
    """A node of a tree that a sampled request verifies.

    It does not know the `TreeDistributions` that know it: a circle would keep the logits of a pass
    in memory until Python looks for garbage.
    """

    sampler: Sampler
    logits: Tensor
    output: Sequence[int]
    noise: Noise

    def p(self) -> Distribution:
        return self.sampler.distribution(self.logits, self.output)

    def draw(self) -> LogitsDraw:
        logits = self.sampler.shaped(self.logits, self.output)
        return LogitsDraw(logits, self.noise, self.sampler.params)

    def drawn(self) -> int | None:
        return drawn_from_logits([self.draw()])[0]


class TreeDistributions:
    """p at every node of one row's tree, computed when an acceptance rule reads it.

    A rule walks down one path, so most distributions of a tree are never read. Each one that is
    read costs a few [V] operations. Plain greedy requests need only the argmax of every node.

    Args:
        logits: [1 + n, V] logits after every node of the tree, root first.
        output_ids: tokens generated so far, including the root if it was generated.
        argmax: [1 + n] the token of the largest logit, which is finite, and the smallest id on a
            tie; None if unknown.
        noise: the request's. With it, `Distribution.drawn` may be known without p.
        position: index in the sequence of the token that follows the root.
    """

    def __init__(
        self,
        logits: Tensor,
        tree: TokenTree,
        sampler: Sampler,
        output_ids: Sequence[int],
        argmax: Sequence[int] | None = None,
        noise: Noise | None = None,
        position: int = 0,
    ) -> None:
        assert len(logits) == len(tree)
        self._logits = logits
        self._tree = tree
        self._sampler = sampler
        self._output_ids = output_ids
        self._distributions: dict[int, Distribution] = {}
        draws = not sampler.params.greedy and draws_from_logits(logits)
        self._noise, self._position = noise if draws else None, position
        self._argmax: Sequence[int] | None = None  # plain greedy: p is one-hot at these tokens
        self._unmasked: Sequence[int] | None = None  # likewise, where `Sampler.keeps` them
        self._finite = argmax is not None
        if sampler.plain_greedy:
            best = _argmax(logits) if argmax is None else argmax
            self._argmax, self._unmasked = (None, best) if sampler.has_masks else (best, None)

    @property
    def greedy(self) -> bool:
        return self._sampler.params.greedy

    def __getitem__(self, node: int) -> Distribution:
        if self._argmax is not None:
            return self._one_hot(node, self._argmax[node])
        if node not in self._distributions:
            self._distributions[node] = self._made(node)
        return self._distributions[node]

    def _made(self, node: int) -> Distribution:
        if (sampled := self.sampled(node)) is None:
            return self._computed(node)
        return LazyDistribution(sampled.p, draw=sampled.drawn)

    def sampled(self, node: int) -> SampledNode | None:
        """The node, if its successor can be drawn without p."""
        if self._noise is None:
            return None
        at = self._noise.at(self._position + self._tree.depths[node])
        return SampledNode(self._sampler, self._logits[node], self._output(node), at)

    def know_root(self, root: SampledNode, token: int | None) -> None:
        """Take this token as the one drawn after the root; None if that is not certain."""
        self._distributions[0] = LazyDistribution(root.p, draw=lambda: token)

    def _one_hot(self, node: int, token: int) -> Distribution:
        if not self._finite:
            check_finite(self._logits[node, token])
        return Distribution.one_hot(token)

    def _computed(self, node: int) -> Distribution:
        output = self._output(node)
        if self._unmasked is not None and self._sampler.keeps(self._unmasked[node], output):
            return self._one_hot(node, self._unmasked[node])
        return self._sampler.distribution(self._logits[node], output)

    def untempered(self, node: int) -> Distribution:
        return self._sampler.untempered(self._logits[node], self._output(node))

    def _output(self, node: int) -> list[int]:
        path = self._tree.path_tokens(node)
        # Look-ahead tokens (see `drafters/padding.py`) are no text: no rule of p knows them.
        size = self._sampler.vocab_size
        return [*self._output_ids, *(token for token in path if token < size)]

    def reached(self, node: int) -> bool:
        """Whether p after this node has been computed, so that reading it is free."""
        known = self._distributions.get(node)
        return self._argmax is not None or (known is not None and known.is_made)

    def prob(self, node: int, token: int) -> float:
        if self._argmax is not None:
            return float(self._argmax[node] == token)
        return self[node].prob(token)

    def log_probs(self, node: int) -> Tensor:
        """[V] log-probabilities after `node` under the model itself (`SamplingParams.logprobs`)."""
        return log_probs_of(self._logits[node])

    def likeliest(self, count: int) -> tuple[Tensor, Tensor]:
        """The most likely tokens [1 + n, k] after every node and their probabilities, for traces.

        All nodes are computed together, which is faster: the last bits may depend on the tree.
        """
        best = log_probs_of(self._logits).topk(min(count, self._logits.shape[-1]), dim=-1)
        return best.indices, best.values.exp()


# `BadWords`: words that an output never contains (vLLM's `bad_words`).
#
# Of a multi-token word, only its last token is banned, right after its first ones. So
# what is forbidden at a node of a token tree depends on the node's own path. The words are a part
# of p, like the rules in `rules.py`: the sampler applies them at every node (invariant 6).


Word = tuple[int, ...]


class BadWords:
    """Sequences of tokens that no output completes.

    Only the output counts, as in vLLM; Transformers' `bad_words_ids` count the prompt, too.
    """

    def __init__(self, words: Iterable[Word]) -> None:
        tokens: list[int] = []
        # By the token before the last, so that a position looks at few of many words.
        self._phrases: dict[int, list[Word]] = {}
        for word in words:
            if len(word) == 1:
                tokens += word
            else:
                self._phrases.setdefault(word[-2], []).append(word)
        self._tokens = TokenSet(tokens)

    def keep(self, token: int, output_ids: Sequence[int]) -> bool:
        return token not in self._tokens and token not in self._endings(output_ids)

    def apply(self, logits: Tensor, output_ids: Sequence[int]) -> Tensor:
        """Mask what would complete a word in logits [V], which are changed."""
        self._tokens.forbid(logits)
        if endings := self._endings(output_ids):
            logits[endings] = -torch.inf
        return logits

    def _endings(self, output_ids: Sequence[int]) -> list[int]:
        """Last tokens of the phrases whose other tokens the output ends with."""
        found = self._phrases.get(output_ids[-1], ()) if output_ids else ()
        return [word[-1] for word in found if ends_with(output_ids, word[:-1])]


def check_finite(logit: Tensor) -> None:
    """Check the largest logit [] of a position."""
    if not math.isfinite(logit):
        raise RequestError(
            f"the largest logit is {float(logit)}, so no token can be drawn: if you set "
            "logit_bias, penalties or masks, relax them; if you set none, the model overflows in "
            "this dtype: use float32 or bfloat16."
        )


def check_token_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    if (token := max(token_ids, default=0)) >= vocab_size:
        raise ConfigError(
            f"{field}: token id {token} is outside the vocabulary (0 to {vocab_size - 1})."
        )
