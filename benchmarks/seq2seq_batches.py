"""Batches by tokens, for the training of `benchmarks.seq2seq_target`."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

__all__ = ["TokenBatches"]

_POOL = 50
"""Batches whose texts are sorted by length at a time."""


class TokenBatches:
    """Batches of as many texts as fit a number of tokens, texts of similar lengths together.

    Args:
        lengths: of each text, the longer of source and output.
        tokens: the most that a padded batch has.
        seed: of the order.
    """

    def __init__(self, lengths: Sequence[int], tokens: int, seed: int) -> None:
        self._lengths, self._tokens, self._seed, self._epoch = lengths, tokens, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order: each epoch has its own."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._batches(0))

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches(self._epoch))

    def _batches(self, epoch: int) -> list[list[int]]:
        chance = random.Random(f"{self._seed} {epoch}")
        order = list(range(len(self._lengths)))
        chance.shuffle(order)
        mean = sum(self._lengths) / len(order)
        size = max(1, round(_POOL * self._tokens / mean))
        batches: list[list[int]] = []
        for start in range(0, len(order), size):
            batches += self._packed(
                sorted(order[start : start + size], key=self._lengths.__getitem__)
            )
        chance.shuffle(batches)
        return batches

    def _packed(self, ordered: Sequence[int]) -> Iterator[list[int]]:
        batch: list[int] = []
        for text in ordered:
            if batch and (len(batch) + 1) * self._lengths[text] > self._tokens:
                yield batch
                batch = []
            batch.append(text)
        if batch:
            yield batch
