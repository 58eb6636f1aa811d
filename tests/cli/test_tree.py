"""`tree`: from a vector or a tiny model to a drawing, a file, and a draft that has its shape."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest
from rich.console import Console

from tests.cli.conftest import Run, error_of, save_tiny
from tokenleap.cli.console import THEME
from tokenleap.cli.tune import Costs, drawn, solved
from tokenleap.drafters.shapes import TreeFile
from tokenleap.runtime.costs import CostCurve
from tokenleap.tuning.sequoia import best_size, best_tree, expected_tokens

VECTOR = (0.7, 0.15, 0.05)
GIVEN = ["tree", "--acceptance-vector", "0.7,0.15,0.05"]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model that is wrong at times."""
    return save_tiny(tmp_path_factory.mktemp("other"), seed=1)


# Without a model


def test_a_given_vector(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = run.done(*GIVEN, "--nodes", "12")
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "├── 0  0.700" in lines
    assert "│   ├── 0  0.490" in lines
    assert "└── 1  0.150" in lines
    assert "this tree              12       7     3.648" in result.stdout
    assert "chain                  12      12     3.301" in result.stdout
    assert "[2, 1, 1, 1, 1, 1]     12       6     3.500" in result.stdout
    assert "+10.5% over the chain" in result.stdout


def test_json(run: Run) -> None:
    value = json.loads(run(*GIVEN, "--nodes", "9", "--depth", "2", "--json").stdout)
    best = best_tree(VECTOR, 9, 2)
    assert value["format"] == "tokenleap-tree-1"
    assert [tuple(path) for path in value["paths"]] == list(best.paths)
    assert value["acceptance"] == list(VECTOR)
    assert value["expected_tokens"] == best.expected_tokens
    assert (value["nodes"], value["depth"]) == (9, 2)
    assert value["drafts"] is value["errors"] is value["method"] is value["model"] is None
    tree, chain, full, none = value["compared"]
    assert tree["expected_tokens"] == best.expected_tokens
    assert chain["expected_tokens"] == pytest.approx(expected_tokens([(0,) * 9], VECTOR))
    assert full["levels"] == 2
    assert full["nodes"] <= 9
    assert full["expected_tokens"] <= best.expected_tokens
    assert none["expected_tokens"] == 1
    assert none["tokens_per_second"] is None


def test_a_vector_of_zeros_has_no_tree(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    result = run("tree", "--acceptance-vector", "0,0", "--nodes", "5", "--output", file)
    assert result.exit_code == 2
    assert "No tree: no drafted token is ever accepted." in result.stdout
    assert "there is no tree to save" in error_of(result)
    assert not file.exists()


# The drawing


def test_large_trees_are_cut_with_a_count() -> None:
    best = best_tree(VECTOR, 60, 16)
    console = Console(width=80, theme=THEME, color_system=None)
    with console.capture() as capture:
        console.print(drawn(best.paths, VECTOR, shown=10))
    lines = capture.get().splitlines()
    nodes = [line for line in lines if "0." in line]
    more = [int(line.split()[-2]) for line in lines if line.endswith("more")]
    assert len(nodes) == 10
    assert sum(more) == 50
    reached = sorted((prod(VECTOR[rank] for rank in path) for path in best.paths), reverse=True)
    shown = sorted((float(line.split()[-1]) for line in nodes), reverse=True)
    assert shown == pytest.approx(reached[:10], abs=5e-4)


def test_what_is_left_out_is_counted_where_it_hangs() -> None:
    paths = [(0,), (1,), (0, 0), (0, 1), (0, 1, 0)]
    console = Console(width=80, theme=THEME, color_system=None)
    with console.capture() as capture:
        console.print(drawn(paths, (0.6, 0.2), shown=2))
    assert capture.get().splitlines() == [
        "last token",
        "├── 0  0.600",
        "│   ├── 0  0.360",
        "│   └── 2 more",
        "└── 1 more",
    ]


def test_a_tree_with_many_levels_keeps_parents() -> None:
    """Ties between a node and its parent (a rank that is always accepted) break no tree."""
    paths = best_tree((1.0,), 9, 9).paths
    console = Console(width=80, theme=THEME, color_system=None)
    with console.capture() as capture:
        console.print(drawn(paths, (1.0,), shown=4))
    assert capture.get().count("1.000") == 4
    assert "5 more" in capture.get()


# On a model


def measure(tiny: Path, draft: Path, prompts: Path, *more: object) -> list[object]:
    return ["tree", prompts, "-m", tiny, "--draft-model", draft, "--max-tokens", 24, *more]


def test_measured(run: Run, tiny: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = run.done(*measure(tiny, tiny, prompts, "--nodes", 4, "--ranks", 3, "--ignore-eos"))
    assert result.stderr == ""
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "draft_model: accepted in 24 drafts" in " ".join(result.stdout.split())
    assert "   0    1.0000  0.0000" in result.stdout
    assert "   2    0.0000  0.0000" in result.stdout
    assert "Expected 5.000 tokens per pass: +0.0% over the chain" in result.stdout


def test_measured_json_and_file(
    run: Run, tiny: Path, other: Path, prompts: Path, tmp_path: Path
) -> None:
    file = tmp_path / "tree.json"
    arguments = ["--ranks", 30, "--nodes", 6, "--temperature", 2, "--output", file, "--json"]
    result = run.done(*measure(tiny, other, prompts, *arguments))
    value = json.loads(result.stdout)
    drafts, vector = value["drafts"], value["acceptance"]
    assert 0 < sum(vector) < 1 + 1e-9
    assert len(vector) == len(value["errors"]) == 30
    for rate, error in zip(vector, value["errors"], strict=True):
        assert rate * drafts == pytest.approx(round(rate * drafts))
        assert error == pytest.approx((rate * (1 - rate) / drafts) ** 0.5)
    assert value["expected_tokens"] == best_tree(vector, 6, 16).expected_tokens
    loaded = TreeFile.load(file)
    assert [list(path) for path in loaded.paths] == value["paths"]
    assert list(loaded.acceptance) == vector
    assert loaded.expected_tokens == value["expected_tokens"]
    assert (loaded.method, loaded.model) == ("draft_model", str(tiny))
    assert [path.name for path in tmp_path.iterdir()].count("tree.json") == 1


def test_the_file_is_drafted(run: Run, tiny: Path, other: Path, tmp_path: Path) -> None:
    file, trace = tmp_path / "tree.json", tmp_path / "steps.json"
    vector = ["--acceptance-vector", "0.5,0.2,0.1", "--nodes", 7, "--depth", 3]
    assert run("tree", *vector, "--output", file).exit_code == 0
    config = json.dumps({"tree": str(file), "controller": "fixed"})
    drafter = ["--draft-model", other, "--speculative-config", config, "--max-tokens", 20]
    result = run.done("generate", "hello", "-m", tiny, *drafter, "--trace", trace)
    steps = json.loads(trace.read_text())["steps"]
    assert len(steps[0]["drafted"]) == 7
    plain = run("generate", "hello", "-m", tiny, "--method", "none", "--max-tokens", 20)
    assert result.stdout == plain.stdout


def test_the_size_is_chosen_by_cost(run: Run, tiny: Path, prompts: Path) -> None:
    """Whatever this machine's costs are, no rival has more tokens per second than the tree."""
    result = run.done(*measure(tiny, tiny, prompts, "--ranks", 2, "--json"))
    value = json.loads(result.stdout)
    rates = [rival["tokens_per_second"] for rival in value["compared"]]
    assert all(rate > 0 for rate in rates)
    assert rates[0] == pytest.approx(max(rates))
    given = ["--acceptance-vector", "0.5,0.2", "--json"]
    value = json.loads(run(*measure(tiny, tiny, prompts, *given)).stdout)
    assert value["acceptance"] == [0.5, 0.2]
    assert value["errors"] is None


def test_costs_choose_among_sizes() -> None:
    curve = CostCurve({1: 1.0, 8: 1.1, 16: 2.0, 64: 8.0})
    found = solved(VECTOR, None, 5, None, Costs(curve, 0.1))
    size = best_size(VECTOR, curve, 128, 5, 0.1)
    assert (found.tree.num_nodes, found.tree.depth) == (size.nodes, size.depth)
    assert 0 < size.nodes < 20
    rates = [rival.tokens_per_second(Costs(curve, 0.1)) for rival in found.rivals()]
    assert max(rates) == rates[0] == pytest.approx(size.expected_tokens / size.seconds)
    dear = solved(VECTOR, None, 5, None, Costs(CostCurve({1: 1.0, 2: 3.0}), 0.1))
    assert dear.tree.paths == ()
    assert [rival.name for rival in dear.rivals()] == ["no draft"]


# Wrong use


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "0"], "invalid value for '--nodes'"),
        (["--nodes", "257"], "invalid value for '--nodes'"),
        (["--depth", "65"], "invalid value for '--depth'"),
        (["--ranks", "0"], "invalid value for '--ranks'"),
        (["--acceptance-vector", "0.7,x"], "--acceptance-vector takes probabilities, as in"),
        (["--acceptance-vector", "0.7,-0.1"], "must be probabilities between 0 and 1"),
        (["--acceptance-vector", "nan"], "must be probabilities between 0 and 1"),
        (["--acceptance-vector", "0.7,0.4"], "must sum to at most 1"),
        (["--acceptance-vector", ",".join(["0.01"] * 65)], "takes 64 ranks, got 65"),
        (["--acceptance-vector", "0.7", "--ranks", "2"], "--ranks: --acceptance-vector has its"),
        ([*GIVEN[1:], "--nodes", "3", "--temperature", "1"], "--temperature: with --acceptance"),
        ([*GIVEN[1:], "--nodes", "3", "--draft-model", "x"], "--draft-model: with --acceptance"),
        (["p.txt", *GIVEN[1:], "--nodes", "3"], "p.txt: with --acceptance-vector and --nodes"),
        (["--output", "tree.txt"], "--output takes a file that ends in .json"),
        (["--output", "no-such-folder/tree.json"], "there is no folder no-such-folder"),
        ([], "takes no tree: give a draft model, or one of draft_model, eagle, parallel, medusa"),
        (["--method", "suffix"], "method 'suffix' takes no tree"),
        (["--method", "draft_model"], "add --draft-model"),
        (["--method", "earlyexit"], "did you mean 'early_exit'?"),
        (["--speculative-config", '{"tree": [2]}'], "tree in --speculative-config: this command"),
        (["--speculative-config", '{"controller": "fixed"}'], "controller in --speculative-config"),
        (["--method", "early_exit", "-m", "no-such-model"], "no-such-model"),
    ],
)
def test_wrong_use(run: Run, arguments: list[str], message: str) -> None:
    assert message in run.refused("tree", *arguments)


def test_a_rule_for_chains_is_refused(run: Run, tiny: Path, prompts: Path) -> None:
    assert "takes chains only" in run.refused(
        *measure(tiny, tiny, prompts, "--acceptance", "block")
    )


def test_nothing_drafted_is_told(run: Run, tiny: Path, prompts: Path) -> None:
    arguments = measure(tiny, tiny, prompts)[:-1]
    assert "drafted nothing on these prompts" in run.refused(*arguments, 1, "--nodes", 3)


def test_a_tree_file_that_is_not_there(run: Run, tiny: Path, tmp_path: Path) -> None:
    config = json.dumps({"tree": str(tmp_path / "none.json")})
    assert "none.json: No such file or directory" in run.refused(
        "generate", "x", "-m", tiny, "--draft-model", tiny, "--speculative-config", config
    )
