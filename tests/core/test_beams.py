"""The search itself, on tables of log-probabilities, against a search that keeps whole outputs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from typing import Literal

import pytest
import torch
from torch import Tensor

from tokenleap.core.beams import BeamDraft, Beams, BeamSettings, search
from tokenleap.core.tree import TokenTree, chain
from tokenleap.errors import RequestError

VOCAB_SIZE, EOS, ROOT = 12, 2, 7

Found = list[tuple[tuple[int, ...], float]]


def log_probs(output: Sequence[int], seed: int) -> Tensor:
    """[V] of the token after an output: it depends on the last three tokens."""
    generator = torch.Generator().manual_seed(hash((seed, *output[-3:])) % 2**31)
    logits = 2 * torch.randn(VOCAB_SIZE, generator=generator)
    logits[EOS] += 1
    return logits.log_softmax(-1)


def searched_token_by_token(settings: BeamSettings, seed: int) -> Found:
    """Beam search that copies every beam: what `core.beams` does with a tree."""
    live: Found = [((), 0.0)]
    finished: Found = []
    for length in range(1, settings.max_tokens + 1):
        rows = torch.stack([log_probs(tokens, seed) for tokens, _ in live])
        totals = (rows + torch.tensor([total for _, total in live])[:, None]).flatten()
        best = totals.topk(2 * settings.width if len(live) > 1 else VOCAB_SIZE)
        found = [
            ((*live[index // VOCAB_SIZE][0], index % VOCAB_SIZE), total)
            for index, total in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ][: 2 * settings.width]
        last = length == settings.max_tokens
        divisor = length**settings.length_penalty
        finished += [
            (tokens, total / divisor)
            for tokens, total in found[: settings.width]
            if last or tokens[-1] == EOS
        ]
        finished = sorted(finished, key=lambda each: -each[1])[: settings.width]
        live = [each for each in found if each[0][-1] != EOS][: settings.width]
        full = len(finished) == settings.width
        if full and settings.early_stopping is True:
            break
        if settings.early_stopping == "never" and settings.length_penalty > 0:
            divisor = settings.max_tokens**settings.length_penalty
        if full and live[0][1] / divisor <= finished[-1][1]:
            break
    return finished


def proposed(beams: Beams, dice: random.Random, seed: int) -> TokenTree:
    """The search's tree with likely and unlikely tokens below its leaves."""
    tokens, parents = list(beams.tree.tokens), list(beams.tree.parents)
    level = [node for _, node in beams.live]
    for _ in range(dice.randint(0, 2)):
        below = []
        for node in level:
            path = TokenTree(tuple(tokens), tuple(parents)).path_tokens(node)
            likely = log_probs([*OUTPUT, *path], seed).topk(8).indices.tolist()
            for token in likely[: dice.randint(2, 8)]:
                tokens.append(token)
                parents.append(node)
                below.append(len(tokens) - 1)
        level = below
    return TokenTree(tuple(tokens), tuple(parents))


OUTPUT: list[int] = []
"""Tokens that the present search has committed."""


def searched_in_a_tree(
    settings: BeamSettings, seed: int, dice: random.Random | None
) -> tuple[Found, int]:
    """The outputs, and the number of passes; with `dice`, random nodes are proposed."""
    OUTPUT.clear()
    beams, passes, steps, kept = Beams(settings, chain([ROOT])), 0, 0, 0
    while not beams.done:
        tree = beams.tree if dice is None else proposed(beams, dice, seed)
        draft = BeamDraft.of(beams, tree)

        def scores(nodes: Sequence[int], tree: TokenTree = tree, first: int = kept) -> Tensor:
            assert min(nodes) >= first, "kept nodes have no logits"
            return torch.stack([log_probs([*OUTPUT, *tree.path_tokens(n)], seed) for n in nodes])

        found = search(draft, scores)
        passes, steps = passes + 1, steps + found.steps
        together = (*found.cached, *found.kept)
        assert list(together) == sorted(set(together))
        expected = [*OUTPUT, *found.tokens]
        beams, kept = found.beams, len(found.kept)
        if not beams.done:
            assert len(found.cached) == len(found.tokens)
            moved = [tree.tokens[node] for node in found.kept]
            assert list(beams.tree.tokens[:kept]) == moved
            assert beams.tree.tokens[0] == (expected[-1] if expected else ROOT)
            OUTPUT[:] = expected
    assert steps == beams.length
    return [((*OUTPUT, *h.tokens), h.score) for h in beams.finished], passes


@pytest.mark.parametrize("width", [2, 3, 5])
def test_it_finds_what_a_search_with_copies_finds(width: int) -> None:
    stops: tuple[bool | Literal["never"], ...] = (True, False, "never")
    saved = 0
    for seed, penalty, early in product(range(4), (-0.5, 0.0, 1.0, 2.0), stops):
        settings = BeamSettings(width, 9, frozenset({EOS}), penalty, early)
        expected = searched_token_by_token(settings, seed)
        found, passes = searched_in_a_tree(settings, seed, None)
        drafted, fewer = searched_in_a_tree(settings, seed, random.Random(seed))
        assert found == drafted
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
        scores = [score for _, score in expected]
        assert [score for _, score in found] == pytest.approx(scores, rel=1e-5)
        saved += passes - fewer
    assert saved > 0


def test_beams_that_are_impossible_are_dropped() -> None:
    beams = Beams(BeamSettings(3, 5), chain([ROOT]))
    scores = torch.full((1, VOCAB_SIZE), -torch.inf)
    scores[0, 4] = 0.0
    beams = beams.advance(scores)
    assert [beams.tree.tokens[node] for _, node in beams.live] == [4]
    assert not beams.done


@pytest.mark.parametrize("value", [-torch.inf, torch.nan])
def test_without_a_possible_token_the_request_fails(value: float) -> None:
    beams = Beams(BeamSettings(3, 5), chain([ROOT]))
    with pytest.raises(RequestError, match="the largest logit is"):
        beams.advance(torch.full((1, VOCAB_SIZE), value))
