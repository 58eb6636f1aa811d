"""Tokenizers that differ, made on the spot, and tiny models over them."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.tiny import tiny_model

__all__ = ["END", "OTHER_TEXT", "TEXT", "bpe", "permuted", "small", "words"]

TEXT = (
    "the cat sat on the mat and the hat sat on the cat",
    "a stone in the water turns in the rain and the stone remains",
    "there is another thing that the others are thinking of",
)
OTHER_TEXT = (
    "we went down to the river and saw the boats in the water",
    "every morning the birds were singing in the garden there",
    "over and over again she was wondering where they were going",
)
END = "<|end|>"


def bpe(
    texts: Sequence[str] = TEXT,
    vocab_size: int = 90,
    *,
    alphabet: Sequence[str] = ("\u0120", *string.ascii_letters, *".,"),
    **special: Any,
) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer trained on a few sentences, over some or all bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=list(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)  # type: ignore[no-untyped-call]


def words(vocabulary: str) -> PreTrainedTokenizerFast:
    """Whole words with the space before them in SentencePiece's sign."""
    names = ["<unk>", *(f"\u2581{word}" for word in vocabulary.split())]
    ids = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]


def small(letters: str) -> PreTrainedTokenizerFast:
    """One token per letter, in this order."""
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]


def permuted(model: PreTrainedModel, order: Sequence[int], **fields: Any) -> PreTrainedModel:
    """The same model with its token `order[i]` under the number i."""
    other = tiny_model(vocab_size=len(order), **fields)
    other.load_state_dict(
        {
            name: weight[list(order)]
            if name.endswith(("embed_tokens.weight", "lm_head.weight"))
            else weight
            for name, weight in model.state_dict().items()
        }
    )
    assert torch.equal(other.lm_head.weight[0], model.lm_head.weight[order[0]])
    return other
