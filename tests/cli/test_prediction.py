"""`generate --prediction-file`, and the field `prediction` of `--prompts-file`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import Result

from tests.cli.conftest import Run, error_of


def parsed(result: Result) -> Any:
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_a_prediction_is_drafted_first(run: Run, tiny: Path, tmp_path: Path) -> None:
    given = ("generate", "-m", tiny, "--max-tokens", 24, "--method", "prediction", "hello")
    fixed = ("--controller", "fixed")
    alone = parsed(run(*given, *fixed, "--json"))
    file = tmp_path / "expected.txt"
    file.write_text(alone["text"])
    predicted = parsed(run(*given, *fixed, "--json", "--prediction-file", file))
    assert predicted["token_ids"] == alone["token_ids"]
    assert predicted["metrics"]["target_passes"] < alone["metrics"]["target_passes"]
    assert predicted["metrics"]["accepted_prediction_tokens"] > 0
    assert run(*given, *fixed, "--prediction-file", file).stdout == alone["text"] + "\n"
    assert "missing.txt: No such file" in error_of(run(*given, "--prediction-file", "missing.txt"))


def test_lines_have_predictions_of_their_own(run: Run, tiny: Path, tmp_path: Path) -> None:
    given = ("generate", "-m", tiny, "--max-tokens", 24, "--method", "prediction")
    fixed = ("--controller", "fixed")
    (alone,) = map(json.loads, run(*given, *fixed, "--jsonl", stdin="hello").stdout.splitlines())
    text = alone["text"]
    lines = [{"prompt": "hello"}, {"prompt": "hello", "prediction": text}, {"prompt": "hello"}]
    lines[2]["prediction"] = ""  # none
    shared = tmp_path / "expected.txt"
    shared.write_text(text)
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    for more, predicted in (((), [1]), (("--prediction-file", shared), [0, 1])):
        found = run(*given, *fixed, "--prompts-file", file, *more).stdout.splitlines()
        for place, line in enumerate(map(json.loads, found)):
            assert line["token_ids"] == alone["token_ids"]
            assert (line["metrics"]["accepted_prediction_tokens"] > 0) == (place in predicted)
    file.write_text('{"prompt": "hello", "prediction": ["a"]}')
    refused = run(*given, "--prompts-file", file)
    assert "prediction must be a text" in error_of(refused)
