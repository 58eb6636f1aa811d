"""A probability distribution over the vocabulary, kept on its support.

Both p (target) and q (drafter) are `Distribution`s. Greedy decoding is a distribution with one
token in its support, top-k a distribution with k; only unrestricted sampling carries the whole
vocabulary. Acceptance rules, drafters and noise see nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import torch
from torch import Tensor

from foretoken.errors import RequestError

__all__ = ["Distribution", "OneHots"]


@dataclass(frozen=True)
class Distribution:
    """Probabilities over tokens.

    Args:
        probs: [S] probabilities, float32 or float64; sums to 1.
        support: [S] token ids in ascending order, or None where S is the whole vocabulary.
    """

    probs: Tensor
    support: Tensor | None = None

    @staticmethod
    def one_hot(token: int) -> Distribution:
        """All mass on one token: a greedy target, or a drafter that does not sample."""
        return _OneHot(token)

    @staticmethod
    def of(probs: Tensor) -> Distribution:
        """From dense [V] probabilities; tokens of probability 0 leave the support."""
        least = float(probs.min())
        if least > 0:  # much sooner said than which ones are
            return Distribution(probs)
        if math.isnan(least):
            raise RequestError(
                "the logits are not numbers: the model or the sampling parameters overflow."
            )
        (support,) = probs.nonzero(as_tuple=True)  # [S]
        return Distribution(probs[support], support)

    @cached_property
    def certain(self) -> int | None:
        """The only possible token, or None where there are several."""
        if len(self.probs) > 1:
            return None
        return 0 if self.support is None else int(self.support[0])

    def prob(self, token: int) -> float:
        """Probability of `token`; 0 outside the support."""
        if self.certain is not None:
            return float(token == self.certain)
        if self.support is None:
            return float(self.probs[token])
        return float(self.at(torch.tensor([token]))[0])

    def at(self, tokens: Tensor) -> Tensor:
        """Probabilities of `tokens` [K] -> [K], on the device of `probs`; 0 outside the support."""
        tokens = tokens.to(self.probs.device)
        if self.support is None:
            return self.probs[tokens]
        index = torch.searchsorted(self.support, tokens).clamp(max=len(self.support) - 1)  # [K]
        found = self.support[index] == tokens
        return torch.where(found, self.probs[index], 0.0)

    @property
    def tokens(self) -> Tensor:
        """[S] the tokens of the support."""
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

        `scale` is the lenience of Leviathan et al., A.5; `weight` the running ratio of block
        verification (Sun et al.). Both are 1 in plain speculative sampling.
        """
        other_probs = other.at(self.tokens).to(self.probs)
        return (weight * self.probs - scale * other_probs).clamp(min=0)

    def residual(
        self, other: Distribution, scale: float = 1.0, weight: float = 1.0
    ) -> Distribution:
        """`norm(max(weight * self - scale * other, 0))`: the distribution after a rejection.

        Where nothing is left, `self` equals `other` up to rounding, so a rejection could not have
        happened by the mathematics; `self` is then the right answer and not 0/0.
        """
        excess = self.excess(other, scale, weight)
        total = excess.sum()
        if not float(total) > 0:
            return self
        return self.normalised(excess / total)

    def without(self, token: int) -> Distribution:
        """Conditioned on another token than this one; unchanged if no other is possible."""
        probs = torch.where(self.tokens == token, 0.0, self.probs)
        total = probs.sum()
        return self.normalised(probs / total) if float(total) > 0 else self

    def normalised(self, probs: Tensor) -> Distribution:
        """A distribution with these [S] probabilities on the same support, zeros dropped."""
        keep = probs > 0
        return Distribution(probs[keep], self.tokens[keep])


class _OneHot(Distribution):
    """A one-hot distribution that makes its two tensors only when somebody reads them.

    Args:
        token: the one that is.
    """

    def __init__(self, token: int) -> None:
        self.__dict__["certain"] = token  # known, so that nobody need read it from the tensor

    @cached_property
    def probs(self) -> Tensor:
        """See `Distribution`."""
        return torch.ones(1)

    @cached_property
    def support(self) -> Tensor:
        """See `Distribution`."""
        return torch.tensor([self.__dict__["certain"]])


class OneHots(Sequence[Distribution]):
    """Distributions that are certain, each made when it is first looked at: most drafts' never are.

    Args:
        tokens: those that are.
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
