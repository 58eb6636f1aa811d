"""The simulated mean acceptance length is that of decoding."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tokenleap.training.trainer import Acceptance

LEVELS = 4


def decode(text: list[int], guesses: list[list[int]], length: int) -> tuple[int, int]:
    """Tokens and passes of decoding a text with drafts that are known for every place."""
    at = passes = 0
    while at < len(text):
        draft = guesses[at][:length]
        passes += 1
        for guess in draft:  # verification of a chain
            if at < len(text) and guess == text[at]:
                at += 1
            else:
                break
        at += 1  # the target's own token
    return len(text), passes


@st.composite
def worlds(draw: st.DrawFn) -> list[tuple[list[int], list[list[int]]]]:
    """Texts of two tokens, and the drafts at each of their places."""
    made = []
    for length in draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)):
        tokens = st.lists(st.integers(0, 1), min_size=length, max_size=length)
        text = draw(tokens)
        guesses = draw(
            st.lists(
                st.lists(st.integers(0, 1), min_size=LEVELS, max_size=LEVELS),
                min_size=length,
                max_size=length,
            )
        )
        made.append((text, guesses))
    return made


def tensors(world: list[tuple[list[int], list[list[int]]]]) -> tuple[Tensor, Tensor]:
    """As training shows it: [B, L, Q] whether a token is right, and whether there is one."""
    most = max(len(text) for text, _ in world)
    right, valid = torch.zeros(2, len(world), LEVELS, most, dtype=torch.bool)
    for row, (text, guesses) in enumerate(world):
        for at, guess in enumerate(guesses):
            for level in range(min(LEVELS, len(text) - at)):
                valid[row, level, at] = True
                right[row, level, at] = guess[level] == text[at + level]
    return right, valid


@given(worlds(), worlds())
@settings(max_examples=80, deadline=None)
def test_simulated_chains_are_those_of_decoding(first: list, second: list) -> None:  # type: ignore[type-arg]
    counts = Acceptance(LEVELS)
    for world in (first, second):
        counts.add(*tensors(world))
    for length in range(1, LEVELS + 1):
        runs = [decode(text, guesses, length) for text, guesses in (*first, *second)]
        tokens, passes = (sum(each) for each in zip(*runs, strict=True))
        assert counts.mean_length(length) == tokens / passes


@given(worlds())
@settings(max_examples=40, deadline=None)
def test_acceptance_by_position_is_given_those_before(world: list) -> None:  # type: ignore[type-arg]
    right, valid = tensors(world)
    counts = Acceptance(LEVELS)
    counts.add(right, valid)
    for level, rate in enumerate(counts.by_position()):
        reached = accepted = 0
        for row in range(len(world)):
            for at in range(right.shape[2]):
                if valid[row, level, at] and right[row, :level, at].all():
                    reached += 1
                    accepted += bool(right[row, level, at])
        assert abs(rate - accepted / max(1, reached)) < 1e-6


def test_all_right_and_all_wrong() -> None:
    valid = torch.ones(1, LEVELS, 60, dtype=torch.bool)
    for right, lengths in ((True, [2, 3, 4, 5]), (False, [1, 1, 1, 1])):
        counts = Acceptance(LEVELS)
        counts.add(torch.full_like(valid, right), valid)
        assert [counts.mean_length(n + 1) for n in range(LEVELS)] == lengths
    assert Acceptance(2).mean_length(2) == 0
