"""The texts of tokens, with a tokenizer that leaves out the space at the beginning of a text."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tokenleap.core.detokenizer import Pieces
from tokenleap.serve.completions import _texts_of

BYTES = {f"<0x{byte:02X}>": 5 + n for n, byte in enumerate("é".encode())}
WORDS = {"<s>": 0, "\u2581The": 1, "\u2581sky": 2, "s": 3, "<unk>": 4, **BYTES}
IDS = [0, 1, 2, 3, 5, 6]


@pytest.fixture(scope="module")
def llamas() -> PreTrainedTokenizerFast:
    """As Llama 2's: words begin with their space, and the first one's is left out."""
    made = Tokenizer(models.WordLevel(WORDS, "<unk>"))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=made, bos_token="<s>", unk_token="<unk>"
    )


def test_pieces_keep_their_spaces(llamas: PreTrainedTokenizerFast) -> None:
    assert Pieces(llamas).all_of([1, 2, 3, 0]) == [" The", " sky", "s", "<s>"]
    assert "\ufffd" in Pieces(llamas).of(5)
    assert Pieces(None).of(1) == ""


def test_texts_make_the_whole_text(llamas: PreTrainedTokenizerFast) -> None:
    found = _texts_of(IDS, llamas, skip_special_tokens=True)
    assert found == ["", "The", " sky", "s", "", "é"]
    assert "".join(found) == llamas.decode(IDS, skip_special_tokens=True)
    whole = "".join(_texts_of(IDS, llamas, skip_special_tokens=False))
    assert whole == llamas.decode(IDS)
    assert "".join(_texts_of(IDS[:-1], llamas, skip_special_tokens=True)) == "The skys\ufffd"
    assert _texts_of([1, 2], None, skip_special_tokens=True) == ["", ""]
