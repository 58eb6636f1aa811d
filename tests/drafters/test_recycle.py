"""The memory of `recycle`, and the tree that it makes of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import drafting
from tests.matrix import tiny_llm
from tests.tiny import tiny_model
from tokenleap import ConfigError, SamplingParams
from tokenleap.control.features import by_rank
from tokenleap.core.acceptance import Accepted
from tokenleap.core.acceptance.base import Origin
from tokenleap.core.sampler import TreeDistributions
from tokenleap.core.sequence import Scope
from tokenleap.core.tree import Draft, TokenTree, chain
from tokenleap.decode import Outcome, StepTimes
from tokenleap.drafters.lookahead import Memory, RecycleDrafter, most_probable
from tokenleap.drafters.options import RecycleOptions
from tokenleap.outputs import StreamedToken
from tokenleap.request import Request
from tokenleap.runtime.network import PassOutput

VOCAB = 16
TIMES = StepTimes(0.0, 0.0, 0.0)


def request_of(*tokens: int) -> Request:
    return drafting.request_of(tokens, vocab_size=VOCAB)


def logits_of(*best: int) -> torch.Tensor:
    """[V] of which these are the largest, in this order."""
    row = torch.zeros(VOCAB)
    for rank, token in enumerate(best):
        row[token] = float(VOCAB - rank)
    return row


def saw(request: Request, draft: Draft, path: tuple[int, ...], *rows: torch.Tensor) -> Outcome:
    logits = torch.stack(rows)
    distributions = TreeDistributions(logits, draft.tree, request.sampler, request.output_ids)
    tokens = [*(draft.tree.tokens[node] for node in path), 0]
    request.token_ids += tokens
    committed = tuple(StreamedToken(token, "", Origin.DRAFT) for token in tokens)
    return Outcome(
        request, draft, Accepted(path, 0, (), ""), committed, PassOutput(logits), distributions
    )


def propose(drafter: RecycleDrafter, request: Request, nodes: int, depth: int = 9) -> Draft:
    return drafting.draft_of(drafter, request, nodes, depth)


def test_what_was_probable_after_a_token_is_drafted_after_it() -> None:
    options = RecycleOptions(recycle_top_k=2, recycle_context=1)
    drafter, first = RecycleDrafter(options), request_of(1)
    assert propose(drafter, first, 4).tree.num_drafted == 0
    draft = Draft.deterministic(chain([1, 2, 3]))
    drafter.observe(
        [saw(first, draft, (1,), logits_of(2, 5), logits_of(7, 8), logits_of(9, 9))], TIMES
    )
    later = propose(drafter, request_of(1), 4, depth=2)
    # 3 was turned down: it is unknown what the target would have said after it.
    assert later.tree == TokenTree((1, 2, 7, 5, 8), (-1, 0, 1, 0, 1))
    assert later.features == (by_rank(0), by_rank(0), by_rank(1), by_rank(1))
    assert [distribution.certain for distribution in later.q] == [2, 7, 5, 8]
    assert propose(drafter, request_of(3), 4).tree.num_drafted == 0


def test_the_latest_pass_counts() -> None:
    drafter = RecycleDrafter(RecycleOptions(recycle_top_k=1))
    for best in (4, 6):
        learn(drafter, [1], best)
    assert propose(drafter, request_of(1), 1).tree.tokens == (1, 6)


def test_longer_contexts_count_for_more_and_shorter_ones_are_there_for_the_rest() -> None:
    drafter = RecycleDrafter(RecycleOptions(recycle_top_k=1, recycle_context=2))
    learn(drafter, [3, 1], 4)
    learn(drafter, [5, 1], 6)
    known = propose(drafter, request_of(3, 1), 1)
    assert (known.tree.tokens, known.features) == ((1, 4), (by_rank(0, 2),))
    new = propose(drafter, request_of(9, 1), 1)
    assert (new.tree.tokens, new.features) == ((1, 6), (by_rank(0, 1),))
    learn(drafter, [1, 4], 7)
    deeper = propose(drafter, request_of(3, 1), 2)
    assert (deeper.tree.tokens, deeper.features) == ((1, 4, 7), (by_rank(0, 2), by_rank(0, 2)))


def test_contexts_that_have_not_come_for_longest_are_forgotten() -> None:
    drafter = RecycleDrafter(RecycleOptions(recycle_context=1, recycle_max_contexts=2))
    for token in (1, 2, 1, 3):
        learn(drafter, [token], 9)
    known = [propose(drafter, request_of(token), 1).tree.num_drafted for token in (1, 2, 3)]
    assert known == [1, 0, 1]


def test_everything_is_forgotten_on_demand() -> None:
    drafter = RecycleDrafter(RecycleOptions())
    learn(drafter, [1], 9)
    drafter.forget()
    assert propose(drafter, request_of(1), 1).tree.num_drafted == 0


def learn(drafter: RecycleDrafter, text: list[int], best: int) -> None:
    """Let it see that a token was the most probable one after a text."""
    request = request_of(*text)
    propose(drafter, request, 1)
    drafter.observe([saw(request, Draft.empty(request.root), (), logits_of(best))], TIMES)


def in_scope(scope: Scope, *tokens: int) -> Request:
    request = request_of(*tokens)
    request.scope = scope
    return request


def test_scopes_remember_for_themselves() -> None:
    drafter = RecycleDrafter(RecycleOptions())

    def known(scope: Scope) -> tuple[int, ...]:
        return propose(drafter, in_scope(scope, 1), 1).tree.tokens[1:]

    for scope, token in ((Scope("a"), 5), (Scope("b"), 6), (Scope("a", private=True), 7)):
        request = in_scope(scope, 1)
        propose(drafter, request, 1)
        draft = Draft.empty(1)
        drafter.observe([saw(request, draft, (), logits_of(token))], TIMES)
        request.token_ids = [1]
        assert propose(drafter, request, 1).tree.tokens == (1, token)
        drafter.release(request)
    assert (known(Scope("a")), known(Scope("b"))) == ((5,), (6,))
    assert known(Scope("a", private=True)) == known(Scope()) == known(Scope("c")) == ()


def test_the_bound_is_for_all_scopes_and_the_oldest_go_first() -> None:
    memory = Memory(5)
    requests = [in_scope(Scope(str(n)), 1) for n in range(9)]
    requests += [in_scope(Scope("0", private=True), 1)]
    for request in requests:
        memory.keep(request, (1, 2), [3])
        assert len(memory) == sum(len(memory.of(each)) for each in requests) <= 5
    assert [len(memory.of(request)) for request in requests] == [0] * 7 + [1, 2, 2]
    for request in requests:
        memory.release(request)
    assert len(memory) == 3, "what is private goes with its request"


def test_likelier_nodes_come_first_and_budgets_bound_the_tree() -> None:
    drafter, request = RecycleDrafter(RecycleOptions()), request_of(1)
    for context, tokens in (((1,), [1, 2, 3]), ((2,), [1]), ((3,), [1])):
        drafter._memory.keep(request, context, tokens)
    depths = [max(propose(drafter, request, nodes).tree.depths) for nodes in (1, 2, 3, 12)]
    assert depths == sorted(depths)
    assert propose(drafter, request, 12, depth=1).tree.tokens == (1, 1, 2, 3)
    assert propose(drafter, request, 0).tree.num_drafted == 0
    tree = propose(drafter, request, 12).tree
    for children in tree.children:
        tokens = [tree.tokens[child] for child in children]
        assert len(set(tokens)) == len(tokens)


def test_nothing_is_learnt_where_nobody_asked() -> None:
    drafter, request = RecycleDrafter(RecycleOptions()), request_of(1)
    propose(drafter, request, 0)
    draft = Draft.empty(1)
    drafter.observe([saw(request, draft, (), logits_of(2))], TIMES)
    assert propose(drafter, request, 4).tree.num_drafted == 0


@given(st.integers(0, 999), st.sampled_from([5, 255, 2048, 4096, 4096 + 7, 33 * 256 + 1]))
def test_the_most_probable_tokens_are_those_of_topk(seed: int, size: int) -> None:
    logits = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    expected = logits.topk(min(8, size)).indices
    assert most_probable(logits, 8) == expected.tolist()


def test_a_model_that_repeats_itself_is_sped_up() -> None:
    """After one round of its loop every token of it is known."""
    plain, llm = tiny_llm(tiny_model()), tiny_llm(tiny_model(), "recycle", gamma=8)
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    (expected,), (output,) = plain.generate([[1, 2]], params), llm.generate([[1, 2]], params)
    assert output.token_ids == expected.token_ids
    assert output.metrics.target_passes < expected.metrics.target_passes


@pytest.mark.parametrize("top_k", [0, 9])
def test_top_k_is_bounded(top_k: int) -> None:
    with pytest.raises(ConfigError, match="recycle_top_k"):
        RecycleOptions(recycle_top_k=top_k)
