"""Texts are refused early by a bound that holds for every text: no text with fewer tokens is."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tokenleap.errors import PromptError
from tokenleap.serve.text_limit import TextLimit, most_bytes_per_token

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES = [f"<0x{value:02X}>" for value in range(256)]
MERGES = [("a", "b"), ("ab", "ab"), ("ab", "Ġ"), ("Ġ", "Ġ")]


def wrapped(backend: Tokenizer) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=backend)  # type: ignore[no-untyped-call]


def byte_level(normalizer: Any = None, symbols: Any = ALPHABET) -> Tokenizer:
    words = [*symbols, *("".join(pair) for pair in MERGES)]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, MERGES))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    backend.normalizer = normalizer
    return backend


def sentence_piece(words: Any = BYTES) -> Tokenizer:
    vocabulary = {word: i for i, word in enumerate([*words, "▁", "a", "▁a"])}
    backend = Tokenizer(models.BPE(vocabulary, [("▁", "a")], byte_fallback=True))
    space = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
    return backend


def with_added(backend: Tokenizer, **options: Any) -> Tokenizer:
    backend.add_special_tokens([AddedToken("<longest>", **options)])
    return backend


@pytest.mark.parametrize(
    ("backend", "bound"),
    [
        (byte_level(), 4),
        (byte_level(normalizers.NFC()), 16),
        (with_added(byte_level()), 9),
        (sentence_piece(), 6),
    ],
)
def test_no_text_has_fewer_tokens(backend: Tokenizer, bound: int) -> None:
    tokenizer = wrapped(backend)
    assert most_bytes_per_token(tokenizer) == bound
    chance = Random(1)
    texts = [
        "ab" * 50,
        " " * 99,
        "\u03b9\u0308\u0301" * 30,
        "\u1fbe\u0308\u0301" * 9,
        "<longest>" * 9,
    ]
    pieces = ["ab", " ", "é", "e\u0301", "語", "\U0001f600", "7", "\n", "<longest>", "\u212b"]
    texts += ["".join(chance.choices(pieces, k=40)) for _ in range(50)]
    for text in texts:
        tokens = len(tokenizer(text)["input_ids"])
        assert len(text.encode()) <= bound * tokens
        TextLimit(tokens, bound).check(text)


@pytest.mark.parametrize(
    "backend",
    [
        byte_level(normalizers.Lowercase()),
        byte_level(normalizers.Replace("a", "")),
        byte_level(symbols=ALPHABET[1:]),
        with_added(byte_level(), lstrip=True),
        sentence_piece(BYTES[1:]),
        Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")),
    ],
)
def test_tokenizers_without_a_bound(backend: Tokenizer) -> None:
    tokenizer, text = wrapped(backend), "a" * 10**5
    assert most_bytes_per_token(tokenizer) is None
    limit = TextLimit.of(tokenizer, 100)
    if len(tokenizer(text)["input_ids"]) <= 100:
        limit.check(text)
        return
    with pytest.raises(PromptError, match=r"more than \d+ tokens, .* context of 100: shorten"):
        limit.check(text)


def test_a_text_that_cannot_fit() -> None:
    limit = TextLimit.of(wrapped(byte_level()), 100)
    limit.check("語" * 133)
    with pytest.raises(
        PromptError, match=r"402 bytes, at least 101 tokens, .* context of 100: sho"
    ):
        limit.check("語" * 134)
    TextLimit.of(None, 1).check("a" * 10**6)


def test_a_long_text_is_counted_no_further_than_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    split = list[str]()

    def count(_: Any, text: str) -> int:
        split.append(text)
        return len(text)

    monkeypatch.setattr("tokenleap.serve.text_limit._count", count)
    limit = TextLimit(10_000, 1000, wrapped(byte_level()))
    limit.check("7" * 40_000)
    assert not split
    with pytest.raises(PromptError, match=r"the prediction has more than \d+ tokens"):
        limit.check("7" * 7_000_000, "prediction")
    assert sum(map(len, split)) < 4 * 10_000
    replace(limit, times=4).check("7" * 75_000)
    with pytest.raises(PromptError, match="with room for 4 times the context of 10000: shorten"):
        replace(limit, times=4).check("7" * 7_000_000)


@pytest.mark.parametrize("text", ["ab \n" * 9000, "7" * 30_000, "é\u0301語" * 9000])
def test_what_fits_is_never_refused(text: str) -> None:
    for backend in (byte_level(), sentence_piece(BYTES)):
        tokenizer = wrapped(backend)
        tokens = len(tokenizer(text)["input_ids"])
        TextLimit.of(tokenizer, tokens).check(text)
