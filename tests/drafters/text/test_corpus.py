"""Text files as tokens: cut where the tokens stay those of the whole text."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.cli.conftest import ascii_tokenizer
from tokenleap import TokenleapError
from tokenleap.drafters.text import ngrams as corpus
from tokenleap.drafters.text.ngrams import check_tokens, fingerprint, read_tokens

TEXT = 'def f(x):\n    """It is,\n\n    as it were, the best."""\n    return x\n\n\nf(1)\n'


def tokens_of(file: Path, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    (pieces,) = read_tokens([file], tokenizer)
    tokens: list[int] = np.concatenate(list(pieces)).tolist()
    return tokens


@pytest.fixture(scope="module")
def merging() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer whose tokens span letters, and spaces with line ends."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT * 20], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(("block", "piece"), [(200, 100), (1 << 20, 100), (300, 1 << 14)])
def test_a_byte_level_tokenizer_gives_the_tokens_of_the_whole_text(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    merging: PreTrainedTokenizerFast,
    block: int,
    piece: int,
) -> None:
    monkeypatch.setattr(corpus, "BLOCK", block)
    monkeypatch.setattr(corpus, "PIECE", piece)
    file = tmp_path / "text"
    file.write_text(TEXT * 50)
    whole = merging(TEXT * 50)["input_ids"]
    assert len(set(whole)) > 10
    assert tokens_of(file, merging) == whole
    # The cuts matter: pieces that simply end after line ends have other tokens.
    lines = merging((TEXT * 50).splitlines(keepends=True))["input_ids"]
    assert list(itertools.chain.from_iterable(lines)) != whole


@given(text=st.text(alphabet="aé€1. \n\r", min_size=1, max_size=80))
def test_a_cut_is_before_the_last_line_end_behind_a_letter(text: str) -> None:
    good = [i for i in range(1, len(text)) if text[i] == "\n" and text[i - 1].isalnum()]
    ends = [i + 1 for i in range(len(text)) if text[i] == "\n"]
    expected = (good or ends or [len(text)])[-1]
    assert corpus._cut(text) == expected


@pytest.mark.parametrize("newline", ["\n", "\r\n", ""])
def test_nothing_is_lost_at_cuts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newline: str
) -> None:
    """One token per character: whatever the cuts, in the order of the text."""
    monkeypatch.setattr(corpus, "BLOCK", 7)
    monkeypatch.setattr(corpus, "PIECE", 3)
    text = f"one two{newline}three.{newline}{newline} four" * 9
    file = tmp_path / "text"
    file.write_bytes(text.encode())
    tokenizer = ascii_tokenizer()
    assert tokens_of(file, tokenizer) == tokenizer(text)["input_ids"]


def test_files_are_read_one_after_the_other(tmp_path: Path) -> None:
    contents = ["one\n", "", "three\n"]
    files = [tmp_path / str(number) for number in range(3)]
    for file, content in zip(files, contents, strict=True):
        file.write_text(content)
    tokenizer = ascii_tokenizer()
    seen: list[int] = []
    read = [np.concatenate(list(text)) for text in read_tokens(files, tokenizer, seen.append)]
    assert [tokenizer.decode(tokens) for tokens in read] == contents
    assert seen == sorted(seen)
    assert seen[-1] == 10


def test_a_fingerprint_tells_vocabularies_apart() -> None:
    tokenizer, other = ascii_tokenizer(), ascii_tokenizer()
    assert fingerprint(tokenizer) == fingerprint(ascii_tokenizer(chat_template=None))
    other.add_tokens(["more"])
    assert fingerprint(other) != fingerprint(tokenizer)


# Bad input


@pytest.mark.parametrize(
    ("content", "byte"), [(b"caf\xe9 au lait", 3), ("naïve caf\u00e9".encode()[:-1], 10)]
)
def test_not_utf_8(tmp_path: Path, content: bytes, byte: int) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(TokenleapError, match=rf"file is not UTF-8 text: .*, byte {byte}\."):
        tokens_of(tmp_path / "file", ascii_tokenizer())


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(TokenleapError, match="missing: No such file"):
        tokens_of(tmp_path / "missing", ascii_tokenizer())


def test_tokens_outside_the_vocabulary() -> None:
    check_tokens(np.array([], dtype=np.int64), 1)
    check_tokens(np.array([0, 4]), 5)
    for tokens in ([5], [-1, 0]):
        with pytest.raises(TokenleapError, match="outside the vocabulary of 5 tokens"):
            check_tokens(np.array(tokens), 5)
