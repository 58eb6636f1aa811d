"""`bench`: a whole run that is killed and resumed, and what is refused before it."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.bench.records import background, drafted, own_output, request
from tests.cli.conftest import Run, error_of, save_gguf
from tests.cli.terminal import environment
from tests.programs import MAIN, TIMEOUT, Program
from tokenleap.bench.contestants import Contestant, Setting
from tokenleap.bench.run import Journal, Plan
from tokenleap.bench.worker import Process, Worker

FAKE_LLAMA = """
class Llama:
    def __init__(self, **options): pass
    def reset(self): pass
    def generate(self, tokens, temp, repeat_penalty):
        import time
        while True:
            time.sleep(0.001)
            yield 1
"""
REQUESTS = 2 * 2 * 3


def requests_in(file: Path) -> int:
    return file.read_text().count('"type": "request"') if file.exists() else 0


@pytest.mark.slow  # four processes import PyTorch; `tests/bench/test_run.py` continues runs in one
def test_a_run_is_killed_and_resumed(
    run: Run, tiny: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = tmp_path / "peer"
    peer.mkdir()
    (peer / "llama_cpp.py").write_text(FAKE_LLAMA)
    monkeypatch.setenv("PYTHONPATH", str(peer), prepend=os.pathsep)
    monkeypatch.syspath_prepend(peer)
    output = tmp_path / "results"
    arguments = [
        *("bench", prompts, "-m", tiny, "--method", "none", "--peers", "llama.cpp-plain"),
        *("--gguf", save_gguf(tmp_path / "tiny.gguf"), "--max-tokens", 96),
        *("--rounds", 3, "--threads", 1),
        *("--dtype", "float32", "--device", "cpu", "--output", output),
    ]
    records = output / "results.jsonl"
    with Program(MAIN, *arguments, env=environment()) as process:
        ends = time.monotonic() + TIMEOUT
        while requests_in(records) < 2:
            assert process.poll() is None
            assert time.monotonic() < ends
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert 2 <= requests_in(records) < REQUESTS
    assert "--resume" in error_of(run(*arguments))
    result = run.done(*arguments, "--resume", "--json")
    assert result.stderr == ""
    assert requests_in(records) == REQUESTS
    value = json.loads(result.stdout)
    rows = {row["label"]: row for row in value["rows"]}
    assert list(rows) == ["none", "llama.cpp-plain"]
    assert rows["none"]["ratio"]["mean"] == 1
    assert rows["llama.cpp-plain"]["differing"] == 2
    assert value["roofline"][0]["step_seconds"] > value["roofline"][0]["stream_seconds"] > 0
    again = run(*arguments, "--resume")  # nothing is left to do
    assert again.stdout.strip() == (output / "table.md").read_text().strip()
    assert "<!doctype html>" in (output / "report.html").read_text()


class Here(Process):
    """A contestant in this process: one of its own would import PyTorch for six seconds."""

    def __init__(self, contestant: Contestant, setting: Setting) -> None:
        self.label = contestant.label
        self._worker = Worker(contestant, setting)

    def wait_until_loaded(self) -> None:
        self.facts = self._worker.facts()

    def ask(self, command: str, **fields: Any) -> Any:
        return json.loads(json.dumps(self._worker.ask(command, **fields)))

    def close(self, *, force: bool = False) -> None:
        pass


def test_lossy_rules_are_judged_at_a_temperature(
    run: Run, tiny: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeded samples of the default rule are those of `none`; a lossy rule's are not."""
    monkeypatch.setattr("tokenleap.bench.run.Process", Here)
    lossy = '{"method": "random", "acceptance": {"rule": "lenient", "lenience": 1e-6}}'
    result = run.done(
        *("bench", prompts, "-m", tiny, "--peers", "", "--method", "random", "--method", lossy),
        *("--temperature", 1, "--max-tokens", 24, "--rounds", 1, "--threads", 1),
        *("--dtype", "float32", "--device", "cpu", "--output", tmp_path / "results", "--json"),
    )
    value = json.loads(result.stdout)
    assert value["settings"]["temperature"] == 1
    none, same, other = value["agreement"]
    assert (none["equal"], same["equal"], other["equal"]) == (2, 2, 0)
    assert (same["equal_tokens"], same["first_difference"]) == (1, None)
    assert same["logprob"] == none["logprob"] > other["logprob"]
    assert none["bleu"] == pytest.approx(100)
    assert other["bleu"] < 50
    assert [each["label"] for each in value["steps"]] == [
        each["label"] for each in (none, same, other)
    ]
    assert value["footprint"] == {"pue": 1.1, "co2": 0.385}
    assert "## Agreement" in (tmp_path / "results" / "table.md").read_text()


def test_other_tokens_than_plain_decoding_are_a_failure(
    run: Run, tiny: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(plan: Plan, journal: Journal, _: object) -> None:
        calls = [request("none", 1.0, own_output([1, 2])), request("ngram", 1.0, drafted([1, 3]))]
        for record in (*background(), *calls):
            journal.add(record)

    monkeypatch.setattr("tokenleap.bench.run.run", measured)
    output = tmp_path / "results"
    result = run("bench", prompts, "-m", tiny, "--peers", "", "--output", output)
    assert result.exit_code == 1
    assert error_of(result) == "error: outputs differ from plain decoding's: ngram"
    assert "ngram: outputs must be those of none, and differ on 1 prompts." in result.stdout
    assert (output / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--all", "--per-kind", "3"], "--all takes every prompt: leave out --per-kind 3"),
        (["--batch-sizes", "4,x"], "--batch-sizes takes numbers, as in 1,4,16, got 4,x"),
        (["--batch-sizes", "0"], "--batch-sizes takes numbers"),
        (["--method", "ngrm"], "did you mean 'ngram'?"),
        (["--method", "draft_model"], "needs a draft model: add --draft-model"),
        (["--peers", "vllm"], "unknown peer 'vllm'"),
        (["--peers", "openvino"], "needs --gguf"),
        (["--gguf", "none.gguf"], "--gguf: there is no file none.gguf"),
        (["--draft-model", "small"], "--draft-model: no contestant takes it"),
        (["--model", "no-such-model"], "no-such-model"),
        (["--resume"], "--resume: there is no"),
        (["--threads", "0"], "invalid value for '--threads'"),
        (["--temperature", "-1"], "invalid value for '--temperature'"),
        (["--pue", "0.9"], "invalid value for '--pue'"),
    ],
)
def test_wrong_use(
    run: Run, prompts: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    assert message in run.refused("bench", prompts, "--output", tmp_path / "results", *arguments)
    assert not (tmp_path / "results").exists()


def test_a_gguf_nobody_reads_is_refused(run: Run, prompts: Path) -> None:
    assert "--gguf is for the peers llama.cpp and openvino" in run.refused(
        "bench", prompts, "--gguf", prompts
    )


def test_a_gguf_of_another_model_is_refused(
    run: Run, tiny: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: True)
    file = save_gguf(tmp_path / "other.gguf", layers=3, vocabulary=50)
    arguments = ["bench", prompts, "-m", tiny, "--peers", "llama.cpp", "--output", tmp_path / "out"]
    assert run.refused(*arguments, "--gguf", file) == (
        f"error: --gguf: {file} is another model than the one in {tiny}: layers 3, not 2; "
        "vocabulary 50, not 97."
    )
    assert "is not a GGUF file" in run.refused(*arguments, "--gguf", prompts, code=1)
    assert not (tmp_path / "out").exists()


def test_a_peer_that_is_not_installed(
    run: Run, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert (
        "llama.cpp is not installed: leave it out of --peers, or pip install 'llama-cpp-python<"
        in run.refused("bench", prompts, "--gguf", prompts, "--peers", "llama.cpp")
    )


def test_a_gguf_model_is_the_peers_model(
    run: Run, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: True)
    file = save_gguf(tmp_path / "tiny.gguf")
    result = run("bench", prompts, "-m", file, "--peers", "llama.cpp", "--temperature", 1)
    assert "llama.cpp-plain is measured in greedy decoding only" in error_of(result)
    assert "needs --gguf" not in result.stderr


def test_a_damaged_gguf_model_leaves_no_folder(run: Run, prompts: Path, tmp_path: Path) -> None:
    file = save_gguf(tmp_path / "tiny.gguf")
    file.write_bytes(file.read_bytes()[:100])
    assert "tiny.gguf" in run.refused(
        "bench", prompts, "-m", file, "--peers", "none", "--output", tmp_path / "out", code=1
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("module", "message"),
    [("scipy.stats", "intervals need SciPy"), ("sacrebleu.metrics", "chrF need sacreBLEU")],
)
def test_what_could_not_be_reported_is_not_measured(
    run: Run,
    tiny: Path,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    message: str,
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert f"{message}: pip install 'sacrebleu<" in run.refused(
        "bench", prompts, "-m", tiny, "--peers", "none", "--output", tmp_path / "out", code=1
    )
    assert not (tmp_path / "out").exists()


def test_a_peer_that_is_not_sampled(
    run: Run, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: True)
    arguments = ["--gguf", prompts, "--peers", "llama.cpp", "--temperature", 1]
    assert "--temperature: llama.cpp-plain is measured in greedy decoding only" in run.refused(
        "bench", prompts, *arguments
    )
