"""Optimal trees against all trees there are, simulation, and the models' own logits."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from tests.tiny import tiny_model
from tokenleap import LLM, ConfigError, SamplingParams
from tokenleap.config import SpeculativeConfig
from tokenleap.drafters.shapes import Paths, TreeFile, TreeOptions, Widths
from tokenleap.errors import TokenleapError
from tokenleap.runtime.costs import CostCurve
from tokenleap.tuning.sequoia import (
    Acceptance,
    accepted_rank,
    best_size,
    best_tree,
    best_widths,
    expected_tokens,
    measure_acceptance,
    one_level,
    pass_costs,
)

Tree = frozenset[tuple[int, ...]]

ALARM = 1e-9
VECTOR = (0.6, 0.2, 0.1)


# The dynamic program


def all_trees(nodes: int, depth: int, ranks: int) -> Iterator[Tree]:
    """Every tree of at most this many nodes, levels and children of a node."""
    yield frozenset()
    if not depth:
        return
    for width in range(1, min(nodes, ranks) + 1):
        below = list(all_trees(nodes - width, depth - 1, ranks))
        for subtrees in product(below, repeat=width):
            tree: set[tuple[int, ...]] = {(rank,) for rank in range(width)}
            tree |= {(rank, *path) for rank, sub in enumerate(subtrees) for path in sub}
            if len(tree) <= nodes:
                yield frozenset(tree)


TREES = {size: list(all_trees(*size)) for size in ((5, 3, 3), (4, 4, 2), (6, 2, 2), (3, 1, 3))}


@st.composite
def vectors(draw: st.DrawFn, ranks: int = 3) -> tuple[float, ...]:
    """Vectors in any order, zeros included, with a sum of at most 1."""
    parts = draw(st.lists(st.integers(0, 20), min_size=1, max_size=ranks))
    return tuple(part / max(20, sum(parts)) for part in parts)


@given(vectors(), st.sampled_from(list(TREES)))
@example((0.0, 0.9), (5, 3, 3))
@example((0.1, 0.2, 0.7), (5, 3, 3))
@example((1.0,), (4, 4, 2))
def test_no_tree_is_better(vector: tuple[float, ...], size: tuple[int, int, int]) -> None:
    nodes, depth, ranks = size
    vector = vector[:ranks]
    found = best_tree(vector, nodes, depth)
    assert frozenset(found.paths) in TREES[size]
    assert expected_tokens(found.paths, vector) == pytest.approx(found.expected_tokens, rel=1e-12)
    best = max(
        expected_tokens(sorted(tree), vector)
        for tree in TREES[size]
        if all(rank < len(vector) for path in tree for rank in path)
    )
    assert found.expected_tokens == pytest.approx(best, rel=1e-12)


@given(vectors(), st.integers(1, 12), st.integers(1, 6))
def test_every_node_is_needed(vector: tuple[float, ...], nodes: int, depth: int) -> None:
    """No node can be left out, with what is below it and its younger siblings, at no loss."""
    found = best_tree(vector, nodes, depth)
    assert found.num_nodes <= nodes
    assert found.depth <= depth
    assert Paths(found.paths).num_nodes == found.num_nodes  # beginnings and elders are there
    leaves = [p for p in found.paths if not any(q[: len(p)] == p for q in found.paths if q != p)]
    for leaf in leaves:
        if (*leaf[:-1], leaf[-1] + 1) not in found.paths:
            rest = [path for path in found.paths if path != leaf]
            assert expected_tokens(rest, vector) < found.expected_tokens


def test_with_a_simulated_walk() -> None:
    """At every node a child is accepted by the vector, or none: tokens per pass as expected."""
    found = best_tree(VECTOR, 14, 5)
    nodes, dice, steps = set(found.paths), np.random.default_rng(0), 20_000
    draws = dice.choice(4, p=(*VECTOR, 1 - sum(VECTOR)), size=(steps, found.depth + 1))
    tokens = 0
    for row in draws.tolist():
        path: tuple[int, ...] = ()
        while (*path, row[len(path)]) in nodes:
            path = (*path, row[len(path)])
        tokens += len(path) + 1
    tolerance = found.depth * math.sqrt(math.log(2 / ALARM) / (2 * steps))
    assert tokens / steps == pytest.approx(found.expected_tokens, abs=tolerance)


def test_a_sure_first_rank_makes_a_chain() -> None:
    assert best_tree((1.0, 0.0), 5, 9).paths == tuple((0,) * depth for depth in range(1, 6))
    assert best_tree((0.5,), 9, 3).expected_tokens == pytest.approx(1 + 0.5 + 0.25 + 0.125)


def test_one_level_takes_the_ranks_in_order() -> None:
    assert best_tree((0.3, 0.3, 0.3), 9, 1).paths == ((0,), (1,), (2,))
    assert best_tree((0.0, 0.0), 9, 9) == best_tree((0.0,), 1, 1)
    assert best_tree((0.0, 0.0), 9, 9).paths == ()


def test_a_large_tree() -> None:
    """It takes a third of a second; a search through all trees would not end before the timeout."""
    vector = [0.5 * 0.5**rank for rank in range(16)]
    found = best_tree(vector, 128, 16)
    assert found.num_nodes == 128
    assert found.expected_tokens == pytest.approx(expected_tokens(found.paths, vector))


@pytest.mark.parametrize(
    ("vector", "message"),
    [
        ((), "acceptance vector: must be probabilities"),
        ((0.5, -0.1), "acceptance vector: must be probabilities"),
        ((math.nan,), "acceptance vector: must be probabilities"),
        ((0.7, 0.4), "acceptance vector: must sum to at most 1, as one child at most is accepted"),
    ],
)
def test_wrong_vectors(vector: tuple[float, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        best_tree(vector, 3, 3)
    with pytest.raises(ConfigError, match=message):
        expected_tokens([(0,)], vector)


@pytest.mark.parametrize(("nodes", "depth"), [(0, 3), (3, 0), (-1, 1), (2.5, 1), (True, 1)])
def test_wrong_sizes(nodes: int, depth: int) -> None:
    for solve in (best_tree, best_widths):
        with pytest.raises(ConfigError, match=r"max_(nodes|depth): must be a whole number"):
            solve(VECTOR, nodes, depth)


# Full trees


@given(vectors(), st.integers(1, 20), st.integers(1, 4))
def test_no_full_tree_is_better(vector: tuple[float, ...], nodes: int, depth: int) -> None:
    widths, value = best_widths(vector, nodes, depth)
    ranks = range(1, len(vector) + 1)
    fitting = [
        tree
        for levels in range(1, depth + 1)
        for tree in product(ranks, repeat=levels)
        if Widths(tree).num_nodes <= nodes
    ]
    best = max((expected_tokens(full_paths(tree), vector) for tree in fitting), default=1.0)
    assert value == pytest.approx(best, rel=1e-12)
    assert widths == () or widths in fitting
    assert value == pytest.approx(expected_tokens(full_paths(widths), vector), rel=1e-12)
    assert value <= best_tree(vector, nodes, depth).expected_tokens * (1 + 1e-12)


def full_paths(widths: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(product(*(range(width) for width in widths))) if widths else []


# The size


@given(
    vectors(),
    st.integers(1, 9),
    st.integers(1, 4),
    st.floats(0, 0.5),
    st.floats(0, 0.3),
    st.floats(0.5, 1.5),
)
def test_no_size_is_faster(
    vector: tuple[float, ...], nodes: int, depth: int, level: float, slope: float, bend: float
) -> None:
    """By brute force over all sizes, each charged for the nodes and levels its tree really has."""
    costs = CostCurve({1: 1.0, 4: bend, 10: bend + slope})
    found = best_size(vector, costs, nodes, depth, level)
    rates = [1.0]
    for n, d in product(range(1, nodes + 1), range(1, depth + 1)):
        tree = best_tree(vector, n, d)
        seconds = level * tree.depth + costs(1 + tree.num_nodes)
        rates.append(tree.expected_tokens / seconds)
    assert found.expected_tokens / found.seconds == pytest.approx(max(rates), rel=1e-9)
    if found.nodes:
        tree = best_tree(vector, found.nodes, found.depth)
        assert (tree.num_nodes, tree.depth) == (found.nodes, found.depth)
        assert tree.expected_tokens == found.expected_tokens


def test_costs_decide_the_size() -> None:
    flat = CostCurve({1: 1.0, 128: 1.0})
    steep = CostCurve({1: 1.0, 2: 2.0, 128: 128.0})
    assert best_size(VECTOR, flat, 100, 16, 0.0).nodes == 100
    assert best_size(VECTOR, flat, 100, 16, 0.2).depth < best_size(VECTOR, flat, 100, 16, 0).depth
    none = best_size(VECTOR, steep, 100, 16, 0.0)
    assert (none.nodes, none.depth, none.expected_tokens, none.seconds) == (0, 0, 1.0, 1.0)
    with pytest.raises(ConfigError, match="draft_cost"):
        best_size(VECTOR, flat, 3, 3, -1.0)


# Measurement

PROMPTS = [[3, 5, 7, 3, 5, 7], [11, 2]]
TOKENS = 40


def small(seed: int = 0) -> PreTrainedModel:
    """So few tokens that one model often guesses another one's."""
    return tiny_model(initializer_range=0.12, seed=seed, vocab_size=12)


def laboratory(ranks: int, **fields: object) -> LLM:
    given = {"model": small(seed=1), **fields}
    config = one_level(SpeculativeConfig.parse(given), ranks)
    return LLM(small(), speculative_config=config)


def ranks_by_hand(prompt: list[int], ranks: int) -> list[int | None]:
    """The rank of the target's token among the draft model's, at every step, from their logits."""
    models = [small(seed) for seed in (0, 1)]
    text, found = list(prompt), []

    def after(model: torch.nn.Module) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = model(input_ids=torch.tensor([text])).logits[0, -1]
        return logits

    while len(text) - len(prompt) < TOKENS:
        if len(text) - len(prompt) < TOKENS - 1:  # the last token is not worth a draft
            best = after(models[1]).topk(ranks).indices.tolist()
            token = int(after(models[0]).argmax())
            found.append(best.index(token) if token in best else None)
            if token in best:
                text.append(token)
        text.append(int(after(models[0]).argmax()))
    return found


def test_ranks_are_those_of_the_logits() -> None:
    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    found = measure_acceptance(laboratory(3), PROMPTS, params, 3)
    expected = [rank for prompt in PROMPTS for rank in ranks_by_hand(prompt, 3)]
    assert found.drafts == len(expected)
    assert found.accepted == tuple(expected.count(rank) for rank in range(3))
    assert sum(found.accepted) > 3  # else the test shows nothing
    assert found.draft_seconds > 0


def test_a_drafter_that_is_the_target_is_right_at_once() -> None:
    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    model = small()
    found = measure_acceptance(laboratory(4, model=model), PROMPTS, params, 4)
    assert found.vector == (1.0, 0.0, 0.0, 0.0)
    assert found.errors == (0.0,) * 4
    assert best_tree(found.vector, 8, 3).paths == ((0,), (0, 0), (0, 0, 0))


def test_sampled_children_are_drawn() -> None:
    params = SamplingParams(temperature=1, seed=1, max_tokens=TOKENS)
    model = small()
    found = measure_acceptance(
        laboratory(2, model=model, acceptance="rejection"), PROMPTS, params, 2
    )
    assert found.vector == (1.0, 0.0)  # p is q, so that the first draw is always kept


def test_errors_are_binomial() -> None:
    found = Acceptance((30, 10), 100, 0.1)
    assert found.vector == (0.3, 0.1)
    assert found.errors == pytest.approx((math.sqrt(0.21 / 100), math.sqrt(0.09 / 100)))


def test_a_rank_counts_elder_siblings() -> None:
    llm = laboratory(3)
    (result,) = llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=TOKENS))
    seen = {accepted_rank(step) for step in result.outputs[0].trace if step.drafted}
    assert seen <= {None, 0, 1, 2}
    assert len(seen) > 1


def test_one_level_keeps_what_else_was_asked_for() -> None:
    given = SpeculativeConfig.parse(
        {
            "method": "early_exit",
            "exit_layer": 1,
            "acceptance": "rejection",
            "controller": "heuristic",
            "num_speculative_tokens": 9,
        }
    )
    config = one_level(given, 4)
    assert config.as_dict() == {
        **given.as_dict(),
        "tree": [4],
        "num_speculative_tokens": 4,
        "controller": {"rule": "fixed"},
    }


def test_methods_without_trees_are_refused() -> None:
    with pytest.raises(ConfigError, match="method 'ngram' takes no tree: give a draft model, or"):
        one_level(SpeculativeConfig(method="ngram"), 4)


def test_nothing_drafted_is_told() -> None:
    params = SamplingParams(temperature=0, max_tokens=1)
    with pytest.raises(ConfigError, match="drafted nothing on these prompts"):
        measure_acceptance(laboratory(2), PROMPTS, params, 2)


def test_costs_are_those_of_the_target() -> None:
    costs = pass_costs(laboratory(2))
    assert costs.measured
    assert costs(1) > 0


# Files


def test_a_tree_comes_back_from_its_file(tmp_path: Path) -> None:
    found = best_tree(VECTOR, 9, 4)
    file = TreeFile(found.paths, VECTOR, found.expected_tokens, "draft_model", "a model")
    path = tmp_path / "tree.json"
    path.write_text(json.dumps(file.as_dict()))
    assert TreeFile.load(path) == file
    options = TreeOptions.model_validate({"tree": str(path)})
    assert options.tree == found.paths
    assert options.default_num_speculative_tokens() == 9


def test_a_file_needs_its_paths_only(tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    path.write_text('{"format": "tokenleap-tree-1", "paths": [[0, 1]]}')
    assert TreeFile.load(path) == TreeFile(((0, 1),))


@pytest.mark.parametrize("field", ['"acceptance": 3', '"expected_tokens": "x"', '"method": 1'])
def test_a_damaged_origin_is_told(tmp_path: Path, field: str) -> None:
    path = tmp_path / "tree.json"
    path.write_text(f'{{"format": "tokenleap-tree-1", "paths": [[0]], {field}}}')
    with pytest.raises(TokenleapError, match="is a damaged tree"):
        TreeFile.load(path)
