"""Lookups and trained drafts: which of the two, what is grafted, and that neither changes bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.control.worlds import request_of
from tests.drafting import drafter_of
from tests.enumeration import (
    chains,
    distance,
    most_likely,
    output_distribution,
    random_distributions,
    trees,
)
from tests.heads import tiny_head
from tests.matrix import PROMPTS
from tests.tiny import tiny_model
from tokenleap import LLM, ConfigError, SamplingParams
from tokenleap.control import Budget
from tokenleap.control.base import Fixed
from tokenleap.control.features import agreed, by_match, by_rank, disagreed
from tokenleap.control.lookup_models import HybridModel
from tokenleap.core.acceptance import RULES
from tokenleap.core.distribution import Distribution
from tokenleap.core.tree import Draft, TokenTree, chain
from tokenleap.drafters.base import Drafter, DrafterTraits
from tokenleap.drafters.combine import Hybrid, MoreTokens, graft
from tokenleap.request import Request

NGRAM = {"method": "ngram", "prompt_lookup_min": 1}
TREE = {"method": "eagle", "tree": "dynamic", "num_speculative_tokens": 8}


def hybrid(**fields: Any) -> LLM:
    config = {"method": "hybrid", "model": tiny_head(), "lookup": NGRAM, **fields}
    return LLM(tiny_model(), speculative_config=config)


class Says(Drafter):
    """Proposes the same tokens for every request, and counts for whom."""

    def __init__(self, tokens: Sequence[int], *, looks_up: bool, match: int = 1) -> None:
        self.traits = DrafterTraits(looks_up=looks_up)
        self._tokens, self._match = tokens, match
        self.asked: list[int] = []
        self.silent: set[int] = set()  # keys of requests for which it has nothing

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        self.asked += [request.key for request in batch]
        return [self._draft(r, budget.chain) for r, budget in zip(batch, budgets, strict=True)]

    def _draft(self, request: Request, length: int) -> Draft:
        tokens = () if request.key in self.silent else self._tokens[:length]
        features = by_match(self._match, len(tokens)) if self.traits.looks_up else ()
        return Draft.deterministic(chain([request.root, *tokens]), features)


def both(
    lookup: Sequence[int], trained: Sequence[int], match: int = 1
) -> tuple[Hybrid, Says, Says]:
    parts = Says(lookup, looks_up=True, match=match), Says(trained, looks_up=False)
    return Hybrid(*parts, 4), *parts


# Grafts

LOOKUP = Draft.deterministic(chain([0, 1, 2, 3, 4]), by_match(5, 4))


def test_a_lookup_goes_on_where_a_trained_chain_ends() -> None:
    made = graft(Draft.deterministic(chain([0, 1, 2])), LOOKUP, 9, siblings=False)
    assert made.tree == chain([0, 1, 2, 3, 4])
    assert made.features == (agreed(5), agreed(6), 7, 8)
    short = graft(Draft.deterministic(chain([0, 1, 2])), LOOKUP, 3, siblings=False)
    assert short.tree == chain([0, 1, 2, 3])


def test_where_they_differ_a_chain_stays_a_chain_and_a_tree_gets_a_branch() -> None:
    trained = Draft.deterministic(chain([0, 1, 7]))
    alone = graft(trained, LOOKUP, 9, siblings=False)
    assert alone.tree == trained.tree
    assert alone.features == (agreed(5), 0)
    branch = graft(trained, LOOKUP, 9, siblings=True)
    assert branch.tree == TokenTree((0, 1, 7, 2, 3, 4), (-1, 0, 1, 1, 3, 4))
    assert branch.features == (agreed(5), 0, disagreed(6), 7, 8)


def test_a_lookup_may_be_a_tree_too() -> None:
    tree = TokenTree((0, 1, 5, 2, 6), (-1, 0, 0, 1, 2))
    ranks = (by_rank(0), by_rank(1), by_rank(0), by_rank(0))
    made = graft(
        Draft.deterministic(chain([0, 1])), Draft.deterministic(tree, ranks), 9, siblings=True
    )
    assert made.tree == TokenTree((0, 1, 5, 2, 6), (-1, 0, 0, 1, 2))
    assert made.features == (agreed(ranks[0]), disagreed(ranks[1]), by_rank(0), by_rank(0))


def test_without_a_lookup_nothing_is_grafted() -> None:
    trained = Draft.deterministic(chain([0, 1]))
    assert graft(trained, Draft.empty(0), 9, siblings=True) is trained
    other = Draft.deterministic(chain([0, 8]), by_match(3, 1))
    assert graft(trained, other, 9, siblings=False) is trained


def test_sampled_nodes_keep_their_places_and_their_q() -> None:
    """Whatever their tokens: a token drawn twice is drafted twice (invariant 2)."""
    q = Distribution(torch.ones(9) / 9)
    drawn = Draft(TokenTree((0, 1, 1, 4), (-1, 0, 0, 1)), (q, q, q))
    for limit in (3, 4, 9):
        made = graft(drawn, LOOKUP, limit, siblings=True)
        assert made.tree.tokens[:4] == drawn.tree.tokens
        assert made.tree.parents[:4] == drawn.tree.parents
        assert all(made.q_of(node) is q for node in (1, 2, 3))
        assert made.tree.num_drafted == min(limit, 6)
        assert [made.q_of(node).certain for node in range(4, len(made.tree))] == [2, 3, 4][
            : limit - 3
        ]


@pytest.mark.parametrize("rule", ["rejection", "coupled", "block"])
@pytest.mark.parametrize("lookup", [(0, 1, 2, 0), (2, 2), (1, 0, 1)])
def test_grafted_chains_are_lossless(rule: str, lookup: tuple[int, ...]) -> None:
    """Enumerated: a sampled chain, continued by the lookup where it happens to agree."""
    p, q = random_distributions(3, 1), random_distributions(3, 2)
    found = Draft.deterministic(chain([0, *lookup]), by_match(2, len(lookup)))

    def drafts() -> Iterator[tuple[Draft, float]]:
        for drawn, weight in chains(q, 2):
            yield graft(drawn, found, 9, siblings=False), weight

    outcomes = output_distribution(RULES[rule](), drafts(), p, length=4)
    assert distance(outcomes, p, 4) < 1e-6


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_grafted_trees_are_lossless(rule: str) -> None:
    p, q, other = (random_distributions(3, seed) for seed in (1, 2, 3))
    found = Draft.deterministic(chain([0, 2, 1, 0]), by_match(2, 3))

    def drafts() -> Iterator[tuple[Draft, float]]:
        for drawn, weight in chains(q, 2):
            yield graft(drawn, found, 9, siblings=True), weight / 2
        for tree, weight in trees(other, most_likely, 2, 2):
            yield graft(tree, found, 9, siblings=True), weight / 2

    outcomes = output_distribution(RULES[rule](), drafts(), p, length=4)
    assert distance(outcomes, p, 4) < 1e-6


# The choice without a clock


@pytest.mark.parametrize(
    ("match", "tokens", "trained"), [(1, 4, True), (9, 4, False), (9, 1, True)]
)
def test_more_expected_tokens_win(match: int, tokens: int, trained: bool) -> None:
    budget = Budget(16, 16)
    found = Draft.deterministic(chain([0] * (1 + tokens)), by_match(match, tokens))
    (chosen,) = MoreTokens(4).choose([request_of()], [budget], [found])
    assert chosen == (budget if trained else Budget(0, 16))
    (nothing_found,) = MoreTokens(4).choose([request_of()], [budget], [Draft.empty(0)])
    assert nothing_found == budget


def test_only_requests_that_need_it_are_drafted_for() -> None:
    drafter, lookup, trained = both((5, 6, 7, 8), (5, 9), match=9)
    batch = [request_of(), request_of()]
    lookup.silent.add(batch[1].key)
    drafts = drafter.propose(batch, [Budget(16, 16)] * 2)
    assert trained.asked == [batch[1].key]
    assert [draft.tree.tokens[1:] for draft in drafts] == [(5, 6, 7, 8), (5, 9)]


def test_trained_drafts_have_their_own_limit() -> None:
    drafter, _, _ = both((), (1, 2, 3, 4, 5, 6))
    (draft,) = drafter.propose([request_of()], [Budget(16, 16)])
    assert draft.tree.tokens[1:] == (1, 2, 3, 4)
    assert drafter.level_sizes(16) == [1, 1, 1, 1]
    assert drafter.level_sizes(2) == [1, 1]


def test_where_nothing_is_drafted_the_lookup_stays() -> None:
    drafter, _, trained = both((5, 6), ())
    (draft,) = drafter.propose([request_of()], [Budget(16, 16)])
    assert trained.asked
    assert draft.tree.tokens[1:] == (5, 6)


# Inside an LLM

GREEDY = SamplingParams(temperature=0, max_tokens=24, logprobs=1)
SEEDED = SamplingParams(temperature=1.1, top_k=12, seed=4, max_tokens=24, logprobs=1)
CASES = [
    *(({"method": "eagle"}, each) for each in (None, "fixed", "heuristic", "confidence")),
    *((TREE, each) for each in (None, "fixed", "confidence")),
    *(({"method": "draft_model"}, each) for each in (None, "fixed", "confidence")),
]


@pytest.mark.parametrize(("drafter", "controller"), CASES)
def test_bits_are_those_of_plain_decoding(drafter: dict[str, Any], controller: str | None) -> None:
    """Greedy and sampled, in a batch."""
    params = [params for params in (GREEDY, SEEDED) for _ in PROMPTS]
    model = {"model": tiny_model(seed=1)} if drafter["method"] == "draft_model" else {}
    llm = hybrid(controller=controller, drafter=drafter, **model)
    plain = llm.generate(PROMPTS * 2, params, speculative_config={"method": "none"})
    for _ in range(2):
        made = llm.generate(PROMPTS * 2, params)
        assert all(output.metrics.drafter_failure is None for output in made)
        assert [o.token_ids for o in made] == [o.token_ids for o in plain]
        if drafter is not TREE:  # whose last bits may differ without a native runtime
            assert [o.logprobs for o in made] == [o.logprobs for o in plain]
        assert sum(o.metrics.num_draft_tokens for o in made) > 0 or controller is None


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({}, HybridModel),
        ({"controller": "cost_model"}, HybridModel),
        ({"acceptance": "rejection"}, Fixed),
        ({"acceptance": "typical"}, Fixed),
        ({"controller": "fixed"}, Fixed),
    ],
)
def test_only_the_default_controller_chooses_by_the_clock(
    fields: dict[str, Any], kind: type[object]
) -> None:
    llm = hybrid(**fields)
    strategy, drafter = llm.engine._speculation.default, drafter_of(llm)
    assert isinstance(drafter, Hybrid)
    assert type(strategy.controller) is kind
    chooser: object = drafter.chooser
    if kind is HybridModel:
        assert chooser is strategy.controller
    else:
        assert isinstance(chooser, MoreTokens)


@pytest.mark.parametrize("part", ["_lookup", "_trained"])
def test_a_part_that_fails_costs_only_its_request_the_drafts(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`test_hybrid_model.py` has the default controller, which might not draft for this one."""
    llm = hybrid(controller="fixed")
    inner = getattr(drafter_of(llm), part)
    propose = inner.propose

    def picky(batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        if any(list(request.prompt_ids) == PROMPTS[2] for request in batch):
            raise RuntimeError("not for this one")
        made: list[Draft] = propose(batch, budgets)
        return made

    monkeypatch.setattr(inner, "propose", picky)
    params = SamplingParams(temperature=0, max_tokens=80, logprobs=1)
    outputs = llm.generate(PROMPTS, params)
    plain = LLM(tiny_model()).generate(PROMPTS, params)
    assert [o.logprobs for o in outputs] == [o.logprobs for o in plain]
    failures = [output.metrics.drafter_failure for output in outputs]
    assert "not for this one" in str(failures[2])
    assert failures[:2] + failures[3:] == [None] * (len(PROMPTS) - 1)
    assert sum(output.metrics.num_draft_tokens for output in outputs) > 0


def test_options_pass_through() -> None:
    drafter = drafter_of(hybrid(drafter=TREE))
    assert isinstance(drafter, Hybrid)
    assert drafter.traits.drafts_trees
    assert sum(drafter.level_sizes(16)) == 8
    chains_only = drafter_of(hybrid(acceptance="block"))
    assert not chains_only.traits.drafts_trees
    static = drafter_of(hybrid(drafter={"method": "eagle", "tree": [2, 1]}))
    assert isinstance(static, Hybrid)
    assert static.level_sizes(16) == [2, 2]
    config = {"method": "hybrid", "model": tiny_head()}
    assert LLM(tiny_model(), speculative_config=config).speculative_config.gamma == 16


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": None}, "needs a trained head: set 'model'"),
        ({"drafter": {"tree": "dynamic"}}, "drafter needs a 'method'"),
        ({"drafter": {"method": "eagle", "model": "x"}}, "takes the 'model' of 'hybrid'"),
        ({"drafter": {"method": "eagle", "num_speculative_tokens": 0}}, "must be 1 to 256, got 0"),
        ({"drafter": {"method": "eagle", "widths": 3}}, "has no field 'widths'"),
        ({"drafter": {"method": "ngram_table"}}, "takes no draft model"),
        ({"drafter": {"method": "eagle", "controller": "fixed"}}, "belongs to the outer"),
        ({"lookup": {"method": "ngram_table"}}, "its method must look tokens up"),
        ({"lookup": {"method": "suffix", "branching": True}}, "its method must look tokens up"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        hybrid(**fields)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# With a draft model


def test_a_draft_model_is_continued_by_a_lookup() -> None:
    """The target as its own draft model, in text that repeats itself."""
    target = tiny_model()
    config = {
        "method": "hybrid",
        "model": LLM(target),
        "lookup": NGRAM,
        "drafter": {"method": "draft_model", "num_speculative_tokens": 2},
        "num_speculative_tokens": 9,
        "controller": "fixed",
    }
    llm = LLM(target, speculative_config=config)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    (output,) = llm.generate([PROMPTS[0]], params)
    lengths = {len(step.drafted) for step in output.trace}
    assert max(lengths) > 2
    assert 2 in lengths
    assert output.metrics.acceptance_rate > 0.5


def test_a_loaded_model_is_no_head() -> None:
    with pytest.raises(ConfigError, match="needs a trained head"):
        hybrid(model=tiny_model(seed=1))
    with pytest.raises(ConfigError, match="has no field 'tre'"):
        hybrid(model=tiny_model(seed=1), drafter={"method": "draft_model", "tre": 1})
