from __future__ import annotations

import random

import pytest
import torch
from benchmarks.harness import TINY, load
from benchmarks.tree_cost import Case, Rows, main, measure

from tests.benchmarks.program import run
from tests.counting import counted
from tests.matrix import PROMPTS
from tests.tiny import VOCAB_SIZE, tiny_model
from tokenleap.core.tree import TokenTree
from tokenleap.runtime.target import Target


@pytest.mark.parametrize(
    ("case", "parents"),
    [
        (Case(1, 2, 0), (-1, 0, 1)),
        (Case(2, 2, 0), (-1, 0, 1, 0, 3)),
        (Case(3, 3, 2), (-1, 0, 1, 2, 2, 2)),
        (Case(2, 4, 2), (-1, 0, 1, 2, 3, 2, 5)),
    ],
)
def test_paths_share_their_beginning(case: Case, parents: tuple[int, ...]) -> None:
    tree = case.tree(vocab_size=96)
    assert tree.parents == parents
    leaves = [node for node in range(len(tree)) if not tree.children[node]]
    assert [tree.depths[leaf] for leaf in leaves] == [case.depth] * case.paths


def test_positions_and_copies_are_counted() -> None:
    target = Target(load(TINY, "float32", "cpu").module)
    case = Case(4, 6, 3)
    costs = measure(target, [case], context=20, rounds=2)[case]
    assert costs["tree"].positions == costs["tree"].written == 1 + 3 + 4 * 3
    assert costs["rows"].positions == 4 * (1 + 6)
    assert costs["rows"].written == 4 * (1 + 6) + 3 * 20
    assert all(cost.seconds > 0 for cost in costs.values())
    assert target._keys == [0]  # no fork is left


@pytest.mark.parametrize("seed", range(6))
def test_logits_of_rows_are_those_of_the_tree(seed: int) -> None:
    """Rows of very different lengths, one without any KV; siblings may have the same token."""
    dice, target = random.Random(seed), Target(tiny_model())
    for key, prompt in enumerate(PROMPTS):
        target.add(key)
        target.prefill(key, prompt[:-1])
    keys = dice.sample(range(len(PROMPTS)), 3)
    trees = [random_tree(dice, nodes) for nodes in (1, 6, 15)]
    expected = [output.scores.clone() for output in target.verify(keys, trees)]
    rows = Rows(target)
    for _ in range(2):  # the first pass leaves nothing behind
        for found, logits in zip(rows.verify(keys, trees), expected, strict=True):
            torch.testing.assert_close(found, logits, atol=1e-4, rtol=1e-4)
            assert torch.equal(found.argmax(-1), logits.argmax(-1))
        assert target._keys == list(range(len(PROMPTS)))


def random_tree(dice: random.Random, nodes: int) -> TokenTree:
    parents = [-1, *(dice.randrange(node) for node in range(1, nodes))]
    return TokenTree(tuple(dice.randrange(VOCAB_SIZE) for _ in parents), tuple(parents))


@pytest.mark.parametrize(("paths", "shared"), [(1, 0), (2, 5), (5, 3), (8, 0)])
def test_positions_grow_with_paths_in_rows_and_with_nodes_in_trees(paths: int, shared: int) -> None:
    target, context = Target(tiny_model()), len(PROMPTS[0])
    target.add(0)
    target.prefill(0, PROMPTS[0])
    passes, rows = counted(target), Rows(target)
    tree = Case(paths, 6, shared).tree(VOCAB_SIZE)
    target.verify([0], [tree])
    rows.verify([0], [tree])
    assert passes == [1 + shared + paths * (6 - shared), paths * (1 + 6)]
    assert (rows.num_positions, rows.num_copied) == (passes[1], (paths - 1) * context)


def test_a_table_is_printed() -> None:
    arguments = ["--model", "tiny", "--rounds", "1", "--context", "9", "--dtype", "float32"]
    result = run(main, [*arguments, "--paths", "1", "--paths", "3"])
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stdout.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.split("|")[1:5]] for line in lines[2:]]
    assert cells == [
        ["1 x 6", "0", "7", "7"],
        ["3 x 6", "0", "19", "21"],
        ["3 x 6", "3", "13", "21"],
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shared", "6"], "--shared must be less than --depth 6, got 6"),
        (["--context", "1020"], "--context must be at most 1017"),
    ],
)
def test_wrong_use_is_one_line(arguments: list[str], message: str) -> None:
    result = run(main, ["--model", "tiny", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
