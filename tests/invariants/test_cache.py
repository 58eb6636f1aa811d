"""Invariant 1: between steps the cache holds exactly all tokens but the last. Rollback forgets."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from tests.drafting import RandomTrees, scheduler_of
from tests.matrix import PROMPTS
from tests.tiny import CONTEXT, VOCAB_SIZE, tiny_model
from tokenleap import SamplingParams
from tokenleap.core.tree import TokenTree, chain
from tokenleap.drafters.lookups import NgramDrafter
from tokenleap.drafters.options import NgramOptions
from tokenleap.request import Request
from tokenleap.runtime.kv_slab import KVSlab
from tokenleap.runtime.target import Target


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("lean")


@lru_cache
def _shared_target(model: PreTrainedModel) -> Target:
    return Target(model)


def fresh_logits(model: PreTrainedModel, tokens: Sequence[int], probe: int) -> torch.Tensor:
    """[V] after `tokens` and `probe`, from a slab that never held anything else."""
    target = _shared_target(model)
    target._slab, target._keys = KVSlab(), []
    target.add(0)
    target.prefill(0, tokens)
    return target.verify([0], [chain([probe])])[0].scores[0].clone()


@pytest.mark.parametrize("drafter", ["chains", "trees"])
def test_all_tokens_but_the_last(model: PreTrainedModel, drafter: str) -> None:
    target = Target(model)
    proposer = (
        NgramDrafter(NgramOptions(prompt_lookup_min=1))
        if drafter == "chains"
        else RandomTrees(lambda _: list(range(VOCAB_SIZE)), VOCAB_SIZE)
    )
    scheduler = scheduler_of(target, proposer, gamma=6, max_num_seqs=3)
    params = SamplingParams(seed=2, temperature=0.8, max_tokens=20)
    requests = [
        Request(prompt, params, vocab_size=VOCAB_SIZE, max_model_len=CONTEXT) for prompt in PROMPTS
    ]
    for request in requests:
        scheduler.add(request)
    while scheduler.busy:
        scheduler.step()
        for request in requests:
            if request.key in target:
                assert target.cached(request.key) == len(request.token_ids) - 1
                expected = fresh_logits(model, request.token_ids[:-1], request.root)
                (output,) = target.verify([request.key], [chain([request.root])])
                torch.testing.assert_close(output.scores[0], expected, atol=1e-4, rtol=1e-4)
    assert not any(request.key in target for request in requests)


trees = (
    st.integers(1, 9)
    .flatmap(
        lambda n: st.tuples(
            st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=n, max_size=n),
            st.tuples(*(st.integers(0, max(0, i - 1)) for i in range(1, n))),
        )
    )
    .map(lambda t: TokenTree(tuple(t[0]), (-1, *t[1])))
)
contexts = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=0, max_size=20)


@settings(max_examples=40, deadline=None)
@given(tree=trees, context=contexts, data=st.data())
def test_a_node_is_scored_like_its_path(
    tree: TokenTree, context: list[int], data: st.DataObject
) -> None:
    """Tree attention: every branch as if it stood alone; committing it leaves just that."""
    target = Target(SHARED)
    target.add(7)
    target.prefill(7, context)
    (output,) = target.verify([7], [tree])
    logits = output.scores.clone()
    for node in range(len(tree)):
        path = [tree.tokens[0], *tree.path_tokens(node)]
        expected = fresh_logits(SHARED, [*context, *path[:-1]], path[-1])
        torch.testing.assert_close(logits[node], expected, atol=1e-4, rtol=1e-4)
    last = data.draw(st.integers(0, len(tree) - 1))
    target.commit(7, (0, *tree.path(last)))
    kept = [*context, tree.tokens[0], *tree.path_tokens(last)]
    assert target.cached(7) == len(kept)
    (after,) = target.verify([7], [chain([5])])
    torch.testing.assert_close(after.scores[0], fresh_logits(SHARED, kept, 5), atol=1e-4, rtol=1e-4)


SHARED = tiny_model("lean")


@settings(max_examples=30, deadline=None)
@given(tokens=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=30), data=st.data())
def test_rollback_equals_fresh_prefill(tokens: list[int], data: st.DataObject) -> None:
    """To the bit, since only chains were computed."""
    length = data.draw(st.integers(0, len(tokens)))
    target = Target(SHARED)
    target.add(0)
    target.prefill(0, tokens)
    target.rollback(0, length)
    (output,) = target.verify([0], [chain([5])])
    assert torch.equal(output.scores[0], fresh_logits(SHARED, tokens[:length], 5))


def test_chain_equals_tree_of_width_1(model: PreTrainedModel) -> None:
    """There is no other way to make a chain, and its bits are those of single steps."""
    tokens = [5, 9, 2, 7]
    assert chain(tokens) == TokenTree((5, 9, 2, 7), (-1, 0, 1, 2))
    target = Target(model)
    target.add(0)
    target.prefill(0, [1, 2, 3])
    (output,) = target.verify([0], [chain(tokens)])
    together = output.scores.clone()
    for i, token in enumerate(tokens):
        (one,) = target.verify([0], [chain([token])])
        assert torch.equal(one.scores[0], together[i])
        target.commit(0, [0])


def test_rows_of_different_lengths_and_drafts_in_one_pass(model: PreTrainedModel) -> None:
    """Batch neighbours change no bit, also when rows in between have nothing to do."""
    rows = {key: [(key * 7 + i * i) % VOCAB_SIZE for i in range(3 + 11 * key)] for key in range(5)}
    drafts = {0: chain([1]), 2: chain([4, 5, 6, 7, 8]), 3: TokenTree((1, 2, 3), (-1, 0, 0))}
    target = Target(model)
    for key, tokens in rows.items():
        target.add(key)
        target.prefill(key, tokens)
    together = target.verify(list(drafts), list(drafts.values()))
    for output, (key, tree) in zip(together, drafts.items(), strict=True):
        alone = Target(model)
        alone.add(0)
        alone.prefill(0, rows[key])
        assert torch.equal(output.scores, alone.verify([0], [tree])[0].scores)


def test_rows_move_when_one_leaves(model: PreTrainedModel) -> None:
    target = Target(model)
    for key in range(4):
        target.add(key)
        target.prefill(key, [key, key + 1, key + 2])
    target.remove(1)
    target.remove(0)
    target.add(9)
    target.prefill(9, [50, 51])
    for key, tokens in ((2, [2, 3, 4]), (3, [3, 4, 5]), (9, [50, 51])):
        (output,) = target.verify([key], [chain([5])])
        assert torch.equal(output.scores[0], fresh_logits(model, tokens, 5))


def test_the_slab_grows_past_a_key_block() -> None:
    model = tiny_model("lean", max_position_embeddings=1200)
    tokens = [(i * i) % VOCAB_SIZE for i in range(1100)]
    target = Target(model)
    target.add(0)
    for start in range(0, 1100, 100):
        target.prefill(0, tokens[start : start + 100])
    (output,) = target.verify([0], [chain([5])])
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([[*tokens, 5]])).logits[0, -1]
    torch.testing.assert_close(output.scores[0], expected, atol=2e-4, rtol=2e-4)
