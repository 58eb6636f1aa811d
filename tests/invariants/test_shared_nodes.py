"""Equal draws below the same path share a node: by enumeration, and in real drafts.

The output still has exactly the target's distribution, and a rule accepts what it would accept if
every draw had a node of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.drafting import drafter_of
from tests.enumeration import (
    Context,
    DistributionOf,
    Outcomes,
    chains,
    continuations,
    decisions,
    distance,
    output_distribution,
    random_distributions,
)
from tests.matrix import BRANCHING, PROMPTS, tiny_llm
from tests.tiny import CONTEXT, VOCAB_SIZE, tiny_model
from tokenleap import SamplingParams
from tokenleap.control import Budget
from tokenleap.core.acceptance import RULES
from tokenleap.core.acceptance.rules import Rejection
from tokenleap.core.distribution import Distribution
from tokenleap.core.tree import Draft, TokenTree, chain
from tokenleap.decode import Outcome
from tokenleap.drafters.base import Drafter
from tokenleap.drafters.combine import merge
from tokenleap.request import Request

COUNTING = [name for name, rule in RULES.items() if rule.counts_draws]
LOSSLESS = [name for name in COUNTING if RULES[name].lossless]
SHAPES = pytest.mark.parametrize(("width", "depth", "vocabulary"), [(3, 1, 3), (2, 2, 2)])


def shared_trees(q_of: DistributionOf, width: int, depth: int) -> Iterator[tuple[Draft, float]]:
    """Every node above `depth` has `width` independent draws; equal ones share a node."""

    def grow(
        tree: TokenTree, draws: list[tuple[int, Distribution]], weight: float, node: int
    ) -> Iterator[tuple[Draft, float]]:
        if node == len(tree) or tree.depths[node] == depth:
            yield Draft.drawn(tree, draws), weight
            return
        q = q_of(tuple(tree.path_tokens(node)))
        for tokens, chance in continuations(lambda _: q, (), width):
            distinct = list(dict.fromkeys(tokens))
            parents = (*tree.parents, *(node for _ in distinct))
            grown = TokenTree((*tree.tokens, *distinct), parents)
            added = [(len(tree) + distinct.index(token), q) for token in tokens]
            yield from grow(grown, [*draws, *added], weight * chance, node + 1)

    yield from grow(chain([0]), [], 1.0, 0)


def separate(draft: Draft) -> Draft:
    """The same draws with a node each; below the nodes of equal draws, the same draws follow."""
    tokens, parents = [draft.tree.tokens[0]], [-1]
    distributions: list[Distribution] = []
    level = [(0, 0)]  # a node of the result, and the node that it comes from
    while level:
        below = []
        for place, node in level:
            for child, q in draft.tries(node):
                below.append((len(tokens), child))
                tokens.append(draft.tree.tokens[child])
                parents.append(place)
                distributions.append(q)
        level = below
    return Draft(TokenTree(tuple(tokens), tuple(parents)), tuple(distributions))


def cut(draft: Draft, limit: int) -> Draft:
    """The first draws, as `ModelDrafter` keeps them."""
    draws = list(draft.all_draws)[:limit]
    size = 1 + max((node for node, _ in draws), default=0)
    tree = TokenTree(draft.tree.tokens[:size], draft.tree.parents[:size])
    return Draft.drawn(tree, draws)


def committed(rule: str, draft: Draft, p: DistributionOf) -> Outcomes:
    """The committed tokens of a step, with their probabilities."""
    outcomes: Outcomes = defaultdict(float)
    for accepted, weight in decisions(RULES[rule](), draft, p):
        outcomes[*draft.tree.path_tokens(accepted.last), accepted.token] += weight
    return outcomes


def mean_accepted(rule: str, drafts: Iterator[tuple[Draft, float]], p: DistributionOf) -> float:
    return sum(
        chance * weight * len(accepted.path)
        for draft, chance in drafts
        for accepted, weight in decisions(RULES[rule](), draft, p)
    )


@pytest.mark.parametrize("rule", LOSSLESS)
@SHAPES
def test_output_has_the_targets_distribution(
    rule: str, width: int, depth: int, vocabulary: int
) -> None:
    p, q = random_distributions(vocabulary, 1), random_distributions(vocabulary, 101)
    drafts = shared_trees(q, width, depth)
    outcomes = output_distribution(RULES[rule](), drafts, p, length=depth + 1)
    assert sum(outcomes.values()) == pytest.approx(1)
    assert distance(outcomes, p, depth + 1) < 1e-6


@pytest.mark.parametrize("rule", ["rejection", "k_sequential"])
@pytest.mark.parametrize("limit", [1, 3, 5])
def test_a_cut_by_the_number_of_draws_keeps_it(rule: str, limit: int) -> None:
    p, q = random_distributions(2, 2), random_distributions(2, 102)
    drafts = ((cut(draft, limit), chance) for draft, chance in shared_trees(q, 2, 2))
    assert distance(output_distribution(RULES[rule](), drafts, p, length=3), p, 3) < 1e-6


def test_a_cut_by_the_number_of_nodes_would_not() -> None:
    """To drop a third draw only if it needs a third node is to drop it because of its token."""

    def kept(q: DistributionOf) -> Iterator[tuple[Draft, float]]:
        for draft, chance in shared_trees(q, 3, 1):
            draws = [draw for draw in draft.all_draws if draw[0] <= 2]
            size = min(3, len(draft.tree))
            tree = TokenTree(draft.tree.tokens[:size], draft.tree.parents[:size])
            yield Draft.drawn(tree, draws), chance

    errors = []
    for seed in range(2):
        p, q = random_distributions(5, seed, 0.5), random_distributions(5, seed + 100, 0.5)
        errors.append(distance(output_distribution(Rejection(), kept(q), p, length=1), p, 1))
    assert max(errors) > 0.001


@pytest.mark.parametrize("rule", COUNTING)
@SHAPES
def test_a_rule_accepts_what_it_would_of_separate_nodes(
    rule: str, width: int, depth: int, vocabulary: int
) -> None:
    p, q = random_distributions(vocabulary, 3), random_distributions(vocabulary, 103)
    saved = 0
    for draft, _ in shared_trees(q, width, depth):
        apart = separate(draft)
        saved += len(apart.tree) - len(draft.tree)
        assert committed(rule, draft, p) == pytest.approx(committed(rule, apart, p), abs=1e-9)
        for accepted, _ in decisions(RULES[rule](), draft, p):
            assert len(set(accepted.rejected)) == len(accepted.rejected)
            assert not {*accepted.path} & {*accepted.rejected}
    assert saved > 0


def sequences(qs: Sequence[DistributionOf], length: int) -> Iterator[tuple[list[Draft], float]]:
    """One chain from each q, drawn independently."""
    if not qs:
        yield [], 1.0
        return
    for first, chance in chains(qs[0], length):
        for others, weight in sequences(qs[1:], length):
            yield [first, *others], chance * weight


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
@pytest.mark.parametrize("seeds", [(4, 5), (4, 4, 4)])
@pytest.mark.parametrize("limit", [2, 9])
def test_merged_sequences_are_lossless(rule: str, seeds: tuple[int, ...], limit: int) -> None:
    """SpecInfer's trie of several drawn sequences, of one drafter or of several."""
    vocabulary = 5 - len(seeds)
    p = random_distributions(vocabulary, 1)
    qs = [random_distributions(vocabulary, seed) for seed in seeds]
    drafts = ((merge(several, limit, shared=True), chance) for several, chance in sequences(qs, 2))
    outcomes = output_distribution(RULES[rule](), drafts, p, length=3)
    assert distance(outcomes, p, 3) < 1e-6


def test_merged_sequences_are_accepted_further() -> None:
    """Below a shared node, the draws of all sequences through it are tried."""
    p, q = random_distributions(3, 1), random_distributions(3, 4)
    means = [
        mean_accepted(
            "rejection",
            ((merge(several, 9, shared=shared), w) for several, w in sequences([q, q], 2)),
            p,
        )
        for shared in (False, True)
    ]
    assert means[1] > means[0] + 0.001


def test_what_a_draft_keeps_and_says() -> None:
    one, other = random_distributions(4, 1)(()), random_distributions(4, 2)(())
    tree = TokenTree((0, 1, 2, 3), (-1, 0, 0, 1))
    draft = Draft.drawn(tree, [(1, one), (2, one), (1, other), (3, one)])
    assert list(draft.tries(0)) == [(1, one), (2, one), (1, other)]
    assert list(draft.tries(1)) == [(3, one)]
    assert list(draft.tries(3)) == []
    assert draft.q_of(1) is one
    assert draft.only([1]).draws == ((1, one), (1, other))
    assert Draft.drawn(tree, [(1, one), (2, one), (3, one)]).draws == ()
    plain = Draft(tree, (one, other, one))
    assert list(plain.tries(0)) == [(1, one), (2, other)]


# In real drafts

DRAWS: dict[str, Any] = {"tree": [4, 2, 2], "expansion": "sample_with_replacement", "gamma": None}
SAMPLED = SamplingParams(temperature=0.7, seed=3, max_tokens=16)


def drafted(
    monkeypatch: pytest.MonkeyPatch, rule: str, fields: dict[str, Any], counts: bool
) -> tuple[list[tuple[int, ...]], int]:
    """The outputs, and the number of drafted nodes."""
    monkeypatch.setattr(RULES[rule], "counts_draws", counts)
    llm = tiny_llm(tiny_model(), "draft_model", rule, **fields)
    results = llm.generate(PROMPTS[:2], SAMPLED)
    nodes = sum(result.outputs[0].metrics.num_draft_tokens for result in results)
    return [result.token_ids for result in results], nodes


@pytest.mark.parametrize("rule", ["coupled", "rejection", "k_sequential"])
def test_the_same_tokens_with_fewer_nodes(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    apart, many = drafted(monkeypatch, rule, DRAWS, counts=False)
    shared, fewer = drafted(monkeypatch, rule, DRAWS, counts=True)
    assert shared == apart
    assert fewer < 0.95 * many


def draft_of(temperature: float, budget: Budget) -> Draft:
    llm = tiny_llm(tiny_model(), "draft_model", "rejection", **DRAWS)
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=99)
    request = Request(PROMPTS[0], params, vocab_size=VOCAB_SIZE, max_model_len=CONTEXT)
    (draft,) = drafter_of(llm).propose([request], [budget])
    return draft


def test_a_greedy_tree_of_draws_is_a_chain() -> None:
    draft = draft_of(0, Budget(99, 99))
    assert draft.tree.is_chain
    assert [len(list(draft.tries(node))) for node in range(4)] == [4, 2, 2, 0]


def test_a_budget_counts_draws() -> None:
    whole = draft_of(0.7, Budget(99, 99))
    assert len(list(whole.all_draws)) > whole.tree.num_drafted
    for nodes in range(1, 9):
        part = draft_of(0.7, Budget(nodes, 99))
        expected = cut(whole, nodes)
        assert part.tree == expected.tree
        assert [node for node, _ in part.all_draws] == [node for node, _ in expected.all_draws]


class Watch:
    """Wraps a drafter's `observe` and keeps the drafts that were verified."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, drafter: Drafter) -> None:
        self.drafts: list[Draft] = []
        original = drafter.observe

        def observe(outcomes: Sequence[Outcome], times: Any) -> None:
            self.drafts += [outcome.draft for outcome in outcomes]
            original(outcomes, times)

        monkeypatch.setattr(drafter, "observe", observe)


def drawing(seed: int) -> dict[str, Any]:
    model = tiny_model(seed=seed)
    fields = {"tree": [3, 2], "expansion": "sample_with_replacement"}
    return {"method": "draft_model", "model": model, **fields}


IN_TREES: list[tuple[str, dict[str, Any]]] = [
    *((method, {"gamma": 8}) for method in BRANCHING if method not in ("pad", "pass")),
    ("draft_model", DRAWS),
    ("draft_model", {"tree": [3, 2, 1], "gamma": None}),
    ("draft_model", {"tree": "dynamic", "gamma": 10}),
    ("early_exit", {**DRAWS}),
    ("suffix", {"branching": True, "gamma": 8}),
    ("ensemble", {"drafters": [drawing(1), drawing(2)], "gamma": 20}),
    ("hybrid", {"drafter": {"method": "eagle", "tree": [3, 2]}, "gamma": 12}),
]


@pytest.mark.parametrize(("method", "fields"), IN_TREES)
def test_no_node_is_computed_twice_in_a_pass(
    monkeypatch: pytest.MonkeyPatch, method: str, fields: dict[str, Any]
) -> None:
    llm = tiny_llm(tiny_model(), method, "rejection", **fields)
    watch = Watch(monkeypatch, drafter_of(llm))
    llm.generate(PROMPTS[:2], SAMPLED)
    assert any(draft.tree.num_drafted > 1 for draft in watch.drafts)
    for draft in watch.drafts:
        tree = draft.tree
        paths: set[Context] = {tuple(tree.path_tokens(node)) for node in range(len(tree))}
        assert len(paths) == len(tree)


def test_a_rule_that_does_not_count_draws_gets_a_node_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as one of another package that reads `TokenTree.children`."""
    monkeypatch.setattr(RULES["rejection"], "counts_draws", False)
    fields: dict[str, Any] = {"drafters": [drawing(1), drawing(1)], "gamma": 40}
    llm = tiny_llm(tiny_model(), "ensemble", "rejection", **fields)
    watch = Watch(monkeypatch, drafter_of(llm))
    llm.generate(PROMPTS[:2], SAMPLED)
    assert all(not draft.draws for draft in watch.drafts)
    assert any(len(set(draft.tree.tokens[1:4])) < 3 for draft in watch.drafts)
