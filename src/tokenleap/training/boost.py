"""Boost-tuned draft models: SpecInfer (Miao et al., arXiv 2305.09781, section 3).

The draft models are trained one after the other, each on what all those before it missed:

    S_1 = all samples
    S_i = the samples of S_(i-1) in which drafter i - 1 drafts another token than the target wrote

A sample is `sample_length` tokens of an answer. Drafter i - 1 drafts it greedily, so it gets the
whole sample right if each of its tokens is the most probable one behind the text in front of it. In
the paper a sample is a whole answer, which small models hardly ever get right. The best checkpoint
of drafter i is the one that is best on what those before it missed of the held-out text.

All drafters begin at the same `start`, as the paper tunes models that were trained before. An
`ensemble` merges their drafts into one token tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from accelerate.utils import send_to_device
from annotated_types import Ge, Le

from tokenleap.core.config import Config
from tokenleap.drafters.model_set import write_drafters
from tokenleap.training.batches import FIRST_LEARNT, Batch, BatchSampler, TrainingSet, collate
from tokenleap.training.distill import (
    DraftModelTraining,
    DraftModelTrainingOptions,
    loaded,
    target_tokenizer,
)
from tokenleap.training.method import HeadParts, Trainee

__all__ = ["BoostTraining", "BoostTrainingOptions", "missed", "missed_parts"]

_BATCH_TOKENS = 4096


class BoostTrainingOptions(DraftModelTrainingOptions):
    """Options of `tokenleap train boost`.

    Args:
        drafters: most draft models; there are fewer if nothing is missed any more.
        sample_length: tokens of a sample, which a drafter has to get right together.
    """

    drafters: Annotated[int, Ge(2), Le(8)] = 2
    sample_length: Annotated[int, Ge(1)] = 4


class BoostTraining(DraftModelTraining):
    """Several draft models."""

    name: ClassVar[str] = "boost"
    summary: ClassVar[str] = "several small models, each tuned on what the others miss (SpecInfer)"
    Options: ClassVar[type[Config]] = BoostTrainingOptions

    @property
    def _own(self) -> BoostTrainingOptions:
        assert isinstance(self.options, BoostTrainingOptions)
        return self.options

    @property
    def num_drafters(self) -> int:
        return self._own.drafters

    def missed(self, folder: Path, parts: HeadParts, data: TrainingSet) -> TrainingSet:
        """See `TrainingMethod.missed`: the samples that a drafter does not get right."""
        vocab_size = parts.embedding.shape[0]
        lm = loaded(str(folder), vocab_size, target_tokenizer(parts.name))
        trainee = self.of(lm, vocab_size).to(parts.embedding.device)
        return missed(trainee, data, self._own.sample_length)

    def finish(self, out: Path, folders: Sequence[Path]) -> None:
        """See `TrainingMethod.finish`: the list of the folders."""
        write_drafters(out, [each.name for each in folders])

    def serving(self, folder: Path) -> dict[str, Any]:
        """See `TrainingMethod.serving`: their drafts are merged."""
        return {"method": "ensemble", "drafters": str(folder)}


@torch.no_grad()
def missed(trainee: Trainee, data: TrainingSet, sample_length: int) -> TrainingSet:
    """The samples in which a drafter does not get every token right."""
    left = {}
    for index, right in _right_tokens(trainee.eval(), data):
        if parts := missed_parts(right, data[index].answers, sample_length):
            left[index] = parts
    return data.only(left)


def missed_parts(
    right: Sequence[bool], parts: Sequence[tuple[int, int]], sample_length: int
) -> list[tuple[int, int]]:
    """[start, stop) of the samples that are not all right; neighbours become one part."""
    found: list[tuple[int, int]] = []
    for first, end in parts:
        for start in range(max(first, FIRST_LEARNT), end, sample_length):
            stop = min(start + sample_length, end)
            if all(right[start:stop]):
                continue
            if found and found[-1][1] == start:
                found[-1] = (found[-1][0], stop)
            else:
                found.append((start, stop))
    return found


def _right_tokens(trainee: Trainee, data: TrainingSet) -> Iterator[tuple[int, list[bool]]]:
    """(index, for each token whether it is the most probable one) of each conversation."""
    device = next(trainee.parameters()).device
    for numbers in BatchSampler(data.sizes, _BATCH_TOKENS):
        batch: Batch = send_to_device(collate([data[number] for number in numbers], 1), device)
        hits = trainee(batch, 1).right[:, 0]
        for row, number in enumerate(numbers):
            places = batch.roots[row][hits[row]] + FIRST_LEARNT
            right = torch.zeros(data.sizes[number], dtype=torch.bool)
            right[places.cpu()] = True
            yield number, right.tolist()
