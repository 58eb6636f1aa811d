"""`rest`: the trie of what followed, its chains and trees; files: `test_text_files.py`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.drafting import draft_of, request_of
from tests.matrix import LOSSLESS, PROMPTS, takes_any_tree, tiny_llm
from tests.tiny import reference_greedy, tiny_model
from tokenleap import ConfigError, SamplingParams
from tokenleap.control import Budget
from tokenleap.core.tree import Draft, TokenTree
from tokenleap.drafters.options import RestOptions
from tokenleap.drafters.text.datastore import RestDrafter, index_texts, spread

V = 40
TEXTS = [
    [1, 2, 3, 4, 5],
    [1, 2, 3, 4, 6],
    [1, 2, 3, 7],
    [9, 2, 8, 8, 8],
    [2],
]


def propose(text: list[int], budget: Budget = Budget(10, 10), **fields: Any) -> Draft:  # noqa: B008
    drafter = RestDrafter(index_texts(TEXTS, V), RestOptions(datastore="given", **fields))
    (draft,) = drafter.propose([request_of(text, vocab_size=V + 9)], [budget])
    return draft


def drafted(text: list[int], **fields: Any) -> list[int]:
    return list(propose(text, **fields).tree.tokens[1:])


def test_the_most_frequent_continuation_of_the_longest_suffix() -> None:
    assert drafted([0, 1, 2]) == [3, 4, 5]  # the smaller one of two as frequent
    assert drafted([0, 9, 2]) == [8, 8, 8]  # though 3 follows 2 more often
    assert drafted([5, 5, 2], min_match=1) == [3, 4, 5]
    assert drafted([3, 4, 6]) == []  # nothing follows
    assert drafted([2, 3, 4], budget=Budget(1, 9)) == [5]
    assert drafted([1, 2, 3], budget=Budget(9, 1)) == [4]


def test_the_range_of_lengths() -> None:
    assert drafted([5, 5, 2]) == []
    assert drafted([0, 1, 2], min_match=3) == []
    assert drafted([5, 1, 2], min_match=2) == [3, 4, 5]
    assert drafted([0, 9, 2], min_match=1, max_match=1) == [3, 4, 5]
    assert drafted([2], min_match=1) == [3, 4, 5]


def test_tokens_that_are_not_in_the_datastore() -> None:
    assert drafted([1, 2, 39]) == []
    assert drafted([1, 2, V], min_match=1) == []  # what separates the texts


def test_a_trie_by_weight() -> None:
    tree = propose([0, 1, 2], branching=True).tree
    assert tree == TokenTree((2, 3, 4, 7, 5, 6), (-1, 0, 1, 1, 2, 2))
    tree = propose([0, 1, 2], branching=True, budget=Budget(3, 10)).tree
    assert tree == TokenTree((2, 3, 4, 7), (-1, 0, 1, 1))
    tree = propose([0, 1, 2], branching=True, budget=Budget(9, 1)).tree
    assert tree == TokenTree((2, 3), (-1, 0))


@pytest.mark.parametrize("branching", [False, True])
def test_a_budget_with_thresholds(branching: bool) -> None:
    """After 1 2: 3 always, 4 twice of three times, then 5 or 6 in halves."""
    for budget, length in (
        (Budget(9, 9, 0.5), 5 if branching else 3),
        (Budget(9, 9, 0.7), 3 if branching else 2),
        (Budget(9, 9, 0.0, 0.7), 3 if branching else 2),
        (Budget(9, 9, 0.0, 1.0), 3 if branching else 2),
    ):
        assert propose([0, 1, 2], budget, branching=branching).tree.num_drafted == length
    assert propose([0, 1, 2], Budget(0, 0), branching=branching).tree.num_drafted == 0
    assert propose([0, 1, 2], Budget(5, 0), branching=branching).tree.num_drafted == 0


@pytest.mark.parametrize("seed", range(10))
def test_trees_against_counting(seed: int) -> None:
    """Weights are shares of all occurrences; the heaviest strings are drafted."""
    dice = random.Random(seed)
    texts = [[dice.choice([0, 0, 1, 2]) for _ in range(40)] for _ in range(3)]
    options = RestOptions(datastore="given", branching=True, max_match=2, max_hits=10_000)
    drafter = RestDrafter(index_texts(texts, V), options)
    draft = draft_of(drafter, request_of([3, 0, 1]), 12, 4)
    starts = [(t, i + 2) for t in texts for i in range(len(t)) if t[i : i + 2] == [0, 1]]
    strings = [tuple(t[i : i + n]) for t, i in starts for n in range(1, 5) if i + n <= len(t)]
    weights = {string: strings.count(string) for string in strings}
    paths = [tuple(draft.tree.path_tokens(node)) for node in range(1, len(draft.tree))]
    assert len(set(paths)) == 12
    assert [weights[path] for path in paths] == sorted(weights.values(), reverse=True)[:12]


def test_occurrences_are_read_at_equal_distances() -> None:
    assert list(spread(range(5, 8), 3)) == [5, 6, 7]
    assert list(spread(range(10, 20), 4)) == [10, 12, 15, 17]
    assert list(spread(range(0), 4)) == []
    assert drafted([0, 1, 2], max_hits=1) == [3, 4, 5]
    assert propose([0, 1, 2], branching=True, max_hits=1).tree.is_chain


# With a model


def store_of(path: Path, outputs: list[list[int]]) -> str:
    index_texts(outputs, vocab_size=96).save(path)
    return str(path)


def test_a_text_that_is_known_takes_few_passes(tmp_path: Path) -> None:
    model = tiny_model()
    output = reference_greedy(model, PROMPTS[0], 40)
    store = store_of(tmp_path / "a", [PROMPTS[0] + output])
    llm = tiny_llm(model, "rest", gamma=9, datastore=store)
    (answer,) = llm.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=40))
    assert list(answer.token_ids) == output
    assert answer.metrics.target_passes <= 5


@pytest.mark.parametrize("rule", [rule for rule in LOSSLESS if takes_any_tree(rule)])
def test_trees_keep_the_output(rule: str, tmp_path: Path) -> None:
    model = tiny_model()
    greedy = SamplingParams(temperature=0, max_tokens=30)
    plain = [o.token_ids for o in tiny_llm(model).generate(PROMPTS, greedy)]
    dice = random.Random(0)
    altered = [[t if dice.random() < 0.9 else 1 for t in text] for text in plain * 4]
    store = store_of(tmp_path / "a", altered)
    llm = tiny_llm(model, "rest", rule, gamma=12, datastore=store, branching=True)
    outputs = llm.generate(PROMPTS, greedy)
    assert [o.token_ids for o in outputs] == plain
    steps = [step for o in outputs for step in o.trace.steps]
    assert any(len(set(step.parents)) < len(step.parents) for step in steps)
    assert sum(o.metrics.num_accepted_tokens for o in outputs) > 0


# Bad input


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"datastore": ""}, "'rest' needs 'datastore': a file made by 'tokenleap datastore build'"),
        ({"max_match": 1}, r"min_match \(2\) is larger than max_match \(1\)"),
        ({"max_match": 0}, "max_match"),
        ({"min_match": 0}, "min_match"),
        ({"max_hits": 0}, "max_hits"),
        ({"branching": "perhaps"}, "branching"),
    ],
)
def test_wrong_options(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RestOptions(**{"datastore": "a", **fields})
