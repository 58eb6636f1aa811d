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
    Explainer,
    Options,
    ResultsFile,
    default_methods,
    methods_of,
    named_methods,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny import VOCAB_SIZE, tiny_model
from tokenleap.bench.contestants import BASELINE, Contestant
from tokenleap.bench.prompts_file import Prompt
from tokenleap.core.acceptance.base import Accepted, TargetDistributions
from tokenleap.core.acceptance.rules import Coupled
from tokenleap.core.noise import StepNoise
from tokenleap.core.tree import Draft
from tokenleap.drafters.registry import METHODS as REGISTERED

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
