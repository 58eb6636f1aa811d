"""`suffix`: length, frequency, branches, and what is remembered of earlier requests."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.drafters.test_suffix_trie import expected_counts, fill
from tests.drafting import draft_of, drafter_of, request_of, tokens_of
from tests.matrix import LOSSLESS, PROMPTS, takes_any_tree, tiny_llm
from tests.tiny import tiny_model
from tokenleap import ConfigError, SamplingParams
from tokenleap.control import Budget
from tokenleap.core.sequence import SHARED, Scope
from tokenleap.core.tree import Draft, TokenTree
from tokenleap.drafters.options import SuffixOptions
from tokenleap.drafters.suffix import (
    EarlierOutputs,
    SuffixDrafter,
    SuffixTrie,
    grow_chain,
    grow_tree,
)


def options(**fields: Any) -> SuffixOptions:
    """Options without the prefix of their names; a token of a draft per token of its match."""
    fields = {"max_spec_factor": 1.0, **fields}
    known = SuffixOptions.field_names()
    prefixed = {f"suffix_decoding_{name}": value for name, value in fields.items()}
    return SuffixOptions(**{n if n in known else n[16:]: v for n, v in prefixed.items()})


def propose(
    tokens: list[int],
    nodes: int = 16,
    depth: int = 16,
    drafter: SuffixDrafter | None = None,
    **fields: Any,
) -> Draft:
    drafter = drafter or SuffixDrafter(options(**fields))
    return draft_of(drafter, request_of(tokens), nodes, depth)


def drafted(tokens: list[int], **fields: Any) -> list[int]:
    return list(propose(tokens, **fields).tree.tokens[1:])


def test_the_draft_grows_with_the_match() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 50]
    assert drafted([*text, 3]) == [4]
    assert drafted([*text, 2, 3]) == [4, 5]
    assert drafted([*text, 1, 2, 3]) == [4, 5, 6]
    assert drafted([*text, 2, 3], max_spec_factor=2.5) == [4, 5, 6, 7, 8]
    assert drafted([*text, 3], max_spec_factor=0.5) == []
    assert drafted([*text, 1, 2, 3], nodes=2) == [4, 5]


def test_the_depth_bounds_match_and_draft_together() -> None:
    text = list(range(40))
    assert drafted([*text, *range(10)], max_tree_depth=6) == [10, 11, 12]
    assert drafted([*text, *range(10)], max_tree_depth=6, max_spec_factor=5) == [10, 11, 12, 13, 14]


def test_the_most_frequent_successor_wins_and_the_latest_new_one_on_a_tie() -> None:
    assert drafted([1, 5, 1, 6, 1, 6, 1, 5, 1, 6, 9, 1], nodes=1) == [6]
    assert drafted([1, 5, 1, 6, 1], nodes=1) == [6]


def test_a_longer_match_is_worth_more_than_a_frequent_short_one() -> None:
    tokens = [8, 1, 5, 9, 9, 2, 1, 6, 2, 1, 6, 3, 1, 6, 4, 8, 1]
    assert drafted(tokens) == [5, 9]


def test_improbable_tokens_are_not_drafted() -> None:
    tokens = [1, 2, 1, 3, 1, 4, 1, 5, 1]
    assert drafted(tokens, min_token_prob=0.3) == []
    assert drafted(tokens, min_token_prob=0.25) == [5]


@pytest.mark.parametrize("branching", [False, True])
def test_a_budget_with_thresholds_drafts_nothing_below_an_improbable_token(branching: bool) -> None:
    drafter = SuffixDrafter(options(branching=branching))
    request = request_of([1, 2, 3, 4, 1, 2, 3, 5, 9, 1, 2, 3])  # 4 and 5 are as probable
    for budget, length in (
        (Budget(3, 3), 3),
        (Budget(3, 3, 0.4), 3),
        (Budget(3, 3, 0.6), 2 if branching else 1),
        (Budget(3, 3, 0.0, 0.6), 2 if branching else 1),
    ):
        (draft,) = drafter.propose([request], [budget])
        assert draft.tree.num_drafted == length


def test_nothing_to_say() -> None:
    assert drafted([1, 2, 3, 4]) == []
    assert drafted([1, 1], nodes=0, depth=0) == []


# Trees


def test_branches_by_path_probability() -> None:
    tokens = [7, 1, 5, 7, 1, 5, 7, 1, 6, 7, 2, 7, 1]  # after 7 1: 5 5 6
    tree = propose(tokens, branching=True).tree
    assert tree == TokenTree((1, 5, 7), (-1, 0, 1))
    tree = propose(tokens, branching=True, max_spec_factor=2).tree
    assert tree == TokenTree((1, 5, 7, 1, 6), (-1, 0, 1, 2, 0))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("branching", [False, True])
def test_candidates_against_counting(seed: int, branching: bool) -> None:
    """Path probabilities, their order, the threshold and the score, from counts taken afresh."""
    dice = random.Random(seed)
    tokens = [dice.choice([0, 0, 1, 2]) for _ in range(60)]
    depth, least, nodes = 9, dice.choice([0.0, 0.1, 0.3]), dice.randrange(1, 12)
    trie = SuffixTrie(depth)
    text = fill(trie, tokens)
    known = expected_counts([tokens], depth)
    for length in range(1, min(4, len(text.cursors))):
        place, match = text.cursors[length], tuple(tokens[-length:])
        found = (
            grow_tree(place, nodes, Budget(nodes, 4), least)
            if branching
            else grow_chain(place, 4, Budget(4, 4), least)
        )
        tree = found.draft(tokens[-1], with_features=False).tree
        paths = [tuple(tree.path_tokens(node)) for node in range(1, len(tree))]
        assert len(set(paths)) == len(paths)

        def probability(path: tuple[int, ...], match: tuple[int, ...] = match) -> float:
            """Of the occurrences of `match` and its extensions that have a successor."""
            product = 1.0
            for i in range(len(path)):
                string = (*match, *path[:i])
                ends_here = tokens[len(tokens) - len(string) :] == list(string)
                product *= known[(*string, path[i])] / (known[string] - ends_here)
            return product

        values = [probability(path) for path in paths]
        assert all(value >= least for value in values)
        assert found.score == pytest.approx(sum(values))
        assert values == sorted(values, reverse=True)
        if branching:
            everything = sorted(
                (
                    probability(string[length:])
                    for string in known
                    if string[:length] == match and length < len(string) <= length + 4
                ),
                reverse=True,
            )
            best = [value for value in everything if value >= least][:nodes]
            assert values == pytest.approx(best)


@pytest.mark.parametrize(
    ("rule", "temperature"),
    [
        *((rule, 0) for rule in (*LOSSLESS, "typical") if takes_any_tree(rule)),
        ("coupled", 0.7),
        ("coupled", 1.5),
    ],
)
def test_trees_keep_the_output(rule: str, temperature: float) -> None:
    model = tiny_model()
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=40)
    plain = tiny_llm(model).generate(PROMPTS, params)
    fields = {"suffix_decoding_max_spec_factor": 4.0, "branching": True}
    llm = tiny_llm(model, "suffix", rule, gamma=12, **fields)
    for _ in range(2):  # the second time with the first time's outputs
        outputs = llm.generate(PROMPTS, params)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    steps = [step for o in outputs for step in o.trace.steps]
    assert any(len(set(step.parents)) < len(step.parents) for step in steps)
    assert sum(o.metrics.num_accepted_tokens for o in outputs) > 0


# Earlier outputs


def finished(drafter: SuffixDrafter, prompt: list[int], output: list[int]) -> None:
    """Let a request run and end."""
    request = request_of(prompt)
    drafter.propose([request], [Budget(4, 4)])
    request.token_ids += output
    drafter.release(request)


def test_earlier_outputs_are_searched_but_not_earlier_prompts() -> None:
    drafter = SuffixDrafter(options())
    finished(drafter, [1, 2, 3, 4], [5, 6, 7, 8])
    assert drafted([9, 5, 6], drafter=drafter) == [7, 8]
    assert drafted([9, 2, 3], drafter=drafter) == []


def test_the_better_of_own_and_earlier_text_is_taken() -> None:
    drafter = SuffixDrafter(options())
    finished(drafter, [1], [5, 6, 7, 8])
    own_is_longer = [4, 5, 6, 50, 51, 52, 4, 5, 6]
    assert drafted(own_is_longer, drafter=drafter) == [50, 51, 52]
    own_is_shorter = [6, 50, 51, 52, 4, 5, 6]
    assert drafted(own_is_shorter, drafter=drafter) == [7, 8]


@pytest.mark.parametrize("fields", [{"max_cached_requests": 0}, {"max_cached_tokens": 0}])
def test_nothing_is_remembered_with_a_bound_of_0(fields: dict[str, int]) -> None:
    drafter = SuffixDrafter(options(**fields))
    finished(drafter, [1], [5, 6, 7, 8])
    assert drafted([9, 5, 6], drafter=drafter) == []


def test_the_least_recently_used_output_goes_first() -> None:
    drafter = SuffixDrafter(options(max_cached_requests=2))
    finished(drafter, [1], [10, 11, 12])
    finished(drafter, [1], [20, 21, 22])
    assert drafted([10], drafter=drafter) == [11]  # used
    finished(drafter, [1], [30, 31, 32])
    assert drafted([10], drafter=drafter) == [11]
    assert drafted([20], drafter=drafter) == []
    assert drafted([30], drafter=drafter) == [31]


@pytest.mark.parametrize("max_tokens", [1, 7, 30])
def test_tokens_are_bounded(max_tokens: int) -> None:
    earlier = EarlierOutputs(options(max_cached_tokens=max_tokens, max_cached_requests=5))
    dice = random.Random(0)
    for _ in range(60):
        scope = Scope(dice.choice("abc"), private=dice.random() < 0.1)
        earlier.add([dice.randrange(3) for _ in range(dice.randrange(15))], scope)
        assert earlier.num_tokens <= max_tokens
        assert len(earlier) <= 5
        tries = [trie for salt in "abc" if (trie := earlier.trie(Scope(salt))) is not None]
        assert sum(trie.root.followed for trie in tries) == earlier.num_tokens
        assert all(trie.root.children for trie in tries), "what is empty is dropped"
        assert earlier.trie(Scope("a", private=True)) is None
    assert earlier.num_tokens > 0


def test_scopes_remember_for_themselves() -> None:
    drafter = SuffixDrafter(options())

    def drafted_in(scope: Scope) -> list[int]:
        request = request_of([9, 5, 6])
        request.scope = scope
        return tokens_of(drafter, request, 4)

    scopes = Scope("a"), Scope("b"), Scope("a", private=True)
    for scope, token in zip(scopes, (7, 8, 9), strict=True):
        request = request_of([1])
        request.scope = scope
        request.token_ids += [5, 6, token, token]
        drafter.release(request)
    assert [drafted_in(scope) for scope in scopes] == [[7, 7], [8, 8], []]
    assert drafted_in(Scope()) == drafted_in(Scope("c")) == []


@pytest.mark.parametrize("method", ["suffix", "recycle"])
def test_metrics_tell_what_came_from_earlier_requests(method: str) -> None:
    llm = tiny_llm(tiny_model(), method, gamma=12)
    params = SamplingParams(temperature=1, seed=3, max_tokens=40)
    first, second = (llm.generate([[1, 2, 3]], params)[0] for _ in range(2))
    assert second.token_ids == first.token_ids
    assert first.metrics.accepted_earlier_tokens == 0
    assert second.metrics.accepted_earlier_tokens > 20
    assert second.metrics.accepted_earlier_tokens <= second.metrics.num_accepted_tokens
    prompt = {"prompt_token_ids": [1, 2, 3], "cache_salt": "another"}
    (other,) = llm.generate([prompt], params)
    assert other.token_ids == first.token_ids
    assert other.metrics.accepted_earlier_tokens == 0
    assert other.metrics.target_passes == first.metrics.target_passes
    llm.reset_drafter_memory()
    (third,) = llm.generate([[1, 2, 3]], params)
    assert third.metrics.accepted_earlier_tokens == 0


def test_an_output_larger_than_the_store_keeps_its_end() -> None:
    earlier = EarlierOutputs(options(max_cached_tokens=3))
    earlier.add([1, 2, 3, 4, 5], SHARED)
    trie = earlier.trie(SHARED)
    assert trie is not None
    assert sorted(trie.root.children) == [3, 4, 5]


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tree_depth": 1},
        {"max_cached_requests": -1},
        {"max_cached_tokens": -1},
        {"max_spec_factor": 0},
        {"min_token_prob": 1.1},
        {"branching": "perhaps"},
    ],
)
def test_wrong_options(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        options(**fields)


@pytest.mark.parametrize(
    "method", ["suffix", "ensemble", "switch", "horizontal_cascade", "cascade"]
)
def test_earlier_outputs_are_forgotten_on_demand(method: str) -> None:
    """Those of `suffix` itself, and of one inside others."""
    suffix = {"method": "suffix"}
    fields: dict[str, dict[str, Any]] = {
        "suffix": {},
        "ensemble": {"drafters": [suffix, suffix]},
        "switch": {"drafters": [suffix, suffix]},
        "horizontal_cascade": {"drafters": [suffix, suffix], "tokens": [2, 2]},
        "cascade": {"drafter": suffix, "model": tiny_model()},
    }
    llm = tiny_llm(tiny_model(), method, **fields[method])
    params = SamplingParams(temperature=1, seed=1, max_tokens=24)

    def remembered() -> list[int]:
        llm.generate([[1, 2, 3]], params)
        return [len(drafter._earlier) for drafter in suffix_drafters(drafter_of(llm))]

    first = remembered()
    assert max(first) == 1
    assert max(remembered()) > 1
    llm.reset_drafter_memory()
    assert max(len(drafter._earlier) for drafter in suffix_drafters(drafter_of(llm))) == 0
    assert remembered() == first


def test_drafters_of_single_requests_forget_as_well() -> None:
    llm = tiny_llm(tiny_model())
    config = {"method": "suffix"}
    llm.generate([[1, 2, 3]], SamplingParams(seed=1, max_tokens=8), speculative_config=config)
    (strategy,) = llm.engine.strategies.kept()
    drafter = strategy.drafter
    assert isinstance(drafter, SuffixDrafter)
    assert len(drafter._earlier) == 1
    llm.reset_drafter_memory()
    assert len(drafter._earlier) == 0


def test_outputs_are_remembered_although_nobody_asked_and_not_what_was_taken_back() -> None:
    drafter = SuffixDrafter(options())
    never, back, again = (request_of([1, 2]) for _ in range(3))
    for request in (back, again):
        drafter.propose([request], [Budget(4, 4)])
        drafter.rewind(request)
    drafter.propose([again], [Budget(4, 4)])
    for request, kept in ((never, 1), (back, 1), (again, 2)):
        request.token_ids += [3, 4]
        drafter.release(request)
        assert len(drafter._earlier) == kept


def suffix_drafters(drafter: Any) -> list[SuffixDrafter]:
    """Itself, or those inside."""
    if isinstance(drafter, SuffixDrafter):
        return [drafter]
    inner = [*getattr(drafter, "inner", ()), *getattr(drafter, "_stages", ())]
    inner += [drafter._drafter] if hasattr(drafter, "_drafter") else []
    return [one for each in inner for one in suffix_drafters(each)]
