"""Rounds on make-believe processes: the order, what is kept, what is not done again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest

from tests.bench.records import NGRAM, OWN_FACTS, PEER_FACTS
from tokenleap.bench import run, worker
from tokenleap.bench.contestants import BASELINE, Contestant, Setting
from tokenleap.bench.prompts_file import Prompt
from tokenleap.bench.run import FORMAT, Journal, Plan
from tokenleap.bench.worker import Process
from tokenleap.errors import TokenleapError

PEER = Contestant("transformers-plain", "transformers-plain")
PROMPTS = tuple(Prompt(name, "kind", name * 3) for name in ("a", "b"))


class BrokenOffError(Exception):
    """Stands for whatever ends a run."""


class FakeProcess:
    """Answers at once, and keeps who was asked for what; may break off."""

    calls: list[tuple[str, int, int]]
    forgot: list[tuple[str, int]]
    """Who was told to forget, before which call."""
    seeds: list[tuple[int, ...]]
    judged: int
    lasts: int
    context: int
    """The context that prompts were to fit into."""

    def __init__(self, contestant: Contestant, setting: Setting) -> None:
        self.label = contestant.label
        self.facts: dict[str, Any] = {}

    def wait_until_loaded(self) -> None:
        self.facts = OWN_FACTS if self.label == BASELINE.label else {**PEER_FACTS, "batches": False}
        if self.label == NGRAM.label:  # its draft model takes some of the memory
            self.facts = {**OWN_FACTS, "max_model_len": 200}

    def ask(self, command: str, **fields: Any) -> Any:
        answers: dict[str, Callable[..., Any]] = {
            "encode": self.encode,
            "control": lambda seeds, max_model_len: [[seed] * 5 for seed in seeds],
            "generate": self.generate,
            "judge": self.judge,
            "forget": lambda: type(self).forgot.append((self.label, len(type(self).calls))),
            "stream": lambda size: size / 1e9,
            "memory": lambda: {"peak_bytes": 1},
        }
        return answers[command](**fields)

    def encode(self, texts: list[str], max_model_len: int) -> list[list[int]]:
        type(self).context = max_model_len
        return [[ord(letter) for letter in text] for text in texts]

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        temperature: float = 0.0,
        seeds: Sequence[int] = (),
    ) -> dict[str, Any]:
        assert len(seeds) == (len(prompts) if temperature else 0)
        if temperature == run.CONTROL_TEMPERATURE:
            assert prompts == [[seeds[0]] * 5]
        type(self).seeds.append(tuple(seeds))
        if len(type(self).calls) == type(self).lasts:
            raise BrokenOffError
        type(self).calls.append((self.label, len(prompts), max_tokens))
        return {"seconds": 1.0, "outputs": [{"token_ids": [1] * max_tokens} for _ in prompts]}

    def judge(self, prompt: list[int], token_ids: list[int]) -> dict[str, Any]:
        type(self).judged += 1
        return {"text": "".join(map(chr, prompt)), "logprob": -1.0}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> type[FakeProcess]:
    monkeypatch.setattr(run, "Process", FakeProcess)
    FakeProcess.calls, FakeProcess.forgot, FakeProcess.lasts = [], [], 1000
    FakeProcess.seeds, FakeProcess.judged = [], 0
    return FakeProcess


def plan(rounds: int = 2, batch_sizes: tuple[int, ...] = ()) -> Plan:
    return Plan((BASELINE, PEER), Setting("m", max_tokens=4), PROMPTS, rounds, batch_sizes)


def silent(*_: object) -> None:
    pass


def requests(journal: Journal) -> list[tuple[str, str, int]]:
    return [
        (record["contestant"], record["unit"], record["round"])
        for record in journal.records
        if record["type"] == "request"
    ]


def test_contestants_take_turns_on_every_prompt(processes: type[FakeProcess]) -> None:
    journal = Journal(None, FORMAT, {})
    run.run(plan(), journal, silent)
    peer = PEER.label
    assert requests(journal) == [
        *(("none", "a", 0), (peer, "a", 0), (peer, "a", 1), ("none", "a", 1)),
        *(("none", "b", 0), (peer, "b", 0), (peer, "b", 1), ("none", "b", 1)),
    ]
    warm_up = processes.calls[:2]
    assert warm_up == [("none", 1, run.WARM_UP_TOKENS), (peer, 1, run.WARM_UP_TOKENS)]
    assert {call[1:] for call in processes.calls[2:]} == {(1, 4)}
    kinds = {record["type"] for record in journal.records}
    assert kinds == {"contestant", "energy", "roofline", "request", "memory", "judgement"}
    assert journal.records[-1]["type"] == "roofline"


def test_who_meets_a_prompt_again_has_forgotten_it(processes: type[FakeProcess]) -> None:
    """After the warm-up, before every further round, and before a batch of what was there alone."""
    run.run(plan(rounds=2, batch_sizes=(3,)), Journal(None, FORMAT, {}), silent)
    own = [number for number, call in enumerate(processes.calls) if call[0] == "none"]
    before = {number for label, number in processes.forgot if label == "none"}
    # Warm-up alone and in a batch; a, a again, b, b again; the batch, twice.
    assert len(own) == 2 + 4 + 2
    assert [number in before for number in own][3:] == [True, False, True, True, True]
    assert any(own[1] < number <= own[2] for number in before)


def test_batches_are_for_those_who_take_them(processes: type[FakeProcess]) -> None:
    journal = Journal(None, FORMAT, {})
    run.run(plan(rounds=1, batch_sizes=(3,)), journal, silent)
    batches = [record for record in journal.records if record.get("batch") == 3]
    assert [record["contestant"] for record in batches] == ["none"]
    assert batches[0]["prompt_tokens"] == [3, 3, 3]


def test_the_control_is_for_tokenleaps_contestants(processes: type[FakeProcess]) -> None:
    """Peers do not sample with its noise."""
    journal = Journal(None, FORMAT, {})
    run.run(replace(plan(rounds=1), control=2), journal, silent)
    found = [call for call in requests(journal) if call[1].startswith("random")]
    assert found == [("none", "random 0", 0), ("none", "random 1", 0)]
    kinds = [r["kind"] for r in journal.records if r["type"] == "request"]
    assert kinds.count("control") == 2


def test_samples_have_a_seed_per_prompt(processes: type[FakeProcess]) -> None:
    """The same for all contestants and rounds; the prompts of a batch differ in it."""
    hot = replace(plan(2, (3,)), setting=Setting("m", max_tokens=4, temperature=0.7))
    journal = Journal(None, FORMAT, {})
    run.run(hot, journal, silent)
    first, second = ((prompt.seed,) for prompt in PROMPTS)
    calls = [seeds for seeds in processes.seeds if len(seeds) == 1]
    assert calls == [first] * 4 + [second] * 4
    (batch,) = {seeds for seeds in processes.seeds if len(seeds) == 3}
    assert len(set(batch)) == 3
    assert {r["temperature"] for r in journal.records if r["type"] == "request"} == {0.7}


def test_every_output_is_judged_once(processes: type[FakeProcess], tmp_path: Path) -> None:
    """Equal outputs of a prompt are judged together; the control and batches are not judged."""
    file = tmp_path / "results.jsonl"
    whole = replace(plan(2, (3,)), control=1)
    journal = Journal(file, FORMAT, whole.header())
    run.run(whole, journal, silent)
    judged = [r for r in journal.records if r["type"] == "judgement"]
    assert len({(r["contestant"], r["unit"], r["round"]) for r in judged}) == len(judged) == 8
    assert processes.judged == 2
    # A run that was broken off while it judged goes on there.
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if '"judgement"' not in line))
    journal = Journal(file, FORMAT, whole.header())
    run.run(whole, journal, silent)
    assert sum(r["type"] == "judgement" for r in journal.records) == 8
    assert sum(r["type"] == "request" for r in journal.records) == 2 * 2 * 2 + 2 + 2


def test_prompts_fit_into_the_shortest_context_of_all(processes: type[FakeProcess]) -> None:
    run.run(plan(), Journal(None, FORMAT, {}), silent)
    assert processes.context == 256
    everyone = Plan((BASELINE, NGRAM, PEER), Setting("m", max_tokens=4), PROMPTS, 1)
    run.run(everyone, Journal(None, FORMAT, {}), silent)
    assert processes.context == 200


def test_a_run_that_was_broken_off_goes_on(processes: type[FakeProcess], tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    processes.lasts = 2 + 3
    with pytest.raises(BrokenOffError):
        run.run(plan(), Journal(file, FORMAT, plan().header()), silent)
    processes.calls.clear()
    processes.lasts = 1000
    journal = Journal(file, FORMAT, plan().header())
    assert len(requests(journal)) == 3
    run.run(plan(), journal, silent)
    assert len(processes.calls) == 2 + 5
    assert len(set(requests(journal))) == 8
    processes.calls.clear()
    run.run(plan(), Journal(file, FORMAT, plan().header()), silent)
    assert processes.calls == []  # nothing is loaded when nothing is missing


def test_rounds_may_be_added_and_other_settings_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    Journal(file, FORMAT, plan(1).header())
    Journal(file, FORMAT, plan(3).header())
    other = Plan((BASELINE, PEER), Setting("m", max_tokens=5), PROMPTS, 1)
    with pytest.raises(TokenleapError, match="made with max_tokens 4, and this run has 5"):
        Journal(file, FORMAT, other.header())


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def use(code: str) -> None:
        file = tmp_path / "worker.py"
        file.write_text(code)
        monkeypatch.setattr(worker, "COMMAND", [sys.executable, str(file)])

    return use


def test_a_process_that_ends_leaves_its_last_words(program: Callable[[str], None]) -> None:
    program("import sys; sys.exit('no memory left')")
    with Process(PEER, Setting("m")) as started, pytest.raises(TokenleapError) as caught:
        started.wait_until_loaded()
    assert str(caught.value) == "transformers-plain has ended: no memory left"


def test_what_a_contestant_complains_of_is_told(program: Callable[[str], None]) -> None:
    program('input(); print(\'{"error": "no such file"}\')')
    with (
        Process(PEER, Setting("m")) as started,
        pytest.raises(TokenleapError, match="transformers-plain: no such file"),
    ):
        started.wait_until_loaded()


def test_threads_are_set_before_anything_is_imported(program: Callable[[str], None]) -> None:
    program(
        "import json, os; input();"
        "print(json.dumps({'answer': {'threads': os.environ['OMP_NUM_THREADS']}}))"
    )
    with Process(PEER, Setting("m", threads=7)) as started:
        started.wait_until_loaded()
        assert started.facts["threads"] == "7"
        assert 0 < started.facts["load_seconds"] < 60


def test_a_process_in_the_middle_of_its_work_is_ended(program: Callable[[str], None]) -> None:
    program("import time; time.sleep(60)")
    with pytest.raises(BrokenOffError), Process(PEER, Setting("m")) as started:
        raise BrokenOffError
    assert started._process.returncode is not None


def test_a_process_that_answers_no_more_is_ended(
    program: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without waiting for it forever, and with what it said last."""
    monkeypatch.setattr(worker, "_PATIENCE", 0.01)
    program(
        "import os, sys, time; print('stuck', file=sys.stderr, flush=True);"
        "os.close(1); time.sleep(600)"
    )
    with Process(PEER, Setting("m")) as started, pytest.raises(TokenleapError) as caught:
        started.wait_until_loaded()
    assert str(caught.value) == "transformers-plain has ended: stuck"
    assert started._process.returncode is not None
