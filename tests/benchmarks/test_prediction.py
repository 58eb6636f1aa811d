from __future__ import annotations

import pytest
from benchmarks.prediction import EDITS, UNRELATED, Run, cases, chosen, measure

from benchmarks import BenchmarkError
from tests.tiny import tiny_model, tiny_tokenizer
from tokenleap import LLM


def test_every_edit_changes_the_file() -> None:
    made = {case.name: case for case in cases(300)}
    assert list(made) == [*EDITS, UNRELATED]
    for name, case in made.items():
        assert (case.after == case.before) == (name == "nothing")
        assert case.before in case.prompt
        assert (case.prediction == case.before) == (name != UNRELATED)
        assert len(case.before.splitlines()) == 300
    assert "fragments" in made["rename"].after
    assert "chunk " not in made["rename"].after
    with pytest.raises(BenchmarkError, match="--lines"):
        cases(10**4)


def test_edits_are_chosen_by_their_names() -> None:
    made = cases(1)
    assert chosen(made, "") == made
    assert [case.name for case in chosen(made, "unrelated, rename")] == ["rename", "unrelated"]
    with pytest.raises(BenchmarkError, match=r"no 'typo'; choose from nothing, rename, .*unrel"):
        chosen(made, "rename,typo")


def test_every_run_has_the_tokens_of_plain_decoding() -> None:
    llm = LLM(tiny_model(), tokenizer=tiny_tokenizer())
    runs = [Run("none", False), Run("suffix", True)]
    (case, *_) = cases(1)
    tokens, plain, predicted, passes, counts = measure(llm, case, runs, 1, free=True)
    assert int(passes) <= int(tokens)
    assert plain.startswith("1.00")
    assert float(predicted.split()[0]) > 0
    assert [int(count) >= 0 for count in counts.split(", ")] == [True, True]
