"""Log-probabilities of tokens under the model itself, as users get them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Logprob", "PromptLogprobs", "TokenLogprobs", "log_probs_of"]

PromptLogprobs = tuple[dict[int, "Logprob"] | None, ...]
"""Per prompt token, the log-probabilities at its position by token id; None for the first token."""


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


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position, under the model itself.

    Args:
        token_id: the generated token, or that of the prompt.
        logprob: its log-probability.
        top: the most likely tokens and their log-probabilities, best first.
        rank: how many tokens are at least as likely as it, itself included.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    rank: int

    @staticmethod
    def of(log_probs: Tensor, token: int, num_top: int) -> TokenLogprobs:
        """Look a token up.

        Args:
            log_probs: [V] log-probabilities at its position.
            token: the token.
            num_top: number of most likely tokens; -1 is all.
        """
        size = len(log_probs)
        best = log_probs.topk(size if num_top < 0 else min(num_top, size))
        top = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        rank = int((log_probs >= log_probs[token]).sum())
        return TokenLogprobs(token, float(log_probs[token]), tuple(top), rank)

    def by_token(
        self, text: Callable[[int], str | None] = lambda token: None
    ) -> dict[int, Logprob]:
        """The same by token id, as vLLM has it: the token itself first, then the most likely ones.

        Args:
            text: a token's text, or None.
        """
        own = (self.token_id, self.logprob, self.rank)
        best = ((token, value, place) for place, (token, value) in enumerate(self.top, 1))
        return {token: Logprob(value, rank, text(token)) for token, value, rank in (own, *best)}


def log_probs_of(logits: Tensor) -> Tensor:
    """[V] log-probabilities of one position, in float32 unless its logits are float64.

    One position at a time, so that the bits do not depend on the others (invariant 7).
    """
    return (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
