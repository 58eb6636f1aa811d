"""Flags of the engine reach `LLM`, change no output, and are refused where they do nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tokenleap
from tests.cli.conftest import Run
from tokenleap import LLM
from tokenleap.bench.contestants import BASELINE, Setting
from tokenleap.bench.run import Plan
from tokenleap.runtime.choices import QUANTIZATION_OPTIONS

SHORT = ["--max-tokens", 8]
GIVEN = ["--kv-cache-memory", "4MiB", "--max-num-batched-tokens", 7, "--max-model-len", 900]
EXPECTED = {"kv_cache_memory": "4MiB", "max_num_batched_tokens": 7, "max_model_len": 900}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of every `LLM` that was made."""
    seen: list[dict[str, Any]] = []

    class Seen(LLM):
        def __init__(self, model: Any, **arguments: Any) -> None:
            seen.append(arguments)
            super().__init__(model, **arguments)

    monkeypatch.setattr("tokenleap.LLM", Seen)
    return seen


def test_generate(run: Run, tiny: Path, made: list[dict[str, Any]]) -> None:
    several = ["generate", "hello", "-m", tiny, *SHORT, "--n", 3, "--temperature", 1, "--seed", 1]
    expected = run(*several).stdout
    more = ["--max-num-seqs", 2, "--prefix-cache-memory", "1MiB", "--batch-invariant"]
    result = run.done(*several, *GIVEN, *more)
    assert result.stdout == expected
    assert made[0]["enable_prefix_caching"]
    assert {"kv_cache_memory", "max_num_seqs", "prefix_cache_memory"}.isdisjoint(made[0])
    wanted = {**EXPECTED, "max_num_seqs": 2, "prefix_cache_memory": "1MiB"}
    wanted["batch_invariant"] = True
    assert {name: made[1][name] for name in wanted} == wanted


def test_chat(run: Run, tiny: Path, made: list[dict[str, Any]]) -> None:
    lines = "hello\nand?\n"
    expected = run("chat", "-m", tiny, *SHORT, stdin=lines).stdout
    given = ["chat", "-m", tiny, *SHORT, *GIVEN, "--no-enable-prefix-caching"]
    result = run.done(*given, stdin=lines)
    assert result.stdout == expected
    wanted = {**EXPECTED, "enable_prefix_caching": False}
    assert {name: made[1][name] for name in wanted} == wanted
    assert "no_enable_prefix_caching" not in made[1]


def test_bench(
    run: Run,
    tiny: Path,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    made: list[Any],
) -> None:
    from tokenleap.bench.own import OwnRunner

    plans: list[Plan] = []

    class StoppedError(Exception):
        """Before anything is measured."""

    def measured(plan: Plan, *_: object) -> None:
        plans.append(plan)
        raise StoppedError

    monkeypatch.setattr("tokenleap.bench.run.run", measured)
    monkeypatch.setattr("tokenleap.bench.own.LLM", tokenleap.LLM)
    common = ["bench", prompts, "-m", tiny, "--peers", "", "--quantization", "int8"]
    for number, more in enumerate(([], [*GIVEN, "--batch-sizes", 20, "--max-num-seqs", 5])):
        with pytest.raises(StoppedError):
            run(*common, "--output", tmp_path / str(number), *more)
    settings = [plan.setting for plan in plans]
    assert settings[0] == Setting(str(tiny), threads=settings[0].threads)
    assert (settings[1].max_num_seqs, plans[1].batch_sizes) == (5, (20,))
    assert all(one.quantization == "int8" for one in plans[1].contestants)
    OwnRunner(BASELINE, settings[1])
    wanted = {**EXPECTED, "max_num_seqs": 5}
    assert {name: made[0][name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-cache-memory", "many"], "--kv-cache-memory: expected bytes or text such as '2GiB'"),
        (["--kv-cache-memory", "0"], "--kv-cache-memory: must be above 0"),
        (["--kv-cache-memory", f"{'9' * 400}GiB"], "--kv-cache-memory: expected bytes"),
        (["--kv-cache-memory", "1KiB"], "--kv-cache-memory: one sequence of this model takes"),
        (["--prefix-cache-memory", "x"], "--prefix-cache-memory: expected bytes"),
        (
            ["--prefix-cache-memory", "1MiB", "--no-enable-prefix-caching"],
            "--prefix-cache-memory: --no-enable-prefix-caching keeps nothing",
        ),
        (["--max-num-batched-tokens", "0"], "--max-num-batched-tokens: must be at least 1"),
        (["--max-num-seqs", "0", "--n", "2", "--temperature", "1"], "--max-num-seqs: must be at"),
        (["--max-num-seqs", "4"], "--max-num-seqs is for several answers: add --n"),
        (["--prefix-cache-memory", "1MiB"], "--prefix-cache-memory is for several answers"),
        (["--no-enable-prefix-caching"], "--no-enable-prefix-caching is for several answers"),
        (["--max-num-seqs", "x"], "invalid value for '--max-num-seqs'"),
        (
            ["--quantization", "int3"],
            f"--quantization: must be one of {', '.join(QUANTIZATION_OPTIONS)}, got",
        ),
    ],
)
def test_wrong_use(run: Run, tiny: Path, arguments: list[str], message: str) -> None:
    assert message in run.refused("generate", "hello", "--model", tiny, *arguments)


def test_mistakes_are_found_before_a_model_is_fetched(run: Run) -> None:
    for flag, value in (("--quantization", "int3"), ("--kv-cache-memory", "many")):
        assert run.refused("generate", "hello", "--model", "no-such-model", flag, value).startswith(
            f"error: {flag}"
        )


def test_bench_refuses_what_does_nothing(run: Run, tiny: Path, prompts: Path) -> None:
    assert "--max-num-seqs is for several prompts at once: add --batch-sizes" in run.refused(
        "bench", prompts, "-m", tiny, "--max-num-seqs", 4
    )
    assert run("bench", prompts, "-m", tiny, "--no-enable-prefix-caching").exit_code == 2
