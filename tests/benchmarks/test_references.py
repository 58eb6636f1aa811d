from __future__ import annotations

from benchmarks.references import RUNS, edited, measure

from tests.tiny import tiny_model, tiny_tokenizer
from tokenleap import LLM


def test_one_word_in_so_many_is_replaced() -> None:
    assert edited("a b c d e f g", 3) == "a b otherwise d e otherwise g"


def test_every_run_is_compared_with_plain_decoding() -> None:
    llm = LLM(tiny_model(), tokenizer=tiny_tokenizer(), speculative_config={"method": "none"})
    ratios = measure(llm, ("a prompt",), tokens=8, every=3, rounds=1)
    assert list(ratios) == list(RUNS)
    assert ratios["none", False].mean == 1
    assert all(ratio.mean > 0 for ratio in ratios.values())
