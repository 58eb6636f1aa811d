from __future__ import annotations

import gc
from pathlib import Path
from random import Random
from unittest.mock import Mock

import pytest
from benchmarks.contract import HOT, Cell
from benchmarks.contract_seq2seq import SENTENCE, WORDS, Subject
from benchmarks.harness import Loaded

from benchmarks import contract, contract_seq2seq
from tests.benchmarks.program import run
from tests.tiny_seq2seq import VOCAB_SIZE, tiny_seq2seq

KINDS = {WORDS: 4, SENTENCE: 12, HOT: 8}


def subject() -> Subject:
    def source(kind: str, dice: Random) -> list[int]:
        return dice.choices(range(4, VOCAB_SIZE), k=3 if kind == WORDS else 9)

    configs = [{"method": "copy"}, {"method": "suffix"}]
    return Subject(Loaded(tiny_seq2seq("bart"), None), configs, KINDS, source)


def test_every_round_has_sources_of_its_own_and_as_many_as_its_tokens_need() -> None:
    one, cell = subject(), Cell(4, WORDS)
    first, second = one.prompts(cell, 0), one.prompts(cell, 1)
    assert first == one.prompts(cell, 0)
    assert not {*map(tuple, first)} & {*map(tuple, second)}
    params = one.params(cell, 0)
    assert len(params) == len(first) >= one.enough(cell) // contract_seq2seq.SHORTEST
    assert {each.max_tokens for each in params} == {4}
    assert not any(each.ignore_eos for each in params)
    assert {each.temperature for each in one.params(Cell(4, HOT), 0)} == {1.5}


def test_the_whole_on_a_tiny_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(contract_seq2seq, "subjects", lambda *_: {"tiny": subject()})
    monkeypatch.setattr(contract_seq2seq, "TOKENS", 16)
    monkeypatch.setattr(contract, "gc", Mock(spec=gc))  # rounds thaw what tests have frozen
    output = tmp_path / "rounds.jsonl"
    arguments = ["--wheels", str(tmp_path), "--output", str(output), "--rounds", "3"]
    arguments += ["--batch-size", "1", "--batch-size", "2"]
    first = run(contract_seq2seq.main, arguments)
    assert first.exit_code in (0, 1), first.output  # on tiny models speed is noise
    assert "Outputs that differ from those of none: 0." in first.output
    for batch in (1, 2):
        for method in ("copy", "suffix"):
            assert all(f"| {batch}: tiny, {method}: {kind} " in first.output for kind in KINDS)
    assert len(output.read_text().splitlines()) == 1 + 3 * 2 * 2 * len(KINDS)
    other = run(contract_seq2seq.main, [*arguments, "--only", "tiny, ngram"])
    assert other.exit_code == 2
    assert "--only tiny, ngram: not among tiny, copy; tiny, suffix" in other.output


def test_a_round_ends_with_its_requests() -> None:
    """Outputs that end early have fewer tokens than a round should have."""
    one = subject()
    llms = contract.variants(one.model, {"method": "copy"}, 2)
    few = Mock(wraps=one, enough=lambda cell: 10**6)
    few.prompts = lambda cell, index: one.prompts(cell, index)[:5]
    few.params = lambda cell, index: one.params(cell, index)[:5]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contract, "gc", Mock(spec=gc))
        found = contract.run_round(llms, few, Cell(2, WORDS), 0)
    assert found["differing"] == 0
