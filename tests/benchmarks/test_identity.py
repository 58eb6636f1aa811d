from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.harness import Loaded
from benchmarks.identity import (
    CHECKS,
    Bench,
    Comparison,
    Difference,
    Explainer,
    Generation,
    Options,
    ResultsFile,
    default_methods,
    first_difference,
    methods_of,
    named_methods,
    summary,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny import VOCAB_SIZE, tiny_model
from tokenleap import TokenleapError
from tokenleap.bench.contestants import BASELINE, Contestant
from tokenleap.bench.prompts_file import Prompt
from tokenleap.core.acceptance.base import Accepted, TargetDistributions
from tokenleap.core.acceptance.rules import Coupled
from tokenleap.core.noise import StepNoise
from tokenleap.core.tree import Draft
from tokenleap.drafters.registry import METHODS as REGISTERED


def test_equal_generations_do_not_differ() -> None:
    one = Generation((1, 2), (-0.5, -0.25))
    assert first_difference(one, Generation((1, 2), (-0.5, -0.25))) is None
    assert first_difference(Generation((1, 2)), one) is None


def test_the_first_difference_in_tokens() -> None:
    found = first_difference(Generation((1, 2, 3)), Generation((1, 5, 6)))
    assert found == Difference(1, 2, 5)
    assert first_difference(Generation((1,)), Generation((1, 4))) == Difference(1, None, 4)


def test_one_bit_of_a_logprob_is_a_difference() -> None:
    after = -0.5000000000000001
    found = first_difference(Generation((1,), (-0.5,)), Generation((1,), (after,)))
    assert found == Difference(0, 1, 1, -0.5, after)


def comparison(
    prompt: str = "1", difference: Difference | None = None, *, promised: bool = True
) -> Comparison:
    return Comparison("greedy", "ngram", prompt, "qa", 10, 5, promised, difference)


def test_a_difference_counts_where_identity_is_promised() -> None:
    assert comparison("1", Difference(0, 1, 2)).broken
    assert not comparison("1", Difference(0, 1, 2), promised=False).broken
    assert not comparison("1").broken


def test_a_results_file_goes_on_where_it_was_broken_off(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    first = ResultsFile(file, {"seed": 1})
    first.add(comparison("1"))
    first.add(comparison("2", Difference(3, 1, 2, top2_gap=0.5)))
    with file.open("a") as end:
        end.write('{"check": "gre')
    again = ResultsFile(file, {"seed": 1})
    assert again.comparisons == first.comparisons
    again.add(comparison("3"))
    assert list(ResultsFile(file, {"seed": 1}).comparisons.values())[2] == comparison("3")


def test_results_of_other_settings_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    ResultsFile(file, {"seed": 1})
    with pytest.raises(TokenleapError, match="made with seed 1, and this run has 2"):
        ResultsFile(file, {"seed": 2})


@pytest.mark.parametrize("content", ["hello\n", "{}\n", "[]\n", '{"check": 1', "\n"])
def test_another_file_is_refused_and_left_alone(tmp_path: Path, content: str) -> None:
    file = tmp_path / "notes.txt"
    file.write_text(content)
    with pytest.raises(TokenleapError, match="not a results file"):
        ResultsFile(file, {})
    assert file.read_text() == content


def test_the_summary_counts_per_kind() -> None:
    table = summary([comparison("1"), comparison("2", Difference(0, 1, 2))])
    assert table.splitlines()[-1].split("|")[1:4] == [" greedy: ngram ", " 1/2 ", " 1/2 "]


NAMES = ("draft_model", "ngram", "ngram_table")
# Drafts of one length: the default controller may draft nothing on a busy machine.
METHODS = tuple(
    replace(one, config={**one.config, "controller": "fixed"})
    for one in named_methods(NAMES, "itself")
)


def tokenizer() -> PreTrainedTokenizerFast:
    """A word per token: "t0" to "t95"."""
    words = {f"t{token}": token for token in range(VOCAB_SIZE)}
    whole = Tokenizer(models.WordLevel(words, unk_token="t0"))
    whole.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=whole)  # type: ignore[no-untyped-call]


# Prompts that repeat themselves, so that every drafter finds something.
GROUP = [
    Prompt(str(start), "kind", " ".join(f"t{start + i % 5}" for i in range(9 + start)))
    for start in range(3)
]


def run_checks(
    dtype: str,
    results: ResultsFile,
    advanced: list[None] | None = None,
    methods: Sequence[Contestant] = METHODS,
) -> None:
    counted = [] if advanced is None else advanced
    module = tiny_model(dtype=getattr(torch, dtype))
    bench = Bench(
        Options(tuple(methods), max_tokens=12, max_prompt_tokens=64, batch_size=3),
        Loaded(module, tokenizer()),
        {"itself": module},
        Explainer(tiny_model),
        results,
        lambda: counted.append(None),
    )
    bench.run([check for check in CHECKS if check.dtype == dtype], GROUP)


def in_memory() -> ResultsFile:
    return ResultsFile(None, {})


def number_of_comparisons(dtype: str) -> int:
    checks = [check for check in CHECKS if check.dtype == dtype]
    return sum(len(methods_of(check, METHODS)) for check in checks) * len(GROUP)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_check_of_every_method_is_made_and_identical(dtype: str) -> None:
    results = in_memory()
    run_checks(dtype, results)
    found = results.comparisons.values()
    assert len(found) == number_of_comparisons(dtype)
    assert all(comparison.identical for comparison in found)
    assert {comparison.generated_tokens for comparison in found} == {12}


def test_none_is_compared_wherever_it_is_not_the_reference() -> None:
    against_itself = [c.name for c in CHECKS if BASELINE not in methods_of(c, METHODS)]
    assert against_itself == ["bfloat16 greedy", "bfloat16 sampled"]


def accept_the_first(
    _: Coupled, draft: Draft, p: TargetDistributions, noise: StepNoise
) -> Accepted:
    """A broken rule: whatever was drafted first is kept."""
    path = tuple(range(1, min(2, len(draft.tree))))
    return Accepted(path, noise.draw(p[len(path)], len(path)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rule_that_is_wrong_is_found_and_explained(
    monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setattr(Coupled, "accept", accept_the_first)
    results = in_memory()
    run_checks(dtype, results)
    differing = [c for c in results.comparisons.values() if not c.identical]
    assert Counter(c.method for c in differing).keys() >= {"ngram", "ngram_table"}
    assert all(c.method != "none" for c in differing)
    for comparison in differing:
        assert comparison.difference is not None
        assert comparison.difference.top2_gap is not None
        assert comparison.difference.top2_gap >= 0


def test_comparisons_that_are_there_are_not_made_again(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    results = ResultsFile(file, {})
    run_checks("bfloat16", results)
    kept: list[Comparison] = list(results.comparisons.values())
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-4]))  # four comparisons are lost
    advanced: list[None] = []
    again = ResultsFile(file, {})
    run_checks("bfloat16", again, advanced)
    assert len(advanced) == 4
    assert list(again.comparisons.values()) == kept


def test_bits_are_not_promised_to_a_run_that_drafted_branches() -> None:
    results = in_memory()
    text = '{"method": "draft_model", "tree": [2, 1], "controller": "fixed"}'
    (tree,) = named_methods([text], "itself")
    run_checks("bfloat16", results, methods=[tree])
    promised = {c.method: c.promised for c in results.comparisons.values()}
    assert promised == {"none": True, tree.label: False}
    run_checks("float32", results, methods=[tree])
    assert all(c.promised for c in results.comparisons.values() if c.check.startswith("float32"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("none", "is the baseline"),
        ('{"method": "ngram", "quantization": "int8"}', "quantized weights change the output"),
    ],
)
def test_a_method_that_cannot_be_compared_is_refused(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        named_methods([text], "itself")


def test_methods_that_need_fields_are_left_out_by_name() -> None:
    ready, left_out = default_methods("itself")
    assert {"ngram", "ngram_table", "draft_model"} <= {method.label for method in ready}
    assert {*(method.label for method in ready), *left_out, "none"} == set(REGISTERED)
