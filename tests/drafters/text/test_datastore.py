"""The suffix array against sorting, look-ups against counting, and the file both are kept in."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.cli.conftest import ascii_tokenizer
from tokenleap import TokenleapError
from tokenleap.drafters.text.datastore import FILE, Datastore, build_datastore, index_texts
from tokenleap.drafters.text.ngrams import fingerprint

V = 5
texts = st.lists(st.lists(st.integers(0, V - 1), max_size=25), min_size=1, max_size=5).filter(any)
patterns = st.lists(st.integers(0, V - 1), min_size=1, max_size=6)
SHORT, WIDE = 2**16 - 1, 2**31 - 1
"""The widest vocabularies of tokens in 16 and in 32 bits."""


def occurrences(listed: list[list[int]], pattern: list[int]) -> int:
    size = len(pattern)
    return sum(text[i : i + size] == pattern for text in listed for i in range(len(text)))


# Sorting


@pytest.mark.parametrize("vocab_size", [V, 256, 300, SHORT, SHORT + 1, 2**24 + 9, WIDE])
@given(data=st.data())
@settings(max_examples=20)
def test_suffixes_are_in_the_order_of_their_tokens(vocab_size: int, data: st.DataObject) -> None:
    """With tokens of all sizes that differ in their first byte, in their last, or not at all."""
    few = st.sampled_from(sorted({0, 1, 255, 256, 257, vocab_size // 2, vocab_size - 1}))
    token = few.filter(lambda one: one < vocab_size) | st.integers(0, vocab_size - 1)
    listed = data.draw(st.lists(st.lists(token, max_size=25), min_size=1, max_size=4).filter(any))
    store = index_texts(listed, vocab_size)
    tokens = [token for text in listed if text for token in (*text, vocab_size)]
    assert store.tokens.tolist() == tokens
    assert store.suffixes.tolist() == sorted(range(len(tokens)), key=lambda i: tokens[i:])
    assert store.tokens.dtype == (np.uint16 if vocab_size <= SHORT else np.int32)
    assert store.highest == max(max(text) for text in listed if text)


@given(listed=texts)
def test_sizes(listed: list[list[int]]) -> None:
    store = index_texts(listed, V)
    assert store.num_tokens == sum(map(len, listed))
    assert store.num_documents == sum(map(bool, listed))
    assert store.longest_document == max(map(len, listed))


def test_every_file_is_a_text(tmp_path: Path) -> None:
    tokenizer = ascii_tokenizer()
    contents = ["the cat sat\n" * 3, "", "on the mat"]
    files = [tmp_path / str(number) for number in range(3)]
    for file, content in zip(files, contents, strict=True):
        file.write_text(content)
    seen: list[int] = []
    built = build_datastore(files, tokenizer, seen.append)
    expected = index_texts([tokenizer(text)["input_ids"] for text in contents], len(tokenizer))
    assert np.array_equal(built.tokens, expected.tokens)
    assert np.array_equal(built.suffixes, expected.suffixes)
    assert built.fingerprint == fingerprint(tokenizer)
    assert seen[-1] == sum(map(len, contents))


# Looking up


@given(listed=texts, pattern=patterns)
def test_all_occurrences_are_found_and_none_across_texts(
    listed: list[list[int]], pattern: list[int]
) -> None:
    store = index_texts(listed, V)
    found = store.find(pattern)
    assert len(found) == occurrences(listed, pattern)
    assert store.continuations(found, 0, len(pattern)) == [pattern] * len(found)


@given(listed=texts, text=st.lists(st.integers(0, V - 1), max_size=12), shortest=st.integers(1, 3))
def test_the_longest_suffix_is_found(
    listed: list[list[int]], text: list[int], shortest: int
) -> None:
    store = index_texts(listed, V)
    known = [
        size
        for size in range(shortest, min(7, len(text)) + 1)
        if occurrences(listed, text[len(text) - size :])
    ]
    length, found = store.find_suffix(text, shortest, 7)
    assert length == max(known, default=0)
    assert len(found) == (occurrences(listed, text[len(text) - length :]) if length else 0)


def test_continuations_end_with_their_text() -> None:
    store = index_texts([[1, 2, 3, 4], [1, 2], [1, 2, 3, 0]], V)
    assert store.continuations(store.find([1, 2]), 2, 9) == [[3, 0], [3, 4], []]
    assert store.continuations(store.find([1, 2]), 2, 1) == [[3], [3], []]


def test_tokens_the_tokenizer_does_not_have() -> None:
    """A target may be wider than its tokenizer: the separator is none of its tokens."""
    store = index_texts([[1, 2], [3]], V)
    for pattern in ([V], [2, V], [V, 3], [V + 1], [2**40]):
        assert not store.find(pattern)
    assert store.find_suffix([3, V, 1, 2], 1, 4)[0] == 2


# The file


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_loading_reads_next_to_nothing(tmp_path: Path) -> None:
    """64 MB are mapped; a copy would make this process larger by as much."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    size = 8_000_000
    tokens = np.zeros(size, dtype=np.int32)
    tokens[-1] = V
    Datastore(tokens, np.arange(size, dtype=np.int32), V).save(tmp_path / "large")
    before = resident()
    loaded = Datastore.load(tmp_path / "large")
    assert len(loaded.tokens) == size
    assert resident() - before < 8_000_000


@pytest.fixture
def file(tmp_path: Path) -> Path:
    dice = random.Random(0)
    path = tmp_path / "a.datastore"
    index_texts([[dice.randrange(V) for _ in range(200)]], V).save(path)
    return path


# Bad input


def test_without_pydivsufsort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    """Told before the work; what others have built can be used."""
    monkeypatch.setitem(sys.modules, "pydivsufsort", None)
    with pytest.raises(TokenleapError, match="pip install 'pydivsufsort<"):
        build_datastore([tmp_path / "missing"], ascii_tokenizer())
    assert Datastore.load(file).find([1])


def test_arrays_that_do_not_fit_together(tmp_path: Path, file: Path) -> None:
    metadata = {"format": FILE.format, "version": "1", "vocab_size": str(V)}
    whole = load_file(file)
    tokens, suffixes = whole["tokens"], whole["suffixes"]
    save_file(whole, tmp_path / "good", metadata)
    Datastore.load(tmp_path / "good")
    damaged = [
        {"tokens": tokens},
        {"suffixes": suffixes},
        {"tokens": tokens.float(), "suffixes": suffixes},
        {"tokens": tokens, "suffixes": suffixes.bfloat16()},
        {"tokens": tokens, "suffixes": suffixes[1:].clone()},
        {"tokens": tokens[:0].clone(), "suffixes": suffixes[:0].clone()},
        {"tokens": tokens[:-1].clone(), "suffixes": suffixes[:-1].clone()},
        {"tokens": tokens[None], "suffixes": suffixes[None]},
    ]
    for tensors in damaged:
        save_file(tensors, tmp_path / "bad", metadata)
        with pytest.raises(TokenleapError, match="bad is damaged"):
            Datastore.load(tmp_path / "bad")
    for known in ({"vocab_size": "6"}, {"vocab_size": "five"}):
        save_file(whole, tmp_path / "bad", {**metadata, **known})
        with pytest.raises(TokenleapError, match="bad is damaged"):
            Datastore.load(tmp_path / "bad")


def test_positions_that_are_wrong_lead_to_no_error(tmp_path: Path, file: Path) -> None:
    """They are not read when a file is loaded; a draft made of them is merely bad."""
    whole = load_file(file)
    wrong = torch.randint(-(2**31), 2**31 - 1, whole["suffixes"].shape).to(torch.int32)
    metadata = {"format": FILE.format, "version": "1", "vocab_size": str(V)}
    save_file({**whole, "suffixes": wrong}, tmp_path / "bad", metadata)
    store = Datastore.load(tmp_path / "bad")
    store.find_suffix([1, 2, 3, 4], 1, 4)
    found = store.continuations(range(len(wrong)), 2, 5)
    assert all(0 <= token < V for continuation in found for token in continuation)
