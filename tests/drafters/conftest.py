"""Fixtures of the tests of drafters."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch import Tensor

from tokenleap.core.references import Source
from tokenleap.core.tree import Draft
from tokenleap.drafters.model_drafter import ModelDrafter
from tokenleap.runtime.seq2seq.network import EncoderSide


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[Source]:
    """How often each source was read, by all encoders."""
    counts: Counter[Source] = Counter()
    encoded = EncoderSide.encoded

    def counted(network: EncoderSide, source: Source) -> Tensor:
        counts[source] += 1
        return encoded(network, source)

    monkeypatch.setattr(EncoderSide, "encoded", counted)
    return counts


@pytest.fixture
def all_drafts(monkeypatch: pytest.MonkeyPatch) -> list[Draft]:
    """Every draft of a `ModelDrafter`."""
    found: list[Draft] = []
    propose = ModelDrafter.propose

    def kept(self: ModelDrafter, *args: Any) -> list[Draft]:
        drafts = propose(self, *args)
        found.extend(drafts)
        return drafts

    monkeypatch.setattr(ModelDrafter, "propose", kept)
    return found
