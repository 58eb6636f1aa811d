from __future__ import annotations

import pytest
import typer
from benchmarks.harness import TINY, load
from benchmarks.tree_cost import Case, main, measure
from typer.testing import CliRunner

from tokenleap.runtime.target import Target

app = typer.Typer()
app.command()(main)


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


def test_a_table_is_printed() -> None:
    arguments = ["--model", "tiny", "--rounds", "1", "--context", "9", "--dtype", "float32"]
    result = CliRunner().invoke(app, [*arguments, "--paths", "1", "--paths", "3"])
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
    result = CliRunner().invoke(app, ["--model", "tiny", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
