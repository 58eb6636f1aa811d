"""`train`: a head by one command, which can be killed at any time, and mistakes in one line."""

from __future__ import annotations

import csv
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run, ascii_tokenizer, error_of, save_tiny
from tests.cli.terminal import environment
from tests.programs import Program
from tests.tiny import tiny_model
from tests.tiny_seq2seq import tiny_seq2seq
from tests.training.world import short_talks
from tokenleap import LLM, SamplingParams
from tokenleap.training import report as reports
from tokenleap.training import run as training_run
from tokenleap.training.conversations import ConversationFile
from tokenleap.training.features import bytes_per_token
from tokenleap.training.method import training_method
from tokenleap.training.report import Speeds
from tokenleap.training.run import DrafterSeries, TrainingFolder

QUICK = ["--tokens", 200, "--held-out-tokens", 60, "--set", "batch_tokens=128"]
SHORT = ["--set", "epochs=2", "--set", "evaluate_every=2"]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few and short conversations, no measurement of how long it will take, and no drawing."""
    monkeypatch.setattr(reports, "_draw", lambda path, _: path.touch())  # `test_trainer.py` draws
    monkeypatch.setattr(reports, "_TOKENS", 16)
    monkeypatch.setattr(training_run, "_ROWS", 1)
    monkeypatch.setattr(training_run, "_SERVED_PROMPTS", 1)
    short_talks(monkeypatch)
    speeds = Speeds(1e3, 1e4, 1e3, 500)
    monkeypatch.setattr(training_run, "measure_speeds", lambda *_, **__: speeds)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": f"Say {4 * f'{n:02}'}!"}) + "\n" for n in range(30))
    )
    return file


def files_in(folder: Path) -> set[str]:
    return {str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()}


# A whole run


@pytest.mark.parametrize(
    ("trained", "method"),
    [
        *((name, name) for name in ("eagle", "pass")),
        pytest.param("hydra", "hydra", marks=pytest.mark.slow),
        ("distill", "draft_model"),
    ],
)
def test_train_and_use(run: Run, tiny: Path, tmp_path: Path, trained: str, method: str) -> None:
    out = tmp_path / "head"
    result = run.done("train", trained, "-m", tiny, "-o", out, *QUICK, *SHORT)
    if trained == "pass":  # with as many nodes as the blocks of its training need
        assert f'"method": "pass", "model": "{out}", "num_speculative_tokens": 24' in result.stdout
    else:
        assert f"Use it: --method {method} --draft-model {out}" in result.stdout
    assert "tokens a pass with chains of 4 on 1 held-out prompts" in result.stdout
    for told in ("This will take about", "Draft vocabulary: 97", "held out: acceptance by"):
        assert told in result.stderr
    training = {
        *("settings.json", "report.json", "curves.csv", "curves.png"),
        *("data/train.jsonl", "data/held_out.jsonl", "features/train/index.json"),
    }
    assert {f"training/{name}" for name in training} <= files_in(out)

    params = SamplingParams(temperature=0, max_tokens=20)
    prompt = [[1, 2, 3, 4]]
    (plain,) = LLM(str(tiny)).generate(prompt, params)
    config = {"method": method, "model": str(out), "controller": "fixed"}
    shutil.rmtree(out / "training")  # "can be deleted"
    (drafted,) = LLM(str(tiny), speculative_config=config).generate(prompt, params)
    assert drafted.token_ids == plain.token_ids
    assert drafted.metrics.num_draft_tokens > 0
    assert drafted.metrics.drafter_failure is None

    run.done(
        "generate", "abc", "-m", tiny, "--max-tokens", 9, "--draft-model", out, "--method", method
    )
    again = run("train", trained, "-m", tiny, "-o", out, *QUICK)
    assert "already has a drafter: choose another folder" in error_of(again)


def test_a_new_model(run: Run, tiny: Path, tmp_path: Path) -> None:
    """It is said that it is one, and how it differs; the printed options use it."""
    before, out = (tiny / "model.safetensors").read_bytes(), tmp_path / "new"
    result = run.done("train", "medusa_2", "-m", tiny, "-o", out, *QUICK, *SHORT)
    assert "GB of memory besides the target" in result.stderr
    assert f"{out} is a new model, and its output is not the target's" in result.stdout
    report = json.loads((out / "training/report.json").read_text())
    assert 0.5 < report["perplexity"]["new"] / report["perplexity"]["target"] < 2
    assert (tiny / "model.safetensors").read_bytes() == before
    (printed,) = (line for line in result.stdout.splitlines() if line.startswith("Use it: "))
    assert printed == f"Use it: --model {out} --method medusa --draft-model {out}/heads"
    options = printed.removeprefix("Use it: ").split()
    run.done("generate", "abc", "--max-tokens", 9, *options)


def test_json_and_running_it_again(run: Run, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "head"
    arguments = ("train", "mlp_speculator", "-m", tiny, "-o", out, *QUICK, *SHORT, "--json")
    report = json.loads(run(*arguments).stdout)
    assert report == json.loads((out / "training/report.json").read_text())
    assert report["training"]["answer_tokens"] >= 200
    assert report["held_out"]["greedy"] == 1
    assert report["coverage"] == 1
    assert report["served"]["prompts"] == 1
    weights = (out / "model.safetensors").read_bytes()
    features = (out / "training/features/train/hidden").stat().st_mtime_ns
    again = run(*arguments)
    assert "Continuing the training" in again.stderr
    assert json.loads(again.stdout)["best"] == report["best"]
    assert (out / "model.safetensors").read_bytes() == weights
    assert (out / "training/features/train/hidden").stat().st_mtime_ns == features


def test_two_processes_do_not_train_in_one_folder(run: Run, tiny: Path, tmp_path: Path) -> None:
    with TrainingFolder(tmp_path / "head").held():
        result = run("train", "eagle", "-m", tiny, "-o", tmp_path / "head", *QUICK, *SHORT)
    assert f"another process trains in {tmp_path / 'head'}" in result.stderr


def test_own_data(run: Run, tiny: Path, tmp_path: Path, prompts: Path) -> None:
    """Heads with few levels are served with chains that are longer than they can draft."""
    text = tmp_path / "some.txt"
    text.write_text("ab cd " * 40)
    arguments = ["--data", prompts, "--data", text, "--set", "max_length=64", *QUICK, *SHORT]
    few = ["--set", "num_heads=2", "--json"]
    result = run.done("train", "medusa", "-m", tiny, "-o", tmp_path / "head", *arguments, *few)
    report = json.loads(result.stdout)
    assert report["training"]["conversations"] > 3
    assert report["held_out"]["conversations"] >= 1
    assert len(report["best"]["mean_lengths"]) == 2
    assert report["served"]["by_position"][2:] == [0, 0]
    text.write_text("ef gh " * 40)
    again = run("train", "medusa", "-m", tiny, "-o", tmp_path / "head", *arguments, *few)
    assert "has a training with another 'data'" in error_of(again)


def test_prompts_that_must_stay_unseen(run: Run, tiny: Path, tmp_path: Path, prompts: Path) -> None:
    secret = tmp_path / "secret.jsonl"
    entries = [{"question_id": n, "turns": [4 * str(n)]} for n in range(20, 30)]
    secret.write_text("\n".join(json.dumps(each) for each in entries))
    arguments = ["--data", prompts, "--unseen", secret, "--set", "max_length=64", *QUICK]
    arguments += ["--tokens", 10_000, "--set", "epochs=1"]
    out = tmp_path / "head"
    result = run.done("train", "blockwise", "-m", tiny, "-o", out, *arguments, "--json")
    told = [line for line in result.stderr.splitlines() if line.startswith("Conversations: 1")]
    written = list(ConversationFile(out / "training/data/train.jsonl"))
    encode = ascii_tokenizer().encode
    secrets = [str(encode(4 * str(n)))[1:-1] for n in range(20, 30)]
    number = sum(any(each in str(list(talk.tokens)) for each in secrets) for talk in written)
    assert number > 5
    assert f"left out: 0 twice, {number} for prompts that must stay unseen" in told[0]
    index = json.loads((out / "training/features/train/index.json").read_text())
    learnt = json.loads(result.stdout)["training"]["conversations"]
    assert len(index["lengths"]) == learnt == len(written) - number


def test_a_dry_run_leaves_nothing(run: Run, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "head"
    result = run.done("train", "eagle", "-m", tiny, "-o", out, "--dry-run", "--json", *QUICK)
    found = json.loads(result.stdout)
    layers = len(training_method("eagle", {}).read_layers(2))
    assert found["disk_bytes"] == round(2.2 * 260 * bytes_per_token(layers, 64))
    parts = [found[f"{part}_hours"] for part in ("writing", "feature", "training")]
    assert found["hours"] == pytest.approx(sum(parts))
    tokens, writing = 2.2 * 260, 1.3 * 260 / 1e3 + 1.2 * 260 / 1e4  # answers, and what they answer
    seconds = [writing, tokens / 1e4, 3 * tokens * (0.4 / 1e3 + 0.6 / 500)]
    assert parts == pytest.approx([each / 3600 for each in seconds])
    assert "This will take about 1 min here" in result.stderr
    assert not out.exists()


def test_the_estimate_runs_every_part(
    run: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(training_run, "_ROWS", 2)
    result = run.done(
        "train", "eagle", "-m", tiny, "-o", tmp_path / "head", "--dry-run", "--json", *QUICK
    )
    found = json.loads(result.stdout)
    needed = found.pop("training_bytes")
    assert needed.keys() == {"memory", "disk"}
    assert all(value > 0 for value in (*found.values(), *needed.values()))


def test_too_small_a_disk(
    run: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 10_000})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    result = run("train", "eagle", "-m", tiny, "-o", tmp_path / "head", *QUICK)
    assert result.exit_code == 2
    assert "error: the features need 0.0 GB" in result.stderr
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("untied", "medusa"),
        ("int8", "eagle"),
        pytest.param("int8", "medusa", marks=pytest.mark.slow),
        ("gpt2", "eagle"),
    ],
)
def test_other_targets(run: Run, tmp_path: Path, own_cache: Path, kind: str, method: str) -> None:
    folder = save_tiny(tmp_path / "target")
    more: list[Any] = []
    if kind == "int8":
        model = tiny_model(vocab_size=97, head_dim=32, max_position_embeddings=512)
        model.save_pretrained(folder)
        more = ["--quantization", "int8"]
    elif kind == "gpt2":
        tiny_model("gpt2", vocab_size=97, n_positions=512).save_pretrained(folder)
    out = tmp_path / method
    few = ["--tokens", 60, "--held-out-tokens", 20, "--set", "epochs=1"]
    run.done("train", method, "-m", folder, "-o", out, *QUICK, *few, *more)
    run.done(
        *("generate", "abc", "-m", folder, "--method", method, "--draft-model", out),
        *("--max-tokens", 9, *more),
    )


# Stopping


SCRIPT = """
import os, signal, sys
import pytest
from tokenleap.training import run, trainer
from tokenleap.training.report import Speeds
from tests.training.world import short_talks
short_talks(pytest.MonkeyPatch())
run._ROWS, run._SERVED_PROMPTS = 1, 1
run.measure_speeds = lambda *_, **__: Speeds(1e3, 1e3, 1e3, 1e3)
step, left = trainer.Trainer._step, int(sys.argv.pop(1))
number = getattr(signal, sys.argv.pop(1))
def stopping(self, batches):
    global left
    found = step(self, batches)
    left -= 1
    if left == 0:
        os.kill(os.getpid(), number)
    return found
trainer.Trainer._step = stopping
from tokenleap.cli import main
main()
"""


def stopped(steps: int, name: str, *arguments: object) -> tuple[int, str]:
    """The exit code and stderr."""
    if name == "SIGKILL":
        with Program(SCRIPT, steps, name, *arguments, env=environment()) as program:
            _, errors = program.communicate()
            return program.wait(), errors
    # A forked one does not hear a SIGINT that it sends to itself.
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(steps), name, *(str(each) for each in arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    return done.returncode, done.stderr


@pytest.mark.slow  # as `test_trainer.py` in one process
def test_a_kill_and_ctrl_c_lose_nothing(run: Run, tiny: Path, tmp_path: Path) -> None:
    """The same head as in one go, and the steps before are not made again."""
    whole, out = tmp_path / "whole", tmp_path / "stopped"
    arguments = (
        "train",
        "hydra",
        "-m",
        tiny,
        *QUICK,
        "--set",
        "epochs=4",
        "--set",
        "evaluate_every=3",
    )
    code, _ = stopped(4, "SIGKILL", *arguments, "-o", out)
    assert code == -signal.SIGKILL
    assert [each.name for each in (out / "training/checkpoints").iterdir()] == ["checkpoint-3"]
    code, errors = stopped(2, "SIGINT", *arguments, "-o", out)
    assert code == 130, errors
    assert "interrupted" in errors.splitlines()
    assert "Traceback" not in errors
    assert [each.name for each in (out / "training/checkpoints").iterdir()] == ["checkpoint-5"]
    assert (out / "model.safetensors").exists()
    for folder in (out, whole):
        run.done(*arguments, "-o", folder)
    for name in ("model.safetensors", "training/curves.csv"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.slow
def test_two_processes(tiny: Path, tmp_path: Path) -> None:
    """One of them writes, both train, and the steps are half as many."""
    steps = {}
    for processes in (1, 2):
        out = tmp_path / str(processes)
        launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
        settings = ["--set", "evaluate_every=1", "--set", "patience=0"]
        options = ["train", "hydra", "-m", tiny, "-o", out, *QUICK, *settings, "--json"]
        result = subprocess.run(
            [sys.executable, *launcher, "-m", "tokenleap", *(str(each) for each in options)],
            capture_output=True,
            text=True,
            check=False,
            env=environment(),
        )
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout) == json.loads((out / "training/report.json").read_text())
        assert (out / "model.safetensors").exists()
        with (out / "training/curves.csv").open() as file:
            steps[processes] = int(list(csv.DictReader(file))[-1]["step"])
    assert steps[2] == 3 * (steps[1] // 3 // 2)  # of three epochs


def test_answers_of_the_draft_model(run: Run, tiny: Path, tmp_path: Path) -> None:
    own = ["--set", "answers=mixed", "--set", "refresh_every=2", "--set", "epochs=1"]
    result = run.done("train", "distill", "-m", tiny, "-o", tmp_path / "draft", *QUICK, *own)
    for step in (0, 2):
        assert f"Step {step}: the draft model answers " in result.stderr


def test_draft_models_whose_drafts_are_merged(run: Run, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "draft models"
    result = run.done("train", "boost", "-m", tiny, "-o", out, *QUICK, "--set", "epochs=1")
    assert "Drafter 2 of 2 learns what the one before it missed: " in result.stderr
    config = json.dumps({"method": "ensemble", "drafters": str(out)})
    assert f"Use it: --speculative-config '{config}'" in result.stdout.replace("\n", " ")
    shutil.rmtree(out / "training")
    arguments = ("generate", "abc", "-m", tiny, "--max-tokens", 9, "--json")
    plain, drafted = (run(*arguments, *more) for more in ((), ("--speculative-config", config)))
    assert drafted.exit_code == 0, drafted.stderr
    texts = [json.loads(each.stdout)["text"] for each in (plain, drafted)]
    assert texts[0] == texts[1]
    again = run("train", "boost", "-m", tiny, "-o", out, *QUICK)
    assert "already has a drafter" in error_of(again)


# Wrong use


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eagel"], "nothing can be trained as 'eagel': did you mean 'eagle'?"),
        (["eagle", "--set", "epochs"], "--set: write NAME=VALUE, got epochs"),
        (["eagle", "--set", "epoch=1"], "--set: there is no 'epoch': did you mean 'epochs'?"),
        (["eagle", "--set", "num_heads=1"], "--set: there is no 'num_heads'"),
        (["eagle", "--set", "epochs=0"], "--set epochs: input should be greater than 0"),
        (["eagle", "--set", "epochs=NaN"], "--set epochs: input should be a finite number"),
        (["eagle", "--set", "seed=x"], "--set seed: input should be a valid integer"),
        (["eagle", "--set", "seed=1", "--set", "seed=2"], "--set: seed is given twice"),
        (["eagle", "--set", "loss=mse"], "--set loss: input should be 'kl', 'ce' or 'tv'"),
        (["medusa", "--set", "levels=2"], "--set levels: 'medusa' learns all of its heads"),
        (["eagle", "--tokens", "0"], "invalid value for '--tokens'"),
        (["eagle", "--data", "self", "--data", "x"], "--data: give 'self' or files, not both"),
        (["eagle", "--data", "none.jsonl"], "--data: there is no file none.jsonl"),
        (["eagle", "--unseen", "none.jsonl"], "--unseen: there is no file none.jsonl"),
        (["eagle", "--set", "layers=[0, 9]"], "layers: this model has layers 0 to 2"),
        (["eagle", "-m", "nonesuch"], "nonesuch"),
        (["distill", "--set", "answers=fixed"], "answers: 'fixed' learns those in your files"),
        (["boost", "--set", "drafters=1"], "--set drafters: input should be greater than or"),
    ],
)
def test_wrong_use(
    run: Run, tiny: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    assert message in run.refused("train", "-o", tmp_path / "head", "-m", tiny, *arguments)
    assert not (tmp_path / "head").exists()


def test_a_file_in_place_of_a_folder(run: Run, tiny: Path, prompts: Path) -> None:
    result = run("train", "eagle", "-m", tiny, "-o", prompts)
    assert "--out: " in error_of(result)
    assert "is not a folder" in error_of(result)


def test_a_bad_line_is_named(run: Run, tiny: Path, tmp_path: Path, prompts: Path) -> None:
    with prompts.open("a") as file:
        file.write('{"messages": [{"role": "tool", "content": "x"}]}\n')
    assert f"{prompts}, line 31: a message has the role 'tool'" in run.refused(
        "train", "eagle", "-m", tiny, "-o", tmp_path / "head", "--data", prompts
    )
    unseen = tmp_path / "unseen.jsonl"
    unseen.write_text('{"prompt": "one"}\n{"prompt"\n')
    result = run("train", "eagle", "-m", tiny, "-o", tmp_path / "head", "--unseen", unseen)
    assert "unseen.jsonl, line 2: not JSON" in result.stderr.splitlines()[-1]


def test_no_chat_template(
    run: Run, tiny_without_template: Path, tmp_path: Path, prompts: Path
) -> None:
    """It cannot write by itself, but answers prompts."""
    arguments = ("train", "medusa", "-m", tiny_without_template, "-o", tmp_path / "head", *QUICK)
    refused = run.refused(*arguments)
    assert "no chat template" in refused
    assert "--data" in refused
    assert not (tmp_path / "head").exists()
    run.done(*arguments, "--data", prompts, "--set", "epochs=1")


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_another_training_in_the_same_folder(run: Run, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "head"
    arguments = ("train", "eagle", "-m", tiny, "-o", out, "--dtype", "float32", *QUICK)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(DrafterSeries, "train", interrupt)
        assert run(*arguments).exit_code == 130
    before = files_in(out)
    for changed, named in (
        (["--set", "epochs=4"], "settings"),
        (["--set", "noise=0"], "options"),
        (["--tokens", "201"], "data"),
        (["--dtype", "bfloat16"], "dtype"),
    ):
        refused = run.refused(*arguments, *changed)
        assert "has a training with another" in refused
        assert named in refused
        assert files_in(out) == before


def test_without_the_library_it_stands_on(
    run: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    assert run.refused("train", "eagle", "-m", tiny, "-o", tmp_path / "head").startswith(
        "error: training needs accelerate: pip install 'accelerate<"
    )


# Encoder-decoders


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("bart"), ascii_tokenizer(None)
    size, end = len(tokenizer.get_vocab()), tokenizer.eos_token_id
    fields = {"eos_token_id": end, "decoder_start_token_id": end, "pad_token_id": 0}
    tiny_seq2seq("bart", vocab_size=size, **fields).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_spec_drafter(run: Run, bart: Path, tmp_path: Path) -> None:
    data, out = tmp_path / "pairs.tsv", tmp_path / "drafter"
    data.write_text("".join(f"say {4 * f'{n:02}'}!\t{n}\n" for n in range(22)))
    steps = ["max_steps=4", "evaluate_every=2", "max_length=16", "num_masks=3", "batch_tokens=128"]
    given = [part for each in steps for part in ("--set", each)]
    arguments = ["-m", bart, "-o", out, "--data", data, "--size", 0.2, *given]
    result = run("train", "spec_drafter", *arguments, *QUICK[:4], "--json")
    report = json.loads(result.stdout)
    assert len(report["served"]["by_position"]) == 3
    assert report["training"]["conversations"] > 10  # which all begin alike
    written = json.loads((out / "config.json").read_text())
    assert written["tokenleap"]["spec_drafter"]["num_masks"] == 3
    assert written["d_model"] == 16
    assert written["tokenleap"]["probe"]
    llm = LLM(bart, speculative_config={"method": "spec_drafter", "model": out})
    (output,) = llm.generate("say 5!", SamplingParams(temperature=0, max_tokens=8))
    assert output.metrics.drafter_failure is None


def test_data_for_encoder_decoders(run: Run, bart: Path, tiny: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text("one\ntwo\n")
    second.write_text("1\n")
    out = ["-o", tmp_path / "out"]
    both = ["--source", first, "--target", second]
    for arguments, message in (
        (["-m", bart, *both], "a.txt has 2 lines and"),
        (["-m", bart], "an encoder-decoder cannot write sources by itself"),
        (["-m", bart, "--source", first], "--source and --target: give both"),
        (["-m", bart, *both, "--data", first], "give both, without --data"),
        (["-m", tiny, *both], "is trained for an encoder-decoder, and this target is a decoder"),
    ):
        assert message in error_of(run("train", "spec_drafter", *arguments, *out))
    message = error_of(run("train", "eagle", "-m", bart, "--data", first, *out))
    assert "'eagle' is trained for a decoder-only model" in message
    message = error_of(run("train", "eagle", "-m", tiny, "--size", 0.5, *out))
    assert "there is no 'size'" in message
    message = error_of(run("train", "eagle", "-m", tiny, *both, *out))
    assert "--source and --target are for encoder-decoders" in message
