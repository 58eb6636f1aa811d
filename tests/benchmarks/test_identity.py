from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
from benchmarks.harness import Loaded
from benchmarks.identity import (
    CHECKS,
    FORMAT,
    Comparison,
    Difference,
    Generation,
    Options,
    comparisons,
    default_methods,
    first_difference,
    methods_of,
    named_methods,
    summary,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks import identity
from tests.tiny import VOCAB_SIZE, tiny_model
from tokenleap import LLM
from tokenleap.bench.contestants import BASELINE, Contestant
from tokenleap.bench.prompts_file import Prompt
from tokenleap.bench.run import Journal
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


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(_model: str, dtype: str, _device: str) -> Loaded:
        return Loaded(tiny_model(dtype=getattr(torch, dtype)), tokenizer())

    monkeypatch.setattr(identity, "load", load)


OPTIONS = Options("itself", "itself", max_tokens=12, max_prompt_tokens=64, batch_size=3)


def run_checks(
    dtype: str, methods: Sequence[Contestant] = METHODS, path: Path | None = None
) -> list[Comparison]:
    checks = [check for check in CHECKS if check.dtype == dtype]
    return comparisons(OPTIONS, methods, checks, GROUP, Journal(path, FORMAT, {}))


def number_of_comparisons(dtype: str) -> int:
    checks = [check for check in CHECKS if check.dtype == dtype]
    return sum(len(methods_of(check, METHODS)) for check in checks) * len(GROUP)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_check_of_every_method_is_made_and_identical(dtype: str) -> None:
    found = run_checks(dtype)
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
    differing = [c for c in run_checks(dtype) if not c.identical]
    assert Counter(c.method for c in differing).keys() >= {"ngram", "ngram_table"}
    assert all(c.method != "none" for c in differing)
    for comparison in differing:
        assert comparison.difference is not None
        assert comparison.difference.top2_gap is not None
        assert comparison.difference.top2_gap >= 0


def test_comparisons_that_are_there_are_not_made_again(tmp_path: Path) -> None:
    """Four lines are lost: one method's batch and three of its single prompts."""
    file = tmp_path / "results.jsonl"
    found = run_checks("bfloat16", path=file)
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-4]) + '{"check": "gre')  # and it was broken off
    generate = Mock(wraps=LLM.generate)
    with patch.object(LLM, "generate", lambda *args, **fields: generate(*args, **fields)):
        assert run_checks("bfloat16", path=file) == found
    assert file.read_text().splitlines(keepends=True) == lines
    assert 4 <= generate.call_count <= 4 + len(GROUP)  # and the references of these


def test_bits_are_not_promised_to_a_run_that_drafted_branches() -> None:
    text = '{"method": "draft_model", "tree": [2, 1], "controller": "fixed"}'
    (tree,) = named_methods([text], "itself")
    promised = {c.method: c.promised for c in run_checks("bfloat16", [tree])}
    assert promised == {"none": True, tree.label: False}
    assert all(c.promised for c in run_checks("float32", [tree]))


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
