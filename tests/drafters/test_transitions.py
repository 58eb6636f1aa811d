"""Transitions: what a drafted token adds to the logits of the next, in chains, trees and draws."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.drafters.heads.folders import Fault, assert_refused
from tests.drafting import request_of
from tests.spec_drafters import random_spec_drafter, save_spec_drafter, spec_drafter_of
from tests.tiny_seq2seq import VOCAB_SIZE, tiny_seq2seq, tiny_source
from tokenleap import LLM, SamplingParams
from tokenleap.core.acceptance import RULES
from tokenleap.core.tree import TokenTree
from tokenleap.drafters import blocks as product_trees
from tokenleap.drafters.blocks import (
    TRANSITIONS_FILE,
    TokenTransitions,
    product_chain,
    product_tree,
)
from tokenleap.drafters.spec_drafter import load_spec_drafter
from tokenleap.runtime.choose import network_for
from tokenleap.runtime.growth_plan import GrowthPlan
from tokenleap.runtime.network import GrowthLimit
from tokenleap.runtime.target import Target

DEPTH, SIZE, WIDTH = 4, 12, 8
MASKS = 5
SOURCES = [list(tiny_source(length=length, seed=length).tokens) for length in (9, 30)]


def transitions_of(size: int = SIZE, seed: int = 0) -> TokenTransitions:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(WIDTH, WIDTH, generator=generator) / 2
    return TokenTransitions(matrix, torch.randn(size, WIDTH, generator=generator))


def logits_of(seed: int = 1) -> Tensor:
    return torch.randn(DEPTH, SIZE, generator=torch.Generator().manual_seed(seed)) * 2


def test_between_candidates_is_a_part_of_what_is_behind_tokens() -> None:
    transitions = transitions_of()
    candidates = torch.tensor([[3, 1, 7], [0, 11, 2], [5, 5, 4]])
    found = transitions.between(candidates)
    assert found.shape == (2, 3, 3)
    for level in range(2):
        behind = transitions.added_after(candidates[level])
        torch.testing.assert_close(found[level], behind[:, candidates[level + 1]])


def test_behind_a_token_is_its_bilinear_form() -> None:
    torch.manual_seed(0)
    matrix, rows = torch.randn(WIDTH, WIDTH), torch.randn(SIZE, WIDTH)
    found = TokenTransitions(matrix, rows).added_after(torch.tensor([4]))[0]
    expected = torch.stack([rows[w] @ matrix @ rows[4] for w in range(SIZE)])
    torch.testing.assert_close(found, expected - expected.mean())


@torch.inference_mode()
def test_what_all_logits_get_alike_does_not_count() -> None:
    """With rows that have much in common, tokens after the candidates keep their share."""
    torch.manual_seed(0)
    matrix, rows = torch.randn(WIDTH, WIDTH), torch.randn(40, WIDTH)
    logits = torch.randn(DEPTH, 40)
    limit, plan = GrowthLimit(DEPTH, None, 100), GrowthPlan((1,) * DEPTH)
    for common in (0.0, 3.0):
        transitions = TokenTransitions(matrix / 8, rows + common)
        tree = product_tree(logits, None, plan, limit, transitions)
        for level in range(1, DEPTH):
            before = torch.tensor(tree.tokens[level - 1 : level])
            exact = (logits[level] + transitions.added_after(before)[0]).softmax(-1)
            assert tree.probabilities[level] == pytest.approx(
                float(exact[tree.tokens[level]]), abs=0.1
            )


def test_probabilities_are_never_negative() -> None:
    """Though all tokens are candidates, and all transitions are far below zero."""
    for seed in range(50):
        torch.manual_seed(seed)
        transitions = TokenTransitions(-20 * torch.eye(WIDTH), torch.randn(SIZE, WIDTH))
        logits = 4 * torch.randn(DEPTH, SIZE)
        tree = grown(logits, transitions, GrowthPlan((1,) * DEPTH))
        assert min(tree.probabilities) >= 0


# Trees


def grown(logits: Tensor, transitions: TokenTransitions | None, plan: GrowthPlan) -> Any:
    limit = GrowthLimit(DEPTH, nodes=None, scored=100)
    return product_tree(logits, torch.arange(SIZE), plan, limit, transitions)


@pytest.mark.parametrize("widths", [(1, 1, 1, 1), (3, 2, 1, 2)])
def test_children_are_the_best_behind_their_parent(widths: tuple[int, ...]) -> None:
    """Of a vocabulary that is smaller than the number of candidates, so the tree is exact."""
    logits, transitions = logits_of(), transitions_of()
    tree = grown(logits, transitions, GrowthPlan(widths))
    found: dict[int, list[tuple[int, float]]] = {}
    for token, parent, probability in zip(
        tree.tokens, tree.parents, tree.probabilities, strict=True
    ):
        found.setdefault(parent, []).append((token, probability))
    depths = {-1: 0}
    for node, parent in enumerate(tree.parents):
        depths[node] = depths[parent] + 1
    for parent, children in found.items():
        scores = logits[depths[parent]]
        if parent >= 0:
            scores = scores + transitions.added_after(torch.tensor([tree.tokens[parent]]))[0]
        best = scores.softmax(-1).topk(widths[depths[parent]])
        assert [token for token, _ in children] == best.indices.tolist()
        assert [p for _, p in children] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert len(tree.tokens) == sum(torch.tensor(widths).cumprod(0).tolist())


def test_candidates_are_the_best_without_transitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token after them is not drafted, and keeps its share of the probability."""
    monkeypatch.setattr(product_trees, "CHAIN_CANDIDATES", 2)
    logits, transitions = logits_of(), transitions_of()
    tree = grown(logits, transitions, GrowthPlan((1,) * DEPTH))
    for level in range(1, DEPTH):
        best = logits[level].topk(2).indices
        assert tree.tokens[level] in best
        added = torch.zeros(SIZE)
        before = torch.tensor([tree.tokens[level - 1]])
        added[best] = transitions.added_after(before)[0, best]
        expected = (logits[level] + added).softmax(-1)[tree.tokens[level]]
        assert tree.probabilities[level] == pytest.approx(float(expected), abs=1e-5)


def test_a_matrix_of_zeros_changes_nothing() -> None:
    nothing = TokenTransitions(torch.zeros(WIDTH, WIDTH), torch.randn(SIZE, WIDTH))
    for widths in ((1, 1, 1, 1), (3, 2, 2, 1)):
        plan = GrowthPlan(widths)
        found, expected = grown(logits_of(), nothing, plan), grown(logits_of(), None, plan)
        assert (found.tokens, found.parents) == (expected.tokens, expected.parents)
        assert found.probabilities == pytest.approx(expected.probabilities, abs=1e-5)


@cache
def native_network() -> Any:
    return network_for(tiny_seq2seq("bart_wide"), runtime="native")


def best_chain(logits: Tensor, transitions: TokenTransitions | None) -> Any:
    return native_network().best_chain(logits, None if transitions is None else transitions.tables)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("least", [(0.0, 0.0), (0.2, 0.0), (0.0, 0.05)])
def test_native_chains_are_those_of_the_tree(
    dtype: torch.dtype, least: tuple[float, float]
) -> None:
    """20 chains of 6 tokens, out of a vocabulary with more tokens than candidates."""
    generator = torch.Generator().manual_seed(0)
    matrix, rows = (torch.randn(n, 32, generator=generator) / 4 for n in (32, 50))
    plan, limits = GrowthPlan((1,) * 6), GrowthLimit(6, None, 100, *least)
    lengths = set()
    for transitions in (None, TokenTransitions(matrix.to(dtype), rows.to(dtype))):
        for _ in range(10):
            logits = 3 * torch.randn(6, 50, generator=generator)
            chain = best_chain(logits, transitions)
            found = product_chain(chain, torch.arange(50), limits)
            expected = product_tree(logits, torch.arange(50), plan, limits, transitions)
            assert (found.tokens, found.parents) == (expected.tokens, expected.parents)
            assert found.probabilities == pytest.approx(expected.probabilities, rel=1e-4)
            lengths.add(len(found.tokens))
    assert (len(lengths) > 1) == any(least)


def test_what_native_chains_do_not_take() -> None:
    logits, rows = torch.randn(3, 50), torch.randn(50, 24)
    assert best_chain(logits, TokenTransitions(torch.zeros(24, 24), rows)) is None
    assert best_chain(logits.bfloat16(), None) is None
    assert best_chain(logits, TokenTransitions(torch.zeros(16, 16), rows[:, :16].half())) is None


# In the engine


@pytest.fixture(scope="module", params=["bart", "bart_wide"])
def llm(request: pytest.FixtureRequest) -> LLM:
    """With PyTorch operations, and native."""
    return LLM(tiny_seq2seq(request.param, eos_bias=2.0))


def outputs_of(llm: LLM, temperature: float = 0, **fields: Any) -> Any:
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=9)
    name = "bart_wide" if llm.runtime == "native" else "bart"
    model = random_spec_drafter(name, MASKS, "target", transitions=True)
    config = {"method": "spec_drafter", "model": model, "controller": "fixed", **fields}
    return llm.generate(SOURCES, params, speculative_config=config if fields else None)


@pytest.mark.parametrize("shape", [{}, {"tree": [3, 2]}, {"tree": "dynamic"}])
@pytest.mark.parametrize("temperature", [0, 0.9])
def test_drafts_change_no_output(llm: LLM, shape: dict[str, Any], temperature: float) -> None:
    plain = [output.token_ids for output in outputs_of(llm, temperature)]
    every = not shape and not temperature
    for rule in RULES if every else ("coupled", "rejection", "typical"):
        outputs = outputs_of(llm, temperature, acceptance=rule, **shape)
        assert all(output.metrics.drafter_failure is None for output in outputs)
        assert all(output.metrics.num_draft_tokens for output in outputs)
        if RULES[rule].lossless and (temperature == 0 or rule == "coupled"):
            assert [output.token_ids for output in outputs] == plain


def test_drafts_are_other_ones(llm: LLM) -> None:
    """The first tokens of a draft are alike with and without, and the others are not."""
    name = "bart_wide" if llm.runtime == "native" else "bart"
    model = random_spec_drafter(name, MASKS, "target")
    drafts = [
        [step.drafted for output in outputs for step in output.trace.steps if step.drafted]
        for outputs in (outputs_of(llm, acceptance="coupled"), outputs_of(llm, model=model))
    ]
    first = [each[0] for each in drafts]
    assert first[0][0] == first[1][0]
    assert first[0][1:] != first[1][1:]


@torch.inference_mode()
def test_logits_of_nodes_are_those_behind_their_tokens() -> None:
    """q of drawn tokens is exact: it is the softmax of these."""
    target = Target(tiny_seq2seq("bart"))
    without, _one = load_spec_drafter(random_spec_drafter("bart", MASKS), target)
    scorer, _other = load_spec_drafter(random_spec_drafter("bart", MASKS, transitions=True), target)
    assert scorer.transitions is not None
    pending = (2, 20, 21)
    request = request_of(pending, vocab_size=VOCAB_SIZE, source=tiny_source())
    found = []
    for each in (without, scorer):
        each.admit([request], 8)
        key = request.key
        each.expect({key: 3})
        each.pending(request)
        root = TokenTree(pending, (-1, 0, 1))
        tree = TokenTree((*pending, 7, 8), (-1, 0, 1, 2, 2))
        first = each.verify([key], [root], [0])[0].scores.clone()
        found.append((first, each.verify([key], [tree], [3])[0].scores))
    torch.testing.assert_close(found[0][0], found[1][0])
    expected = found[0][1] + scorer.transitions.added_after(torch.tensor([7, 8]))
    torch.testing.assert_close(found[1][1], expected)


# Files


def _wrong_size(folder: Path) -> None:
    from safetensors.torch import save_file

    save_file({"matrix": torch.zeros(3, 3)}, folder / TRANSITIONS_FILE)


FAULTS: dict[str, Fault] = {
    "missing": (
        lambda folder: (folder / TRANSITIONS_FILE).unlink(),
        "does not exist: the folder is incomplete",
    ),
    "truncated": (lambda folder: os.truncate(folder / TRANSITIONS_FILE, 40), "cannot be read"),
    "of another size": (_wrong_size, r"'matrix' has shape \[3, 3\]"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_file(fault: str, tmp_path: Path) -> None:
    save_spec_drafter(tmp_path, *spec_drafter_of(transitions=True))
    target = Target(tiny_seq2seq("bart"))
    assert_refused(tmp_path, FAULTS[fault], lambda folder: load_spec_drafter(folder, target))
