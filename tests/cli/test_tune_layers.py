"""`tune-layers`: a file that `layer_skip` takes, whole or not at all, and mistakes in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.cli.terminal import Terminal
from tokenleap.drafters.options import TunedLayers
from tokenleap.tuning.tune_layers import LayerLaboratory, SkipSet
from tokenleap.tuning.tune_layers import Run as Speed

QUICK = ["--max-tokens", "8", "--trials", "3", "--seconds", "30"]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder / "layers.json"


def measured_as(monkeypatch: pytest.MonkeyPatch, *ratios: float) -> None:
    """Runs with these speeds; then Ctrl-C."""
    left = iter(ratios)

    def measure(_: LayerLaboratory, skip: SkipSet, gamma: int) -> Speed:
        ratio = next(left, None)
        if ratio is None:
            raise KeyboardInterrupt
        return Speed(10 * ratio, 10)

    monkeypatch.setattr(LayerLaboratory, "measure", measure)


def test_tune_and_use(
    run: Run, tiny: Path, prompts: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = run.done("tune-layers", prompts, "-o", output, "-m", tiny, *QUICK)
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    table = lines[lines.index("") : -4]
    assert max(map(len, table)) <= 80
    assert "greedy, 2 prompts, 16 tokens" in result.stdout
    assert "MLP left out in layers: " in result.stdout
    tuned = TunedLayers.load(str(output))
    assert tuned.num_hidden_layers == 2
    assert tuned.measured["positions"] == 16
    assert 0 <= tuned.measured["alpha"] <= 1
    assert tuned.measured["tokens_per_second"] > 0
    assert [path.name for path in output.parent.iterdir()] == ["layers.json"]

    config = json.dumps({"method": "layer_skip", "layers": str(output)})
    arguments = ("generate", "abc", "-m", tiny, "--max-tokens", 12)
    drafted = run.done(*arguments, "--speculative-config", config)
    assert drafted.stdout == run(*arguments, "--method", "none").stdout


def test_json(run: Run, tiny: Path, prompts: Path, output: Path) -> None:
    arguments = [*QUICK, "--temperature", "1", "--json"]
    result = run("tune-layers", prompts, "-o", output, "-m", tiny, *arguments)
    value = json.loads(result.stdout)
    saved = json.loads(output.read_text())
    trials = value.pop("trials")
    assert value.pop("output") == str(output)
    assert value == saved
    assert saved["format"] == "tokenleap-layers-1"
    assert saved["measured"]["temperature"] == 1
    assert sum(trial["runs"] for trial in trials) <= 3
    best = max(trials, key=lambda trial: (trial["runs"], trial["speedup"]))
    assert saved["measured"]["speedup"] == best["speedup"]
    assert saved["num_speculative_tokens"] == best["gamma"]
    assert saved["skip_mlp"] == best["skip_mlp"]


@pytest.mark.parametrize(("trials", "told"), [(1, True), (2, True), (3, False)])
def test_a_lucky_run_is_told(
    run: Run,
    tiny: Path,
    prompts: Path,
    output: Path,
    monkeypatch: pytest.MonkeyPatch,
    trials: int,
    told: bool,
) -> None:
    measured_as(monkeypatch, *[1.5] * trials)
    result = run("tune-layers", prompts, "-o", output, "-m", tiny, *QUICK, "--trials", trials)
    assert ("only: to be sure, give more" in result.stdout) == told
    assert json.loads(output.read_text())["measured"]["runs"] == trials


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [(1.25, "Best: 1.25x plain decoding"), (0.5, "None is faster than plain decoding here")],
)
def test_verdict(
    run: Run,
    tiny: Path,
    prompts: Path,
    output: Path,
    monkeypatch: pytest.MonkeyPatch,
    ratio: float,
    verdict: str,
) -> None:
    measured_as(monkeypatch, *[ratio] * 3)
    result = run.done("tune-layers", prompts, "-o", output, "-m", tiny, *QUICK)
    assert verdict in result.stdout
    assert json.loads(output.read_text())["measured"]["speedup"] == ratio


def test_ctrl_c_saves_the_best_so_far(
    run: Run, tiny: Path, prompts: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured_as(monkeypatch, 0.5, 0.75)
    result = run("tune-layers", prompts, "-o", output, "-m", tiny, *QUICK, "--trials", 9)
    assert result.exit_code == 130
    assert "has the fastest of the 2 choices that were run" in result.stderr
    assert TunedLayers.load(str(output)).measured["speedup"] == 0.75


def test_ctrl_c_before_the_first_run_leaves_nothing(
    run: Run, tiny: Path, prompts: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured_as(monkeypatch)
    result = run("tune-layers", prompts, "-o", output, "-m", tiny, *QUICK)
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")
    assert list(output.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trials", "0"], "invalid value for '--trials'"),
        (["--max-tokens", "1"], "invalid value for '--max-tokens'"),
        (["--seconds", "nan"], "invalid value for '--seconds'"),
        (["--temperature", "inf"], "--temperature: "),
        (["-o", "/no/such/folder/layers.json"], "there is no folder /no/such/folder"),
        (["--model", "nonesuch"], "nonesuch"),
        (["--max-model-len", "3"], "the prompt has"),
    ],
)
def test_wrong_use(
    run: Run, tiny: Path, prompts: Path, output: Path, arguments: list[str], message: str
) -> None:
    assert message in run.refused("tune-layers", prompts, "-m", tiny, "-o", output, *arguments)
    assert not output.exists()


def test_progress_at_a_terminal(tiny: Path, prompts: Path, output: Path) -> None:
    arguments = ["-m", tiny, "--max-tokens", 400, "--trials", 2]
    with Terminal("tune-layers", prompts, "-o", output, *arguments) as terminal:
        terminal.wait_for(r"Run [12] of at most 2")
        assert terminal.end() == 0
    assert "Traceback" not in terminal.shown
    assert "Saved: --method layer_skip" in terminal.shown


def unusable(run: Run, tiny: Path, file: Path, **more: Any) -> str:
    """The message of `generate` about such a file."""
    config = json.dumps({"method": "layer_skip", "layers": str(file), **more})
    return run.refused("generate", "abc", "-m", tiny, "--speculative-config", config)


def test_files_that_cannot_be_used(run: Run, tiny: Path, tmp_path: Path) -> None:
    assert "cannot read" in unusable(run, tiny, tmp_path / "absent.json")
    file = tmp_path / "layers.json"
    file.write_text("{")
    assert "is not a valid layers file" in unusable(run, tiny, file)
    deep = TunedLayers(
        skip_attention=(1,), skip_mlp=(), num_hidden_layers=9, num_speculative_tokens=2
    )
    file.write_text(deep.model_dump_json())
    assert "for a model of 9 layers and this one has 2" in unusable(run, tiny, file)
