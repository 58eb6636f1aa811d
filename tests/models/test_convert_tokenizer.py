"""A converted tokenizer cuts text as its vocabulary was made for, and decodes to the same text."""

from __future__ import annotations

import itertools
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tokenleap.models import load_tokenizer, resolve

TEXTS = [
    "the  the then  12 123",
    "  two leading, two trailing  ",
    "def f(x):\n\n\treturn {1: [x,   22]}\r\n",
    "<|im_start|>user\nthe <|im_end|> 12<|im_end|>",
    "naïve 中文 👩‍👩‍👧 🎉 \u00a0 ½",
]
GPT2_CUT = r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"


def random_texts(alphabet: list[str], count: int) -> list[str]:
    chance = random.Random(0)
    return ["".join(chance.choices(alphabet, k=chance.randrange(1, 24))) for _ in range(count)]


ASCII_TEXTS = random_texts([*"  the12 in'\n\t.(", "<|im_end|>", "the ", "    ", "'s"], 500)


def merge(pieces: list[str], ranks: dict[tuple[str, str], float]) -> list[str]:
    """Join the best-ranked neighbours until none can be joined: byte-pair encoding by the book."""
    while True:
        pairs = list(itertools.pairwise(pieces))
        best = min(pairs, key=lambda pair: ranks.get(pair, float("inf")), default=None)
        if best is None or best not in ranks:
            return pieces
        at = pairs.index(best)
        pieces = [*pieces[:at], "".join(best), *pieces[at + 2 :]]


@pytest.mark.parametrize(("pre", "digits_alone"), [("smollm", True), ("gpt-2", False)])
def test_byte_level_text_is_cut_as_the_file_says(
    pre: str,
    digits_alone: bool,
    make_gguf: Any,
    byte_vocabulary: list[str],
    byte_merges: list[str],
    bytes_as_letters: dict[int, str],
) -> None:
    tokenizer = load_tokenizer(resolve(make_gguf(settings={"tokenizer.ggml.pre": pre})))
    assert tokenizer is not None
    ids = {token: number for number, token in enumerate(byte_vocabulary)}
    ranks = {tuple(pair.split(" ")): float(rank) for rank, pair in enumerate(byte_merges)}

    def encode(text: str) -> list[int]:
        found = []
        for part in re.split(r"(<\|\w+\|>)", text):
            if part in ids and part.startswith("<|"):
                found.append(ids[part])
                continue
            for run in re.split(r"([0-9])", part) if digits_alone else [part]:
                for word in re.findall(GPT2_CUT, run):
                    letters = [bytes_as_letters[byte] for byte in word.encode()]
                    found += [ids[piece] for piece in merge(letters, ranks)]  # type: ignore[arg-type]
        return found

    for text in [*TEXTS[:4], *ASCII_TEXTS]:
        assert tokenizer(text)["input_ids"] == encode(text), text


@pytest.mark.parametrize(
    ("architecture", "pre"),
    [*itertools.product(["llama", "qwen3"], ["smollm", "gpt-2", "qwen2"]), ("qwen2", "qwen2")],
)
def test_byte_level_text_survives_encoding_and_decoding(
    architecture: str, pre: str, make_gguf: Any
) -> None:
    path = make_gguf(architecture, settings={"tokenizer.ggml.pre": pre})
    tokenizer = load_tokenizer(resolve(path))
    assert tokenizer is not None
    for text in [*TEXTS, *ASCII_TEXTS]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_special_tokens_limits_and_chat_template_are_saved(make_gguf: Any) -> None:
    tokenizer = load_tokenizer(resolve(make_gguf()))
    assert tokenizer is not None
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert (tokenizer.unk_token_id, tokenizer.pad_token_id) == (0, 2)
    assert tokenizer.model_max_length == 64
    text = tokenizer.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False)
    assert text == "<|im_start|>user\nthe<|im_end|>\n"
    assert tokenizer(text)["input_ids"][0] == 1


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_added_tokens_are_read_without_the_vocabulary(
    architecture: str, make_gguf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer is the one that Transformers makes where only tokenizer.json has them."""
    folder = resolve(make_gguf(architecture, settings={"tokenizer.ggml.pre": "qwen2"}))
    other = shutil.copytree(folder, tmp_path / "other")
    path = other / "tokenizer_config.json"
    content = json.loads(path.read_text())
    del content["added_tokens_decoder"]
    path.chmod(0o644)
    path.write_text(json.dumps(content))
    read: list[Any] = []
    parsed = json.load

    def noted(file: Any) -> Any:
        read.append(Path(file.name))
        return parsed(file)

    monkeypatch.setattr(json, "load", noted)
    expected, found = AutoTokenizer.from_pretrained(other), load_tokenizer(folder)
    assert found is not None
    assert type(found) is type(expected)
    assert read.count(folder / "tokenizer.json") == read.count(other / "tokenizer.json") - 1
    assert found.added_tokens_decoder == expected.added_tokens_decoder
    assert found.special_tokens_map == expected.special_tokens_map
    assert found.all_special_ids == expected.all_special_ids
    assert found.get_vocab() == expected.get_vocab()
    assert found.chat_template == expected.chat_template
    for text in [*TEXTS, *ASCII_TEXTS, "cafe\u0301"]:
        ids = expected(text)
        assert found(text) == ids, text
        for skipped in (True, False):
            shown = found.decode(ids["input_ids"], skip_special_tokens=skipped)
            assert shown == expected.decode(ids["input_ids"], skip_special_tokens=skipped)


# SentencePiece: scores fall with the length of the list, so earlier pieces are joined first.
PIECES = ["▁t", "he", "▁the", "▁▁", "in", "▁"]


def sentencepiece_settings(prefix: bool) -> dict[str, Any]:
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = list("abcdefghijklmnopqrstuvwxyz")
    tokens = ["<unk>", "<s>", "</s>", *byte_pieces, *PIECES, *letters]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.merges": None,
        "tokenizer.chat_template": None,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
        "tokenizer.ggml.scores": [-float(number) for number in range(len(tokens))],
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": prefix,
        "tokenizer.ggml.padding_token_id": None,
    }


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_text_is_joined_by_score_and_keeps_its_spaces(
    prefix: bool, make_model: Any, make_gguf: Any
) -> None:
    settings = sentencepiece_settings(prefix)
    tokens = settings["tokenizer.ggml.tokens"]
    path = make_gguf(model=make_model(vocabulary=len(tokens)), settings=settings)
    tokenizer = load_tokenizer(resolve(path))
    assert tokenizer is not None
    ids = {token: number for number, token in enumerate(tokens)}
    ranks = {
        (token[:at], token[at:]): float(number)
        for token, number in ids.items()
        for at in range(1, len(token))
        if token in PIECES and token[:at] in ids and token[at:] in ids
    }

    def encode(text: str) -> list[int]:
        pieces = merge(list(("▁" if prefix else "") + text.replace(" ", "▁")), ranks)
        spelt = [[piece] if piece in ids else _bytes(piece) for piece in pieces]
        return [ids["<s>"], *(ids[piece] for part in spelt for piece in part)]

    for text in ["the  inn", " the", "  the ", "é🎉", *random_texts([*"  thein", "\n", "é"], 300)]:
        encoded = tokenizer(text)["input_ids"]
        assert encoded == encode(text), text
        assert tokenizer.decode(encoded, skip_special_tokens=True) == text


def _bytes(piece: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in piece.encode()]
