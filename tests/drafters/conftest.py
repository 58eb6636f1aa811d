"""Fixtures of the tests of drafters."""

from __future__ import annotations

from collections import Counter

import pytest
from torch import Tensor

from foretoken.core.source import Source
from foretoken.runtime.seq2seq.network import Seq2SeqNetwork


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[Source]:
    """How often each source was read, by all encoders."""
    counts: Counter[Source] = Counter()
    encoded = Seq2SeqNetwork.encoded

    def counted(network: Seq2SeqNetwork, source: Source) -> Tensor:
        counts[source] += 1
        return encoded(network, source)

    monkeypatch.setattr(Seq2SeqNetwork, "encoded", counted)
    return counts
