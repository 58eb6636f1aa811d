"""Bad input: one line that helps, the right exit code, nothing left behind."""

from __future__ import annotations

import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from tests.cli.conftest import Run, error_of, save_tiny
from tests.tiny import tiny_model
from tokenleap.cli import app, root
from tokenleap.cli.root import in_flags


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1"], "--temperature: input should be greater than or equal to 0"),
        (["--top-p", "1.5", "--temperature", "1"], "--top-p: input should be"),
        (["--top-p", "0.5"], "--top-p changes nothing in greedy decoding"),
        (["--max-tokens", "0"], "--max-tokens: must be at least 1, got 0"),
        (["--max-tokens", "-1"], "--max-tokens: must be at least 1, got -1"),
        (["--min-tokens", "9", "--max-tokens", "3"], "--min-tokens (9) is larger than --max-tok"),
        (["--n", "2"], "--n 2 with temperature 0 would give 2 copies"),
        (["--stop", ""], "--stop: a stop string cannot be empty"),
        (["--seed", "-1"], "--seed: "),
        (["--logit-bias", "{"], "--logit-bias is not valid JSON"),
        (["--logit-bias", "[1]"], "--logit-bias must be a JSON object"),
        (["--logit-bias", '{"a": 1}'], "--logit-bias: "),
        (["--logit-bias", '{"999": 1}'], "--logit-bias: token id 999 is outside the vocabulary"),
        (["--allowed-token-ids", "1,x"], "--allowed-token-ids takes token ids"),
        (["--stop-token-ids", "5000"], "--stop-token-ids: token id 5000 is outside"),
        (["--method", "ngrm"], "unknown method 'ngrm': did you mean 'ngram'?"),
        (["--method", "draft_model"], "add --draft-model"),
        (["--method", "ngram", "--draft-model", "x"], "remove --draft-model"),
        (["--acceptance", "copled"], "unknown acceptance rule 'copled': did you mean 'coupled'?"),
        (["--num-speculative-tokens", "999"], "--num-speculative-tokens: input should be"),
        (["--speculative-config", "nope"], "--speculative-config is not valid JSON"),
        (["--speculative-config", '"ngram"'], "--speculative-config must be a JSON object"),
        (["--speculative-config", '{"methd": "ngram"}'], "did you mean 'method'?"),
        (["--speculative-config", '{"model": 3}'], "must be a path, an id or an alias"),
        (
            ["--method", "none", "--speculative-config", '{"method": "ngram"}'],
            '--method none contradicts {"method": "ngram"} in --speculative-config',
        ),
        (
            [
                "--acceptance",
                "block",
                "--speculative-config",
                '{"acceptance": {"rule": "typical"}}',
            ],
            "--acceptance block contradicts",
        ),
        (["--dtype", "int3"], "--dtype: must be auto, float32"),
        (["--device", "toaster"], "--device: unknown device 'toaster'"),
        (["--max-model-len", "99999"], "--max-model-len: must be 2 to 8192"),
        (["--max-model-len", "3"], "the prompt has"),
        (["--logprobs", "3"], "--logprobs are shown in JSON only"),
        (["--prompt-logprobs", "0"], "--prompt-logprobs are shown in JSON only"),
        (["--trace", "x.json", "--n", "2", "--temperature", "1"], "leave out --n 2"),
        (["--trace", "/no/such/folder/x.json"], "there is no folder /no/such/folder"),
        (["--trace", "/"], "is a folder: name a file"),
    ],
)
def test_wrong_use(run: Run, tiny: Path, arguments: list[str], message: str) -> None:
    assert message in run.refused("generate", "hello", "--model", tiny, *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("generate hi --max-new-tokens 4", "--max-new-tokens: use --max-tokens. Try"),
        ("generate hi --num_predict 4", "--num-predict: use --max-tokens. Try"),
        ("generate hi -ngl 99", "and --device cuda for -ngl. Try"),
        ("serve -ngl 99", "-n: use --device cuda for -ngl. Try"),
        ("generate --prompts-file -", "--prompts-file: standard input has no prompts"),
        ("generate hi --temp 1", "--temp: did you mean '--temperature'? Try"),
        ("generate hi --seeed 1", "--seeed: did you mean '--seed'? Try"),
        ("generate hi --stream", "--stream: answers to one prompt are streamed anyway. Try"),
        ("generate hi --frobnicate", "--frobnicate. Try 'tokenleap generate --help'."),
        ("generate hi -v", "-v: set the environment variable TOKENLEAP_LOG=info. Try"),
        ("-v", "-v: use --version. Try 'tokenleap --help'."),
        ("serve -p 80", "-p: use --port. Try"),
        ("generate -p hi", "-p: write the prompt without an option. Try"),
        ("serve --stream", "no such option: --stream. Try"),
        ("models -p hi", "no such option: -p. Try"),
        ("generate hi there", "(there): put a prompt of several words in quotes. Try"),
        ("chat smollm2-135m", "(smollm2-135m): name a model with --model. Try"),
        ("download x", "no such command 'download': use 'tokenleap models fetch'"),
        ("models rm x", "no such command 'rm': use 'tokenleap models remove'"),
        ("generat hi", "no such command 'generat': did you mean 'generate'?"),
        ("zzz", "no such command 'zzz': known: bench, chat, "),
        ("generate --sed 1", "no such option: --sed"),
        ("generate --n x hi", "invalid value for '--n'"),
        ("trace", "missing argument 'FILE'"),
        ("models burn", "no such command 'burn'"),
        ("demo --rounds 0", "invalid value for '--rounds'"),
    ],
)
def test_habits(run: Run, arguments: str, message: str) -> None:
    """Other programs' names get ours; no suggestion means something else."""
    assert message in run.refused(*arguments.split())


def test_advice_names_what_there_is() -> None:
    groups: list[Any] = [get_command(app)]
    options: set[str] = set()
    commands = {"--help", "--version"}
    while groups:
        command = groups.pop()
        commands |= set(nested := getattr(command, "commands", {}))
        groups += nested.values()
        options |= {name for each in command.params for name in each.opts}
    for advice in chain.from_iterable(root._OPTIONS.values()):
        assert set(re.findall(r"(?<!\S)--[a-z-]+", advice)) <= options, advice
    for advice in root._COMMANDS.values():
        for words in re.findall(r"'tokenleap ([^']+)'", advice):
            assert set(words.split()) <= commands, advice


def test_options_may_have_underscores(run: Run, tiny: Path) -> None:
    result = run.done("generate", "hi", "--model", tiny, "--max_tokens", 2, "--quiet")
    assert result.stdout == run("generate", "hi", "-m", tiny, "--max-tokens", 2, "-q").stdout


def test_prompts_that_cannot_be(run: Run, tiny: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    blank = tmp_path / "blank"
    blank.write_text(" \n\t\n")
    for arguments, stdin in (
        *((["--file", empty], None), ([""], None), ([], ""), (["-"], "\n")),
        *((["--file", blank], None), (["  "], None), (["--jsonl"], "a\n \nb\n")),
    ):
        assert "the prompt is empty" in run.refused("generate", "-m", tiny, *arguments, stdin=stdin)
    both = run("generate", "hello", "--file", empty)
    assert (both.exit_code, error_of(both)) == (2, "error: give PROMPT or --file, not both")
    assert run("generate", "caf\udce9").exit_code == 2


def test_what_cannot_be_read_is_1(run: Run, tiny: Path, tmp_path: Path) -> None:
    assert (
        run.refused("generate", "-m", tiny, "--file", tmp_path / "absent", code=1)
        == f"error: {tmp_path / 'absent'}: No such file or directory"
    )
    assert run("generate", "-m", tiny, "--file", tmp_path).exit_code == 1
    assert (
        run.refused("generate", "-m", tiny, stdin=b"caf\xe9", code=1)
        == "error: standard input is not UTF-8 text: byte 3 is 0xe9"
    )


def test_outputs_that_would_destroy_what_is_read(run: Run, tiny: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("hello")
    for command in (
        ("ngrams", "build", text, "--output", text, "-m", tiny),
        ("datastore", "build", text, "--output", tmp_path / "." / "text.txt", "-m", tiny),
        ("tune-layers", text, "-o", text, "-m", tiny),
        ("trace", text, "--svg", text),
    ):
        assert "is read: name another file to write" in run.refused(*command)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hi"}\n')
    foreign = ("generate", "--prompts-file", prompts, "-m", tiny, "--output", text, "--resume")
    assert "does not end in a JSON object" in run.refused(*foreign, code=1)
    assert text.read_text() == "hello"


def test_where_nothing_can_be_written(run: Run, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("hello")
    arguments = ("ngrams", "build", tmp_path / "text.txt", "-m", tiny, "--output", "/proc/x")
    assert "/proc/x cannot be written: " in run.refused(*arguments)


def test_out_of_memory_is_one_line(run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr("tokenleap.llm.LLM.generate", full)
    monkeypatch.setattr("tokenleap.llm.LLM.stream", full)
    assert "error: out of memory" in run.refused("generate", "hi", "-m", tiny, code=1)


@pytest.mark.parametrize(
    "command", ["plan --measure --prompts", "tree", "bench", "tune-layers -o layers.json"]
)
def test_prompt_files_that_cannot_be_read(run: Run, tmp_path: Path, command: str) -> None:
    file = tmp_path / "prompts.txt"
    assert "prompts.txt" in run.refused(*command.split(), file, code=1)
    for content, message in ((b"\n \n", "has no prompts"), (b"caf\xe9", "is not UTF-8 text")):
        file.write_bytes(content)
        assert message in run.refused(*command.split(), file)


def test_models_that_cannot_be(run: Run, tiny: Path, tmp_path: Path) -> None:
    wrong = run.refused("generate", "hi", "--model", "smolm2")
    assert "did you mean smollm2-" in wrong
    assert "smollm2-135m" in wrong
    assert "no model 'nowhere'" in run.refused(
        "generate", "hi", "-m", tiny, "--draft-model", "nowhere"
    )
    for name in ("", "~nobody/model", "x" * 5000, "./absent"):
        assert run("generate", "hi", "--model", name).exit_code == 2
    assert "no config.json" in run.refused("generate", "hi", "--model", tmp_path, code=1)
    truncated = tmp_path / "model.gguf"
    truncated.write_bytes(b"GGUF")
    assert run("generate", "hi", "--model", truncated).exit_code == 1


def test_another_vocabulary(run: Run, tiny: Path, tmp_path: Path) -> None:
    tiny_model(vocab_size=50).save_pretrained(tmp_path)
    assert "vocabulary of 50 tokens" in run.refused(
        "generate", "hi", "-m", tiny, "--draft-model", tmp_path
    )


def test_a_trace_that_cannot_be_written(
    run: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "steps.json"
    file.write_text("old")

    def full(path: Path, *_: object, **__: object) -> int:
        path.touch()
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_text", full)
    result = run("generate", "hi", "-m", tiny, "--trace", file, "--max-tokens", 3)
    assert result.exit_code == 1
    assert "No space left on device" in error_of(result)
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_flag_and_json_may_agree(run: Run, tiny: Path) -> None:
    config = {"method": "ngram", "acceptance": {"rule": "typical", "posterior_alpha": 0.2}}
    agreeing = ["--method", "ngram", "--acceptance", "typical", "--num-speculative-tokens", 2]
    result = run(
        *("generate", "hi", "-m", tiny, "--max-tokens", 3, "--json", *agreeing),
        *("--speculative-config", json.dumps(config)),
    )
    effective = json.loads(result.stdout)["speculative_config"]
    assert effective["num_speculative_tokens"] == 2
    assert effective["acceptance"]["posterior_alpha"] == 0.2


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("n: must be 1.", "--n: must be 1."),
        ("set max_model_len=128 or less", "set --max-model-len 128 or less"),
        ("the seed of a plant, and its device", "the seed of a plant, and its device"),
        ("device: use device='cpu'.", "--device: use --device cpu."),
    ],
)
def test_advice_in_flags(said: str, shown: str) -> None:
    assert in_flags(said) == shown


def test_no_chat_without_template(run: Run, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", chat_template=None)
    assert "has no chat template" in run.refused("chat", "-m", folder, stdin="hi\n")
