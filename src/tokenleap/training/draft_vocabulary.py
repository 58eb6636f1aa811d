"""The draft vocabulary of a head: what the target writes most often."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch

from tokenleap.training.features import FeatureCache

__all__ = ["draft_vocabulary"]


def draft_vocabulary(
    training: FeatureCache,
    held_out: FeatureCache,
    ends: Collection[int],
    size: int,
    vocab_size: int,
) -> tuple[torch.Tensor, float]:
    """Choose the tokens that a head can draft.

    Args:
        training: what it learns from.
        held_out: what it is evaluated on.
        ends: tokens that end a text; they are chosen first.
        size: most tokens.
        vocab_size: of the target.

    Returns:
        [Vd] ids, ascending; and their share of what is held out.
    """
    counts = training.counts(vocab_size)
    counts[list(ends)] = np.iinfo(np.int64).max
    most = np.argsort(-counts, kind="stable")[:size]
    tokens = np.sort(most)
    others = held_out.counts(vocab_size)
    coverage = float(others[tokens].sum() / max(1, others.sum()))
    return torch.from_numpy(tokens), coverage
