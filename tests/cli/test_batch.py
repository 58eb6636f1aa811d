"""`generate --prompts-file`: a JSON object per line in and out, also after an interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run, error_of
from tokenleap import LLM, SamplingParams, decode
from tokenleap.cli.prompts import LineResults

MESSAGES = [{"role": "user", "content": "hello"}]
SHORT = ("--max-tokens", 12, "--method", "none")
PROMPTS: list[dict[str, Any]] = [
    {"prompt": "hello", "id": "first"},
    {"messages": MESSAGES, "temperature": 0.8, "seed": 3},
    {"prompt_token_ids": [5, 6, 7], "max_tokens": 3, "id": 17},
    {"prompt": "x y x y x", "references": ["x y z"], "stop": ["q"], "id": "\u2028"},
]


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return LLM(tiny, dtype="float32")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join(map(json.dumps, PROMPTS[:2])) + "\n\n")
    with file.open("a") as more:
        more.writelines(json.dumps(prompt) + "\n" for prompt in PROMPTS[2:])
    return file


def generated(run: Run, tiny: Path, file: Path, *options: object) -> Any:
    quoting = ("--max-tokens", 12, "--method", "ngram", "--dtype", "float32")
    return run("generate", "-m", tiny, *quoting, "--prompts-file", file, *options)


def test_every_line_has_its_prompt_and_its_own_parameters(
    run: Run, tiny: Path, llm: LLM, prompts: Path
) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12)
    expected = [
        *llm.chat(MESSAGES, greedy),
        *llm.chat(MESSAGES, SamplingParams(temperature=0.8, seed=3, max_tokens=12)),
        *llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=3)),
        *llm.chat([{"role": "user", "content": "x y x y x"}], greedy),
    ]
    result = generated(run, tiny, prompts)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    found = [json.loads(line) for line in lines_of(result.stdout)]
    assert [line["token_ids"] for line in found] == [list(out.token_ids) for out in expected]
    assert [line["line"] for line in found] == [1, 2, 4, 5]  # line 3 is empty
    assert [line.get("id") for line in found] == ["first", None, 17, "\u2028"]
    assert found[0]["prompt"] == "hello"
    assert found[1]["messages"] == MESSAGES
    assert found[2]["prompt_token_ids"] == [5, 6, 7]
    assert "trace" not in found[0]
    piped = run(
        *("generate", "-m", tiny, "--max-tokens", 12, "--dtype", "float32", "--prompts-file", "-"),
        stdin=prompts.read_text(),
    )
    assert [json.loads(line)["token_ids"] for line in lines_of(piped.stdout)] == [
        line["token_ids"] for line in found
    ]


def lines_of(text: str) -> list[str]:
    """Not by `splitlines`: a text in JSON may have line separators of Unicode."""
    return text.split("\n")[:-1]


def without_times(file: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in lines_of(file.read_text())]
    return [{k: v for k, v in line.items() if k != "metrics"} for line in lines]


@pytest.mark.parametrize("cut", [0, 9])
def test_an_interrupted_run_goes_on_without_repeating_or_losing_lines(
    run: Run, tiny: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert generated(run, tiny, prompts, "--output", whole).exit_code == 0
    add = LineResults.add

    def interrupted(results: LineResults, place: int, record: dict[str, Any]) -> None:
        if record["line"] == 4:
            raise KeyboardInterrupt
        add(results, place, record)

    with monkeypatch.context() as patch:
        patch.setattr(LineResults, "add", interrupted)
        stopped = generated(run, tiny, prompts, "--output", output)
    assert stopped.exit_code == 130
    assert f"{output} has 2 of 4 lines: add --resume" in " ".join(stopped.stderr.split())
    content = output.read_bytes()
    output.write_bytes(content[: len(content) - cut])  # as a kill may leave it
    again = generated(run, tiny, prompts, "--output", output)
    assert again.exit_code == 2
    assert "exists already: add --resume" in error_of(again)
    resumed = generated(run, tiny, prompts, "--output", output, "--resume")
    assert resumed.exit_code == 0, resumed.stderr
    assert resumed.stdout == ""
    assert without_times(output) == without_times(whole)
    if not cut:
        assert output.read_bytes().startswith(content)  # what was there was not made again
    before = output.read_bytes()
    assert generated(run, tiny, prompts, "--output", output, "--resume").exit_code == 0
    assert output.read_bytes() == before


def test_results_of_other_prompts_or_options_are_not_continued(
    run: Run, tiny: Path, prompts: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    assert generated(run, tiny, prompts, "--output", output).exit_code == 0
    for more in (["--dtype", "bfloat16"], ["--temperature", 1, "--seed", 1], ["--no-chat"]):
        result = generated(run, tiny, prompts, "--output", output, "--resume", *more)
        assert result.exit_code == 1
        assert "line 1 is the result of another prompt, or of other options" in error_of(result)
    text = prompts.read_text()
    prompts.write_text(text.replace("x y x", "z y x"))
    changed = generated(run, tiny, prompts, "--output", output, "--resume")
    assert "line 4 is the result of another prompt" in error_of(changed)
    prompts.write_text("".join(line + "\n" for line in text.splitlines()[:1]))
    fewer = generated(run, tiny, prompts, "--output", output, "--resume")
    assert "line 2 is the result of another prompt" in error_of(fewer)
    output.write_text("nonsense\n")
    damaged = generated(run, tiny, prompts, "--output", output, "--resume")
    assert "line 1 is not a JSON object" in error_of(damaged)


def test_lines_of_text_may_go_to_a_file_too(run: Run, tiny: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    given = ["generate", "-m", tiny, *SHORT, "--jsonl"]
    printed = run(*given, stdin="hello\nhi")
    assert run(*given, "--output", output, stdin="hello\nhi").exit_code == 0
    saved = [json.loads(line) for line in lines_of(output.read_text())]
    shown = [json.loads(line) for line in lines_of(printed.stdout)]
    for one, other in zip(saved, shown, strict=True):
        assert one["token_ids"] == other["token_ids"]
        assert one["prompt"] == other["prompt"]


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_failed_lines_are_tried_again(
    run: Run, tiny: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    """Also if the run was killed: then the last `lost` lines are not in the file."""
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert generated(run, tiny, prompts, "--output", whole).exit_code == 0
    advance = decode._advance

    def failing(*arguments: Any) -> Any:
        if arguments[2].prompt_ids[-1] == 7 or arguments[2].params.seed == 3:
            raise OSError("no disk")
        return advance(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(decode, "_advance", failing)
        first = generated(run, tiny, prompts, "--output", output)
        assert first.exit_code == 1
        assert "2 of 4 lines ended with an error" in error_of(first)
        before = lines_of(output.read_text())
        assert [json.loads(line)["error"] for line in before] == [
            *(None, "OSError: no disk", "OSError: no disk", None)
        ]
        again = generated(run, tiny, prompts, "--output", output, "--resume")
        assert "2 of 4 lines ended with an error" in error_of(again)
    output.write_text("".join(line + "\n" for line in before[: len(before) - lost]))
    resumed = generated(run, tiny, prompts, "--output", output, "--resume")
    assert resumed.exit_code == 0, resumed.stderr
    assert without_times(output) == without_times(whole)
    kept = [place for place in (0, 3) if place < len(before) - lost]
    after = lines_of(output.read_text())
    assert [after[place] for place in kept] == [before[place] for place in kept]


def test_lines_that_were_made_again_are_kept_if_the_run_is_interrupted(
    run: Run, tiny: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert generated(run, tiny, prompts, "--output", whole).exit_code == 0
    failed = [{**json.loads(line), "error": "lost"} for line in lines_of(whole.read_text())]
    output.write_text("".join(json.dumps(record) + "\n" for record in failed))
    add = LineResults.add

    def interrupted(results: LineResults, place: int, record: dict[str, Any]) -> None:
        if place == 2:
            raise KeyboardInterrupt
        add(results, place, record)

    with monkeypatch.context() as patch:
        patch.setattr(LineResults, "add", interrupted)
        assert generated(run, tiny, prompts, "--output", output, "--resume").exit_code == 130
    assert without_times(output)[:2] == without_times(whole)[:2]
    assert [json.loads(line)["error"] for line in lines_of(output.read_text())[2:]] == ["lost"] * 2
    assert generated(run, tiny, prompts, "--output", output, "--resume").exit_code == 0
    assert without_times(output) == without_times(whole)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("hello", "not JSON"),
        ("[1]", 'it takes an object, such as {"prompt": "Hello"}'),
        ("{}", "give one of prompt, messages, prompt_token_ids, encoder_prompt, got none of them"),
        ('{"prompt": "a", "messages": []}', "got prompt and messages"),
        ('{"prompt": ""}', "prompt must be a text that is not empty"),
        ('{"prompt": " \\n"}', "prompt must be a text that is not empty"),
        ('{"messages": ["a"]}', "messages must be a list of objects"),
        ('{"prompt_token_ids": [1.5]}', "prompt_token_ids must be a list of whole numbers"),
        ('{"prompt_token_ids": [true]}', "prompt_token_ids must be a list of whole"),
        ('{"prompt_token_ids": [99999]}', "99999"),
        (
            '{"prompt": "a", "max_token": 3}',
            "SamplingParams has no field 'max_token': did you mean 'max_tokens'?",
        ),
        ('{"prompt": "a", "temperature": -1}', "temperature: input should be greater"),
        ('{"prompt": "a", "top_p": 0.5}', "top_p changes nothing in greedy decoding"),
        ('{"prompt": "a", "references": "b"}', "references must be a list of texts"),
        ('{"prompt": "a", "id": [1]}', "id must be a text or a whole number"),
    ],
)
def test_a_malformed_line_is_named_before_anything_runs(
    run: Run, tiny: Path, tmp_path: Path, line: str, message: str
) -> None:
    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text(f'{{"prompt": "hello"}}\n{line}\n')
    result = generated(run, tiny, file, "--output", output)
    assert result.exit_code == 2
    assert error_of(result).startswith("error: line 2")
    assert message in error_of(result)
    assert not output.exists() or output.read_text() == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompts-file", "FILE", "hello"], "--prompts-file has all prompts: leave out PROMPT"),
        (["--prompts-file", "FILE", "--file", "FILE"], "leave out --file"),
        (["--prompts-file", "FILE", "--jsonl"], "leave out --jsonl"),
        (["--prompts-file", "FILE", "--json"], "leave out --json"),
        (["--prompts-file", "FILE", "--trace", "t.json"], "--trace describes one answer"),
        (["--prompts-file", "FILE", "--resume"], "--resume continues a file: add --output"),
        (["--prompts-file", "FILE", "--output", "x.jsonl", "--resume"], "--resume: there is no x"),
        (["--prompts-file", "FILE", "--output", "none/x.jsonl"], "there is no folder none"),
        (["--prompts-file", "EMPTY"], "has no prompts"),
        (["hello", "--output", "x.jsonl"], "--output is for several prompts"),
    ],
)
def test_wrong_use(run: Run, tmp_path: Path, options: list[str], message: str) -> None:
    files = {"FILE": tmp_path / "in.jsonl", "EMPTY": tmp_path / "empty.jsonl"}
    files["FILE"].write_text('{"prompt": "hello"}\n')
    files["EMPTY"].write_text("\n\n")
    assert message in run.refused("generate", *(files.get(option, option) for option in options))
