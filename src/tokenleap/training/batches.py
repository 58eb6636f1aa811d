"""Batches to train on, and what is to be learnt from them.

A pair (t, t + 1) stands for a draft that starts there: the head sees the target's hidden states up
to position t and the token at t + 1, and level k of the draft guesses the token at t + 2 + k. Pairs
before parts to learn are the roots of a batch. All levels of all roots are learnt at once,
with the text's own tokens in between (teacher forcing).

A batch has conversations of similar length. Packing several into one row would fill it better, but
attention would cost more than it saves: most of its mask would be empty.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, Sampler

from tokenleap.training.features import FeatureCache, Features

__all__ = [
    "FIRST_LEARNT",
    "Batch",
    "BatchSampler",
    "Examples",
    "Joined",
    "Levels",
    "TrainingSet",
    "collate",
]

FIRST_LEARNT = 2
"""The first token that a draft can guess: a pair comes before it."""


_WINDOW = 32
"""Batches whose conversations are sorted by length together."""


class Levels(NamedTuple):
    """Examples to learn: L levels of the drafts of Q roots in each of B conversations.

    Args:
        inputs: [B, L, Q] the last token before the one to guess.
        labels: [B, L, Q] the token to guess.
        teacher_tokens: [B, L, Q, K] the target's most probable tokens there.
        teacher_logprobs: [B, L, Q, K] their log-probabilities.
        valid: [B, L, Q] whether there is something to learn; false after an answer's end, and for
            padding.
    """

    inputs: Tensor
    labels: Tensor
    teacher_tokens: Tensor
    teacher_logprobs: Tensor
    valid: Tensor


class Batch(NamedTuple):
    """B conversations of at most T pairs.

    Args:
        hidden: [B, T, A, E] the target's hidden states at position t, in int8.
        scales: [B, T, A, G] their scales.
        tokens: [B, T + 1] all tokens.
        lengths: [B] pairs of each conversation.
        roots: [B, Q] the pairs from which drafts start, ascending; padded with 0.
        sources: [B, S] what an encoder-decoder read, padded with 0; S is 0 for other models.
        source_lengths: [B].
        encoded: [B, S, E] what its encoder made of them, in half precision; S is 0 if no drafter
            reads it.
    """

    hidden: Tensor
    scales: Tensor
    tokens: Tensor
    lengths: Tensor
    roots: Tensor
    levels: Levels
    sources: Tensor = torch.zeros(0, 0, dtype=torch.long)
    source_lengths: Tensor = torch.zeros(0, dtype=torch.long)
    encoded: Tensor = torch.zeros(0, 0, 0, dtype=torch.float16)

    @property
    def next_tokens(self) -> Tensor:
        """[B, T] the token at t + 1."""
        return self.tokens[:, 1:]

    @property
    def num_tokens(self) -> int:
        """Pairs without padding."""
        return int(self.lengths.sum())


class Examples(Dataset[Features]):
    """Conversations that have something to learn."""

    sizes: Sequence[int]

    def __len__(self) -> int:
        return len(self.sizes)


class Joined(Examples):
    """Some of these and some of those conversations."""

    def __init__(self, *parts: tuple[Examples, Sequence[int]]) -> None:
        self._places = [(examples, number) for examples, numbers in parts for number in numbers]
        self.sizes = [examples.sizes[number] for examples, number in self._places]

    def __getitem__(self, index: int) -> Features:
        examples, number = self._places[index]
        features: Features = examples[number]
        return features


class TrainingSet(Examples):
    """The conversations of a cache that have something to learn in their first tokens.

    Args:
        length: most tokens of a conversation; the rest is cut off.
        answers: for each conversation of the cache, [start, stop) of each part to learn; None for
            all of its answers.
    """

    def __init__(
        self,
        cache: FeatureCache,
        length: int,
        answers: Sequence[Sequence[tuple[int, int]]] | None = None,
    ) -> None:
        self._cache, self._length = cache, length
        self._answers = cache.index["answers"] if answers is None else answers
        sizes = [min(size, length) for size in cache.lengths]
        self._numbers = [
            number
            for number, parts in enumerate(self._answers)
            if any(max(first, FIRST_LEARNT) < min(stop, sizes[number]) for first, stop in parts)
        ]
        self._kept = [sizes[number] for number in self._numbers]
        self.sizes = [max(sizes[number], len(cache.source(number))) for number in self._numbers]

    def __getitem__(self, index: int) -> Features:
        each, size = self._cache[self._numbers[index]], self._kept[index]
        return Features(
            each.tokens[:size],
            self._parts(index),
            each.hidden[:size],
            each.scales[:size],
            each.top_tokens[:size],
            each.top_logprobs[:size],
            each.source,
            each.encoded,
        )

    def _parts(self, index: int) -> list[tuple[int, int]]:
        """[start, stop) of each part to learn of a conversation."""
        size = self._kept[index]
        parts = self._answers[self._numbers[index]]
        return [(first, min(stop, size)) for first, stop in parts if first < size]

    @property
    def num_learnt(self) -> int:
        """Tokens to learn."""
        parts = (part for index in range(len(self)) for part in self._parts(index))
        return sum(max(0, stop - max(FIRST_LEARNT, first)) for first, stop in parts)

    def only(self, parts: Mapping[int, Sequence[tuple[int, int]]]) -> TrainingSet:
        """The same conversations with fewer parts to learn."""
        answers: list[Sequence[tuple[int, int]]] = [()] * len(self._cache)
        for index, chosen in parts.items():
            answers[self._numbers[index]] = chosen
        return TrainingSet(self._cache, self._length, answers)


class BatchSampler(Sampler[list[int]]):
    """Batches of similar conversations, in an order that follows from seed and epoch.

    Args:
        sizes: tokens of each conversation; they may be replaced between two epochs.
        batch_tokens: most tokens of a batch, padding included; a longer conversation has a batch of
            its own.
        seed: of the order; None keeps the conversations sorted by length.
        multiple_of: the number of batches is a multiple of this, so that as many processes get
            the same number; what is left over is skipped in this epoch.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        batch_tokens: int,
        seed: int | None = None,
        multiple_of: int = 1,
    ) -> None:
        self.sizes, self._batch_tokens, self._seed = sizes, batch_tokens, seed
        self._multiple_of = multiple_of
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; every epoch has another order."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches())

    def __len__(self) -> int:
        return len(self._batches())

    def _batches(self) -> list[list[int]]:
        numbers = list(range(len(self.sizes)))
        if self._seed is None:
            return self._filled(sorted(numbers, key=self.sizes.__getitem__))
        order = random.Random(self._seed * 1_000_003 + self._epoch)
        order.shuffle(numbers)
        mean = sum(self.sizes) / max(1, len(self.sizes))
        window = max(1, round(_WINDOW * self._batch_tokens / max(1, mean)))
        batches: list[list[int]] = []
        for start in range(0, len(numbers), window):
            part = sorted(numbers[start : start + window], key=self.sizes.__getitem__)
            batches += self._filled(part)
        order.shuffle(batches)
        return batches[: len(batches) - len(batches) % self._multiple_of]

    def _filled(self, numbers: Sequence[int]) -> list[list[int]]:
        """Batches of these conversations, which are sorted by length."""
        batches: list[list[int]] = []
        for number in numbers:
            fits = batches and (len(batches[-1]) + 1) * self.sizes[number] <= self._batch_tokens
            if fits:
                batches[-1].append(number)
            else:
                batches.append([number])
        return batches


def collate(conversations: Sequence[Features], num_levels: int, first: int = FIRST_LEARNT) -> Batch:
    """One batch of these conversations, to learn `num_levels` levels of drafting.

    Args:
        first: see `Trainee.first_learnt`. The roots of the batch are so many tokens before
            the first ones that their drafts guess.
    """
    made = [_pairs(each, num_levels, first) for each in conversations]
    hidden, scales, tokens, lengths, roots, levels, sources, source_lengths, encoded = (
        list(each) for each in zip(*made, strict=True)
    )
    return Batch(
        pad_sequence(hidden, batch_first=True),
        pad_sequence(scales, batch_first=True),
        pad_sequence(tokens, batch_first=True),
        torch.cat(lengths),
        pad_sequence(roots, batch_first=True),
        Levels(*(_padded_roots(each) for each in zip(*levels, strict=True))),
        pad_sequence(sources, batch_first=True),
        torch.cat(source_lengths),
        pad_sequence(encoded, batch_first=True),
    )


def _padded_roots(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors [L, Q, ...] with different Q as one [B, L, Q, ...]."""
    return pad_sequence([each.transpose(0, 1) for each in tensors], batch_first=True).transpose(
        1, 2
    )


def _pairs(each: Features, num_levels: int, first_learnt: int) -> Batch:
    """One conversation, without the axis of conversations."""
    size = len(each.tokens)
    learnt = torch.zeros(size + num_levels, dtype=torch.bool)
    for first, stop in each.answers:
        learnt[first:stop] = True
    roots = learnt[first_learnt:size].nonzero().flatten()
    level = torch.arange(num_levels)[:, None]
    ahead = roots + first_learnt + level  # [L, Q] positions of the labels
    at = ahead.clamp(max=size - 1)
    levels = Levels(
        inputs=each.tokens[at - 1],
        labels=each.tokens[at],
        teacher_tokens=each.top_tokens[at - 1],
        teacher_logprobs=each.top_logprobs[at - 1],
        valid=learnt[ahead].cumprod(0).bool(),
    )
    return Batch(
        hidden=each.hidden[:-1],
        scales=each.scales[:-1],
        tokens=each.tokens,
        lengths=torch.tensor([size - 1]),
        roots=roots,
        levels=levels,
        sources=each.source,
        source_lengths=torch.tensor([len(each.source)]),
        encoded=each.encoded,
    )
