"""Counting n-grams of files, and the file they are kept in."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from tests.cli.conftest import ascii_tokenizer
from tokenleap import TokenleapError
from tokenleap.drafters.text import ngrams
from tokenleap.drafters.text import ngrams as corpus
from tokenleap.drafters.text.ngrams import (
    FILE,
    NgramTables,
    build_ngrams,
    count_ngrams,
    fingerprint,
)

V = 5
texts = st.lists(st.lists(st.integers(0, V - 1), max_size=30), min_size=1, max_size=5)


def ngrams_of(listed: list[list[int]], order: int) -> Counter[tuple[int, ...]]:
    return Counter(
        tuple(text[i : i + order]) for text in listed for i in range(len(text) - order + 1)
    )


def ngrams_in(tables: NgramTables, order: int) -> dict[tuple[int, ...], int]:
    """Counts of all n-grams, as the look-ups give them."""
    found: dict[tuple[int, ...], int] = {}
    for a in range(V):
        if order == 1 and tables.unigrams[a]:
            found[(a,)] = int(tables.unigrams[a])
        if order == 2:
            row = tables.bigrams(a)
            pairs = zip(tables.bigram_tokens[row], tables.bigram_counts[row], strict=True)
            found |= {(a, int(b)): int(n) for b, n in pairs}
        for b in range(V) if order == 3 else ():
            row = tables.trigrams(a, b)
            pairs = zip(tables.trigram_tokens[row], tables.trigram_counts[row], strict=True)
            found |= {(a, b, int(c)): int(n) for c, n in pairs}
    return found


@given(listed=texts.filter(any))
def test_counts_are_those_of_the_texts(listed: list[list[int]]) -> None:
    tables = count_ngrams(listed, V)
    for order in (1, 2, 3):
        assert ngrams_in(tables, order) == ngrams_of(listed, order)
    assert tables.num_tokens == sum(map(len, listed))
    assert tables.bigrams(V + 3) == tables.trigrams(V, 0) == tables.trigrams(0, V) == slice(0, 0)


@given(
    text=st.lists(st.integers(0, V - 1), min_size=1, max_size=60),
    sizes=st.lists(st.integers(0, 9), max_size=20),
)
def test_pieces_of_a_text_count_like_the_whole(text: list[int], sizes: list[int]) -> None:
    counter = ngrams._Counter(V)
    start = 0
    for size in [*sizes, len(text)]:
        counter.add(np.array(text[start : start + size], dtype=np.int64))
        start += size
    tables = counter.tables(None)
    for order in (1, 2, 3):
        assert ngrams_in(tables, order) == ngrams_of([text], order)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return ascii_tokenizer()


TEXT = "It was the best of times,\nit was the worst of times.\n" * 40


@pytest.mark.parametrize("block", [7, 64, 1 << 20])
def test_files_are_counted_block_by_block(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tokenizer: PreTrainedTokenizerBase,
    block: int,
) -> None:
    """Characters are not cut in two, n-grams reach over blocks and not over files."""
    monkeypatch.setattr(corpus, "BLOCK", block)
    contents = [TEXT, "naïve caf\u00e9s \u20ac \U0001f600 without a newline" * 5, ""]
    files = [tmp_path / f"{i}.txt" for i in range(len(contents))]
    for file, content in zip(files, contents, strict=True):
        file.write_text(content, encoding="utf-8")
    seen: list[int] = []
    tables = build_ngrams(files, tokenizer, seen.append)
    expected = count_ngrams(
        [tokenizer(text, add_special_tokens=False)["input_ids"] for text in contents],
        len(tokenizer),
    )
    for name in ("unigrams", "bigram_tokens", "bigram_counts", "trigram_tokens", "trigram_counts"):
        assert np.array_equal(getattr(tables, name), getattr(expected, name))
    assert seen[-1] == sum(file.stat().st_size for file in files)
    assert tables.fingerprint == fingerprint(tokenizer)


# Bad input


@pytest.fixture
def file(tmp_path: Path) -> Path:
    dice = random.Random(0)
    path = tmp_path / "a.ngrams"
    count_ngrams([[dice.randrange(V) for _ in range(200)]], V).save(path)
    return path


@pytest.mark.parametrize("name", list(ngrams._DTYPES))
def test_arrays_that_do_not_fit_together(tmp_path: Path, file: Path, name: str) -> None:
    """Nothing that is loaded leads outside the arrays or outside the vocabulary."""
    metadata = {"format": FILE.format, "version": "1"}
    whole = load_file(file)
    damaged = [
        {k: v for k, v in whole.items() if k != name},
        {**whole, name: whole[name].to(torch.int16)},
        {**whole, name: whole[name][:-1]},
        {**whole, name: whole[name] * 0 - 1},
        {**whole, name: whole[name] + 100}
        if name.endswith(("starts", "tokens"))
        else {**whole, name: whole[name] * 0},
        {**whole, "unigrams": whole["unigrams"] + 2**62},  # their sum overflows
    ]
    for tensors in damaged:
        save_file(tensors, tmp_path / "bad", metadata)
        with pytest.raises(TokenleapError, match="bad is damaged"):
            NgramTables.load(tmp_path / "bad")
