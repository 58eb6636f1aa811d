"""Trees lose the nodes that do not pay, by how often nodes of such probabilities were right."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from tests.control.worlds import cheap, cpu, flat, judged, learn, measured, request_of, steep
from tokenleap.control.cost_model import CostModel
from tokenleap.control.features import by_match
from tokenleap.control.lookup_models import HybridModel
from tokenleap.core.distribution import Distribution
from tokenleap.core.tree import Draft, TokenTree
from tokenleap.drafters.combine import graft

LEVELS = (3, 3, 1)
TREE = TokenTree((0, 1, 2, 3, 4, 5, 6, 7), (-1, 0, 0, 0, 1, 1, 2, 4))


def dear(positions: int) -> float:
    return 0.01 * (1 + 0.15 * (positions - 1))


def claimed(probabilities: Sequence[float], tree: TokenTree = TREE) -> Draft:
    """A draft of most probable tokens, each with this probability after its parent."""
    paths = [1.0]
    for parent, probability in zip(tree.parents[1:], probabilities, strict=True):
        paths.append(paths[parent] * probability)
    draft = Draft.deterministic(tree)
    return Draft(draft.tree, draft.q, path_probs=tuple(paths[1:]))


def model_of(seconds: Callable[[int], float]) -> CostModel:
    model = CostModel(sum(LEVELS), costs=measured(seconds), levels=LEVELS)
    model.budgets([request_of()], 1)
    return model


def right_of(draft: Draft, odds: Sequence[float], dice: random.Random) -> list[int]:
    """The path of a text that follows each node with this probability, given its parent."""
    path = [0]
    while True:
        draw, children = dice.random(), draft.tree.children[path[-1]]
        for child in children:
            draw -= odds[child - 1]
            if draw < 0:
                path.append(child)
                break
        else:
            return path[1:]


def test_a_node_stays_if_it_pays() -> None:
    """Nodes 1, 4 and 7 are probable. The cheaper nodes are, the more of the others stay."""
    draft = claimed([0.85, 0.08, 0.03, 0.85, 0.08, 0.5, 0.85])
    kept = {}
    for seconds in (steep, cpu, flat):
        model, request = model_of(seconds), request_of()
        (trimmed,) = model.trim([request], [draft], 1)
        kept[seconds] = trimmed.tree.tokens[1:]
        assert trimmed.is_one_hot
        assert len(trimmed.path_probs) == trimmed.tree.num_drafted
    assert kept == {steep: (), cpu: (1, 4, 7), flat: (1, 2, 3, 4, 5, 6, 7)}


def test_sampled_nodes_all_stay() -> None:
    """Dropping one for its probability would change the distribution (invariant 2)."""
    drawn = tuple(Distribution.one_hot(token) for token in TREE.tokens[1:])
    for draft in (Draft(TREE, drawn, path_probs=(0.01,) * 7), Draft.deterministic(TREE)):
        assert model_of(steep).trim([request_of()], [draft], 1) == [draft]


def test_claims_are_not_believed_for_long() -> None:
    """A drafter that is seldom right whatever it says has its nodes cut, and another one not."""
    claims = [0.6, 0.3, 0.1, 0.6, 0.3, 0.6, 0.6]
    sizes = dict[bool, list[int]]()
    for honest in (True, False):
        model, request, dice = model_of(dear), request_of(), random.Random(1)
        odds = claims if honest else [0.02] * 7
        sizes[honest] = []
        for _ in range(200):
            draft = claimed(claims)
            model.budgets([request], 1)
            (trimmed,) = model.trim([request], [draft], 1)
            path = right_of(draft, odds, dice)
            verified = [n for n in path if draft.tree.tokens[n] in trimmed.tree.tokens[1:]]
            places = trimmed.tree.walk(draft.tree.tokens[n] for n in verified)
            after = path[len(places)] if len(places) < len(path) else 0
            positions = len(trimmed.tree)
            learn(model, [judged(request, trimmed, places, after)], 0.0005, dear(positions))
            sizes[honest].append(trimmed.tree.num_drafted)
    assert sum(sizes[True][100:]) > 2 * 100
    assert sum(sizes[False][100:]) < 0.5 * 100


def test_what_is_cut_is_learnt_of() -> None:
    """Nodes that were cut turn out right, and come back."""
    model, request = model_of(cpu), request_of()
    draft = claimed([0.02] * 7)
    for step in range(60):
        model.budgets([request], 1)
        (trimmed,) = model.trim([request], [draft], 1)
        assert trimmed.tree.num_drafted or step < 50
        places = trimmed.tree.walk([1, 4, 7])
        after = [1, 4, 7][len(places)] if len(places) < 3 else 8
        outcome = judged(request, trimmed, places, after)
        learn(model, [outcome], 0.0005, cpu(len(trimmed.tree)))


def test_drafts_cost_what_was_drafted() -> None:
    """And not what was left of them."""
    model, request = model_of(cheap), request_of()
    draft = claimed([0.9, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01])
    for _ in range(20):
        model.budgets([request], 1)
        (trimmed,) = model.trim([request], [draft], 1)
        learn(model, [judged(request, trimmed, [])], 0.003, cheap(2))
    assert model._estimates.drafting.level == pytest.approx(0.001 / 0.0101, rel=0.2)


def test_a_hybrid_cuts_trees_and_lookups_together() -> None:
    """Looked-up tokens below a node of the tree stay if they pay, and improbable nodes do not."""
    model = HybridModel(16, costs=measured(cpu), levels=LEVELS)
    request = request_of()
    model.budgets([request], 1)
    found = Draft.deterministic(TokenTree((0, 1, 9, 10), (-1, 0, 1, 2)), by_match(3, 3))
    model.choose([request], [], [found])
    draft = graft(claimed([0.85, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02]), found, 16, siblings=True)
    assert draft.is_one_hot
    (trimmed,) = model.trim([request], [draft], 1)
    assert trimmed.tree.tokens == (0, 1, 9, 10)
    learn(model, [judged(request, trimmed, [1, 2, 3])], 0.001, cpu(4))
    assert model._trained._estimates.history(request).tried
