"""Paths as batch rows score, keep and generate what tree attention does, for more positions."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from tests.counting import counted
from tests.matrix import PROMPTS
from tests.tiny import CONTEXT, VOCAB_SIZE, tiny_model
from tokenleap import SamplingParams
from tokenleap.analysis.measure import RowsVerifier
from tokenleap.control import Fixed
from tokenleap.core.acceptance import RULES
from tokenleap.core.tree import TokenTree, chain
from tokenleap.decode import Verifier, step
from tokenleap.drafters.base import Drafter
from tokenleap.drafters.model_drafter import ModelDrafter
from tokenleap.drafters.models import OwnModel
from tokenleap.drafters.shapes import TreeOptions
from tokenleap.request import Request
from tokenleap.runtime.target import Target
from tokenleap.speculation import Speculation, Strategy


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model()


def filled(model: PreTrainedModel) -> Target:
    """Rows of very different lengths, one without any KV."""
    target = Target(model)
    for key, prompt in enumerate(PROMPTS):
        target.add(key)
        target.prefill(key, prompt[:-1])
    return target


def random_tree(dice: random.Random, nodes: int) -> TokenTree:
    """Any tree; siblings may have the same token."""
    parents = [-1, *(dice.randrange(node) for node in range(1, nodes))]
    return TokenTree(tuple(dice.randrange(VOCAB_SIZE) for _ in parents), tuple(parents))


@pytest.mark.parametrize("seed", range(6))
def test_logits_are_those_of_the_tree(model: PreTrainedModel, seed: int) -> None:
    dice = random.Random(seed)
    target = filled(model)
    keys = dice.sample(range(len(PROMPTS)), 3)
    trees = [random_tree(dice, nodes) for nodes in (1, 6, 15)]
    expected = [output.scores.clone() for output in target.verify(keys, trees)]
    rows = RowsVerifier(target)
    for _ in range(2):  # the first pass is not committed, and leaves nothing behind
        for found, logits in zip(rows.verify(keys, trees), expected, strict=True):
            torch.testing.assert_close(found.scores, logits, atol=1e-4, rtol=1e-4)
            assert torch.equal(found.scores.argmax(-1), logits.argmax(-1))


@pytest.mark.parametrize("node", range(7))
def test_any_path_can_be_kept(model: PreTrainedModel, node: int) -> None:
    """Also the last request's, after the others have committed; what follows is scored alike."""
    tree = TokenTree((3, 5, 7, 5, 8, 9, 5), (-1, 0, 0, 1, 1, 2, 5))
    target, reference = filled(model), filled(model)
    rows = RowsVerifier(target)
    keys = [4, 0, 2]
    rows.verify(keys, [tree] * 3)
    reference.verify(keys, [tree] * 3)
    for key in keys:
        rows.commit(key, (0, *tree.path(node)))
        reference.commit(key, (0, *tree.path(node)))
    assert target._keys == reference._keys
    for key in range(len(PROMPTS)):
        assert target.cached(key) == reference.cached(key)
        found, expected = (
            t.verify([key], [chain([11, 12])])[0].scores for t in (target, reference)
        )
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


TREES = {
    "independent": TreeOptions(tree=(3, 2, 1), expansion="sample_with_replacement"),
    "distinct": TreeOptions(tree=(2, 3)),
    "dynamic": TreeOptions(tree="dynamic", tree_depth=3),
}


def drafter_of(options: TreeOptions) -> Drafter:
    """Trees of a draft model that is the target."""
    return ModelDrafter(OwnModel(Target(tiny_model())), options, coupled=False)


def generate(
    verifier_of: Callable[[Target], Verifier], drafter: Drafter, rule: str, params: SamplingParams
) -> list[list[int]]:
    """The loop itself, over all prompts at once; the cache invariant is checked each step."""
    target = Target(tiny_model())
    verifier = verifier_of(target)
    speculation = Speculation(Strategy(drafter, Fixed(9), RULES[rule]()))
    requests = [
        Request(prompt, params, vocab_size=VOCAB_SIZE, max_model_len=CONTEXT) for prompt in PROMPTS
    ]
    for request in requests:
        target.add(request.key)
        target.prefill(request.key, request.token_ids[:-1])
    while running := [request for request in requests if not request.finished]:
        step(verifier, speculation, running)
        assert target._keys == [request.key for request in requests]
        for request in running:
            if not request.finished:
                assert target.cached(request.key) == len(request.token_ids) - 1
    assert sum(request.metrics.num_accepted_tokens for request in requests) > 10
    return [request.output_ids for request in requests]


@pytest.mark.parametrize(
    ("shape", "rule"),
    [
        ("independent", "k_sequential"),
        ("independent", "coupled"),
        ("distinct", "rejection"),
        ("dynamic", "typical"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_generation_is_that_of_the_tree(shape: str, rule: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=20)
    expected = generate(lambda target: target, drafter_of(TREES[shape]), rule, params)
    assert generate(RowsVerifier, drafter_of(TREES[shape]), rule, params) == expected


@pytest.mark.parametrize("paths", [1, 2, 5, 8])
@pytest.mark.parametrize("shared", [0, 3, 5])
def test_positions_grow_with_paths_in_rows_and_with_nodes_in_trees(
    model: PreTrainedModel, paths: int, shared: int
) -> None:
    """`paths` paths of depth 6, of which the first `shared` nodes are one chain."""
    depth, context = 6, len(PROMPTS[0]) - 1
    parents = list(range(-1, shared))
    for _ in range(paths):
        parents += [shared, *range(len(parents), len(parents) + depth - shared - 1)]
    tree = TokenTree(tuple(range(len(parents))), tuple(parents))
    target = filled(model)
    passes = counted(target)
    target.verify([0], [tree])
    rows = RowsVerifier(target)
    rows.verify([0], [tree])
    assert passes[0] == 1 + shared + paths * (depth - shared)
    assert passes[1] == paths * (1 + depth)
    assert rows.num_positions == paths * (1 + depth)
    assert rows.num_copied == (paths - 1) * context
