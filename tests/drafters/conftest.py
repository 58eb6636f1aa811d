"""Fixtures of the tests of drafters."""

from __future__ import annotations

from collections import Counter

import pytest
from torch import Tensor

from tokenleap.core.references import Source
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
