"""`plan`: the table of the theory, and its two columns on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tokenleap import analysis
from tokenleap.cli.plan import read_texts

MEASURE = ["plan", "--measure", "--max-tokens", "16", "--rounds", "2"]


def test_table_and_best_gamma(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = run.done("plan", "--alpha", "0.8", "--c", "0.05", "--max-gamma", "6")
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "    5     3.689    2.951x  1.694x" in lines
    assert "Best gamma: 8, 3.092x faster." in lines
    assert "Oracle that knows how many guesses will pass: 4.167x." in lines


def test_json(run: Run) -> None:
    value = json.loads(
        run("plan", "--alpha", "0.7", "--c", "0.1", "--c-hat", "0.02", "--json").stdout
    )
    assert value["best_gamma"] == analysis.best_gamma(0.7, 0.1)
    assert value["oracle_improvement"] == analysis.oracle_improvement(0.7, 0.1)
    assert [row["gamma"] for row in value["table"]] == list(range(11))
    for row in value["table"]:
        gamma = row["gamma"]
        assert row["expected_tokens"] == analysis.expected_tokens(0.7, gamma)
        assert row["improvement"] == analysis.improvement(0.7, gamma, 0.1)
        assert row["operations"] == analysis.operations(0.7, gamma, 0.02)


@pytest.mark.parametrize(
    ("alpha", "c", "sentence"),
    [
        ("0.3", "0.5", "Drafting does not pay: alpha is not above c"),
        ("0.9", "0", "as long as possible"),
        ("1", "0.5", "as long as possible"),
        ("0", "0", "Drafting does not pay"),
    ],
)
def test_verdict_at_the_ends(run: Run, alpha: str, c: str, sentence: str) -> None:
    result = run.done("plan", "--alpha", alpha, "--c", c)
    assert sentence in result.stdout


def test_json_without_a_bound(run: Run) -> None:
    value = json.loads(run("plan", "--alpha", "1", "--json").stdout)
    assert value["oracle_improvement"] is None
    assert value["longer_is_always_better"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --alpha (and --c), or --measure"),
        (["--alpha", "1.5"], "invalid value for '--alpha'"),
        (["--alpha", "nan"], "invalid value for '--alpha'"),
        (["--alpha", "0.5", "--c", "inf"], "c: must be a finite number of at least 0, got inf"),
        (["--alpha", "0.5", "--max-gamma", "257"], "invalid value for '--max-gamma'"),
        (["--alpha", "0.5", "--rounds", "2"], "--rounds: only --measure uses this"),
        (["--alpha", "0.5", "--model", "x"], "--model: only --measure uses this"),
        (["--alpha", "0.5", "--temperature", "1"], "--temperature: only --measure uses this"),
        (["--measure", "--alpha", "0.5"], "--alpha: --measure finds this out by itself"),
        (["--measure", "--gammas", "1,x"], "--gammas takes draft lengths, as in 1,2,4"),
        (["--measure", "--gammas", "0,1"], "--gammas must be between 1 and 256"),
        (["--measure", "--method", "none"], "--method none drafts nothing"),
        (["--measure", "--method", "ngrm"], "did you mean 'ngram'?"),
        (["--measure", "--model", "no-such-model"], "no-such-model"),
        (
            ["--measure", "--speculative-config", '{"num_speculative_tokens": 3}'],
            "--gammas says how much to draft",
        ),
        (["--measure", "--method", '{"controller": "fixed"}'], "controller in --method: --gammas"),
        (["--measure", "--method", "ngram", "--method", "suffix"], "only --lenience measures"),
        (["--lenience", "1"], "--lenience: only --measure uses this"),
        (["--measure", "--lenience", "2"], "--lenience takes numbers above 0 and at most 1"),
        (["--measure", "--lenience", "1,x"], "as in 1,0.5,0.3,0.1, got 1,x"),
        (["--measure", "--lenience", "1", "--rounds", "2"], "--rounds: --lenience measures alpha"),
        (["--measure", "--lenience", "1", "--method", "none"], "--method none drafts nothing"),
        (
            [
                "--measure",
                "--lenience",
                "1",
                "--method",
                '{"method": "ngram", "acceptance": "block"}',
            ],
            "--lenience measures the rule lenient",
        ),
        (
            ["--measure", "--method", '{"method": "ngram"}', "--speculative-config", "{}"],
            "--method has a JSON object already",
        ),
    ],
)
def test_wrong_use(run: Run, arguments: list[str], message: str) -> None:
    assert message in run.refused("plan", *arguments)


def test_without_a_file_there_are_three_prompts() -> None:
    assert len(read_texts(None)) == 3


# Measuring


def test_measure(run: Run, tiny: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = run.done(
        *MEASURE, "-m", tiny, "--prompts", prompts, "--method", "random", "--gammas", "1,3"
    )
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "\u2026" not in result.stdout
    assert "mean probability that rejection accepts, over 32 positions" in result.stdout
    assert [line.split()[0] for line in lines if line[:5].strip().isdigit()] == ["1", "3"]
    assert result.stdout.count("theorem 3.8") == 3


def test_measure_with_a_draft_model_that_is_the_target(run: Run, tiny: Path, prompts: Path) -> None:
    """Alpha is 1: every guess passes, and the theory's tokens per step are counted."""
    arguments = ["--draft-model", tiny, "--gammas", "1,3", "--temperature", "1", "--ignore-eos"]
    result = run(*MEASURE, "-m", tiny, "--prompts", prompts, *arguments, "--json")
    value = json.loads(result.stdout)
    assert value["method"] == "draft_model"
    assert value["acceptance"] == "rejection"
    assert value["alpha"] == pytest.approx(1, abs=1e-4)
    assert value["drafting_share"] == 1
    assert value["positions"] == 32
    one, three = value["trials"]
    assert one["expected_tokens"] == pytest.approx(2, abs=1e-3)
    assert three["expected_tokens"] == pytest.approx(4, abs=1e-3)
    assert three["accepted"] == [0, 0, 0, 1]
    assert three["predicted"] == pytest.approx(analysis.improvement(value["alpha"], 3, value["c"]))
    product = 1.0
    for factor in three["factors"].values():
        product *= factor
    assert product == pytest.approx(three["measured"] / three["predicted"])
    assert three["low"] <= three["high"]


def test_alpha_by_lenience_of_several_drafters(
    run: Run, tiny: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    skipping = '{"method": "early_exit", "exit_layer": 1}'
    arguments = [
        *("plan", "--measure", "--lenience", "1,0.3", "-m", tiny, "--prompts", prompts),
        *("--max-tokens", "8", "--temperature", "1", "--method", "ngram", "--method", skipping),
    ]
    result = run.done(*arguments)
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "alpha by lenience, over 2 prompt(s)" in result.stdout
    value = json.loads(run(*arguments, "--json").stdout)
    assert value["leniences"] == [1, 0.3]
    rows = value["drafters"]
    assert [row["label"] for row in rows] == ["ngram", 'early_exit {"exit_layer": 1}']
    for row in rows:
        strict, lenient = row["alphas"]
        assert 0 <= row["rejection_sampling"] <= strict + 1e-6
        assert strict <= lenient <= 1
    assert rows[1]["positions"] == 16


def test_nothing_drafted_is_told(run: Run, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "one.txt"
    file.write_text("q")
    arguments = ["--prompts", file, "--max-tokens", "3"]
    fields = '{"prompt_lookup_min": 64, "prompt_lookup_max": 64}'
    assert "drafted nothing on these prompts" in run.refused(
        *MEASURE[:2], *arguments, "-m", tiny, "--speculative-config", fields
    )


def test_one_token_cannot_be_measured(run: Run, tiny: Path, prompts: Path) -> None:
    result = run("plan", "--measure", "-m", tiny, "--prompts", prompts, "--max-tokens", "1")
    assert result.exit_code == 2


def test_plots(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "figures" / "new"
    run.done("plan", "--alpha", "0.8", "--c", "0.05", "--plots", folder)
    files = sorted(folder.iterdir())
    assert [file.name[:7] for file in files] == ["figure2", "figure3", "figure4"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


def test_plots_without_matplotlib(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenleap.cli.options.find_spec", lambda _: None)
    assert "pip install 'matplotlib<" in run.refused("plan", "--alpha", "0.8", "--plots", tmp_path)


def test_plots_into_a_file(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("x")
    assert "--plots takes a folder" in run.refused(
        "plan", "--alpha", "0.8", "--plots", tmp_path / "file"
    )
