"""`BadWords`: words that an output never contains (vLLM's `bad_words`).

A word of several tokens is forbidden at its last token alone, and only behind its first ones. So
what is forbidden at a node of a token tree depends on the node's own path. The words are a part of
p, like the rules in `rules.py`: the sampler applies them at every node (invariant 6).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tokenleap.core.rules import ends_with

__all__ = ["BadWords"]

Word = tuple[int, ...]


class BadWords:
    """Sequences of tokens that no output completes.

    A word that the prompt begins and the output ends is not among them: only the output counts, as
    in vLLM. (Transformers' `bad_words_ids` count the prompt, too.)

    Args:
        words: the sequences, each of at least one token.
    """

    def __init__(self, words: Iterable[Word]) -> None:
        self._tokens: set[int] = set()
        # By the token before the last, so that a position looks at few of many words.
        self._phrases: dict[int, list[Word]] = {}
        for word in words:
            if len(word) == 1:
                self._tokens.add(word[0])
            else:
                self._phrases.setdefault(word[-2], []).append(word)
        self._everywhere = torch.tensor(sorted(self._tokens), dtype=torch.long)

    def keep(self, token: int, output_ids: Sequence[int]) -> bool:
        """Whether the largest logit of a position stays the largest.

        Args:
            token: its token.
            output_ids: all tokens generated before the position, including drafted ones.
        """
        return token not in self._tokens and token not in self._endings(output_ids)

    def apply(self, logits: Tensor, output_ids: Sequence[int]) -> Tensor:
        """Mask what would complete a word.

        Args:
            logits: [V] logits of a position; they are changed.
            output_ids: as in `keep`.

        Returns:
            [V] the logits: -inf where a token is forbidden.
        """
        logits[self._everywhere.to(logits.device)] = -torch.inf
        if endings := self._endings(output_ids):
            logits[endings] = -torch.inf
        return logits

    def _endings(self, output_ids: Sequence[int]) -> list[int]:
        """Last tokens of the phrases whose other tokens the output ends with."""
        found = self._phrases.get(output_ids[-1], ()) if output_ids else ()
        return [word[-1] for word in found if ends_with(output_ids, word[:-1])]
