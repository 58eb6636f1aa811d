"""A probability distribution over the vocabulary, stored on its support.

Both p (target) and q (drafter) are `Distribution`s. Greedy decoding has one token in its support,
and top-k sampling has k. Only unrestricted sampling stores the whole vocabulary. Acceptance rules,
drafters and noise work on distributions and never see logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias, overload

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from tokenleap.core.params import SamplingParams
from tokenleap.errors import RequestError


@dataclass(frozen=True)
class Distribution:
    """Probabilities of S tokens; all other tokens have probability 0.

    Args:
        probs: [S] probabilities, float32 or float64; sums to 1.
        support: [S] token ids in ascending order, or None if S is the whole vocabulary.
    """

    probs: Tensor
    support: Tensor | None = None

    @staticmethod
    def one_hot(token: int) -> Distribution:
        """All mass on one token: the p of a greedy target, or the q of a token not sampled."""
        return _OneHot(token)

    @staticmethod
    def of(probs: Tensor) -> Distribution:
        """Make a distribution from dense probabilities, without the tokens of probability 0.

        Args:
            probs: [V] probabilities that sum to 1.

        Raises:
            RequestError: a probability is NaN.
        """
        minimum = float(probs.min())
        if minimum > 0:  # much faster than `nonzero`
            return Distribution(probs)
        if math.isnan(minimum):
            raise RequestError(
                "the logits contain NaN, so no token can be drawn: if you set logit_bias or "
                "penalties, lower them; if you set none, the model overflows in this dtype: use "
                "float32 or bfloat16."
            )
        (support,) = probs.nonzero(as_tuple=True)  # [S]
        return Distribution(probs[support], support)

    @cached_property
    def certain(self) -> int | None:
        """The only token of the support, or None if there are several."""
        if len(self.probs) > 1:
            return None
        return 0 if self.support is None else int(self.support[0])

    @cached_property
    def drawn(self) -> int | None:
        """The token that the target's noise draws in this place, if that is known already."""
        return None

    @property
    def is_made(self) -> bool:
        """Whether reading its probabilities computes nothing."""
        return True

    def prob(self, token: int) -> float:
        """Probability of `token`; 0 outside the support."""
        if self.certain is not None:
            return float(token == self.certain)
        if self.support is None:
            return float(self.probs[token]) if token < len(self.probs) else 0.0
        return float(self.at(torch.tensor([token]))[0])

    def known_prob(self, token: int) -> float | None:
        """`prob`, perhaps with rounding errors, without computing the distribution for it.

        It is None where this would be necessary.
        """
        return self.prob(token)

    def at(self, tokens: Tensor) -> Tensor:
        """Probabilities [K] of `tokens` [K], on the device of `probs`; 0 outside the support."""
        tokens = tokens.to(self.probs.device)
        if self.support is None:
            return self.probs[tokens]
        index = torch.searchsorted(self.support, tokens).clamp(max=len(self.support) - 1)  # [K]
        found = self.support[index] == tokens
        return torch.where(found, self.probs[index], 0.0)

    @property
    def tokens(self) -> Tensor:
        """[S] token ids of the support, ascending."""
        if self.support is not None:
            return self.support
        return torch.arange(len(self.probs), device=self.probs.device)

    def dense(self, vocab_size: int) -> Tensor:
        """[V] probabilities over the whole vocabulary."""
        if self.support is None:
            return self.probs
        return self.probs.new_zeros(vocab_size).index_put((self.support,), self.probs)

    def excess(self, other: Distribution, scale: float = 1.0, weight: float = 1.0) -> Tensor:
        """[S] `max(weight * self - scale * other, 0)` on this distribution's support.

        Args:
            other: the distribution that was drafted from (q where `self` is p).
            scale: the lenience of Leviathan et al., appendix A.5; 1 in plain speculative sampling.
            weight: the running ratio w_i of block verification (Sun et al., algorithm 2); 1 in
                plain speculative sampling.
        """
        other_probs = other.at(self.tokens).to(self.probs)
        return (weight * self.probs - scale * other_probs).clamp(min=0)

    def overlap(self, other: Distribution, scale: float = 1.0) -> float:
        """Sum over x of `min(self(x), scale * other(x))`.

        With p and q it is the probability that a token drawn from q is accepted (Leviathan et al.,
        theorem 3.5). Over `scale` it is that under lenience (their appendix A.5). Rounding does not
        take it above 1 or `scale`. Arguments as in `excess`.
        """
        other_probs = other.at(self.tokens).to(self.probs)  # [S]
        return min(float(torch.minimum(self.probs, scale * other_probs).sum()), scale, 1.0)

    def residual(
        self, other: Distribution, scale: float = 1.0, weight: float = 1.0
    ) -> Distribution:
        """The residual distribution `norm(max(weight * self - scale * other, 0))`.

        The correction after a rejection is drawn from it (Leviathan et al., algorithm 1). If the
        excess is 0 everywhere, `self` equals `other` up to rounding errors. A rejection then has
        probability 0 in exact arithmetic, and the result is `self` instead of 0/0. Arguments as in
        `excess`.
        """
        excess = self.excess(other, scale, weight)
        total = excess.sum()
        if not float(total) > 0:
            return self
        return self.normalised(excess / total)

    def without(self, token: int) -> Distribution:
        """The distribution given that the token is not `token`; unchanged if it is the only one."""
        probs = torch.where(self.tokens == token, 0.0, self.probs)
        total = probs.sum()
        return self.normalised(probs / total) if float(total) > 0 else self

    def renamed(self, token_ids: Tensor) -> Distribution:
        """The same probabilities for other tokens: `token_ids[t]` in the place of token t.

        Args:
            token_ids: [n] ascending.
        """
        if self.certain is not None:
            return Distribution.one_hot(int(token_ids[self.certain]))
        return Distribution(self.probs, token_ids[self.tokens])

    def in_float64(self) -> Distribution:
        """The same probabilities in float64, normalised again."""
        probs = self.probs.double()
        return Distribution(probs / probs.sum(), self.support)

    def entropy(self) -> float:
        """Entropy, in nats."""
        return float(-torch.xlogy(self.probs, self.probs).sum())

    def normalised(self, probs: Tensor) -> Distribution:
        """A distribution with other probabilities on the same support; zeros leave the support.

        Args:
            probs: [S] probabilities that sum to 1.
        """
        keep = probs > 0
        return Distribution(probs[keep], self.tokens[keep])


class _OneHot(Distribution):
    """A one-hot distribution that creates its two tensors only when they are read."""

    def __init__(self, token: int) -> None:
        self.__dict__["certain"] = token  # fills the cached property: no tensor needed

    @cached_property
    def probs(self) -> Tensor:
        return torch.ones(1)

    @cached_property
    def support(self) -> Tensor:
        return torch.tensor([self.__dict__["certain"]])


class LazyDistribution(Distribution):
    """A distribution that is computed when it is first read.

    Args:
        make: computes it.
        known: a token and its `known_prob`; None if it is not known beforehand.
        draw: finds what is `drawn`.
    """

    def __init__(
        self,
        make: Callable[[], Distribution],
        known: tuple[int, float] | None = None,
        draw: Callable[[], int | None] | None = None,
    ) -> None:
        self.__dict__["_make"] = make
        self.__dict__["_known"] = known
        self.__dict__["_draw"] = draw

    @cached_property
    @override
    def drawn(self) -> int | None:
        draw: Callable[[], int | None] | None = self.__dict__["_draw"]
        return None if draw is None else draw()

    @property
    @override
    def is_made(self) -> bool:
        return "_make" not in self.__dict__

    @cached_property
    def _made(self) -> Distribution:
        made: Distribution = self.__dict__.pop("_make")()
        return made

    @override
    def known_prob(self, token: int) -> float | None:
        known: tuple[int, float] | None = self.__dict__["_known"]
        if known is not None and known[0] == token:
            return known[1]
        return self.prob(token) if self.is_made else None

    @override
    @cached_property
    def probs(self) -> Tensor:
        return self._made.probs

    @override
    @cached_property
    def support(self) -> Tensor | None:
        return self._made.support


class OneHots(Sequence[Distribution]):
    """A lazy sequence of one-hot distributions: the q of a draft that was not sampled.

    Each is created when it is first read. For most drafted nodes that never happens.

    Args:
        tokens: the token of probability 1 of each distribution.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._made: dict[int, Distribution] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, index: int) -> Distribution: ...

    @overload
    def __getitem__(self, index: slice) -> OneHots: ...

    def __getitem__(self, index: int | slice) -> Distribution | OneHots:
        if isinstance(index, slice):
            return OneHots(self._tokens[index])
        if index not in self._made:
            self._made[index] = Distribution.one_hot(self._tokens[index])
        return self._made[index]


_NUCLEUS_CUTS = (1e-4, 1e-6, 0.0)
"""`nucleus` tries the tokens from these probabilities on before it sorts the whole vocabulary."""


@dataclass(frozen=True)
class Truncation:
    """How a draft's q is truncated; the fields are those of `SamplingParams`."""

    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


Limits: TypeAlias = SamplingParams | Truncation
"""Anything with min_p, top_k and top_p."""


_PLAUSIBLE = 16.0
"""Tokens whose logits are further below the largest are hardly ever among the k likeliest."""


def truncate(logits: Tensor, limits: Limits) -> Distribution:
    """The distribution after min-p, top-k and top-p, in this order, as in vLLM.

    Args:
        logits: [V] logits, already divided by the temperature.
        limits: only min_p, top_k and top_p are read.
    """
    support: Tensor | None = None
    if limits.min_p > 0:
        logits, support = _from(logits.max() + math.log(limits.min_p), logits, support)
    if 1 <= limits.top_k < len(logits):
        # Tokens that tie with the k-th stay, as in Transformers.
        likely = _from(logits.max() - _PLAUSIBLE, logits, support)
        if len(likely[0]) >= limits.top_k:
            logits, support = likely
        logits, support = _from(logits.topk(limits.top_k).values[-1], logits, support)
    distribution = Distribution.of(logits.softmax(-1))
    if support is not None:
        distribution = Distribution(distribution.probs, support[distribution.tokens])
    return distribution if limits.top_p == 1 else nucleus(distribution, limits.top_p)


def _from(least: Tensor, logits: Tensor, support: Tensor | None) -> tuple[Tensor, Tensor]:
    """The logits from `least` on and their tokens; all of them if it is NaN."""
    (kept,) = (~(logits < least)).nonzero(as_tuple=True)
    return logits[kept], kept if support is None else support[kept]


def truncated(distribution: Distribution, top_k: int, top_p: float) -> Distribution:
    """The same for a distribution that was not made from logits.

    Args:
        distribution: what to truncate.
        top_k: see `SamplingParams`.
        top_p: see `SamplingParams`.
    """
    probs = distribution.probs
    if 1 <= top_k < len(probs):
        kept = torch.where(probs < probs.topk(top_k).values[-1], 0.0, probs)
        distribution = distribution.normalised(kept / kept.sum())
    return distribution if top_p == 1 else nucleus(distribution, top_p)


def nucleus(distribution: Distribution, top_p: float) -> Distribution:
    """The distribution on the smallest set of most probable tokens whose mass reaches `top_p`.

    Sorting a whole vocabulary takes milliseconds, and the set is usually small. The search
    therefore tries the most probable tokens first.

    Args:
        distribution: the distribution to truncate.
        top_p: the mass to reach, above 0 and at most 1.
    """
    all_probs = distribution.probs.cpu().numpy()  # several times faster than PyTorch's
    for cut in _NUCLEUS_CUTS:
        likely = np.flatnonzero(all_probs >= cut)
        found = all_probs[likely]
        order = np.argsort(-found, kind="stable")
        ranked = found[order]
        # [k] mass of the more probable tokens
        before = np.cumsum(ranked, dtype=np.float64).astype(ranked.dtype) - ranked
        if cut == 0 or (len(before) and float(before[-1]) >= top_p):
            break
    keep = before < top_p
    keep[0] = True  # a very small top_p may be 0 in float32
    kept = torch.from_numpy(np.sort(likely[order[keep]])).to(distribution.probs.device)
    probs, support = distribution.probs[kept], distribution.support
    return Distribution(probs / probs.sum(), kept if support is None else support[kept])


TokenLogprobs: TypeAlias = dict[int, "Logprob"]
"""Log-probabilities at one position by token id, as vLLM has them: the token itself comes first,
then the most likely ones, best first."""

PromptLogprobs: TypeAlias = list[TokenLogprobs | None]
"""Those of each token of a prompt; None for the first token."""


@dataclass(frozen=True)
class Logprob:
    """The log-probability of one token, as vLLM's.

    Args:
        logprob: its log-probability.
        rank: its place among all tokens of the vocabulary, 1 for the most likely one.
        decoded_token: its text; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


def token_logprobs(
    log_probs: Tensor,
    token: int,
    num_top: int,
    text: Callable[[int], str | None] = lambda token: None,
) -> TokenLogprobs:
    """The log-probabilities of a token and of the most likely ones.

    Args:
        log_probs: [V] log-probabilities at the token's position.
        token: the token.
        num_top: number of most likely tokens; -1 is all.
        text: a token's text, or None.
    """
    size = len(log_probs)
    best = log_probs.topk(size if num_top < 0 else min(num_top, size))
    places = enumerate(zip(best.indices.tolist(), best.values.tolist(), strict=True), 1)
    rank = int((log_probs >= log_probs[token]).sum())
    found = [(token, float(log_probs[token]), rank)]
    found += [(each, value, place) for place, (each, value) in places]
    return {each: Logprob(value, place, text(each)) for each, value, place in found}


def log_probs_of(logits: Tensor) -> Tensor:
    """[V] log-probabilities of one position, in float32 unless its logits are float64.

    One position at a time, so that the bits do not depend on the others (invariant 7).
    """
    return (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
