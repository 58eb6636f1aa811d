"""Text piece by piece: characters are never split, stop strings never leak."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tokenleap.core.detokenizer import Detokenizer, _Beginning

# One token per byte: every character outside ASCII is split over tokens.
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {symbol: i for i, symbol in enumerate(ALPHABET)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]


TOKENIZER = byte_tokenizer()
texts = st.text(alphabet="ab \n€é😀日本", max_size=30)


def feed(detokenizer: Detokenizer, text: str) -> list[str]:
    pieces = []
    for token in TOKENIZER.encode(text):
        pieces.append(detokenizer.add(token))
        if detokenizer.stopped_at is not None:
            break
    return [*pieces, detokenizer.finish()]


@given(texts)
def test_pieces_make_up_the_text(text: str) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    pieces = feed(detokenizer, text)
    assert "".join(pieces) == detokenizer.text == text
    assert not any("\ufffd" in piece for piece in pieces)


@given(texts, st.lists(st.text(alphabet="ab €😀", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_strings_across_token_borders(text: str, stop: list[str]) -> None:
    detokenizer = Detokenizer(TOKENIZER, stop)
    pieces = feed(detokenizer, text)
    ends = {s: text.find(s) + len(s) for s in stop if s in text}
    if ends:
        first = min(ends.values())
        met = [s for s, end in ends.items() if end == first]
        assert detokenizer.stopped_at in met
        assert detokenizer.text == text[: first - max(len(s) for s in met)]
    else:
        assert detokenizer.text == text
    assert "".join(pieces) == detokenizer.text


def test_the_stop_string_can_be_kept() -> None:
    detokenizer = Detokenizer(TOKENIZER, ["b b"], include_stop=True)
    assert "".join(feed(detokenizer, "a b b a")) == "a b b"


def test_a_possible_stop_string_is_held_back_and_then_given() -> None:
    detokenizer = Detokenizer(TOKENIZER, ["abc"])
    pieces = [detokenizer.add(token) for token in TOKENIZER.encode("xabxab")]
    assert pieces == ["x", "", "", "abx", "", ""]
    assert detokenizer.finish() == "ab"


def test_stop_strings_do_not_count_before_the_output_may_end() -> None:
    detokenizer = Detokenizer(TOKENIZER, ["ab"])
    for token in TOKENIZER.encode("xabx"):
        detokenizer.add(token, may_stop=False)
    assert detokenizer.text == "xabx"
    for token in TOKENIZER.encode("xab"):
        detokenizer.add(token)
    assert detokenizer.stopped_at == "ab"
    assert detokenizer.text == "xabxx"


@pytest.mark.parametrize("first", [1, 2, 3, 4, 5, 6])
def test_a_stop_string_may_begin_before_the_output_may_end(first: int) -> None:
    """As in vLLM, unless it ends before: its last character is what stops the output."""
    detokenizer = Detokenizer(TOKENIZER, ["ab"])
    for number, token in enumerate(TOKENIZER.encode("xxabyyab"), 1):
        detokenizer.add(token, may_stop=number >= first)
        if detokenizer.stopped_at is not None:
            break
    assert detokenizer.text == ("xx" if first <= 4 else "xxabyy")


def test_spaces_after_special_tokens_that_are_skipped() -> None:
    """The words after one are not the beginning of a text."""
    words = [("<unk>", 0.0), ("</s>", 0.0), ("▁cute", -1.0), ("▁dog", -2.0), ("▁the", -3.0)]
    backend = Tokenizer(models.Unigram(words, unk_id=0))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["</s>", "<extra_id_0>", "<extra_id_1>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)  # type: ignore[no-untyped-call]
    names = ["<extra_id_0>", "▁cute", "▁dog", "<extra_id_1>", "▁the", "</s>", "▁dog"]
    ids: Any = tokenizer.convert_tokens_to_ids(names)
    detokenizer = Detokenizer(tokenizer)
    text = "".join(detokenizer.add(token) for token in ids) + detokenizer.finish()
    assert text == tokenizer.decode(ids, skip_special_tokens=True) == "cute dog the dog"
    behind = Detokenizer(tokenizer, behind=ids[:2])  # nor is what follows a prompt
    assert behind.add(ids[2]) == " dog"
    assert behind.text == " dog"


@given(texts, texts)
def test_a_text_that_is_continued(first: str, second: str) -> None:
    detokenizer = Detokenizer(TOKENIZER, behind=TOKENIZER.encode(first)[-6:])
    assert "".join(feed(detokenizer, second)) == second


def test_an_unfinished_character_shows_at_the_end() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    assert detokenizer.add(TOKENIZER.encode("€")[0]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_many_tokens_without_a_whole_character(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt may have thousands, and so may an output that is allowed nothing else."""
    detokenizer, decoded = Detokenizer(TOKENIZER), 0
    decode = detokenizer._decode_ids
    assert decode is not None

    def counted(ids: list[int], **options: Any) -> str:
        nonlocal decoded
        decoded += len(ids)
        return decode(ids, **options)

    monkeypatch.setattr(detokenizer, "_decode_ids", counted)
    lone, tail = TOKENIZER.encode("€")[0], TOKENIZER.encode("b€ab")
    ids = [lone] * 4000 + tail
    text = "".join(detokenizer.add(token) for token in ids) + detokenizer.finish()
    assert text == detokenizer.text == TOKENIZER.decode(ids)
    assert decoded < 40 * len(ids)


def test_a_stop_string_after_many_tokens_without_a_whole_character() -> None:
    detokenizer = Detokenizer(TOKENIZER, [" STOP"])
    for token in [TOKENIZER.encode("€")[0]] * 400:
        detokenizer.add(token)
    for token in TOKENIZER.encode(" STOP"):
        assert detokenizer.stopped_at is None
        detokenizer.add(token)
    assert detokenizer.stopped_at == " STOP"


@pytest.mark.parametrize("token", [0, 5])
def test_without_a_tokenizer_there_is_no_text(token: int) -> None:
    detokenizer = Detokenizer(None)
    assert detokenizer.add(token) == detokenizer.finish() == detokenizer.text == ""


def test_the_beginning_of_a_stop_string_is_found_as_by_comparing_all() -> None:
    chance = random.Random(1)
    for _ in range(300):
        stop = "".join(chance.choices("ab", k=chance.randint(1, 7)))
        beginning, text = _Beginning(stop), ""
        for _ in range(12):
            piece = "".join(chance.choices("abc", weights=(4, 4, 1), k=chance.randint(0, 4)))
            text += piece
            expected = max(size for size in range(len(stop)) if text.endswith(stop[:size]))
            assert beginning.after(piece) == expected
