from __future__ import annotations

import torch

from tokenleap.core.rules import TokenSet


def test_it_forbids_the_tokens_that_a_row_of_logits_has() -> None:
    tokens = TokenSet((5, 9, 5, -1, 30))
    assert 30 in tokens
    assert 4 not in tokens
    for size in (10, 7, 40):
        logits = torch.zeros(size)
        tokens.forbid(logits)
        forbidden = [token for token in (5, 9, 30) if token < size]
        assert (logits == -torch.inf).nonzero()[:, 0].tolist() == forbidden


def test_places_are_found_once_for_each_size() -> None:
    tokens = TokenSet(range(0, 900, 2))
    first = [tokens._places_in(torch.zeros(size)) for size in (1000, 500)]
    again = [tokens._places_in(torch.ones(size)) for size in (1000, 500)]
    assert all(a is b for a, b in zip(first, again, strict=True))
